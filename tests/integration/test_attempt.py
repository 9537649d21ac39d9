"""One call of a handler, taken apart: leases that die before it begins, and batches of which some jobs are lost."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Job, Lease, NewJob
from pgworker.claimer import Claimer, Taken
from pgworker.events import JobLost, JobSettled
from tests.handles import Recorder, result, row, running

Admin: TypeAlias = psycopg.Connection[Any]


@pytest.mark.ruling("4.6")
async def test_a_handler_is_not_entered_for_a_lease_that_died_on_the_way(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a SIGSTOP between the claim's answer and the handler: local time says that the lease has ended."""
    entered: list[str] = []
    original = Claimer.round

    async def late(self: Claimer, limit: int) -> Taken:
        taken: Taken = await original(self, limit)
        return taken._replace(sent_at=taken.sent_at - 3600) if taken.claims and not lost.of(JobLost) else taken

    monkeypatch.setattr(Claimer, "round", late)

    @app.kind("work")
    async def work(job: Job[object]) -> None:
        entered.append(job.key)

    lost = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await lost.count(JobLost, 1)
    assert entered == []


@pytest.mark.ruling("2.10")
async def test_a_superseded_job_of_a_batch_costs_only_its_own_outcome(app: App, admin: Admin) -> None:
    entered, leave = anyio.Event(), anyio.Event()
    lost: list[bool] = []

    @app.kind("work", batch=4, concurrency=1)
    async def work(batch: list[Job[int]]) -> list[int]:
        if batch[0].payload < 10:
            entered.set()
            await leave.wait()
            lost.extend(job.lost for job in batch)
        return [job.payload for job in batch]

    await app.enqueue_many("work", [NewJob(index, f"k{index}", "r1") for index in range(4)])
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await entered.wait()
        await app.enqueue("work", 12, key="k2", revision="r2")
        leave.set()
        await seen.count(JobSettled, 4)
        assert worker.status()["work"].superseded == 1
    assert {key: row(admin, key)["state"] for key in ("k0", "k1", "k2", "k3")} == dict.fromkeys(
        ("k0", "k1", "k2", "k3"), "succeeded"
    )
    stored = result(admin, "k2")
    assert stored is not None
    assert (stored["value"], stored["revision"]) == (12, "r2")
    assert lost == [False] * 4  # not yet told: the lease is looked at with the next renewal


@pytest.mark.ruling("2.10")
async def test_a_lost_job_of_a_batch_is_told_and_the_call_goes_on_until_all_are_lost(app: App, admin: Admin) -> None:
    entered = anyio.Event()
    told: list[list[bool]] = []
    cancelled = anyio.Event()

    @app.kind("work", batch=2, concurrency=1, lease=Lease.renew(timedelta(seconds=0.9), timedelta(seconds=0.1)))
    async def work(batch: list[Job[int]]) -> list[int]:
        entered.set()
        try:
            while True:
                told.append([job.lost for job in batch])
                await anyio.sleep(0.02)
        finally:
            cancelled.set()

    await app.enqueue_many("work", [NewJob(index, f"k{index}", "r1") for index in range(2)])
    async with running(app.worker()):
        await entered.wait()
        admin.execute("delete from pgworker.jobs where key = 'k0'")
        with anyio.fail_after(5):
            while told[-1] != [True, False]:  # noqa: ASYNC110 - the handler looks, as handlers do
                await anyio.sleep(0.01)
        assert not cancelled.is_set()
        admin.execute("delete from pgworker.jobs where key = 'k1'")
        with anyio.fail_after(5):
            await cancelled.wait()


async def test_middleware_wraps_the_call_first_outermost_and_may_change_results(dsn: str, admin: Admin) -> None:
    steps: list[str] = []

    def tracing(name: str) -> Any:
        async def middleware(kind: str, jobs: Any, call_next: Any) -> Any:
            steps.append(f"{name} in {kind}")
            results = await call_next(jobs)
            steps.append(f"{name} out")
            return [replace(each, value='"changed"') for each in results] if name == "inner" else results

        return middleware

    app = App(dsn, middleware=[tracing("outer"), tracing("inner")])

    @app.kind("work")
    async def work(job: Job[int]) -> int:
        steps.append("handler")
        return job.payload

    seen = Recorder(app)
    async with app:
        await app.enqueue("work", 1, key="k")
        async with running(app.worker()):
            await seen.count(JobSettled, 1)
    assert steps == ["outer in work", "inner in work", "handler", "inner out", "outer out"]
    stored = result(admin, "k")
    assert stored is not None
    assert stored["value"] == "changed"


@pytest.mark.parametrize("fault", ["raises", "answers too little"])
async def test_a_broken_middleware_is_the_jobs_failure_and_the_runner_lives(dsn: str, admin: Admin, fault: str) -> None:
    async def broken(kind: str, jobs: Any, call_next: Any) -> Any:
        if fault == "raises":
            raise ValueError("SECRET")
        return (await call_next(jobs))[:-1]

    app = App(dsn, middleware=[broken])

    @app.kind("work", max_attempts=1)
    async def work(job: Job[int]) -> int:
        return job.payload

    seen = Recorder(app)
    async with app:
        await app.enqueue("work", 1, key="k")
        async with running(app.worker()):
            await seen.count(JobSettled, 1)
    code = "handler_failed" if fault == "raises" else "handler_result_count"
    assert (row(admin, "k")["state"], row(admin, "k")["last_code"]) == ("failed", code)
