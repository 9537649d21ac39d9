"""Handlers that strike at the task they run in, now or later: no other job pays for it, and no code of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import anyio
import pytest

from pgworker import App, Job
from pgworker.events import JobSettled, RunnerTrouble
from tests.handles import Recorder, jobs, running


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
