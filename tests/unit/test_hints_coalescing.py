"""Which hints are sent when, without a clock, a thread or a database; and what the sender's thread does in trouble."""

from __future__ import annotations

import logging
import queue
from itertools import pairwise
from typing import TypeAlias, cast

import psycopg
import pytest
from psycopg import errors

from pgworker.hints import ASK_BATCH, ASK_FOR_SECONDS, FIRST_ASK_SECONDS, Hints, Outbox

SPACING = 0.010
_Sent: TypeAlias = "queue.SimpleQueue[list[str]]"


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


class FakeConnection:
    """Takes hints, or fails as a server does whose notification queue is full."""

    broken = False

    def __init__(self, full: list[bool], sent: _Sent) -> None:
        self._full = full
        self._sent = sent

    def execute(self, statement: str, arguments: tuple[str, list[str]]) -> FakeConnection:
        if self._full:
            self._full.pop()
            self._sent.put([])
            canary = "too many notifications CANARY"
            raise errors.ProgramLimitExceeded(canary)
        self._sent.put(arguments[1])
        return self

    def fetchall(self) -> list[tuple[object, ...]]:
        return []

    def close(self) -> None:
        pass


def test_a_full_queue_is_told_once_and_costs_only_hints(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = [True, True]
    sent: _Sent = queue.SimpleQueue()

    def connect(*_args: object, **_kwargs: object) -> psycopg.Connection:
        return cast("psycopg.Connection", FakeConnection(full, sent))

    monkeypatch.setattr(psycopg, "connect", connect)
    hints = Hints("", {}, channel="hints")
    with caplog.at_level(logging.INFO, logger="pgworker"):
        for kind in ("one", "two", "three"):
            hints.ready(kind)
            assert sent.get(timeout=10) == ([] if kind != "three" else ["r:three"])
        hints.close(timeout=10)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "ProgramLimitExceeded 54000" in warnings[0]
    assert "CANARY" not in caplog.text
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        "hints are sent again"
    ]
