"""The preset pool at work: how many at a time, for how long, how often, and what a stop leaves alone."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import anyio.from_thread
import anyio.lowlevel
import psycopg
import pytest

from pgworker import App, Backoff, Job
from pgworker.db import Database
from pgworker.events import JobSettled
from pgworker.policy import PRESETS
from pgworker.runner import Runner
from pgworker.slots import Slots
from pgworker.statements import Statement
from tests.handles import Gate, Recorder, jobs, result, row, running

Admin: TypeAlias = psycopg.Connection[Any]

AT_ONCE = Backoff(base=timedelta(milliseconds=1), cap=timedelta(milliseconds=1), jitter="none")


def gated(app: App) -> Gate:
    """Give the app a kind of the preset whose jobs wait at a gate."""
    gate = Gate()

    @app.kind("work", preset="pool")
    async def work(job: Job[int]) -> None:
        await gate.pass_through()

    return gate


@pytest.mark.contract("B2")
async def test_each_worker_claims_under_a_name_of_its_own(app: App, admin: Admin) -> None:
    """Two of one process, of which host and process are the same; so those of two processes differ, too."""
    gate = gated(app)
    await app.enqueue_many("work", jobs(4))
    async with running(app.worker()), running(app.worker()):
        await gate.until(4)
        claimed = admin.execute("select runner from pgworker.facts where what = 'claimed'").fetchall()
    claims = Counter(runner for (runner,) in claimed)
    assert sorted(claims.values()) == [2, 2]
    for name in claims:
        host, process, chance = name.rsplit(":", 2)
        assert (host, process) == (socket.gethostname(), str(os.getpid()))
        assert chance


@pytest.mark.contract("B3")
async def test_two_jobs_run_at_a_time(app: App, admin: Admin) -> None:
    gate = gated(app)
    seen = Recorder(app)
    await app.enqueue_many("work", jobs(10))
    async with running(app.worker()):
        await gate.until(2)
        # a claim takes all that there is room for: with more room it would have taken more
        assert admin.execute("select count(*) from pgworker.jobs where token is not null").fetchone() == (2,)
        gate.open()
        await seen.count(JobSettled, 10)
    assert gate.peak == 2
    assert admin.execute("select distinct state from pgworker.jobs").fetchall() == [("succeeded",)]


@pytest.mark.contract("B8")
async def test_a_claim_owns_its_job_for_two_minutes(app: App, admin: Admin) -> None:
    gate = gated(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await gate.until(1)
        expires = row(admin, "k")["lease_expires_at"]
    ((claimed,),) = admin.execute("select at from pgworker.facts where what = 'claimed'").fetchall()
    assert abs(expires - claimed - timedelta(minutes=2)) < timedelta(seconds=1)


@pytest.mark.contract("B10")
async def test_each_execution_has_a_deadline_and_one_that_passes_it_is_a_failure(app: App, admin: Admin) -> None:
    cancelled: list[int] = []

    @app.kind("work", preset="pool", timeout=0.1, backoff=AT_ONCE)
    async def work(job: Job[int]) -> str:
        if job.attempts == 2:
            return "in time"
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(job.attempts)
        return "late"

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 3)
    assert cancelled == [0, 1]
    assert (row(admin, "k")["state"], row(admin, "k")["attempts"]) == ("succeeded", 2)
    told = admin.execute("select what, code, attempts from pgworker.facts order by id").fetchall()
    assert told == [
        ("enqueued", None, 0),
        ("claimed", None, 0),
        ("retried", "handler_timeout", 1),
        ("claimed", None, 1),
        ("retried", "handler_timeout", 2),
        ("claimed", None, 2),
        ("succeeded", None, 2),
    ]
    assert PRESETS["pool"].timeout == timedelta(minutes=10)


@pytest.mark.contract("B11")
async def test_failures_wait_two_seconds_doubling_to_five_minutes_without_jitter(app: App, admin: Admin) -> None:
    @app.kind("work", preset="pool", batch=10, max_attempts=20)
    async def work(batch: list[Job[int]]) -> None:
        worker.drain()
        raise ValueError

    await app.enqueue_many("work", jobs(10))
    admin.execute("update pgworker.jobs set attempts = payload::int")
    worker = app.worker()
    await worker.run()
    waits = admin.execute(
        "select f.attempts, j.ready_at - f.at from pgworker.facts f join pgworker.jobs j on j.id = f.job_id"
        " where f.what = 'retried' order by 1"
    ).fetchall()
    seconds = [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert waits == [(attempts, timedelta(seconds=each)) for attempts, each in enumerate(seconds, 1)]


@pytest.mark.contract("B32")
@pytest.mark.parametrize("way", ["drain", "cancel"])
async def test_a_stop_between_the_handlers_end_and_the_final_write_leaves_the_write_alone(
    app: App, admin: Admin, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, draining, go_on = anyio.Event(), anyio.Event(), anyio.Event()
    send, drain = Database.run, Runner._drain

    async def run(self: Database, statement: Statement[Any], *, within: float = float("inf")) -> Any:
        if statement.name == "finish_jobs":
            writing.set()
            await go_on.wait()
        return await send(self, statement, within=within)

    async def noted(self: Runner, slots: Slots) -> None:
        draining.set()
        await drain(self, slots)

    monkeypatch.setattr(Database, "run", run)
    monkeypatch.setattr(Runner, "_drain", noted)

    @app.kind("work", preset="pool")
    async def work(job: Job[int]) -> str:
        return "done"

    await app.enqueue("work", 1, key="k")
    worker, scope = app.worker(), anyio.CancelScope()

    async def work_until_stopped() -> None:
        with scope:
            await worker.run()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(work_until_stopped)
            await writing.wait()
            scope.cancel() if way == "cancel" else worker.drain()
            await draining.wait()
            for _ in range(20):  # turns of the loop, in which whatever the stop would cut short has been
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            go_on.set()
    stored = result(admin, "k")
    assert (row(admin, "k")["state"], row(admin, "k")["lease_epoch"]) == ("succeeded", 1)
    assert stored is not None
    assert stored["value"] == "done"


@pytest.mark.contract("B35")
async def test_a_coroutine_runs_in_the_loop_and_a_function_in_a_thread(app: App) -> None:
    """The executor is the kind's: a command that is waited for in a thread holds up no coroutine."""
    where: dict[str, int] = {}
    entered, leave = anyio.Event(), threading.Event()
    loop = threading.get_ident()

    @app.kind("report", preset="pool")
    async def report(job: Job[str]) -> str:
        where["report"] = threading.get_ident()
        await entered.wait()
        leave.set()
        return f"report of {job.payload}"

    @app.kind("sh", preset="pool")
    def sh(job: Job[str]) -> str:
        where["sh"] = threading.get_ident()
        anyio.from_thread.run_sync(entered.set)
        assert leave.wait(10), "the coroutine went on beside it"
        return f"sh of {job.payload}"

    await app.enqueue("sh", "a", key="k")
    await app.enqueue("report", "b", key="k")
    async with running(app.worker()):
        assert await app.result("sh", "k", timeout=15) == "sh of a"
        assert await app.result("report", "k", timeout=15) == "report of b"
    assert where["report"] == loop
    assert where["sh"] != loop
