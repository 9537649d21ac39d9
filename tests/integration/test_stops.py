"""A stop that comes at each moment of a runner's round: it ends soon, and leaves no lease and no attempt behind."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Job, Lease, Pause, Stop
from pgworker.claimer import Claimer, Taken
from pgworker.db import Database
from pgworker.events import JobSettled
from pgworker.finisher import Finisher
from pgworker.operations import pause_kind
from pgworker.queue import JobsTable
from pgworker.statements import Statement
from pgworker.worker import Worker
from tests.handles import Gate, Hand, Recorder, jobs, running

Admin: TypeAlias = psycopg.Connection[Any]

LONG = timedelta(hours=1)


@pytest.fixture(params=["drain", "release", "cancel"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def stopped(worker: Worker, way: str, *, within: float = 8.0) -> AsyncGenerator[None, None]:
    """The worker runs while the block does; then it is stopped this way, and must come to its end in time."""
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(worker.run)
            yield
            if way == "cancel":
                group.cancel_scope.cancel()
            else:
                getattr(worker, way)()
            group.start_soon(_fail_after, within, worker)
    assert {status.lifecycle for status in worker.status().values()} == {"stopped"}


async def _fail_after(seconds: float, worker: Worker) -> None:
    with anyio.fail_after(seconds, shield=True):
        while any(each.lifecycle != "stopped" for each in worker.status().values()):  # noqa: ASYNC110 - no event
            await anyio.sleep(0.01)


def untouched(admin: Admin) -> bool:
    """Whether every job waits as if nobody had ever claimed it."""
    found = admin.execute(
        "select count(*) from pgworker.jobs"
        " where token is not null or state <> 'pending' or attempts > 0 or evictions > 0 or last_code is not null"
    ).fetchone()
    return found == (0,)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - statuses and rows have no event
            await anyio.sleep(0.01)


def count_rounds(monkeypatch: pytest.MonkeyPatch) -> list[Taken]:
    """The rounds of claims that have come back."""
    rounds: list[Taken] = []
    take_round = Claimer.round

    async def counted(self: Claimer, limit: int) -> Taken:
        rounds.append(await take_round(self, limit))
        return rounds[-1]

    monkeypatch.setattr(Claimer, "round", counted)
    return rounds


@pytest.mark.race(6)
async def test_during_the_idle_wait(app: App, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = count_rounds(monkeypatch)

    @app.kind("work", poll=LONG)
    async def work(job: Job[int]) -> None: ...

    async with stopped(app.worker(), way):
        await until(lambda: len(rounds) > 0)


@pytest.mark.race(6)
async def test_during_the_window(app: App, admin: Admin, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = count_rounds(monkeypatch)

    @app.kind("work", batch=4, window=LONG)
    async def work(batch: list[Job[int]]) -> None: ...

    await app.enqueue_many("work", jobs(3))
    worker = app.worker()
    async with stopped(worker, way):
        await until(lambda: [each.lifecycle for each in worker.status().values()] == ["running"])
    assert rounds == []
    assert untouched(admin)


@pytest.mark.contract("X40")
@pytest.mark.race(6)
@pytest.mark.parametrize("moment", ["before it arrives", "after it was answered"])
async def test_during_the_claim(app: App, admin: Admin, way: str, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    claiming, go_on = anyio.Event(), anyio.Event()
    budgets: list[float] = []
    send = Database.run

    async def run(self: Database, statement: Statement[Any], *, within: float = float("inf")) -> Any:
        if statement.name == "settle_jobs":
            budgets.append(within)
        if statement.name != "claim_jobs":
            return await send(self, statement, within=within)
        with anyio.CancelScope(shield=True):
            answer = None if moment == "before it arrives" else await send(self, statement, within=within)
            claiming.set()
            await go_on.wait()
            return answer or await send(self, statement, within=within)

    monkeypatch.setattr(Database, "run", run)
    monkeypatch.setattr("pgworker.runner.MOST_AT_ONCE", 3)

    @app.kind("work", preset="content", batch=4, concurrency=1, window=0)
    async def work(batch: list[Job[int]]) -> None:
        called.extend(job.key for job in batch)

    await app.enqueue_many("work", jobs(4))
    worker = app.worker()
    async with stopped(worker, way):
        await claiming.wait()
        worker._loop.call_later(0.1, go_on.set) if worker._loop else None
    assert called == []
    assert untouched(admin)
    assert worker.status()["work"].released == 4
    assert len(budgets) == 2, "as many in one statement as may be"
    assert all(budget < 5 for budget in budgets) or way == "drain", "what is given back shares the time of the release"


@pytest.mark.race(6)
@pytest.mark.parametrize("colour", ["async", "sync"])
async def test_during_the_handler(app: App, admin: Admin, way: str, colour: str) -> None:
    inside: list[str] = []

    async def work(job: Job[int]) -> None:
        inside.append(job.key)
        await anyio.sleep_forever()

    def work_sync(job: Job[int]) -> None:
        inside.append(job.key)
        job.signal.wait(20)

    handler: Any = work if colour == "async" else work_sync
    app.kind("work", preset="content", batch=None)(handler)
    await app.enqueue_many("work", jobs(2))
    async with stopped(app.worker(), "release" if way == "drain" else way):
        await until(lambda: len(inside) == 2)
    assert untouched(admin)


@pytest.mark.contract("A60")
@pytest.mark.race(6)
async def test_between_two_completions(app: App, admin: Admin, way: str) -> None:
    applying, go_on = anyio.Event(), anyio.Event()
    applied: list[str] = []

    async def apply(conn: psycopg.AsyncConnection[Any], job: Job[int], value: int) -> None:
        applied.append(job.key)
        if len(applied) == 2:
            applying.set()
            await go_on.wait()

    @app.kind("work", preset="content", batch=4, apply=apply)
    async def work(batch: list[Job[int]]) -> list[int]:
        return [job.payload for job in batch]

    await app.enqueue_many("work", jobs(4))
    worker = app.worker()
    async with stopped(worker, way):
        await applying.wait()
        worker._loop.call_later(0.1, go_on.set) if worker._loop else None
    done = 4 if way == "drain" else 2
    found = admin.execute("select state, token, attempts from pgworker.jobs order by key").fetchall()
    assert found == [("succeeded", None, 0)] * done + [("pending", None, 0)] * (4 - done)
    assert admin.execute("select count(*) from pgworker.results").fetchone() == (done,)


@pytest.mark.race(6)
async def test_during_the_release_of_another_stop(
    app: App, admin: Admin, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    releasing, go_on = anyio.Event(), anyio.Event()
    write = Finisher.write

    async def held(self: Finisher, endings: Any) -> None:
        releasing.set()
        await go_on.wait()
        await write(self, endings)

    monkeypatch.setattr(Finisher, "write", held)
    gate = Gate()

    @app.kind("work", preset="content", batch=4)
    async def work(batch: list[Job[int]]) -> None:
        await gate.pass_through()

    await app.enqueue_many("work", jobs(4))
    worker = app.worker()
    async with stopped(worker, way):
        await gate.until(1)
        worker.release()
        await releasing.wait()
        worker._loop.call_later(0.1, go_on.set) if worker._loop else None
    assert untouched(admin)
    assert worker.status()["work"].released == 4


@pytest.mark.race(6)
@pytest.mark.parametrize("whose", ["its own", "the table's"])
async def test_during_a_pause(app: App, admin: Admin, hand: Hand, way: str, whose: str) -> None:
    @app.kind("work", poll=LONG)
    async def work(job: Job[int]) -> Pause:
        return Pause(3600, "down")

    seen = Recorder(app)
    if whose == "the table's":
        hand.send(pause_kind(hand.tables, "work", None, "maintenance"))
    await app.enqueue("work", 1, key="k")
    worker = app.worker()
    async with stopped(worker, way):
        await until(lambda: [each.lifecycle for each in worker.status().values()] == ["paused"])
        if whose == "its own":
            await seen.count(JobSettled, 1)
    assert admin.execute("select count(*) from pgworker.jobs where token is null and attempts = 0").fetchone() == (1,)


@pytest.mark.race(6)
async def test_while_the_listener_cannot_connect(
    dsn: str, admin: Admin, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with App(dsn, listen_dsn="postgresql://127.0.0.1:1/nowhere") as app:

        @app.kind("work", poll=LONG)
        async def work(job: Job[int]) -> None: ...

        async with stopped(app.worker(), way):
            await until(lambda: "LISTEN connection lost or refused" in caplog.text)


@pytest.mark.race(6)
async def test_while_a_full_house_waits_for_a_free_slot(app: App, admin: Admin, way: str) -> None:
    gate = Gate()

    @app.kind("work", preset="content", batch=2, concurrency=1)
    async def work(batch: list[Job[int]]) -> None:
        await gate.pass_through()

    await app.enqueue_many("work", jobs(6))
    worker = app.worker()
    async with stopped(worker, way):
        await gate.until(1)
        if way == "drain" and worker._loop is not None:
            worker._loop.call_later(0.1, gate.open)
    done = 2 if way == "drain" else 0
    found = admin.execute("select state, count(*) from pgworker.jobs where token is null group by 1 order by 1")
    assert found.fetchall() == [("pending", 6 - done), *([("succeeded", done)] if done else [])]


async def test_a_claim_that_fails_is_no_obstacle_to_a_stop(app: App, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait after an error is a wait like any other."""
    surveys: list[JobsTable] = []

    def broken(self: JobsTable) -> Any:
        surveys.append(self)
        raise psycopg.OperationalError

    monkeypatch.setattr(JobsTable, "survey", broken)

    @app.kind("work", poll=LONG)
    async def work(job: Job[int]) -> None: ...

    async with stopped(app.worker(), way):
        await until(lambda: len(surveys) > 0)


