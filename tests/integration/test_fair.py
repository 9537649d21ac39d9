"""Kinds that are fair between tenants, as an app meets them: who starts when, whatever waits of others."""

from __future__ import annotations

from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker import App, Job, NewJob, PayloadError
from pgworker.events import JobSettled
from tests.handles import Recorder, hand, row, running

Admin: TypeAlias = psycopg.Connection[Any]


def fair(app: App, *, concurrency: int = 1) -> list[str]:
    """The kind `work`, fair; the keys of its jobs as they start."""
    started: list[str] = []

    @app.kind("work", fair=True, concurrency=concurrency, poll=0.1)
    async def work(job: Job[None]) -> None:
        started.append(job.key)

    return started


async def until_done(app: App, count: int) -> None:
    seen = Recorder(app)
    async with running(app.worker(["work"])):
        await seen.count(JobSettled, count)


@pytest.mark.field("L34")
@pytest.mark.parametrize("concurrency", [1, 10])
async def test_one_job_of_a_tenant_starts_within_two_claims_whatever_another_has_waiting(
    app: App, concurrency: int
) -> None:
    started = fair(app, concurrency=concurrency)
    await app.enqueue_many("work", [NewJob(key=f"a{number}", tenant="a") for number in range(300)])
    await app.enqueue("work", key="b", tenant="b")
    await until_done(app, 301)
    assert started.index("b") <= 2 * concurrency
    assert [key for key in started if key != "b"] == [f"a{number}" for number in range(300)]


@pytest.mark.parametrize("declared", [True, False])
async def test_jobs_without_a_tenant_run_as_well_whatever_their_producer_knew(
    app: App, dsn: str, admin: Admin, *, declared: bool
) -> None:
    started = fair(app)
    async with App(dsn) as producer:
        producer.declare("work", fair=declared)
        await producer.enqueue_many("work", [NewJob(key=f"a{number}", tenant="a") for number in range(100)])
        await producer.enqueue("work", key="without")
        assert row(admin, "without")["tenant"] == ("" if declared else None)
    await until_done(app, 101)
    # (of a producer that did not know, it is nobody's, and runs by its age)
    assert (started.index("without") <= 2) == declared


async def test_what_nobody_gave_a_tenant_starts_by_its_age_under_a_steady_backlog(app: App, dsn: str) -> None:
    started = fair(app)
    ignorant = hand(dsn)
    for number in range(3):
        ignorant.enqueue(f"old{number}")
    ignorant.connection.close()
    await app.enqueue_many("work", [NewJob(key=f"a{number}", tenant="a") for number in range(100)])
    await until_done(app, 103)
    assert max(started.index(f"old{number}") for number in range(3)) <= 60  # in the rounds 12, 24 and 37


@pytest.mark.ruling("4.3")
async def test_a_job_that_comes_to_lie_before_the_others_is_found_under_a_steady_backlog(app: App, dsn: str) -> None:
    """It is committed late, when its tenant has been served with younger ones."""
    started: list[str] = []
    late = hand(dsn)
    late.connection.execute("begin")
    late.enqueue("late", tenant="b")

    @app.kind("work", fair=True, concurrency=1, poll=0.1)
    async def work(job: Job[None]) -> None:
        started.append(job.key)
        if job.key == "b5":
            late.connection.execute("commit")

    jobs = [NewJob(key=f"{tenant}{number}", tenant=tenant) for number in range(100) for tenant in "ab"]
    await app.enqueue_many("work", jobs)
    await until_done(app, 201)
    late.connection.close()
    assert 0 < started.index("late") - started.index("b5") <= 60  # a look each twentieth of a second, then its turn
    assert len(set(started)) == 201


async def test_an_event_is_its_tenants_as_well(app: App, admin: Admin) -> None:
    fair(app)
    await app.enqueue_many("work", [NewJob(tenant="a"), NewJob(), NewJob(tenant="b")])
    found = admin.execute("select tenant from pgworker.jobs where event order by id").fetchall()
    assert found == [("a",), ("",), ("b",)]


async def test_tenants_are_refused_that_cannot_be_stored(app: App) -> None:
    fair(app)
    for tenant in ("", "x" * 513, "a\0b"):
        with pytest.raises(PayloadError, match="tenant"):
            await app.enqueue("work", tenant=tenant)
    with pytest.raises(PayloadError, match="must be a str"):
        app.sync.enqueue("work", tenant=5)  # type: ignore[arg-type]
    await app.enqueue("work", tenant="é" * 256)
    app.sync.close()


@pytest.mark.parametrize(("argument", "stored"), [("", ""), (", tenant => 'a'", "a"), (", tenant => null", None)])
def test_the_sql_function_says_whose_a_job_is(admin: Admin, argument: str, stored: str | None) -> None:
    for key in ("new", "replaced"):
        admin.execute(f"select pgworker.enqueue('work', key => '{key}'{argument})".encode())
        assert row(admin, key)["tenant"] == stored
        admin.execute("select pgworker.enqueue('work', key => 'replaced', tenant => 'before')")
    with pytest.raises(psycopg.DataError, match="tenant must have at most 512 bytes"):
        admin.execute("select pgworker.enqueue('work', tenant => repeat('x', 513))")
