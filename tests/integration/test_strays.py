"""Handlers that strike at the task they run in, now or later: no other job pays for it, and no code of ours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import anyio
import anyio.lowlevel
import psycopg
import pytest

from pgworker import App, Job
from pgworker.events import JobSettled, RunnerTrouble
from pgworker.finisher import Finisher
from tests.handles import Gate, Recorder, jobs, running


def cancel_of_this_task() -> Callable[[], object]:
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


def uncounted(seen: Recorder) -> list[str]:
    """The keys of the jobs that were given back, in order."""
    return [str(event.key) for event in seen.of(JobSettled) if event.state == "pending" and not event.counted]


async def succeeded(app: App, seen: Recorder, count: int) -> None:
    """The worker runs until so many jobs have succeeded, and has not lost track of any."""
    async with running(app.worker()):
        await seen.wait(lambda: sum(event.state == "succeeded" for event in seen.of(JobSettled)) == count)
    assert seen.of(RunnerTrouble) == []
    assert [event for event in seen.of(JobSettled) if event.counted and event.state != "succeeded"] == []


async def test_a_job_that_a_timer_of_an_earlier_call_cancels_is_given_back_and_runs_again(app: App) -> None:
    seen = Recorder(app)

    @app.kind("work", concurrency=1, prefetch=20, max_attempts=1)
    async def work(job: Job[int]) -> None:
        if job.payload == 0:
            asyncio.get_running_loop().call_later(0.1, cancel_of_this_task())
        else:
            await anyio.sleep(0.2)  # longer than the timer

    await app.enqueue_many("work", jobs(3))
    await succeeded(app, seen, 3)
    assert uncounted(seen) == ["k0001"]


async def test_once_a_timer_has_struck_each_call_has_a_task_for_itself(app: App) -> None:
    """Else jobs would be given back for as long as there are such timers."""
    seen = Recorder(app)

    @app.kind("work", concurrency=1, prefetch=20, max_attempts=1)
    async def work(job: Job[int]) -> None:
        if job.payload % 2:
            await anyio.sleep(0.05)
        else:
            asyncio.get_running_loop().call_later(0.02, cancel_of_this_task())

    await app.enqueue_many("work", jobs(20))
    await succeeded(app, seen, 20)
    assert len(uncounted(seen)) == 1


@pytest.mark.parametrize("batch", [None, 3])
async def test_a_handler_that_outlives_its_deadline_and_cancels_its_task_has_timed_out(
    app: App, batch: int | None
) -> None:
    """Nothing of that is left for the code that writes the outcome."""
    seen = Recorder(app)

    async def work(job: object) -> None:
        with suppress(asyncio.CancelledError):
            await anyio.sleep(5)
        cancel_of_this_task()()

    work.__annotations__["job"] = Job[int] if batch is None else list[Job[int]]
    alone = batch is not None
    app.kind("work", batch=batch, window=0, singly=alone, timeout=timedelta(seconds=0.1), max_attempts=1)(work)
    await app.enqueue_many("work", jobs(batch or 1))
    async with running(app.worker()):
        await seen.count(JobSettled, batch or 1)
    assert {event.code for event in seen.of(JobSettled)} == {"handler_timeout"}
    assert seen.of(RunnerTrouble) == []


class Leaver:
    """Leaves scopes open, as an async generator does that yields inside one and is not read on: a known trap."""

    def __init__(self) -> None:
        self._kept: list[AsyncIterator[int]] = []  # else they are closed at once

    async def leave(self, seconds: float = 60, *, shield: bool = False) -> None:
        self._kept.append(_pages(seconds, shield=shield))
        await anext(self._kept[-1])


async def _pages(seconds: float, *, shield: bool) -> AsyncIterator[int]:
    with anyio.move_on_after(seconds, shield=shield):
        yield 1


def ends(seen: Recorder) -> dict[str | None, tuple[str, str | None]]:
    """The last state and code that was told of each job."""
    return {event.key: (event.state, event.code) for event in seen.of(JobSettled)}


WELL: Final = ("succeeded", None)


@pytest.mark.parametrize("applies", [False, True])
async def test_a_handler_that_leaves_a_scope_open_takes_no_other_job_along(app: App, *, applies: bool) -> None:
    seen, leaver = Recorder(app), Leaver()

    async def apply(connection: object, job: Job[int], result: int) -> None:
        await anyio.lowlevel.checkpoint()

    @app.kind("work", concurrency=2, max_attempts=1, apply=apply if applies else None)
    async def work(job: Job[int]) -> int:
        if job.payload < 2:
            await leaver.leave()
        if job.payload == 1:
            raise ValueError
        return job.payload

    await app.enqueue_many("work", jobs(4))
    async with running(app.worker()):
        await seen.count(JobSettled, 4)
        await app.enqueue("work", 4, key="later")
        await seen.count(JobSettled, 5)
    ended = ends(seen)
    assert ended.pop("k0001") == ("failed", "handler_failed")
    assert ended == dict.fromkeys(("k0000", "k0002", "k0003", "later"), WELL)
    assert {trouble.error for trouble in seen.of(RunnerTrouble)} == {"RuntimeError"}  # it is said, once a task


async def test_a_job_that_an_earlier_ones_scope_strikes_runs_again(app: App) -> None:
    seen, leaver = Recorder(app), Leaver()

    @app.kind("work", concurrency=1, prefetch=20, max_attempts=1)
    async def work(job: Job[int]) -> None:
        if job.payload == 0:
            await leaver.leave(0.1)
        else:
            await anyio.sleep(0.2)  # longer than that

    await app.enqueue_many("work", jobs(2))
    async with running(app.worker()):
        await seen.wait(lambda: ends(seen) == {"k0000": WELL, "k0001": WELL})
    assert uncounted(seen) == ["k0001"]


async def test_once_a_scope_was_left_open_each_call_has_a_task_for_itself(app: App) -> None:
    """Else no deadline would reach those that follow in the same task, for as long as there are such scopes."""
    seen, leaver = Recorder(app), Leaver()
    outlived: list[int] = []

    @app.kind("work", concurrency=1, prefetch=20, max_attempts=1, timeout=timedelta(seconds=0.1))
    async def work(job: Job[int]) -> None:
        if job.payload % 2 == 0:
            await leaver.leave(shield=True)
        else:
            await anyio.sleep(0.3)
            outlived.append(job.payload)

    await app.enqueue_many("work", jobs(6))
    async with running(app.worker()):
        await seen.count(JobSettled, 6)
    assert outlived == [1]


async def test_a_handler_that_its_own_scope_strikes_has_failed(app: App) -> None:
    seen, leaver = Recorder(app), Leaver()

    @app.kind("work", max_attempts=1)
    async def work(job: Job[int]) -> None:
        await leaver.leave(0.1)
        await anyio.sleep(5)

    await app.enqueue_many("work", jobs(1))
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    assert ends(seen) == {"k0000": ("failed", "handler_failed")}


async def test_a_scope_left_open_in_a_try_of_one_job_alone_costs_the_batch_nothing(app: App) -> None:
    seen, leaver = Recorder(app), Leaver()
    calls: list[list[int]] = []

    @app.kind("work", batch=4, window=0, singly=True, max_attempts=1)
    async def work(batch: list[Job[int]]) -> list[int]:
        calls.append([job.payload for job in batch])
        if calls[-1] == [1]:
            await leaver.leave()
        if 1 in calls[-1]:
            raise ValueError
        return calls[-1]

    await app.enqueue_many("work", jobs(4))
    async with running(app.worker()):
        await seen.wait(lambda: sum(event.state != "pending" for event in seen.of(JobSettled)) == 4)
    assert ends(seen) == {"k0001": ("failed", "handler_failed"), "k0000": WELL, "k0002": WELL, "k0003": WELL}
    assert calls == [[0, 1, 2, 3], [0], [1], [2, 3]]


async def test_an_apply_that_leaves_a_scope_open_fails_its_job_and_commits_nothing(
    app: App, admin: psycopg.Connection[Any]
) -> None:
    seen, leaver = Recorder(app), Leaver()
    admin.execute("create table public.written (key text)")

    async def apply(connection: psycopg.AsyncConnection, job: Job[int], result: object) -> None:
        await connection.execute("insert into public.written values (%s)", [job.key])
        if job.payload == 0:
            await leaver.leave()

    @app.kind("work", apply=apply, max_attempts=1)
    async def work(job: Job[int]) -> None: ...

    await app.enqueue_many("work", jobs(2))
    async with running(app.worker()):
        await seen.count(JobSettled, 2)
    assert ends(seen) == {"k0000": ("failed", "handler_failed"), "k0001": WELL}
    assert admin.execute("select key from public.written").fetchall() == [("k0001",)]


async def test_when_a_runner_breaks_its_calls_are_cancelled_before_the_error_goes_on(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have an end to write, too, which nobody writes any more, and those that are about to begin."""
    gate = Gate()
    cleaned_up: list[int] = []

    async def breaks(finisher: Finisher) -> None:
        await gate.until(4)
        gate.open()  # in this turn, half of the calls end
        raise LookupError

    monkeypatch.setattr(Finisher, "run", breaks)

    @app.kind("work", concurrency=4, prefetch=20)
    async def work(job: Job[int]) -> None:
        await gate.pass_through()
        if job.payload % 2:
            raise ValueError
        try:
            await anyio.sleep(30)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
            cleaned_up.append(job.payload)

    await app.enqueue_many("work", jobs(20))
    with anyio.fail_after(10), pytest.raises(ExceptionGroup) as raised:
        await app.worker().run()
    assert raised.group_contains(LookupError)
    assert set(cleaned_up) >= {0, 2}


