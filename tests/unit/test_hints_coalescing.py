"""Which hints are sent when, without a clock, a thread or a database; and what the sender's thread does in trouble."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import psycopg
import pytest
from psycopg import errors

from pgworker.hints import ASK_FOR_SECONDS, FIRST_ASK_SECONDS, LONGEST_ASK_SECONDS, Hint, Hints, Outbox

SPACING = 0.010
MAIL: Hint = ("r:mail", None)
INDEX: Hint = ("r:index", None)


def send(outbox: Outbox, *, at: float, status: str | None = "committed") -> list[Hint]:
    """Serve the outbox as the thread does; the server answers the same to all that is asked."""
    taken = outbox.take(at)
    outbox.answer(taken, {} if status == "committed" else dict.fromkeys(taken, status), now=at)
    return list(taken)


def send_all(outbox: Outbox, *, until: float, status: str | None = "committed") -> list[float]:
    """Serve the outbox at the instants it names; when something was sent or asked."""
    served: list[float] = []
    while (at := outbox.next_at()) is not None and at <= until:
        assert send(outbox, at=at, status=status)
        served.append(at)
    return served


@pytest.mark.contract("A8")
@pytest.mark.ruling("1.26")
def test_the_first_hint_goes_at_once_and_a_burst_becomes_one_more() -> None:
    outbox = Outbox(spacing=SPACING)
    assert outbox.add(MAIL, now=1.0) == 1.0
    assert send(outbox, at=1.0) == [MAIL]
    due = {outbox.add(MAIL, now=1.0 + step / 100_000) for step in range(1, 100)}
    assert due == {1.0 + SPACING}
    assert send_all(outbox, until=9.0) == [1.0 + SPACING]
    assert outbox.next_at() is None


@pytest.mark.contract("A8")
@pytest.mark.ruling("1.26")
@pytest.mark.parametrize("in_transactions", [False, True])
def test_a_steady_stream_is_one_hint_a_spacing_and_the_last_one_is_sent(*, in_transactions: bool) -> None:
    outbox = Outbox(spacing=SPACING)
    sent: list[float] = []
    for step in range(1_000):  # 0.1 ms apart: 100 ms
        now = 5.0 + step / 10_000
        sent += send_all(outbox, until=now)
        outbox.add(("r:mail", str(step) if in_transactions else None), now=now)
    last_told = 5.0 + 999 / 10_000
    sent += send_all(outbox, until=9.0)
    assert len(sent) == 11
    assert min(later - earlier for earlier, later in pairwise(sent)) >= SPACING - 1e-9
    assert sent[-1] >= last_told


def test_a_hint_after_a_rest_goes_at_once_again() -> None:
    outbox = Outbox(spacing=SPACING)
    outbox.add(MAIL, now=1.0)
    send(outbox, at=1.0)
    assert outbox.add(MAIL, now=1.5) == 1.5


def test_kinds_do_not_wait_for_each_other() -> None:
    outbox = Outbox(spacing=SPACING)
    outbox.add(MAIL, now=1.0)
    send(outbox, at=1.0)
    outbox.add(MAIL, now=1.001)
    outbox.add(INDEX, now=1.001)
    assert send(outbox, at=1.001) == [INDEX]
    assert outbox.next_at() == 1.0 + SPACING


def test_everything_is_taken_at_a_close() -> None:
    outbox = Outbox(spacing=SPACING)
    outbox.add(MAIL, now=1.0)
    send(outbox, at=1.0)
    outbox.add(MAIL, now=1.001)
    outbox.add(("r:index", "700"), now=1.001)
    assert list(outbox.take(1.001, everything=True)) == [MAIL, ("r:index", "700")]


@pytest.mark.ruling("1.4")
@pytest.mark.parametrize("status", ["aborted", None])
def test_a_void_transaction_is_asked_about_once_and_delays_no_other_hint(status: str | None) -> None:
    outbox = Outbox(spacing=SPACING)
    outbox.add(("r:mail", "700"), now=1.0)
    assert send_all(outbox, until=9.0, status=status) == [1.0 + FIRST_ASK_SECONDS]
    assert outbox.add(MAIL, now=1.0 + FIRST_ASK_SECONDS) == 1.0 + FIRST_ASK_SECONDS


@pytest.mark.contract("A7")
@pytest.mark.ruling("1.4")
def test_an_open_transaction_is_asked_about_ever_less_often_and_then_given_up() -> None:
    outbox = Outbox(spacing=SPACING)
    outbox.add(("r:mail", "700"), now=0.0)
    asked = send_all(outbox, until=1e9, status="in progress")
    gaps = [round(later - earlier, 6) for earlier, later in pairwise(asked)]
    assert asked[0] == FIRST_ASK_SECONDS
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST_ASK_SECONDS
    assert ASK_FOR_SECONDS <= asked[-1] <= ASK_FOR_SECONDS + LONGEST_ASK_SECONDS
    assert len(asked) < 80


def test_memory_is_bounded_and_the_oldest_is_forgotten() -> None:
    outbox = Outbox(spacing=SPACING, limit=3)
    for number in range(10):
        outbox.add(("r:mail", str(number)), now=1.0)
    assert [transaction for _, transaction in outbox.take(1.1)] == ["7", "8", "9"]


class FakeServer:
    """Stands in for psycopg's connection; a test reads what the sender's thread did, one thing after the other."""

    broken = False

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._did: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: list[Exception] = []
        monkeypatch.setattr(psycopg, "connect", self._connect)

    def next(self) -> str:
        return self._did.get(timeout=10)

    def idle(self) -> bool:
        return self._did.empty()

    def _connect(self, *_args: object, **_kwargs: object) -> psycopg.Connection:
        self._did.put("connect")
        return cast("psycopg.Connection", self)

    def execute(self, statement: str, arguments: tuple[object, ...]) -> FakeServer:
        self._did.put(f"send {arguments[1]}".translate(dict.fromkeys(map(ord, '{"}'))))  # the payloads of an array
        if self.errors:
            raise self.errors.pop()
        return self

    def fetchall(self) -> list[tuple[object, ...]]:
        return [(None, 1, "off")]

    def close(self) -> None:
        self._did.put("close")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    return FakeServer(monkeypatch)


@pytest.fixture
def hints(server: FakeServer) -> Iterator[Hints]:
    hints = Hints("", channel="hints")
    yield hints
    hints.close(timeout=10)


def test_a_full_queue_is_told_once_and_costs_only_hints(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, hints: Hints, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pgworker.hints._PAUSE_SECONDS", 0.05)
    server.errors = [errors.ProgramLimitExceeded("too many notifications CANARY") for _ in range(2)]
    with caplog.at_level(logging.INFO, logger="pgworker"):
        for kind in ("one", "two"):
            hints.ready(kind)
            assert [server.next() for _ in range(3)] == ["connect", f"send r:{kind}", "close"]
        hints.ready("three")
        assert [server.next() for _ in range(2)] == ["connect", "send r:three"]
        hints.close(timeout=10)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "ProgramLimitExceeded 54000" in warnings[0]
    assert "CANARY" not in caplog.text
    assert caplog.records[-1].getMessage() == "hints are sent again"


def test_a_server_in_trouble_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    monkeypatch.setattr("pgworker.hints._PAUSE_SECONDS", 600)
    hints = Hints("", channel="hints")
    server.errors = [errors.ProgramLimitExceeded()]
    hints.ready("one")
    assert [server.next() for _ in range(3)] == ["connect", "send r:one", "close"]
    hints.ready("two")
    hints.close(timeout=10)
    assert server.idle()


def test_an_idle_connection_is_given_back(monkeypatch: pytest.MonkeyPatch, server: FakeServer, hints: Hints) -> None:
    monkeypatch.setattr("pgworker.hints._IDLE_SECONDS", 0.01)
    for kind in ("one", "two"):
        hints.ready(kind)
        assert [server.next() for _ in range(3)] == ["connect", f"send r:{kind}", "close"]


def test_a_thread_that_cannot_be_started_is_the_polls_problem(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, hints: Hints, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="pgworker"):
        patch.setattr(threading.Thread, "start", refuse)
        hints.ready("one")
        hints.ready("two")
    assert len(caplog.records) == 1
    hints.ready("three")
    assert [server.next() for _ in range(2)] == ["connect", "send r:one,r:two,r:three"]


def test_a_bug_that_ends_the_thread_does_not_end_the_hints(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, hints: Hints
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    server.errors = [LookupError()]
    hints.ready("one")
    assert [server.next() for _ in range(2)] == ["connect", "send r:one"]
    for thread in threading.enumerate():
        if thread.name == "pgworker-hints":
            thread.join(timeout=10)
    assert server.next() == "close"
    hints.ready("two")
    assert [server.next() for _ in range(2)] == ["connect", "send r:two"]
