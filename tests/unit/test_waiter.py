"""Which jobs are read when, and what becomes of each wait, without a database or a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import anyio
import psycopg
import pytest
from psycopg import errors

from pgworker import JobCancelled, JobFailed, PgworkerError, ResultGone, Superseded, UnknownJob
from pgworker import waiter as waiter_module
from pgworker import waits as waits_module
from pgworker.config import Settings
from pgworker.kind import Kind, declare_kind
from pgworker.operations import Seen
from pgworker.policy import make_policy
from pgworker.statements import Statement
from pgworker.tablemap import TableMap
from pgworker.waits import Desk, Wait, value_of, verdict


def seen(key: str = "a", **changes: Any) -> Seen:
    job = Seen("work", key, 1, "", 1, "pending", None, None, has_result=False, value=None, age_seconds=None)
    return job._replace(**changes)


def done(key: str = "a", **changes: Any) -> Seen:
    return seen(key, **({"state": "succeeded", "has_result": True, "value": "1", "age_seconds": 0.0} | changes))


# --- what ends a wait -----------------------------------------------------------------------------------------------


@pytest.mark.ruling("2.14")
@pytest.mark.parametrize(
    ("given", "first", "now", "end"),
    [
        (None, None, None, UnknownJob),
        ("r1", None, None, UnknownJob),
        (None, seen(), None, UnknownJob),
        (None, None, seen(), None),
        (None, None, done(), Seen),
        (None, seen(), done(), Seen),
        (None, seen(), done(generation=2), Superseded),
        (None, seen(), seen(generation=2), Superseded),
        (None, seen(), done(id=2), Superseded),
        (None, seen(), done(revision="r1", generation=2), Superseded),
        (None, seen(revision="r1"), done(revision="r1"), Seen),
        (None, seen(revision="r1"), done(revision="r1", id=2, generation=1), Seen),
        (None, seen(revision="r1"), done(revision="r1", generation=3), Seen),  # r2 came and went: it is r1 again
        (None, seen(revision="r1"), done(revision="r2", generation=2), Superseded),
        (None, seen(revision="r1"), done(revision="", generation=2), Superseded),
        ("r1", None, seen(revision="r1"), None),
        ("r1", None, done(revision="r1"), Seen),
        ("r1", None, done(revision="r2"), Superseded),
        ("r1", None, done(), Superseded),
        ("r1", seen(revision="r1"), done(revision="r2"), Superseded),
        (None, None, seen(state="failed", code="c"), JobFailed),
        (None, None, seen(state="cancelled", code="c"), JobCancelled),
        ("r1", None, seen(state="failed", revision="r2"), Superseded),
    ],
)
def test_what_ends_a_wait(given: str | None, first: Seen | None, now: Seen | None, end: type[object] | None) -> None:
    found = verdict(Wait("work", "a", given, first), now)
    assert type(found) is (type(None) if end is None else end)
    if isinstance(found, Superseded):
        assert now is not None
        assert found.revision == (now.revision or None)
    if isinstance(found, Seen):
        assert found is now


@pytest.mark.ruling("2.14")
def test_a_wait_is_for_what_it_first_saw() -> None:
    wait = Wait("work", "a", None)
    assert [wait.look(each) for each in (seen(), seen(), done(generation=2))] == [False, False, True]
    with pytest.raises(Superseded):
        wait.future.result(0)


def test_who_has_given_up_is_told_nothing() -> None:
    wait = Wait("work", "a", None)
    wait.future.cancel()
    assert wait.look(done())
    assert wait.future.cancelled()


def kind(ttl: timedelta | None = None) -> Kind:
    policy = make_policy("standard", {"result_ttl": ttl})
    return declare_kind("work", policy, payload=object, payload_limit=None, version=1)


@pytest.mark.ruling("1.10", "2.14")
def test_which_value_is_handed_out() -> None:
    minute = kind(timedelta(minutes=1))
    assert value_of(kind(), done(value='{"a": [1]}')) == {"a": [1]}
    assert value_of(kind(), done(value="null")) is None
    assert value_of(kind(), done(has_result=False, value='"stale"')) is None
    assert value_of(minute, done(age_seconds=59.0)) == 1
    assert value_of(kind(), done(age_seconds=1e9)) == 1
    for unkept in (done(value=None, age_seconds=None), done(age_seconds=61.0)):
        with pytest.raises(ResultGone):
            value_of(minute, unkept)


@pytest.mark.ruling("1.21")
def test_a_thread_does_not_retire_from_those_who_have_just_come() -> None:
    settings = Settings.load("host=nowhere", environ={})
    watcher = waiter_module._Watcher(settings)
    watcher._thread = threading.current_thread()
    wait = Wait("work", "a", None)
    watcher.add(wait)
    assert not watcher._retire()
    assert watcher._take_new() == [wait]
    assert watcher._retire()
    assert watcher._thread is None  # so that the next one to come starts another


# --- what is read when ----------------------------------------------------------------------------------------------


class Table:
    """Stands in for the database: what it answers, and what it was asked for."""

    def __init__(self) -> None:
        self.jobs: dict[str, Seen] = {}
        self.asked: list[list[str]] = []
        self.errors: list[Exception] = []
        self.subscribed: dict[str, Callable[[], None]] = {}

    async def read(self, statement: Statement[list[Seen]]) -> list[Seen]:
        names = list(zip(*map(tuple, map(self._texts, statement.parameters.values())), strict=True))
        self.asked.append([f"{kind}:{key}" if kind != "work" else key for kind, key in names])
        await anyio.lowlevel.checkpoint()
        if self.errors:
            raise self.errors.pop(0)
        return [self.jobs[key] for _, key in names if key in self.jobs]

    @staticmethod
    def _texts(column: object) -> Sequence[str]:
        assert isinstance(column, list)
        return column

    def subscribe(self, kind: str, callback: Callable[[], None]) -> None:
        assert kind not in self.subscribed
        self.subscribed[kind] = callback


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(waits_module, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def desk(table: Table, clock: Clock) -> Desk:
    return Desk(TableMap(), table.read, table.subscribe)


@pytest.mark.ruling("2.14")
async def test_the_new_are_read_at_once_and_all_once_a_poll(desk: Desk, table: Table, clock: Clock) -> None:
    table.jobs = {"a": seen("a"), "b": seen("b")}
    desk.add([Wait("work", "a", None)])
    await desk.look()
    desk.add([Wait("work", "b", None), Wait("work", "b", None)])
    await desk.look()
    await desk.look()  # nothing is due
    assert table.asked == [["a"], ["b"]]
    clock.now += 0.75
    assert desk.rest_seconds() == 0.25
    clock.now += 0.25
    await desk.look()
    assert table.asked == [["a"], ["b"], ["a", "b"]]


@pytest.mark.ruling("2.14", "2.18")
async def test_when_jobs_of_a_kind_have_ended_its_own_are_read(desk: Desk, table: Table) -> None:
    table.jobs = {"a": seen("a"), "b": seen("b"), "c": seen("c", kind="other")}
    desk.add([Wait("work", "a", None), Wait("work", "b", None), Wait("other", "c", None)])
    assert sorted(table.subscribed) == ["other", "work"]
    await desk.look()
    desk.changed.clear()
    for _ in range(100):
        table.subscribed["work"]()
    assert await desk.changed.wait(0)
    await desk.look()
    await desk.look()
    assert table.asked == [["a", "b", "other:c"], ["a", "b"]]


async def test_those_who_have_given_up_are_not_read_for(desk: Desk, table: Table, clock: Clock) -> None:
    waits = [Wait("work", key, None) for key in "aab"]
    table.jobs = {"a": seen("a"), "b": seen("b")}
    desk.add(waits)
    waits[0].future.cancel()
    await desk.look()
    waits[1].future.cancel()
    clock.now += 1
    await desk.look()
    waits[2].future.cancel()
    clock.now += 1
    await desk.look()
    assert table.asked == [["a", "b"], ["b"]]
    assert desk.is_empty
    assert desk.rest_seconds() == waits_module.IDLE_SECONDS


async def test_those_who_were_told_are_not_read_for(desk: Desk, table: Table, clock: Clock) -> None:
    waits = [Wait("work", key, None) for key in "abc"]
    table.jobs = {"a": done("a"), "b": seen("b")}
    desk.add(waits)
    await desk.look()
    clock.now += 1
    await desk.look()
    assert table.asked == [["a", "b", "c"], ["b"]]
    assert waits[0].future.result(0) == done("a")
    assert isinstance(waits[2].future.exception(0), UnknownJob)


async def test_a_statement_reads_so_many_at_most(
    desk: Desk, table: Table, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits_module, "MOST_AT_ONCE", 2)
    desk.add([Wait("work", key, None) for key in "abcde"])
    await desk.look()
    assert table.asked == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize(
    "error", [psycopg.OperationalError("canary"), TimeoutError(), errors.DeadlockDetected(), errors.AdminShutdown()]
)
async def test_an_outage_is_told_once_and_outwaited(
    desk: Desk, table: Table, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits_module, "MOST_AT_ONCE", 1)
    monkeypatch.setattr(waits_module, "POLL_SECONDS", 0.0)
    waits = [Wait("work", key, None) for key in "ab"]
    desk.add(waits)
    table.errors = [error, error]
    table.jobs = {"a": done("a"), "b": done("b")}
    with caplog.at_level(logging.WARNING, logger="pgworker"):
        await desk.look()
        await desk.look()
    assert table.asked == [["a"], ["a"]]  # a server in trouble is not asked for the rest
    assert not any(wait.future.done() for wait in waits)
    await desk.look()
    assert [wait.future.result(0).key for wait in waits] == ["a", "b"]
    assert [record.message for record in caplog.records] == [
        f"results cannot be read, trying again error={type(error).__name__}"
    ]


async def test_after_an_outage_all_are_read_at_once(
    desk: Desk, table: Table, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleep(seconds: float) -> None:
        assert seconds == 1.0

    monkeypatch.setattr(anyio, "sleep", sleep)
    table.errors = [TimeoutError()]
    desk.add([Wait("work", "a", None)])
    await desk.look()
    assert desk.rest_seconds() == 0.0
    await desk.look()
    assert table.asked == [["a"], ["a"]]


async def test_another_error_ends_the_waits_that_it_met(
    desk: Desk, table: Table, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits_module, "MOST_AT_ONCE", 2)
    waits = [Wait("work", key, None) for key in "abc"]
    desk.add(waits)
    table.errors = [errors.UndefinedTable("canary")]
    table.jobs = {"c": done("c")}
    await desk.look()
    told = [waits[0].future.exception(0), waits[1].future.exception(0)]
    assert [str(error) for error in told] == ["results cannot be read: UndefinedTable"] * 2
    assert told[0] is not told[1]  # each caller's own, whatever its traceback becomes
    assert isinstance(told[0], PgworkerError)
    assert waits[2].future.result(0).key == "c"


async def test_what_is_left_at_the_end_is_known(desk: Desk, table: Table) -> None:
    waits = [Wait("work", key, None) for key in "aab"]
    table.jobs = {"a": seen("a"), "b": done("b")}
    desk.add(waits)
    await desk.look()
    assert desk.clear() == waits[:2]
    assert desk.is_empty
