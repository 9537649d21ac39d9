"""Jobs that are claimed ahead of free slots: how many, in which order, and who gets them when no call begins."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import anyio.lowlevel
import psycopg
import pytest

from pgworker import App, Job, Lease, Pause
from pgworker.ending import Ending
from pgworker.events import JobLost, JobSettled, RunnerTrouble
from pgworker.finisher import Finisher
from pgworker.leases import Held
from pgworker.operations import pause_kind
from pgworker.slots import Slots
from pgworker.worker import Worker
from tests.handles import Gate, Hand, Recorder, jobs, running

Admin: TypeAlias = psycopg.Connection[Any]


def held(admin: Admin) -> int:
    (count,) = admin.execute("select count(*) from pgworker.jobs where token is not null").fetchone() or (0,)
    return int(count)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - a row has no event
            await anyio.sleep(0.01)


@pytest.mark.ruling("1.15")
@pytest.mark.parametrize(("batch", "prefetch"), [(None, 0), (None, 7), (4, 0), (4, 7)])
async def test_what_is_claimed_is_bounded_by_the_slots_and_the_prefetch(
    app: App, admin: Admin, batch: int | None, prefetch: int
) -> None:
    gate = Gate()

    async def work(job: Any) -> None:
        await gate.pass_through()

    app.kind("work", concurrency=2, batch=batch, prefetch=prefetch, window=0)(work)
    bound = 2 * (batch or 1) + prefetch
    await app.enqueue_many("work", jobs(60))
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await gate.until(2)
        await until(lambda: held(admin) == bound)
        await anyio.sleep(0.2)  # time enough for one too many
        assert held(admin) == worker.status()["work"].in_flight == bound
        gate.open()
        await seen.count(JobSettled, 60)
        assert worker.status()["work"].in_flight == 0
    assert gate.peak == 2


@pytest.mark.ruling("1.15")
async def test_unwritten_ends_count_for_the_bound(app: App, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    go_on = anyio.Event()
    write_group = Finisher._write_group

    async def held_up(self: Finisher, group: Sequence[Ending]) -> None:
        await go_on.wait()
        await write_group(self, group)

    monkeypatch.setattr(Finisher, "_write_group", held_up)

    @app.kind("work", concurrency=2, prefetch=6)
    async def work(job: Job[int]) -> None:
        called.append(job.key)

    await app.enqueue_many("work", jobs(40))
    seen = Recorder(app)
    async with running(app.worker(), stop="drain") as worker:
        await until(lambda: len(called) == 8)
        await anyio.sleep(0.2)
        assert len(called) == held(admin) == worker.status()["work"].in_flight == 8
        go_on.set()
        await seen.count(JobSettled, 40)
    assert called == [f"k{number:04}" for number in range(40)]


@pytest.mark.ruling("1.15")
async def test_jobs_begin_in_order_and_are_claimed_many_at_a_time(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    worthwhile = Slots.until_worthwhile
    rooms: list[tuple[int, bool]] = []

    async def noted(self: Slots) -> int:
        room = await worthwhile(self)
        rooms.append((room, self.has_buffered))
        return room

    monkeypatch.setattr(Slots, "until_worthwhile", noted)

    @app.kind("work", concurrency=3, prefetch=40)
    async def work(job: Job[int]) -> None:
        called.append(job.key)
        await anyio.sleep(0.001 * (job.payload % 3))

    await app.enqueue_many("work", jobs(200))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 200)
    assert called == sorted(called)
    # Never before half of what may be ahead is gone while the slots have something to begin with: if not, a server
    # that is slow to write what has ended (which takes room until then) does not keep them waiting.
    assert all(room >= 20 for room, has_buffered in rooms if has_buffered)
    assert any(has_buffered for _, has_buffered in rooms)


@pytest.mark.ruling("1.15")
@pytest.mark.parametrize("stop", ["drain", "release"])
async def test_a_stop_gives_back_what_no_call_has_begun(app: App, admin: Admin, stop: str) -> None:
    gate = Gate()

    @app.kind("work", concurrency=2, prefetch=10)
    async def work(job: Job[int]) -> None:
        await gate.pass_through()

    await app.enqueue_many("work", jobs(12))
    before = admin.execute("select key, ready_at from pgworker.jobs order by key").fetchall()
    async with anyio.create_task_group() as group:
        worker = app.worker()
        group.start_soon(worker.run)
        await gate.until(2)
        await until(lambda: held(admin) == 12)
        (worker.drain if stop == "drain" else worker.release)()
        await until(lambda: held(admin) <= 2)  # at once, while the others still run
        if stop == "drain":
            assert held(admin) == 2
            gate.open()
    assert gate.calls == [1, 1]
    done = 2 if stop == "drain" else 0
    after = admin.execute("select key, ready_at from pgworker.jobs order by key").fetchall()
    assert after == before
    left = admin.execute(
        "select count(*) from pgworker.jobs where state = 'pending' and attempts = 0 and evictions = 0"
    )
    assert left.fetchone() == (12 - done,)
    status = worker.status()["work"]
    assert (status.claimed, status.succeeded, status.released, status.in_flight) == (12, done, 12 - done, 0)


@pytest.mark.contract("A51")
@pytest.mark.ruling("1.15")
@pytest.mark.parametrize("whose", ["its own", "the table's"])
async def test_a_pause_gives_back_what_no_call_has_begun(app: App, admin: Admin, hand: Hand, whose: str) -> None:
    gate = Gate()
    called: list[int] = []

    @app.kind("work", concurrency=2, prefetch=10, poll=0.1)
    async def work(job: Job[int]) -> Pause | None:
        called.append(job.payload)
        await gate.pass_through()
        return Pause(60, "down") if whose == "its own" and job.payload == 0 else None

    await app.enqueue_many("work", jobs(12))
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await gate.until(2)
        await until(lambda: held(admin) == 12)
        if whose == "the table's":
            hand.send(pause_kind(hand.tables, "work", None, "maintenance"))
            await until(lambda: held(admin) == 2)
        gate.open()
        await seen.count(JobSettled, 12)
        await until(lambda: held(admin) == 0)
        assert worker.status()["work"].lifecycle == "paused"
        assert worker.status()["work"].released == 10
    assert called == [0, 1]


@pytest.mark.ruling("1.15", "4.6")
async def test_what_has_waited_for_half_its_lease_is_given_back(app: App, admin: Admin) -> None:
    """Behind a slow call, with a lease that is not renewed: what is left of it would not cover the call."""
    called: list[str] = []

    @app.kind("work", concurrency=1, prefetch=3, timeout=0.1, lease=Lease.cover(timedelta(seconds=1400)))
    async def work(job: Job[int]) -> None:
        called.append(job.key)
        if len(called) == 1:
            for each in held_by(worker):
                each.guard = time.monotonic() + (699 if each.claim.key == "k0001" else 701)

    await app.enqueue_many("work", jobs(4))
    seen = Recorder(app)
    worker = app.worker()
    async with running(worker):
        await seen.count(JobSettled, 5)
    assert called == ["k0000", "k0002", "k0003", "k0001"]
    assert (worker.status()["work"].released, worker.status()["work"].claimed) == (1, 5)


@pytest.mark.ruling("4.6")
async def test_a_row_behind_a_slow_one_that_somebody_else_owns_by_now_never_reaches_the_handler(
    app: App, admin: Admin
) -> None:
    gate = Gate()
    called: list[str] = []

    @app.kind("work", concurrency=1, prefetch=3, lease=Lease.renew(timedelta(seconds=0.9), timedelta(seconds=0.1)))
    async def work(job: Job[int]) -> None:
        called.append(job.key)
        await gate.pass_through()

    await app.enqueue_many("work", jobs(3))
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await gate.until(1)
        await until(lambda: held(admin) == 3)
        admin.execute("update pgworker.jobs set token = gen_random_uuid() where key = 'k0001'")  # as by another claim
        await until(lambda: any(each.cause == "lost" for each in held_by(worker)))
        gate.open()
        await seen.count(JobSettled, 2)
        await seen.count(JobLost, 1)
    assert called == ["k0000", "k0002"]


def held_by(worker: Worker) -> list[Held]:
    slots = worker._runners[0]._slots
    return slots.held if slots is not None else []


@pytest.mark.ruling("1.15")
async def test_a_batch_that_is_called_again_job_by_job_keeps_its_slot_meanwhile(app: App) -> None:
    @app.kind("work", batch=2, concurrency=1, prefetch=6, window=0, singly=True, max_attempts=1)
    async def work(batch: list[Job[int]]) -> list[None]:
        if len(batch) > 1:
            raise ValueError
        running_now.append(len(batch))
        peaks.append(len(running_now))
        await anyio.sleep(0.03)  # meanwhile the batch before is written, and others are claimed
        running_now.pop()
        return [None]

    running_now: list[int] = []
    peaks: list[int] = []
    await app.enqueue_many("work", jobs(40))
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 40)
        assert worker.status()["work"].succeeded == 40
    assert max(peaks) == 1


# --- calls that follow each other in one task ------------------------------------------------------------------------

seen_by = contextvars.ContextVar("seen_by", default="")


async def test_no_handler_sees_what_another_has_set_in_its_context(app: App) -> None:
    found: list[str] = []

    @app.kind("work", concurrency=50)
    async def work(job: Job[int]) -> None:
        found.append(seen_by.get())
        if job.payload % 3:
            seen_by.set(job.key)
        if job.payload % 5 == 0:
            await anyio.lowlevel.checkpoint()

    await app.enqueue_many("work", jobs(50))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 50)
    assert found == [""] * 50


class Incomparable:
    """As some libraries' values are: arrays, expressions."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")


