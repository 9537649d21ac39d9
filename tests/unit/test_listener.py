"""Wake-ups and who gets them, without a database."""

from __future__ import annotations

import anyio
import pytest

from pgworker.listener import Listener, Wake


@pytest.mark.race(7)
async def test_a_hint_between_the_empty_claim_and_the_wait_ends_the_wait() -> None:
    wake = Wake()
    wake.set()
    wake.clear()
    # ... an empty claim ...
    wake.set()
    with anyio.fail_after(5):
        assert await wake.wait(1_000)


@pytest.mark.race(7)
async def test_a_hint_before_the_claim_is_used_up_by_that_claim() -> None:
    wake = Wake()
    wake.set()
    wake.clear()
    # ... the claim, which saw whatever the hint was about ...
    assert not await wake.wait(0)


@pytest.mark.contract("A8")
async def test_a_hundred_hints_are_one_wake_up() -> None:
    wake = Wake()
    for _ in range(100):
        wake.set()
    assert await wake.wait(0)
    wake.clear()
    assert not await wake.wait(0)


async def test_a_hint_ends_a_wait_that_has_begun_even_if_it_is_cleared_at_once() -> None:
    wake = Wake()
    heard: list[bool] = []

    async def sleeper() -> None:
        heard.append(await wake.wait(1_000))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(sleeper)
            await anyio.wait_all_tasks_blocked()
            wake.set()
            wake.clear()
    assert heard == [True]


async def test_a_cancelled_wait_loses_no_hint() -> None:
    wake = Wake()
    with anyio.CancelScope() as scope:
        scope.cancel()
        wake.set()
        await wake.wait(1_000)
    assert await wake.wait(0)


@pytest.mark.contract("A8")
@pytest.mark.ruling("2.18")
@pytest.mark.parametrize(
    ("payload", "woken"),
    [
        ("r:mail", ["ready mail"]),
        ("r:kind:with:colons", ["ready kind:with:colons"]),
        ("r:another", []),
        ("c:mail", ["control mail"]),
        ("c:another", []),
        ("d:mail", []),
        ("p:0123456789abcdef", []),
        ("", ["ready mail", "ready kind:with:colons", "control mail"]),
        ("mail", ["ready mail", "ready kind:with:colons", "control mail"]),
        ("x:mail", ["ready mail", "ready kind:with:colons", "control mail"]),
    ],
)
def test_a_payload_wakes_whom_it_concerns_and_an_unknown_one_everybody(payload: str, woken: list[str]) -> None:
    listener = Listener("", {}, channel="hints")
    calls: list[str] = []
    listener.subscribe("mail", lambda: calls.append("ready mail"))
    listener.subscribe("kind:with:colons", lambda: calls.append("ready kind:with:colons"))
    listener.subscribe_control("mail", lambda: calls.append("control mail"))
    listener._dispatch(payload)
    assert calls == woken


def test_two_runners_of_a_kind_are_both_woken() -> None:
    listener = Listener("", {}, channel="hints")
    calls: list[int] = []
    listener.subscribe("mail", lambda: calls.append(1))
    listener.subscribe("mail", lambda: calls.append(2))
    listener._dispatch("r:mail")
    assert calls == [1, 2]
