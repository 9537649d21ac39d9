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

from pgworker.hints import ASK_BATCH, ASK_FOR_SECONDS, FIRST_ASK_SECONDS, Hints, Outbox

SPACING = 0.010


def take_all(outbox: Outbox, *, until: float) -> list[tuple[float, list[str]]]:
    """Serve the outbox at the instants it names, as the thread does."""
    taken: list[tuple[float, list[str]]] = []
    while (at := outbox.next_at()) is not None and at <= until:
        taken.append((at, outbox.take_hints(at)))
    return taken


@pytest.mark.contract("A8")
@pytest.mark.ruling("1.26")
def test_the_first_hint_goes_at_once_and_a_burst_becomes_one_more() -> None:
    outbox = Outbox(spacing=SPACING)
    assert outbox.hint("r:mail", now=1.0)
    assert take_all(outbox, until=1.0) == [(1.0, ["r:mail"])]
    accepted = [outbox.hint("r:mail", now=1.0 + step / 100_000) for step in range(1, 100)]
    assert accepted == [True] + [False] * 98  # the thread is woken for the first of them only
    assert take_all(outbox, until=9.0) == [(1.0 + SPACING, ["r:mail"])]
    assert outbox.next_at() is None


@pytest.mark.contract("A8")
@pytest.mark.ruling("1.26")
def test_a_steady_stream_is_one_hint_a_spacing_and_the_last_one_is_sent() -> None:
    outbox = Outbox(spacing=SPACING)
    taken: list[float] = []
    for step in range(1_000):  # 0.1 ms apart: 100 ms
        now = 5.0 + step / 10_000
        taken += [at for at, _ in take_all(outbox, until=now)]
        outbox.hint("r:mail", now=now)
    last_told = 5.0 + 999 / 10_000
    taken += [at for at, _ in take_all(outbox, until=9.0)]
    assert len(taken) == 11
    assert min(later - earlier for earlier, later in pairwise(taken)) >= SPACING - 1e-9
    assert taken[-1] >= last_told


def test_a_hint_after_a_rest_goes_at_once_again() -> None:
    outbox = Outbox(spacing=SPACING)
    outbox.hint("r:mail", now=1.0)
    outbox.take_hints(1.0)
    outbox.hint("r:mail", now=1.5)
    assert outbox.next_at() == 1.5


def test_kinds_and_purposes_do_not_wait_for_each_other() -> None:
    outbox = Outbox(spacing=SPACING)
    outbox.hint("r:mail", now=1.0)
    outbox.take_hints(1.0)
    outbox.hint("r:mail", now=1.001)
    outbox.hint("r:index", now=1.001)
    outbox.hint("c:mail", now=1.001)
    assert outbox.take_hints(1.001) == ["r:index", "c:mail"]
    assert outbox.next_at() == 1.0 + SPACING


def test_everything_is_taken_at_a_close() -> None:
    outbox = Outbox(spacing=SPACING)
    outbox.hint("r:mail", now=1.0)
    outbox.take_hints(1.0)
    outbox.hint("r:mail", now=1.001)
    outbox.hint_once_committed("r:index", "700", now=1.001)
    assert outbox.take_questions(1.001, everything=True) == ["700"]
    assert outbox.take_hints(1.001, everything=True) == ["r:mail"]


@pytest.mark.contract("A7")
@pytest.mark.ruling("1.4")
@pytest.mark.parametrize(("status", "told"), [("committed", ["r:mail"]), ("aborted", []), (None, [])])
def test_an_ended_transaction_gives_a_hint_only_if_it_committed(status: str | None, told: list[str]) -> None:
    outbox = Outbox(spacing=SPACING)
    outbox.hint_once_committed("r:mail", "700", now=1.0)
    assert outbox.take_hints(1.1) == []
    assert outbox.take_questions(1.1) == ["700"]
    outbox.answer("700", status, now=1.1)
    assert outbox.take_hints(1.1) == told
    assert outbox.next_at() is None


@pytest.mark.contract("A7")
@pytest.mark.ruling("1.4")
def test_an_open_transaction_is_asked_about_ever_less_often_and_then_given_up() -> None:
    outbox = Outbox(spacing=SPACING)
    outbox.hint_once_committed("r:mail", "700", now=0.0)
    asked: list[float] = []
    while (at := outbox.next_at()) is not None:
        asked += [at] * len(outbox.take_questions(at))
        outbox.answer("700", "in progress", now=at)
    gaps = [round(later - earlier, 6) for earlier, later in pairwise(asked)]
    assert asked[0] == FIRST_ASK_SECONDS
    assert gaps[0] == pytest.approx(FIRST_ASK_SECONDS * 1.5)
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(1.0)
    assert ASK_FOR_SECONDS - 1.0 <= asked[-1] <= ASK_FOR_SECONDS
    assert len(asked) < 80
    assert outbox.take_hints(1e9) == []


def test_all_kinds_of_a_transaction_are_told_after_one_question() -> None:
    outbox = Outbox(spacing=SPACING)
    assert outbox.hint_once_committed("r:mail", "700", now=1.0)
    assert not outbox.hint_once_committed("c:index", "700", now=1.0)
    assert outbox.take_questions(1.1) == ["700"]
    outbox.answer("700", "committed", now=1.1)
    assert sorted(outbox.take_hints(1.1)) == ["c:index", "r:mail"]