async def test_what_settles_last_is_told_before_run_returns(app: App) -> None:
    gate = Gate()

    @app.kind("work")
    async def work(job: Job[int]) -> None:
        await gate.pass_through()

    seen = Recorder(app)
    await app.enqueue("work", 1)
    async with running(app.worker(), stop="drain"):
        await gate.until(1)
        gate.open()
    assert len(seen.of(JobSettled)) == 1


@pytest.mark.parametrize("way", ["drain", "cancel"])
async def test_a_running_job_is_cancelled_at_once_while_its_worker_drains(app: App, way: str) -> None:
    """What tells it, the listener, is there until the last job has ended; its lease is renewed much later."""
    seen, gate, scope = Recorder(app), Gate(), anyio.CancelScope()

    @app.kind("work", lease=Lease.renew(LONG), stop=Stop("drain", LONG))
    async def work(job: Job[int]) -> None:
        await gate.pass_through()

    worker = app.worker()

    async def run() -> None:
        with scope:
            await worker.run()

    await app.enqueue("work", 1, key="a")
    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await gate.until(1)
        if way == "cancel":
            scope.cancel()
        else:
            worker.drain()
        await anyio.sleep(0.2)  # what ends with the stop has ended
        assert await app.cancel("work", key="a") == 1
        await seen.count(JobSettled, 1)
    assert [event.state for event in seen.of(JobSettled)] == ["cancelled"]
