"""Wake-ups and who gets them, without a database."""

from __future__ import annotations

import random
from collections.abc import Callable

import anyio
import psycopg
import pytest
from psycopg.pq import PGnotify

from pgworker.listener import Listener, Wake, _CannotHearError


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
        ("r:mail", ["mail"]),
        ("r:kind:with:colons", ["kind:with:colons"]),
        ("r:another", []),
        ("c:mail", []),
        ("d:mail", []),
        ("p:0123456789abcdef", []),
        ("", ["mail", "kind:with:colons"]),
        ("mail", ["mail", "kind:with:colons"]),
        ("x:mail", ["mail", "kind:with:colons"]),
    ],
)
def test_a_payload_wakes_whom_it_concerns_and_an_unknown_one_everybody(payload: str, woken: list[str]) -> None:
    listener = Listener("", channel="hints")
    calls: list[str] = []
    listener.subscribe("mail", lambda: calls.append("mail"))
    listener.subscribe("kind:with:colons", lambda: calls.append("kind:with:colons"))
    listener._dispatch(payload)
    assert calls == woken


ALL = ["ready mail", "control mail", "control index", "done mail"]


@pytest.mark.ruling("2.18", "1.19")
@pytest.mark.parametrize(
    ("payload", "called"),
    [
        ("r:mail", ["ready mail"]),
        ("c:mail", ["control mail"]),
        ("c:index", ["control index"]),
        ("d:mail", ["done mail"]),
        ("d:index", []),
        ("r:index", []),
        ("p:0123456789abcdef", []),
        ("x:mail", ALL),
        ("", ALL),
    ],
)
def test_a_payload_reaches_those_who_wait_for_its_purpose(payload: str, called: list[str]) -> None:
    listener = Listener("", channel="hints")
    calls: list[str] = []
    listener.subscribe("mail", lambda: calls.append("ready mail"))
    listener.subscribe_control("mail", lambda: calls.append("control mail"))
    listener.subscribe_control("index", lambda: calls.append("control index"))
    listener.subscribe_done("mail", lambda: calls.append("done mail"))
    listener._dispatch(payload)
    assert calls == called


def test_two_runners_of_a_kind_are_both_woken() -> None:
    listener = Listener("", channel="hints")
    calls: list[int] = []
    listener.subscribe("mail", lambda: calls.append(1))
    listener.subscribe("mail", lambda: calls.append(2))
    listener._dispatch("r:mail")
    assert calls == [1, 2]


class Scripted(Listener):
    """Its connections come to the ends that the script gives, one after the other."""

    def __init__(self, *ends: Exception | Callable[[Listener], None]) -> None:
        super().__init__("", channel="hints")
        self._ends = list(ends)

    async def _session(self) -> None:
        if not self._ends:
            raise LookupError  # the script is over
        end = self._ends.pop(0)
        if isinstance(end, Exception):
            raise end
        end(self)
        raise psycopg.OperationalError


def hear(listener: Listener) -> None:
    listener._probe = "p:x"
    listener._dispatch("p:x")


@pytest.mark.contract("D86")
async def test_pauses_grow_to_a_bound_and_start_anew_once_it_was_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(round(seconds, 3))

    monkeypatch.setattr(anyio, "sleep", sleep)
    monkeypatch.setattr(random, "uniform", lambda _, high: high)
    outage, deaf = [psycopg.OperationalError()], [_CannotHearError()]
    with pytest.raises(LookupError):
        await Scripted(*outage * 7, hear, *outage, *deaf * 8, *outage).run()
    assert pauses[:7] == [0.1, 0.2, 0.4, 0.8, 1.6, 2, 2]
    assert pauses[7:9] == [0.1, 0.2]
    assert pauses[9:17] == [0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30]  # a pooler stays one: asked once a probe interval
    assert pauses[17:] == [2]  # but an outage behind it is over sooner


async def test_a_socket_whose_number_the_app_waits_for_is_an_outage_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(_: float) -> None: ...

    monkeypatch.setattr(anyio, "sleep", sleep)
    with pytest.raises(LookupError):
        await Scripted(anyio.BusyResourceError("reading from"), anyio.ClosedResourceError(), hear).run()


async def test_pauses_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        spans.append((low, high))
        return 0

    monkeypatch.setattr(random, "uniform", uniform)
    with pytest.raises(LookupError):
        await Scripted(psycopg.OperationalError()).run()
    assert spans == [(0.5, 1.0)]


def test_a_payload_that_is_no_text_is_unknown_as_well() -> None:
    """In a database without an encoding anybody may notify of any bytes."""
    listener = Listener("", channel="hints")
    calls: list[str] = []
    listener.subscribe("mail", lambda: calls.append("mail"))
    listener._hear(PGnotify(b"hints", 1, b"\xff"))
    assert calls == ["mail"]