def test_many_transactions_are_asked_about_together_and_their_hints_coalesce() -> None:
    outbox = Outbox(spacing=SPACING)
    ids = [str(number) for number in range(500)]
    for step, transaction in enumerate(ids):
        outbox.hint_once_committed("r:mail", transaction, now=1.0 + step / 1e6)
    assert outbox.take_questions(1.1) == ids
    assert outbox.take_questions(1.1) == []  # all have just been asked about
    for transaction in ids:
        outbox.answer(transaction, "committed", now=1.1)
    assert outbox.take_hints(1.1) == ["r:mail"]
    assert outbox.next_at() is None


def test_questions_of_a_busy_producer_are_spaced_and_bounded() -> None:
    outbox = Outbox(spacing=SPACING, limit=ASK_BATCH * 2)
    for number in range(ASK_BATCH + 1):
        outbox.hint_once_committed("r:mail", str(number), now=1.0 + number / 1e6)
    assert len(outbox.take_questions(1.1)) == ASK_BATCH
    assert outbox.next_at() == 1.1 + FIRST_ASK_SECONDS
    assert outbox.take_questions(1.1 + FIRST_ASK_SECONDS) == [str(ASK_BATCH)]


def test_memory_is_bounded_and_the_oldest_is_forgotten() -> None:
    outbox = Outbox(spacing=SPACING, limit=3)
    for number in range(10):
        outbox.hint(f"r:{number}", now=1.0)
        outbox.hint_once_committed("r:mail", str(number), now=1.0)
    assert outbox.take_hints(1.0) == ["r:7", "r:8", "r:9"]
    assert outbox.take_questions(1.1) == ["7", "8", "9"]


def test_a_question_that_cannot_be_answered_is_dropped() -> None:
    outbox = Outbox(spacing=SPACING)
    outbox.hint_once_committed("r:mail", "700", now=1.0)
    outbox.forget(outbox.take_questions(1.1))
    assert outbox.next_at() is None


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
        self._did.put("ask" if "pg_xact_status" in statement else f"send {arguments[1]}")
        if self.errors:
            raise self.errors.pop()
        return self

    def fetchall(self) -> list[tuple[object, ...]]:
        return []

    def close(self) -> None:
        self._did.put("close")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    return FakeServer(monkeypatch)


@pytest.fixture
def hints(server: FakeServer) -> Iterator[Hints]:
    hints = Hints("", {}, channel="hints")
    yield hints
    hints.close(timeout=10)


def test_a_full_queue_is_told_once_and_costs_only_hints(
    server: FakeServer, hints: Hints, caplog: pytest.LogCaptureFixture
) -> None:
    server.errors = [errors.ProgramLimitExceeded("too many notifications CANARY") for _ in range(2)]
    with caplog.at_level(logging.INFO, logger="pgworker"):
        for kind in ("one", "two"):
            hints.ready(kind)
            assert [server.next() for _ in range(3)] == ["connect", f"send ['r:{kind}']", "close"]
        hints.ready("three")
        assert [server.next() for _ in range(2)] == ["connect", "send ['r:three']"]
        hints.close(timeout=10)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "ProgramLimitExceeded 54000" in warnings[0]
    assert "CANARY" not in caplog.text
    assert caplog.records[-1].getMessage() == "hints are sent again"


def test_a_server_in_trouble_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> None:
    monkeypatch.setattr("pgworker.hints._FIRST_PAUSE_SECONDS", 600)
    hints = Hints("", {}, channel="hints")
    server.errors = [errors.ProgramLimitExceeded()]
    hints.ready("one")
    assert [server.next() for _ in range(3)] == ["connect", "send ['r:one']", "close"]
    hints.ready("two")
    hints.close(timeout=10)
    assert server.idle()


def test_a_question_without_an_answer_does_not_hold_up_the_hints(server: FakeServer, hints: Hints) -> None:
    server.errors = [errors.InvalidParameterValue("transaction ID is in the future")]
    hints.ready("foreign", transaction="1")
    assert [server.next() for _ in range(3)] == ["connect", "ask", "close"]
    hints.ready("mail")
    assert [server.next() for _ in range(2)] == ["connect", "send ['r:mail']"]


def test_an_idle_connection_is_given_back(monkeypatch: pytest.MonkeyPatch, server: FakeServer, hints: Hints) -> None:
    monkeypatch.setattr("pgworker.hints._IDLE_SECONDS", 0.01)
    for kind in ("one", "two"):
        hints.ready(kind)
        assert [server.next() for _ in range(3)] == ["connect", f"send ['r:{kind}']", "close"]


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
    assert [server.next() for _ in range(2)] == ["connect", "send ['r:one', 'r:two', 'r:three']"]


def test_a_bug_that_ends_the_thread_does_not_end_the_hints(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, hints: Hints
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    server.errors = [LookupError()]
    hints.ready("one")
    assert [server.next() for _ in range(2)] == ["connect", "send ['r:one']"]
    for thread in threading.enumerate():
        if thread.name == "pgworker-hints":
            thread.join(timeout=10)
    assert server.next() == "close"
    hints.ready("two")
    assert [server.next() for _ in range(2)] == ["connect", "send ['r:two']"]