async def test_a_context_variable_that_cannot_be_compared_harms_nobody(app: App) -> None:
    variable: contextvars.ContextVar[Incomparable | None] = contextvars.ContextVar("incomparable", default=None)

    @app.kind("work", concurrency=2)
    async def work(job: Job[int]) -> None:
        assert variable.get() is None
        variable.set(Incomparable())

    await app.enqueue_many("work", jobs(10))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 10)
    assert not seen.of(RunnerTrouble)


async def test_a_call_that_has_waited_shares_its_task_with_none_after_it(app: App) -> None:
    """What has been left behind to cancel the task, such as a library's timer, must not strike another job."""
    ended: list[int] = []

    @app.kind("work", concurrency=2, prefetch=20, max_attempts=1)
    async def work(job: Job[int]) -> None:
        if job.payload % 2 == 0:
            task = asyncio.current_task()
            assert task is not None
            await anyio.sleep(0.001)
            asyncio.get_running_loop().call_soon(task.cancel)
        else:
            await anyio.sleep(0.02)
        ended.append(job.payload)

    await app.enqueue_many("work", jobs(20))
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 20)
        assert worker.status()["work"].succeeded == 20
    assert sorted(ended) == list(range(20))


async def test_the_loop_has_its_turn_between_calls_that_do_not_wait(app: App) -> None:
    """However many there are: a stop, a renewal or another kind's job must not wait for all of them."""
    turns: list[int] = []
    called: list[int] = []

    @app.kind("work", concurrency=1, prefetch=100)
    async def work(job: Job[int]) -> None:
        if not called:
            asyncio.get_running_loop().call_later(0.02, lambda: turns.append(len(called)))
        called.append(job.payload)
        time.sleep(0.002)  # noqa: ASYNC251 - it blocks the loop, as handlers do

    await app.enqueue_many("work", jobs(100))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 100)
    assert turns
    assert turns[0] < 60