@pytest.mark.parametrize("way", ["sleeps", "fails"])
def test_a_program_that_ends_under_its_worker_comes_to_its_end(dsn: str, way: str) -> None:
    """The event loop cancels each task once, and not as anyio does."""

    async def main() -> None:
        begun = anyio.Event()
        async with App(dsn) as app:

            @app.kind("work", concurrency=4)
            async def work(job: Job[int]) -> None:
                begun.set()
                await anyio.sleep(30 if way == "sleeps" else 0.01)
                raise ValueError

            await app.enqueue_many("work", jobs(4))
            worker = asyncio.get_running_loop().create_task(app.worker().run())
            await begun.wait()
            await anyio.sleep(0.02)
        assert not worker.done()
        raise LookupError

    def program() -> None:
        with suppress(LookupError):
            asyncio.run(main())

    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


async def test_a_worker_outlives_its_calls_even_if_its_loop_ends(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a runner has broken, a handler cleans up, and the program ends meanwhile."""
    ended: list[str] = []
    begun = anyio.Event()

    async def breaks(finisher: Finisher) -> None:
        await begun.wait()
        raise LookupError

    monkeypatch.setattr(Finisher, "run", breaks)
    async with App(dsn) as app:

        @app.kind("work")
        async def work(job: Job[int]) -> None:
            begun.set()
            try:
                await anyio.sleep(30)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(0.3)
                ended.append("call")

        async def run() -> None:
            try:
                await app.worker().run()
            finally:
                ended.append("worker")

        await app.enqueue_many("work", jobs(1))
        before = asyncio.all_tasks()
        worker = asyncio.get_running_loop().create_task(run())
        await begun.wait()
        await anyio.sleep(0.1)
        for task in asyncio.all_tasks() - before:
            if "Slots" not in repr(task.get_coro()):
                task.cancel()
        with pytest.raises((ExceptionGroup, asyncio.CancelledError)):
            await worker
    assert ended == ["call", "worker"]
