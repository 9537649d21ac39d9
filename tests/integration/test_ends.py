"""What a run that did not succeed leaves on its row, and what a later success makes of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker import App, Job, Park, Pause, Permanent, Retry
from pgworker.contrib.http import judge_response
from pgworker.events import JobSettled
from tests.handles import Recorder, age, jobs, result, row, running
from tests.integration.test_facts import facts, told

Admin: TypeAlias = psycopg.Connection[Any]


class CrashError(BaseException):
    """What no handler is meant to raise."""


def stumble() -> Retry:
    raise ValueError


@pytest.mark.contract("B51")
@pytest.mark.parametrize(
    ("stumble", "code", "error"),
    [
        (stumble, "handler_failed", "ValueError"),
        (lambda: Retry(code="upstream"), "upstream", None),
        (lambda: Park("later", 2), "later", None),
    ],
    ids=["raised", "retried", "parked"],
)
async def test_a_success_clears_what_was_said_of_the_failure(
    app: App, admin: Admin, stumble: Callable[[], Retry | Park], code: str, error: str | None
) -> None:
    calls: list[int] = []

    @app.kind("work", preset="pool")
    async def work(job: Job[None]) -> Retry | Park | None:
        calls.append(job.attempts)
        return stumble() if len(calls) == 1 else None

    seen = Recorder(app)
    await app.enqueue("work", key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
        failed = row(admin, "k")
        assert (failed["state"], failed["last_code"], failed["last_error"]) == ("pending", code, error)
        age(admin, 100)
        await app.notify("work")
        await seen.count(JobSettled, 2)
    done = row(admin, "k")
    assert (done["state"], done["last_code"], done["last_error"]) == ("succeeded", None, None)
    assert done["attempts"] == failed["attempts"]


@pytest.mark.contract("B54")
async def test_a_requeue_gives_the_lease_up_and_leaves_nothing_but_its_reason(app: App, admin: Admin) -> None:
    leased: list[tuple[bool, str]] = []

    @app.kind("work", preset="pool", max_attempts=1)
    async def work(job: Job[None]) -> Park:
        now = row(admin, "k")
        leased.append((now["token"] == job.token and now["lease_expires_at"] is not None, now["runner"]))
        return Park(f"dirty_{len(leased)}", timedelta(minutes=2))

    seen = Recorder(app)
    await app.enqueue("work", key="k", revision="r")
    before = row(admin, "k")
    async with running(app.worker()) as worker:
        for count in (1, 2):
            await seen.count(JobSettled, count)
            after = row(admin, "k")
            changed = {name for name in after if after[name] != before[name]}
            assert changed - {"created_at"} == {"ready_at", "last_code", "lease_epoch", "lease_seconds"}
            assert (after["last_code"], after["attempts"], after["token"]) == (f"dirty_{count}", 0, None)
            assert leased == [(True, worker.name)] * count
            age(admin, 200)
            await app.notify("work")


@pytest.mark.parametrize(
    "limited",
    [
        lambda: judge_response(429, "600"),
        lambda: judge_response(429, format_datetime(datetime.now(UTC) + timedelta(seconds=600), usegmt=True)),
        lambda: Park("http_429", 600),
    ],
    ids=["seconds", "date", "parked"],
)
async def test_a_rate_limit_parks_its_job_once_until_the_reset(
    app: App, admin: Admin, limited: Callable[[], Pause | Park | Permanent | None]
) -> None:
    @app.kind("work", preset="pool", max_attempts=1)
    async def work(job: Job[None]) -> Pause | Park | Permanent | None:
        return limited() if job.lease_epoch == 1 else None

    seen = Recorder(app)
    await app.enqueue("work", key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    parked = row(admin, "k")
    assert (parked["state"], parked["attempts"], facts(admin)[-1].code) == ("pending", 0, "http_429")
    ((seconds,),) = admin.execute(
        "select extract(epoch from j.ready_at - f.at)::float8 from pgworker.jobs j, pgworker.facts f"
        " where f.what = 'parked'"
    ).fetchall()
    assert 0.95 * 600 <= seconds <= 1.05 * 600
    age(admin, 640)
    async with running(app.worker()):  # another one: a pause is the runner's own
        await seen.count(JobSettled, 2)
    assert (row(admin, "k")["state"], row(admin, "k")["attempts"]) == ("succeeded", 0)
    assert told(admin) == ["enqueued", "claimed", "parked", "claimed", "succeeded"]


@pytest.mark.contract("B61")
@pytest.mark.parametrize("where", ["loop", "thread"])
async def test_a_crash_is_a_failure_like_any_other_and_its_runner_lives(app: App, admin: Admin, where: str) -> None:
    calls: list[int] = []

    def crash_first(job: Job[None]) -> str:
        calls.append(job.attempts)
        if len(calls) == 1:
            raise CrashError
        return "well"

    if where == "thread":
        app.kind("work", preset="pool")(crash_first)
    else:

        @app.kind("work", preset="pool")
        async def work(job: Job[None]) -> str:
            return crash_first(job)

    seen = Recorder(app)
    await app.enqueue("work", key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
        crashed = row(admin, "k")
        assert (crashed["state"], crashed["attempts"]) == ("pending", 1)
        assert (crashed["last_code"], crashed["last_error"]) == ("handler_panic", "CrashError")
        age(admin, 100)
        await app.notify("work")
        await seen.count(JobSettled, 2)
    done, stored = row(admin, "k"), result(admin, "k")
    assert (done["state"], done["attempts"], calls) == ("succeeded", 1, [0, 1])
    assert stored is not None
    assert stored["value"] == "well"
    assert told(admin) == ["enqueued", "claimed", "retried", "claimed", "succeeded"]


@pytest.mark.contract("B62")
async def test_a_plain_error_waits_by_the_number_of_its_attempt(app: App, admin: Admin) -> None:
    @app.kind("work", preset="pool", max_attempts=-1)
    async def work(job: Job[int]) -> None:
        raise ValueError

    await app.enqueue_many("work", jobs(5))
    admin.execute("update pgworker.jobs set attempts = payload::int")
    seen = Recorder(app)
    async with running(app.worker(), stop="drain"):
        await seen.count(JobSettled, 5)
    waits = admin.execute(
        "select f.attempts, extract(epoch from j.ready_at - f.at)::float8, f.what, f.code"
        " from pgworker.jobs j join pgworker.facts f on f.job_id = j.id and f.attempts = j.payload::int + 1"
        " order by f.attempts, f.id"
    ).fetchall()
    assert [wait[0] for wait in waits] == [1, 2, 3, 4, 5]
    assert waits == [(attempt, 2.0**attempt, "retried", "handler_failed") for attempt in range(1, 6)]
    assert {each.key: each.retry_in_seconds for each in seen.of(JobSettled)} == {
        f"k{failed:04}": 2.0 ** (failed + 1) for failed in range(5)
    }
