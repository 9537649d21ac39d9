"""Which leases are asked about when, and what the answers do, with a clock and a server of the test's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import SimpleNamespace
from typing import cast
from uuid import uuid4

import psycopg
import pytest
from psycopg import errors

from pgworker.config import Settings
from pgworker.db import SyncConnection
from pgworker.job import Cause, Claim, Verdict
from pgworker.leases import Held, LeaseKeeper
from pgworker.policy import STORE_TIMEOUT, Lease
from pgworker.statements import Renewal, Row, Statement
from pgworker.tablemap import TableMap

RENEWED = Lease.renew(timedelta(seconds=15), timedelta(seconds=5))
COVERING = Lease.cover(timedelta(seconds=770))


@dataclass(frozen=True)
class Table:
    """Renewals of one table; the statement carries what was asked."""

    name: str = "jobs"

    def __call__(self, leases: Sequence[tuple[Claim, float | None]]) -> Statement[dict[int, Renewal]]:
        def read(_: Sequence[Row]) -> dict[int, Renewal]:
            return {}

        asked = {claim.key: seconds for claim, seconds in leases}
        return Statement(self.name, b"", {"asked": asked, "ids": [claim.id for claim, _ in leases]}, read)


class Bench(LeaseKeeper):
    """A keeper whose turns are called one by one, at the times that the test says, before a server made of answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("pgworker.leases.time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr("pgworker.leases.send_sync", self._send)
        self.loop: list[Callable[[], None]] = []
        super().__init__(Settings("", "", TableMap()), deadline=STORE_TIMEOUT, call_soon=self.loop.append)
        self.sent: list[tuple[str, dict[str, float | None]]] = []
        self.verdicts: dict[int, Renewal] = {}
        self.errors: dict[str, Exception] = {}
        self.connects = 0
        self.unreachable = False
        self.causes: list[tuple[str, Cause]] = []

    def take(
        self, key: str, lease: Lease, *, kind: str = "work", table: str = "jobs", sent_at: float | None = None
    ) -> Held:
        claim = Claim(
            kind, int(key[1:]), key, "r1", 1, uuid4(), 0, None, 0, 1, 0, 0, datetime.now(UTC), 0.0, None
        )  # fmt: skip
        sent_at = self.now if sent_at is None else sent_at

        def stop(cause: Cause) -> None:
            self.causes.append((key, cause))

        (held,) = self.hold([claim], lease, Table(table), sent_at=sent_at)
        held.listen(stop)
        return held

    def answer(self, held: Held, verdict: Verdict, *, cancel: bool = False) -> None:
        self.verdicts[held.claim.id] = Renewal(verdict, cancel)

    def turn(self) -> list[tuple[str, dict[str, float | None]]]:
        """One turn of the thread; what it sent."""
        so_far = len(self.sent)
        if asked := self._due(self.now):
            self._ask(asked)
        return self.sent[so_far:]

    def watch(self) -> float:
        """One turn of the other thread; returns in how many seconds it makes the next."""
        self._watch(self.now)
        return self._guard_wakes_at - self.now

    def turn_the_loop(self) -> None:
        while self.loop:
            self.loop.pop()()

    def _connected(self) -> SyncConnection:
        if self._connection is None:
            self.connects += 1
            if self.unreachable:
                raise psycopg.OperationalError
            self._connection = cast("SyncConnection", SimpleNamespace(broken=False, close=lambda: None))
        return self._connection

    def _send(self, _: SyncConnection, statement: Statement[dict[int, Renewal]]) -> dict[int, Renewal]:
        self.sent.append((statement.name, cast("dict[str, float | None]", statement.parameters["asked"])))
        if statement.name in self.errors:
            raise self.errors[statement.name]
        ids = cast("list[int]", statement.parameters["ids"])
        return {id_: self.verdicts.get(id_, Renewal("done", cancel_requested=False)) for id_ in ids}


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


@pytest.mark.contract("A42")
@pytest.mark.ruling("1.19")
def test_a_renewed_lease_is_prolonged_and_a_covering_one_is_looked_at_every_five_seconds(keeper: Bench) -> None:
    renewed, covering = keeper.take("k1", RENEWED), keeper.take("k2", COVERING)
    guards = renewed.guard, covering.guard
    assert keeper.turn() == []
    keeper.now += 3.9
    assert keeper.turn() == []
    for _ in range(3):
        keeper.now += 5
        assert keeper.turn() == [("jobs", {"k1": 15.0, "k2": None})]
    assert renewed.guard == guards[0] + 18.9
    assert covering.guard == guards[1]
    assert keeper.causes == []


@pytest.mark.ruling("1.19")
def test_a_lease_is_looked_at_once_it_is_asked_for_and_renewed_in_its_own_time(keeper: Bench) -> None:
    held = keeper.take("k1", RENEWED)
    guard = held.guard
    keeper.verify("work")
    assert keeper.turn() == [("jobs", {"k1": None})]
    assert held.guard == guard
    assert keeper.turn() == []
    keeper.now += 5
    assert keeper.turn() == [("jobs", {"k1": 15.0})]


@pytest.mark.ruling("1.19")
def test_two_hundred_calls_in_a_second_are_ten_looks_and_the_last_call_is_heeded(keeper: Bench) -> None:
    keeper.take("k1", COVERING)
    began = keeper.now
    looked_at: list[float] = []
    for step in range(400):
        keeper.now = began + step * 0.005
        if step < 200:
            keeper.verify("work")
        if keeper.turn():
            looked_at.append(keeper.now - began)
    assert len(looked_at) == 11
    assert looked_at[0] == 0
    assert looked_at[-1] > 0.995
    gaps = [later - earlier for earlier, later in pairwise(looked_at)]
    assert min(gaps) > 0.099


@pytest.mark.ruling("1.19")
def test_the_rate_is_one_for_all_kinds_and_what_costs_no_statement_does_not_count(keeper: Bench) -> None:
    keeper.take("k1", COVERING, kind="one")
    keeper.take("k2", COVERING, kind="two")
    keeper.take("k3", COVERING, kind="three")
    keeper.verify("none")
    assert keeper.turn() == []
    keeper.verify("one")
    keeper.verify("two")
    assert keeper.turn() == [("jobs", {"k1": None, "k2": None})]
    keeper.verify("three")
    assert keeper.turn() == []
    keeper.now += 0.11
    assert keeper.turn() == [("jobs", {"k3": None})]


@pytest.mark.ruling("1.19")
@pytest.mark.parametrize(("claim_sent", "looked"), [(-0.5, True), (0.0, True), (0.001, False)])
def test_a_claim_that_was_under_way_when_it_was_asked_for_is_looked_at_once_it_is_held(
    keeper: Bench, claim_sent: float, *, looked: bool
) -> None:
    keeper.verify("work")
    assert keeper.turn() == []
    asked_at = keeper.now
    keeper.now += 0.3
    keeper.take("k1", COVERING, sent_at=asked_at + claim_sent)
    assert bool(keeper.turn()) == looked


@pytest.mark.contract("X8", "X30")
@pytest.mark.ruling("1.2", "1.19")
@pytest.mark.parametrize("lease", [RENEWED, COVERING])
@pytest.mark.parametrize(
    ("verdict", "cancel", "causes"),
    [
        ("done", False, []),
        ("done", True, [("k1", "cancel")]),
        ("busy", False, []),
        ("lost", False, [("k1", "lost")]),
        ("expired", False, [("k1", "lost")]),
    ],
)
def test_the_run_is_told_once_of_what_the_answer_says(
    keeper: Bench, lease: Lease, verdict: Verdict, *, cancel: bool, causes: list[tuple[str, Cause]]
) -> None:
    held = keeper.take("k1", lease)
    keeper.answer(held, verdict, cancel=cancel)
    for _ in range(3):
        keeper.now += 5
        keeper.verify("work")
        keeper.turn()
    assert keeper.causes == causes
    asked = Counter(seconds for _, asked in keeper.sent for seconds in asked.values())
    assert sum(asked.values()) == (1 if verdict in ("lost", "expired") else 3)


def test_a_lease_that_the_answer_leaves_out_is_lost(keeper: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper.take("k1", COVERING)
    monkeypatch.setattr("pgworker.leases.send_sync", lambda *_: {})
    keeper.verify("work")
    keeper.turn()
    assert keeper.causes == [("k1", "lost")]


@pytest.mark.ruling("1.13", "1.40")
def test_leases_of_one_table_travel_together_whatever_their_kinds(keeper: Bench) -> None:
    keeper.take("k1", RENEWED, kind="one")
    keeper.take("k2", COVERING, kind="two")
    keeper.take("k3", RENEWED, kind="three", table="documents")
    keeper.now += 5
    assert sorted(keeper.turn()) == [("documents", {"k3": 15.0}), ("jobs", {"k1": 15.0, "k2": None})]


@pytest.mark.contract("A24")
@pytest.mark.ruling("1.19", "2.3")
def test_a_superseded_run_and_its_successor_in_one_process_get_an_answer_each(keeper: Bench) -> None:
    keeper.take("k1", COVERING)
    keeper.take("k1", COVERING)
    keeper.take("k2", COVERING)
    keeper.verify("work")
    assert sorted(len(asked) for _, asked in keeper.turn()) == [1, 2]
    assert [list(asked).count("k1") for _, asked in keeper.sent] == [1, 1]


@pytest.mark.contract("X8")
def test_an_error_of_one_tables_statement_costs_the_other_table_nothing(keeper: Bench) -> None:
    broken, sound = keeper.take("k1", RENEWED, table="documents"), keeper.take("k2", RENEWED)
    guards = broken.guard, sound.guard
    keeper.errors["documents"] = errors.UndefinedTable()
    keeper.now += 5
    keeper.turn()
    assert (broken.guard, sound.guard) == (guards[0], guards[1] + 5)
    keeper.now += 0.5
    assert [table for table, _ in keeper.turn()] == ["documents"]
    del keeper.errors["documents"]
    keeper.now += 0.5
    keeper.turn()
    assert broken.guard == guards[0] + 6
    assert keeper.causes == []


@pytest.mark.contract("X8")
def test_a_server_that_cannot_be_reached_is_tried_once_for_all_tables(keeper: Bench) -> None:
    one, two = keeper.take("k1", RENEWED, table="documents"), keeper.take("k2", COVERING)
    keeper.unreachable = True
    keeper.now += 5
    assert keeper.turn() == []
    assert keeper.connects == 1
    keeper.unreachable = False
    keeper.now += 0.5
    assert len(keeper.turn()) == 2
    assert (one.cause, two.cause) == (None, None)


@pytest.mark.ruling("1.19")
def test_a_verify_wakes_the_thread_only_as_early_as_it_may_look(keeper: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[float] = []
    monkeypatch.setattr(keeper._changed, "notify_all", lambda: woken.append(keeper.now))
    keeper._renew_wakes_at = float("inf")
    keeper.verify("work")
    assert woken == [1000.0]
    keeper._next_look_at, keeper._renew_wakes_at = 1000.1, 1000.1  # it sleeps until the next look already
    keeper.verify("work")
    assert woken == [1000.0]


# --- what watches the event loop ------------------------------------------------------------------------------------


def test_the_event_loop_is_left_alone_while_nothing_is_held(keeper: Bench) -> None:
    assert keeper.watch() == float("inf")
    assert not keeper.loop
    held = keeper.take("k1", RENEWED)
    assert keeper.watch() == pytest.approx(0.25)
    assert len(keeper.loop) == 1
    keeper.turn_the_loop()
    keeper.drop([held])
    assert keeper.watch() == float("inf")
    assert not keeper.loop


def test_a_loop_that_stands_still_for_a_third_of_a_lease_is_told_of_once(
    keeper: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    keeper.now += 1_000  # it was not asked while nothing was held
    keeper.take("k1", RENEWED, kind="slow")
    told: list[tuple[float, str]] = []

    def watch(until: float) -> None:
        while keeper.now < until:
            keeper.now += keeper.watch()
            keeper.turn()  # the lease itself is kept
            told.extend((round(keeper.now - 2_000, 2), record.getMessage()) for record in caplog.records)
            caplog.clear()

    watch(2_000 + 14)
    keeper.turn_the_loop()
    assert [(seconds, text[:34], "kinds=slow:" in text) for seconds, text in told] == [
        (5.5, "the event loop stands still for 5.", True)
    ]
    told.clear()
    watch(2_000 + 14 + 5)
    assert told == []
    watch(2_000 + 14 + 6)
    assert len(told) == 1


def test_what_was_held_long_ago_makes_no_standstill(keeper: Bench, caplog: pytest.LogCaptureFixture) -> None:
    keeper.drop([keeper.take("k1", Lease.renew(timedelta(seconds=3)), kind="quick")])
    keeper.now += 100
    keeper.watch()
    keeper.take("k2", RENEWED, kind="slow")
    keeper.now += 2  # which would be too long for the other kind
    keeper.watch()
    keeper.turn_the_loop()
    assert not caplog.records


def test_the_first_lease_after_a_rest_wakes_the_thread_that_watches(
    keeper: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may sleep until a lease that is gone would have ended, and the other until that was to be renewed."""
    held = keeper.take("k1", RENEWED)
    keeper.watch()
    keeper.drop([held])
    keeper.watch()
    keeper._renew_wakes_at = held.ask_at
    woken: list[float] = []
    monkeypatch.setattr(keeper._changed, "notify_all", lambda: woken.append(keeper.now))
    keeper.now += 1
    keeper.take("k2", RENEWED)
    assert woken == [keeper.now]
    assert keeper.watch() == pytest.approx(0.25)
    keeper.take("k3", RENEWED)
    assert len(woken) == 1, "most jobs end before they are looked at"
