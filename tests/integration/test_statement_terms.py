"""What each term of claim, survey, reaper and the reports asks for: quick tests, one of which fails without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import uuid4

import psycopg
import pytest

from pgworker.job import Claim
from pgworker.operations import count_jobs
from pgworker.outcome import Settlement
from pgworker.presence import forget_runners, list_runners, report_runners
from pgworker.statements import (
    BEGINNING,
    Cursor,
    Due,
    Lane,
    Reaped,
    check_fence,
    claim_jobs,
    reap_expired,
    survey_lanes,
)
from tests.handles import RETRY, Hand, age, copy_of, everything, row

Admin: TypeAlias = psycopg.Connection[Any]
LATER = timedelta(hours=1)


def claim_after(hand: Hand, last: Claim) -> list[str]:
    statement = claim_jobs(
        hand.tables, Lane(hand.kind, 0, 0), limit=10, token=uuid4(), runner="r", ttl_seconds=60, max_evictions=5,
        version=1, after=(last.ready_at, last.id),
    )  # fmt: skip
    return [claim.key for claim in hand.send(statement)]


def test_a_claim_takes_what_is_ready_in_its_own_lane(hand: Hand, admin: Admin) -> None:
    hand.enqueue("done")
    hand.finish(hand.claim()[0])
    hand.enqueue("running")
    hand.claim()
    hand.enqueue("mine")
    hand.enqueue("catch-up", urgency="catch_up")
    hand.enqueue("second", priority=1)
    hand.enqueue("before", priority=-1)
    hand.enqueue("later", delay=LATER)
    hand.kind = "another"
    hand.enqueue("of another kind")
    hand.kind = "work"
    assert [claim.key for claim in hand.claim(10)] == ["mine"]


def test_a_claim_writes_to_its_own_rows_only(hand: Hand, admin: Admin) -> None:
    for key in ("mine", "neighbour"):
        hand.enqueue(key)
    copy_of(admin, "mine", kind="copy")
    others = everything(admin, but=("work", "mine"))
    (claim,) = hand.claim(1)
    assert claim.key == "mine"
    assert everything(admin, but=("work", "mine")) == others


def test_a_claim_begins_behind_its_cursor(hand: Hand, admin: Admin) -> None:
    for key in "abc":
        hand.enqueue(key)
    first, second = hand.claim(2)
    age(admin, 61)  # all of them are ready again
    aged = second._replace(ready_at=row(admin, "b")["ready_at"])
    assert claim_after(hand, aged) == ["c"]
    assert first.key == "a"


def test_a_job_whose_cancel_was_requested_is_never_claimed_again(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    hand.claim()
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    age(admin, 61)
    assert hand.claim() == []


@pytest.mark.parametrize(
    ("evictions", "limit", "taken"), [(0, 2, True), (1, 2, False), (2, 2, False), (0, 1, False), (7, None, True)]
)
def test_at_its_limit_of_evictions_a_job_is_the_reapers(
    hand: Hand, admin: Admin, *, evictions: int, limit: int | None, taken: bool
) -> None:
    hand.enqueue("k")
    hand.claim()
    admin.execute("update pgworker.jobs set evictions = %s", [evictions])
    assert hand.claim(max_evictions=limit) == []  # a live lease is nobody else's
    age(admin, 61)
    assert len(hand.claim(max_evictions=limit)) == int(taken)


def test_a_newer_payload_waits_for_a_newer_worker(hand: Hand, admin: Admin) -> None:
    hand.enqueue("old")
    hand.enqueue("new")
    admin.execute("update pgworker.jobs set version = 2 where key = 'new'")
    assert [claim.key for claim in hand.claim(10, version=1)] == ["old"]
    assert [claim.key for claim in hand.claim(10, version=2)] == ["new"]


PAUSES = [
    ("work", "clock_timestamp()", "null", True),
    ("work", "clock_timestamp()", "clock_timestamp() + interval '1 hour'", True),
    ("work", "clock_timestamp()", "clock_timestamp() - interval '1 hour'", False),
    ("work", "null", "null", False),
    ("another", "clock_timestamp()", "null", False),
]


@pytest.mark.parametrize(("kind", "since", "until", "paused"), PAUSES)
def test_a_pause_holds_for_its_kind_and_until_its_end(
    hand: Hand, admin: Admin, *, kind: str, since: str, until: str, paused: bool
) -> None:
    admin.execute(
        f"insert into pgworker.kinds (kind, paused_at, paused_until) values ('{kind}', {since}, {until})".encode()
    )
    hand.enqueue("k")
    (due,) = hand.send(survey_lanes(hand.tables, ["work"]))
    assert due.paused is paused
    assert len(hand.claim()) == int(not paused)


@pytest.mark.parametrize(("facts", "told"), [(0, []), (1, ["evicted"]), (2, ["evicted", "claimed"])])
def test_a_takeover_tells_as_much_as_its_level_says(hand: Hand, admin: Admin, facts: int, told: list[str]) -> None:
    hand.enqueue("k")
    hand.claim(ttl_seconds=0.001)  # younger than the server's start, so this is an eviction
    admin.execute("select pg_sleep(0.002)")
    hand.claim(ttl_seconds=0.001, facts=facts)
    assert [what for (what,) in admin.execute("select what from pgworker.facts order by id")] == told


def test_of_a_claim_of_many_each_row_keeps_its_own_history(hand: Hand, admin: Admin) -> None:
    hand.enqueue("lost")
    hand.claim(ttl_seconds=0.001)
    admin.execute("select pg_sleep(0.002)")
    hand.enqueue("new")
    found = {claim.key: claim.evictions for claim in hand.claim(2, ttl_seconds=0.001, facts=1)}
    assert found == {"lost": 1, "new": 0}
    assert admin.execute("select key, what, runner from pgworker.facts").fetchall() == [("lost", "evicted", "by hand")]


@pytest.mark.parametrize(("facts", "told"), [(1, []), (2, ["claimed"])])
def test_a_first_claim_evicts_nobody(hand: Hand, admin: Admin, facts: int, told: list[str]) -> None:
    hand.enqueue("k")
    hand.claim(facts=facts)
    assert [what for (what,) in admin.execute("select what from pgworker.facts")] == told


def dues(hand: Hand) -> dict[tuple[int, int], Due]:
    return {(due.lane.urgency, due.lane.priority): due for due in hand.send(survey_lanes(hand.tables, [hand.kind]))}


def test_a_survey_finds_the_unfinished_lanes_of_its_kinds(hand: Hand) -> None:
    hand.enqueue("done", priority=7)
    hand.finish(hand.claim(priority=7)[0])
    hand.kind = "another"
    hand.enqueue("k", urgency="catch_up", priority=3)
    hand.kind = "work"
    assert hand.lanes() == []
    hand.enqueue("k")
    assert hand.lanes() == [Lane("work", 0, 0)]
    hand.enqueue("k2", priority=2)
    hand.enqueue("k3", urgency="catch_up", priority=-2)
    assert hand.lanes() == [Lane("work", 0, 0), Lane("work", 0, 2), Lane("work", 1, -2)]


def test_a_survey_says_where_the_first_free_job_is_if_that_is_due(hand: Hand, admin: Admin) -> None:
    hand.enqueue("leased")
    hand.claim()
    hand.enqueue("first")
    hand.enqueue("second")
    hand.enqueue("later", delay=LATER, priority=1)
    first = row(admin, "first")
    assert [due.start for due in hand.send(survey_lanes(hand.tables, ["work"]))] == [
        (first["ready_at"], first["id"] - 1),
        BEGINNING,
    ]
    assert [claim.key for claim in hand.claim(5)] == ["first", "second"]


def test_a_survey_of_lanes_without_number_sees_the_first_thousand_of_each_class(hand: Hand, admin: Admin) -> None:
    admin.execute(
        "insert into pgworker.jobs (kind, key, payload, class, priority)"
        " select 'work', class || ' ' || priority, '1', class, priority"
        " from generate_series(0, 1) class, generate_series(-30000, -28500) priority"
    )
    lanes = hand.lanes()
    assert lanes == [Lane("work", urgency, first - 30000) for urgency in (0, 1) for first in range(1000)]
    admin.execute("update pgworker.jobs set state = 'failed', finished_at = clock_timestamp() where priority < -29000")
    assert hand.lanes() == [Lane("work", urgency, rest - 29000) for urgency in (0, 1) for rest in range(501)]


def test_a_survey_says_of_each_lane_when_its_own_first_job_is_due(hand: Hand) -> None:
    hand.enqueue("done")
    hand.finish(hand.claim()[0])
    hand.kind = "a.kind.before"
    hand.enqueue("ready")
    hand.kind = "work"
    for hours, (urgency, priority) in enumerate([("fresh", 0), ("fresh", 5), ("catch_up", 0)], 1):
        hand.enqueue(str(hours), delay=hours * LATER, urgency=urgency, priority=priority)
    hours_left = {lane: round((due.due_in_seconds or 0) / 3600) for lane, due in dues(hand).items()}
    assert hours_left == {(0, 0): 1, (0, 5): 2, (1, 0): 3}


def test_a_survey_passes_live_leases_over_and_no_expired_ones(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    hand.claim()
    assert dues(hand)[0, 0].due_in_seconds is None
    hand.enqueue("later", delay=LATER)
    assert (dues(hand)[0, 0].due_in_seconds or 0) > 3000
    admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp() where key = 'k'")
    assert (dues(hand)[0, 0].due_in_seconds or 0) <= 0


BREAKS: dict[str, Callable[[Admin, Claim], Claim]] = {
    "nothing": lambda admin, claim: claim,
    "id": lambda admin, claim: claim._replace(id=claim.id + 1),
    "key": lambda admin, claim: claim._replace(key="another"),
    "revision": lambda admin, claim: claim._replace(revision="r2"),
    "token": lambda admin, claim: claim._replace(token=uuid4()),
    "kind": lambda admin, claim: claim._replace(kind="another"),
}


@pytest.mark.parametrize("broken", [*BREAKS, "expiry"])
def test_each_part_of_the_fence_is_checked_before_the_apps_writes(hand: Hand, admin: Admin, broken: str) -> None:
    hand.enqueue("k", "r1")
    (claim,) = hand.claim()
    if broken == "expiry":
        age(admin, 61)
    asked = BREAKS.get(broken, BREAKS["nothing"])(admin, claim)
    assert hand.send(check_fence(hand.tables, asked)) == (1 if broken == "nothing" else None)


def reap(
    hand: Hand,
    *,
    limit: int = 10,
    max_evictions: int | None = 2,
    facts: int = 0,
    ttl_seconds: float = 60,
    after: Cursor = BEGINNING,
) -> Reaped:
    statement = reap_expired(
        hand.tables, Lane(hand.kind, 0, 0), limit=limit, max_evictions=max_evictions, facts=facts,
        ttl_seconds=ttl_seconds, after=after,
    )  # fmt: skip
    return hand.send(statement)


def test_a_page_of_the_reaper_reads_what_is_due_in_its_own_lane(hand: Hand, admin: Admin) -> None:
    hand.enqueue("done")
    hand.finish(hand.claim()[0])
    hand.enqueue("catch-up", urgency="catch_up")
    hand.enqueue("second", priority=1)
    hand.enqueue("before", priority=-1)
    hand.enqueue("later", delay=LATER)
    hand.kind = "another"
    hand.enqueue("of another kind")
    hand.kind = "work"
    assert reap(hand).read == 0
    hand.enqueue("mine")
    hand.enqueue("mine, too")
    assert reap(hand).read == 2
    first = row(admin, "mine")
    assert reap(hand, after=(first["ready_at"], first["id"])).read == 1


def test_the_reaper_writes_to_the_expired_rows_of_its_page_only(hand: Hand, admin: Admin) -> None:
    for key in ("mine", "neighbour", "alive"):
        hand.enqueue(key)
    hand.claim(2)
    age(admin, 61)
    hand.claim(1, max_evictions=1)  # `alive` is the only one not at its limit
    copy_of(admin, "mine", kind="copy")
    others = everything(admin, but=("work", "mine"))
    assert reap(hand, limit=1) == (1, 1, 1, (row(admin, "mine")["ready_at"], row(admin, "mine")["id"]), 1)
    assert everything(admin, but=("work", "mine")) == others
    assert reap(hand)[:3] == (3, 1, 1)
    assert row(admin, "alive") == others["work", "alive"]


def test_the_reaper_shortens_the_leases_of_its_page_that_are_too_long(hand: Hand, admin: Admin) -> None:
    for key in ("mine", "neighbour", "as long as it may be"):
        hand.enqueue(key)
    hand.claim(3)
    copy_of(admin, "mine", kind="copy")
    admin.execute("update pgworker.jobs set lease_expires_at = lease_expires_at + interval '1 hour' where key <> %s", [
        "as long as it may be"
    ])  # fmt: skip
    before, others = row(admin, "mine"), everything(admin, but=("work", "mine"))
    assert reap(hand, limit=1)[:3] == (1, 0, 0)
    after = row(admin, "mine")
    assert timedelta(minutes=59) < before["lease_expires_at"] - after["lease_expires_at"] <= LATER
    assert everything(admin, but=("work", "mine")) == others
    reap(hand)
    assert row(admin, "as long as it may be") == others["work", "as long as it may be"]
    assert row(admin, "neighbour") != others["work", "neighbour"]


@pytest.mark.parametrize(
    ("evictions", "cancel", "state", "code", "told"),
    [
        (0, False, "pending", "handler_failed", ["evicted"]),
        (1, False, "failed", "evicted_too_often", ["evicted", "failed"]),
        (0, True, "cancelled", "handler_failed", ["evicted", "cancelled"]),
        (1, True, "cancelled", "handler_failed", ["evicted", "cancelled"]),
    ],
)
def test_what_the_reaper_makes_of_an_expired_lease(
    hand: Hand, admin: Admin, *, evictions: int, cancel: bool, state: str, code: str, told: list[str]
) -> None:
    hand.enqueue("k")
    hand.settle(hand.claim()[0], replace(RETRY, delay_seconds=0.0, error_class="KeyError"))
    hand.claim(ttl_seconds=0.001)
    admin.execute("update pgworker.jobs set evictions = %s", [evictions])
    if cancel:
        admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    admin.execute("select pg_sleep(0.002)")
    assert reap(hand, ttl_seconds=0.001, facts=1)[1:3] == (1, int(state == "pending"))
    after = row(admin, "k")
    assert (after["state"], after["last_code"], after["evictions"]) == (state, code, evictions + 1)
    assert after["last_error"] == (None if state == "failed" else "KeyError")
    assert (after["finished_at"] is None) == (state == "pending")
    assert (after["token"], after["cancel_requested_at"]) == (None, None)
    assert [what for (what,) in admin.execute("select what from pgworker.facts order by id")] == told


def test_without_facts_the_reaper_tells_nothing(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    hand.claim(ttl_seconds=0.001)
    admin.execute("select pg_sleep(0.002)")
    assert reap(hand, ttl_seconds=0.001).ended_or_freed == 1
    assert admin.execute("select what from pgworker.facts").fetchall() == []


def test_a_count_goes_by_kind_and_derived_state(hand: Hand, admin: Admin) -> None:
    def work(kind: str, *keys: str, **options: Any) -> None:
        hand.kind = kind
        for key in keys:
            hand.enqueue(key, **options)

    work("b.ended", "1", "2", "3")
    for state in ("failed", "cancelled"):
        hand.settle(hand.claim()[0], Settlement(state, "x"))
    hand.finish(hand.claim()[0])
    work("c.both", "1")
    hand.finish(hand.claim()[0])
    work("c.both", "2", "3", delay=LATER)
    work("a.waits", "1", "2")
    age(admin, 100, kind="a.waits")
    work("d.runs", "1", "2", "3")
    hand.claim(2)
    admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp() where kind = 'd.runs' and key = '1'")
    counted = hand.send(count_jobs(hand.tables, bound=10))
    assert [(each.kind, each.state, each.jobs) for each in counted] == [
        ("a.waits", "ready", 2),
        ("b.ended", "cancelled", 1),
        ("b.ended", "failed", 1),
        ("b.ended", "succeeded", 1),
        ("c.both", "scheduled", 2),
        ("c.both", "succeeded", 1),
        ("d.runs", "expired", 1),
        ("d.runs", "ready", 1),
        ("d.runs", "running", 1),
    ]
    ages = {(each.kind, each.state): each.oldest_ready_seconds for each in counted}
    assert 100 <= (ages["a.waits", "ready"] or 0) < 200
    assert {age for (_, state), age in ages.items() if state != "ready"} == {None}


def runners(admin: Admin) -> set[tuple[str, str]]:
    return set(admin.execute("select runner, kind from pgworker.runners").fetchall())


def test_a_report_forgets_the_long_dead_and_nobody_else(hand: Hand, admin: Admin) -> None:
    status = json.dumps({})
    for runner in ("one", "two", "three"):
        hand.send(report_runners(hand.tables, runner, {"a": status, "b": status}, release="1"))
    admin.execute(
        "update pgworker.runners set seen_at = seen_at - interval '25 hours' where (runner, kind) = ('one', 'a')"
    )
    hand.send(report_runners(hand.tables, "two", {"a": status}, release="1"))
    assert runners(admin) == {("one", "b"), ("two", "a"), ("two", "b"), ("three", "a"), ("three", "b")}
    hand.send(forget_runners(hand.tables, "two"))
    assert runners(admin) == {("one", "b"), ("three", "a"), ("three", "b")}
    assert [each.runner for each in hand.send(list_runners(hand.tables))] == ["three", "one", "three"]
