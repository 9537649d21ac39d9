"""Errors that no repetition mends: a write that is refused for good comes to an end, and loses no job."""

from __future__ import annotations

from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker import App, Job, Stop
from pgworker.events import JobLost, JobSettled, RunnerTrouble
from pgworker.outcome import Returned
from tests.handles import Recorder, age, jobs, row, running

Admin: TypeAlias = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is tried for a moment only."""
    monkeypatch.setattr("pgworker.finisher._REFUSED_SECONDS", 0.3)


def refuse(admin: Admin, table: str, when: str, *, error: str = "insufficient_privilege") -> None:
    """From now on such a write of ours is refused, as if a right had been taken away."""
    admin.execute(
        "create function public.refuse() returns trigger language plpgsql as"
        f" $$ begin raise {error}; end $$;"
        f"create trigger refuse before insert or update on pgworker.{table} for each row when ({when})"
        " execute function public.refuse()"
    )


@pytest.mark.ruling("1.18")
async def test_a_success_that_is_refused_for_good_becomes_a_failure(app: App, admin: Admin) -> None:
    refuse(admin, "results", "true")

    @app.kind("work", max_attempts=2)
    async def work(job: Job[int]) -> int:
        return 1

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 1)
        assert worker.status()["work"].retried == 1
    after = row(admin, "k")
    assert (after["state"], after["attempts"], after["token"]) == ("pending", 1, None)
    assert (after["last_code"], after["last_error"]) == ("queue_complete_failed", "InsufficientPrivilege")
    tried = [trouble for trouble in seen.of(RunnerTrouble) if trouble.code == "queue_complete_failed"]
    assert len(tried) > 1  # somebody might have mended it
    admin.execute("drop trigger refuse on pgworker.results")
    age(admin, 60)
    async with running(app.worker()):
        await seen.count(JobSettled, 2)
    assert row(admin, "k")["state"] == "succeeded"


@pytest.mark.contract("A56")
@pytest.mark.ruling("1.18")
@pytest.mark.parametrize("outcome", ["a success", "a failure"])
async def test_a_drain_without_a_grace_ends_although_nothing_can_be_written_and_no_job_is_lost(
    app: App, admin: Admin, outcome: str
) -> None:
    @app.kind("work", stop=Stop("drain"), max_attempts=3)
    async def work(job: Job[int]) -> int:
        worker.drain()
        if outcome == "a failure" and not seen.events:
            raise ValueError
        return 1

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k", revision="r")
    refuse(admin, "jobs", "new.token is null")
    worker = app.worker()
    await worker.run()
    left = row(admin, "k")
    assert (left["state"], left["attempts"], left["lease_epoch"]) == ("pending", 0, 1)
    assert left["token"] is not None
    assert [lost.reason for lost in seen.of(JobLost)] == ["refused"]
    assert seen.of(RunnerTrouble)[-1] == RunnerTrouble("work", "queue_write_refused", "InsufficientPrivilege")
    assert worker.status()["work"].superseded == 0
    assert worker.status()["work"].last_error == "queue_write_refused"
    admin.execute("drop trigger refuse on pgworker.jobs")
    age(admin, 3600)
    worker = app.worker()
    await worker.run()
    after = row(admin, "k")
    assert (after["state"], after["lease_epoch"]) == ("succeeded", 2)


@pytest.mark.contract("A57")
@pytest.mark.ruling("1.18")
async def test_a_trigger_that_raises_for_one_row_fails_that_one_only(app: App, admin: Admin) -> None:
    refuse(admin, "results", "new.value = '3'", error="exception 'SECRET'")

    @app.kind("work", batch=8, max_attempts=1)
    async def work(batch: list[Job[int]]) -> list[int]:
        return [job.payload for job in batch]

    seen = Recorder(app)
    await app.enqueue_many("work", jobs(8))
    async with running(app.worker()):
        await seen.count(JobSettled, 8)
    found = admin.execute(
        "select payload, state, last_code, last_error from pgworker.jobs where state <> 'succeeded'"
    ).fetchall()
    assert found == [(3, "failed", "result_rejected", "RaiseException")]


@pytest.mark.parametrize("value", ['"\\u0000"', "no json"])
async def test_a_value_that_only_a_middleware_could_make_fails_its_own_job(dsn: str, admin: Admin, value: str) -> None:
    """Text that the driver itself cannot send, and text that the server cannot read."""

    async def spoil(kind: str, batch: Any, call_next: Any) -> Any:
        results = list(await call_next(batch))
        results[1] = Returned(value.replace("\\u0000", "\0"), None)
        return results

    async with App(dsn, middleware=[spoil]) as app:

        @app.kind("work", batch=3, max_attempts=1)
        async def work(batch: list[Job[int]]) -> list[int]:
            return [job.payload for job in batch]

        seen = Recorder(app)
        await app.enqueue_many("work", jobs(3))
        async with running(app.worker()):
            await seen.count(JobSettled, 3)
    found = admin.execute("select payload, state, last_code from pgworker.jobs where state <> 'succeeded'").fetchall()
    assert found == [(1, "failed", "result_rejected")]


@pytest.mark.ruling("2.14")
@pytest.mark.parametrize(("results", "told"), [("notify", ["work"]), ("poll", [])])
async def test_those_who_wait_for_results_are_told_once_a_flush(
    app: App, monkeypatch: pytest.MonkeyPatch, results: Any, told: list[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr("pgworker.hints.Hints.done", lambda _self, kind: done.append(kind))

    @app.kind("work", batch=50, results=results, max_attempts=1)
    async def work(batch: list[Job[int]]) -> list[int]:
        return [job.payload for job in batch]

    @app.kind("again", results="notify")
    async def again(job: Job[int]) -> None:
        raise ValueError

    seen = Recorder(app)
    await app.enqueue_many("work", jobs(50))
    await app.enqueue("again", 1)
    async with running(app.worker()):
        await seen.count(JobSettled, 51)
    assert done == told  # what waits for its retry has no result yet
