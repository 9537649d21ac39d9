"""One timer for the deadlines of all calls of a runner."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import cast

import anyio
import pytest

from pgworker.deadlines import Deadlines

SHORT = timedelta(seconds=0.05)
FAR = 5.0  # seconds; nothing here waits so long unless it is broken


async def test_a_call_that_takes_too_long_is_cancelled_and_told_so() -> None:
    deadlines = Deadlines(SHORT)
    began = time.monotonic()
    with anyio.CancelScope() as scope:
        deadlines.begin(scope)
        await anyio.sleep(FAR)
    assert scope.cancelled_caught
    assert 0.05 <= time.monotonic() - began < FAR / 2
    assert deadlines.end(scope)


async def test_a_call_that_ends_in_time_is_left_alone_and_so_is_what_follows_in_its_scope() -> None:
    deadlines = Deadlines(SHORT)
    with anyio.CancelScope() as scope:
        deadlines.begin(scope)
        assert not deadlines.end(scope)
        await anyio.sleep(0.1)
    assert not scope.cancel_called


async def test_each_call_of_a_scope_has_the_whole_time() -> None:
    deadlines = Deadlines(timedelta(seconds=0.2))
    with anyio.CancelScope() as scope:
        for _ in range(3):
            deadlines.begin(scope)
            await anyio.sleep(0.1)
            assert not deadlines.end(scope)
    assert not scope.cancel_called


async def test_one_that_began_later_ends_later() -> None:
    deadlines = Deadlines(timedelta(seconds=0.1))
    ended: list[tuple[int, float]] = []
    began = time.monotonic()

    async def call(number: int) -> None:
        await anyio.sleep(0.04 * number)
        with anyio.CancelScope() as scope:
            deadlines.begin(scope)
            await anyio.sleep(FAR)
        ended.append((number, time.monotonic() - began))

    async with anyio.create_task_group() as group:
        for number in range(3):
            group.start_soon(call, number)
    assert [number for number, _ in ended] == [0, 1, 2]
    assert all(seconds >= 0.1 + 0.04 * number for number, seconds in ended)


async def test_one_timer_serves_quick_calls_and_the_slow_one_among_them() -> None:
    deadlines = Deadlines(SHORT)
    slow = anyio.CancelScope()
    with slow:
        deadlines.begin(slow)
        for _ in range(100):
            quick = anyio.CancelScope()
            deadlines.begin(quick)
            assert not deadlines.end(quick)
        await anyio.sleep(FAR)
    assert slow.cancelled_caught


async def test_a_call_that_blocked_the_loop_past_its_time_counts_as_late() -> None:
    deadlines = Deadlines(SHORT)
    scope = anyio.CancelScope()
    deadlines.begin(scope)
    time.sleep(0.06)  # noqa: ASYNC251 - a handler that blocks
    assert deadlines.end(scope)


async def test_after_a_quiet_time_there_is_a_timer_again() -> None:
    deadlines = Deadlines(SHORT)
    first = anyio.CancelScope()
    deadlines.begin(first)
    deadlines.end(first)
    await anyio.sleep(0.1)  # its timer found nothing
    with anyio.CancelScope() as second:
        deadlines.begin(second)
        await anyio.sleep(FAR)
    assert second.cancelled_caught


@pytest.mark.parametrize("seconds", [0.0, 0.02])
async def test_without_a_timeout_nothing_is_late(seconds: float) -> None:
    deadlines = Deadlines(None)
    with anyio.CancelScope() as scope:
        deadlines.begin(scope)
        await anyio.sleep(seconds)
        assert not deadlines.end(scope)


async def test_a_call_whose_cancelling_raises_keeps_no_other_from_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """What a handler awaits is its own, and so is what that does when it is cancelled."""

    class Raising:
        def cancel(self) -> None:
            raise RecursionError

    deadlines = Deadlines(SHORT)
    deadlines.begin(cast("anyio.CancelScope", Raising()))
    with anyio.CancelScope() as scope:
        deadlines.begin(scope)
        await anyio.sleep(FAR)
    assert scope.cancelled_caught
    assert "a call that is late could not be cancelled" in caplog.text
