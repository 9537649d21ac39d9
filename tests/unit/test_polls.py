"""When runners that nobody wakes look by themselves, without a database."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from pgworker.listener import Wake
from pgworker.polls import Polls

OFTEN = 0.05


def test_a_rhythm_has_the_same_instants_for_all_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("pgworker.polls.time.monotonic", lambda: now[0])
    polls = Polls()
    first = now[0] + polls.until_next(1.0)
    for seconds in (0.1, 0.3, 0.2, 0.7):
        now[0] += seconds
        next_at = now[0] + polls.until_next(1.0)
        assert 0 < next_at - now[0] <= 1.0
        assert abs((next_at - first + 0.5) % 1.0 - 0.5) < 1e-6
    now[0] = next_at - 0.001  # a timer that has fired a little early
    assert polls.until_next(1.0) == pytest.approx(1.001)


async def test_all_of_one_rhythm_wake_in_one_turn_of_the_event_loop() -> None:
    """Whenever they have begun to wait: so they share a survey."""
    polls, wakes = Polls(), [Wake() for _ in range(50)]
    woken_in: list[int] = []
    turn = 0

    async def wait(wake: Wake) -> None:
        await polls.wait(wake, 10 * OFTEN)
        woken_in.append(turn)

    with anyio.fail_after(10):
        await polls.wait(Wake(), 10 * OFTEN)  # so that the next instant is not at hand
        async with anyio.create_task_group() as group:
            for wake in wakes:
                group.start_soon(wait, wake)
                await anyio.lowlevel.checkpoint()
            while len(woken_in) < len(wakes):
                turn += 1
                await anyio.lowlevel.checkpoint()
    assert len(set(woken_in)) == 1
    assert not any(wake.clear() for wake in wakes), "that it is time is no hint"


async def test_each_rhythm_comes_again_and_again_and_has_its_own_instants() -> None:
    polls, often, seldom = Polls(), Wake(), Wake()
    polled, twice = list[str](), anyio.Event()

    async def poll(name: str, wake: Wake, seconds: float) -> None:
        while True:
            await polls.wait(wake, seconds)
            wake.clear()
            polled.append(name)
            if polled.count("seldom") == 2:
                twice.set()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(poll, "often", often, OFTEN)
            group.start_soon(poll, "seldom", seldom, 8 * OFTEN)
            await twice.wait()
            group.cancel_scope.cancel()
    assert polled.count("often") > polled.count("seldom")


async def test_a_hint_and_the_time_at_most_end_the_wait_before_it_is_time() -> None:
    polls, wake = Polls(), Wake()
    with anyio.fail_after(5):
        await polls.wait(wake, 1_000.0, 0.01)
        wake.set()
        await polls.wait(wake, 1_000.0)
    assert wake.clear()


async def test_one_that_is_cancelled_keeps_nobody_from_waking() -> None:
    polls, gone, stays = Polls(), Wake(), Wake()
    with anyio.fail_after(5):
        with anyio.move_on_after(OFTEN / 10):
            await polls.wait(gone, 2 * OFTEN)
        await polls.wait(stays, 2 * OFTEN)
    await polls.wait(gone, 1_000.0, 0)
    assert not gone.clear()
