"""What each term of the operator's statements asks for: quick tests, one of which fails without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker.operations import (
    BEGINNING,
    Cursor,
    Deed,
    Lag,
    Shelf,
    cancel_jobs,
    count_lag,
    expire_results,
    find_job,
    forget_job,
    list_ended,
    list_pauses,
    list_pending,
    pause_kind,
    read_results,
    reopen_jobs,
    resume_kind,
)
from pgworker.statements import Lane
from tests.handles import FAIL, Hand, age, copy_of, everything, result, row

Admin: TypeAlias = psycopg.Connection[Any]
LATER = timedelta(hours=1)


def id_of(admin: Admin, key: str) -> int:
    return int(row(admin, key)["id"])


def cancel(hand: Hand, *ids: int, facts: int = 0) -> dict[int, Deed]:
    return hand.send(cancel_jobs(hand.tables, hand.kind, ids, facts=facts))


def reopen(hand: Hand, *ids: int, code: str | None = None, facts: int = 0) -> dict[int, Deed]:
    statement = reopen_jobs(
        hand.tables, hand.kind, ids, states=["failed"], what="retry_requested", code=code, facts=facts
    )
    return hand.send(statement)


def forget(hand: Hand, key: str = "k", facts: int = 0) -> Deed:
    return hand.send(forget_job(hand.tables, hand.kind, key, facts=facts))


def fail(hand: Hand, key: str, **enqueued: Any) -> None:
    hand.enqueue(key, priority=-9, **enqueued)
    hand.settle(hand.claim(priority=-9)[0], FAIL)


def told(admin: Admin) -> list[str]:
    return [what for (what,) in admin.execute("select what from pgworker.facts order by id")]


def test_each_job_of_a_cancel_has_its_own_answer(hand: Hand, admin: Admin, dsn: str) -> None:
    for key in ("running", "asked", "lapsed"):
        hand.enqueue(key)
    running, asked, lapsed = hand.claim(3)
    for key in ("waiting", "busy", "neighbour"):
        hand.enqueue(key)
    fail(hand, "ended")
    copied = ("waiting", "running", "asked")
    for key in copied:
        copy_of(admin, key, kind="copy")
    admin.execute(
        "update pgworker.jobs set cancel_requested_at = clock_timestamp() where kind = 'work' and key = 'asked'"
    )
    admin.execute(
        "update pgworker.jobs set cancel_requested_at = clock_timestamp(), lease_expires_at = clock_timestamp()"
        " where key = 'lapsed'"
    )
    untouched = [("work", key) for key in ("busy", "neighbour", "ended", "asked")] + [("copy", key) for key in copied]
    before = everything(admin, but=("", ""))
    ids = {key: id_of(admin, key) for key in ("waiting", "running", "asked", "lapsed", "busy", "ended")}
    with psycopg.connect(dsn) as other:
        other.execute("select from pgworker.jobs where key = 'busy' for update")
        deeds = cancel(hand, *ids.values(), 0, facts=1)
    assert {key: deeds[id_] for key, id_ in ids.items()} == {
        "waiting": "done", "running": "requested", "asked": "passed", "lapsed": "done", "busy": "busy",
        "ended": "passed",
    }  # fmt: skip
    assert deeds[0] == "passed"
    after = everything(admin, but=("", ""))
    assert [after[each] for each in untouched] == [before[each] for each in untouched]
    waiting, runs = after["work", "waiting"], after["work", "running"]
    assert (waiting["state"], waiting["cancel_requested_at"], waiting["finished_at"] is None) == (
        "cancelled",
        None,
        False,
    )
    assert (runs["state"], runs["token"], runs["finished_at"]) == ("pending", running.token, None)
    assert runs["cancel_requested_at"] is not None
    assert after["work", "lapsed"]["token"] is None
    assert sorted(told(admin)) == ["cancel_requested", "cancelled", "cancelled"]
    assert (asked.key, lapsed.key) == ("asked", "lapsed")


def test_verbs_without_facts_tell_nothing(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    cancel(hand, id_of(admin, "k"))
    fail(hand, "failed")
    reopen(hand, id_of(admin, "failed"))
    forget(hand)
    assert told(admin) == []


def test_each_job_of_a_retry_has_its_own_answer(hand: Hand, admin: Admin, dsn: str) -> None:
    for key in ("failed", "busy", "pruned", "neighbour"):
        fail(hand, key)
    hand.enqueue("waiting")
    admin.execute("update pgworker.jobs set payload = null where key = 'pruned'")
    copy_of(admin, "failed", kind="copy")
    before = everything(admin, but=("work", "failed"))
    ids = {key: id_of(admin, key) for key in ("failed", "busy", "pruned", "waiting")}
    with psycopg.connect(dsn) as other:
        other.execute("select from pgworker.jobs where key = 'busy' for update")
        deeds = reopen(hand, *ids.values(), 0, facts=1)
    assert {key: deeds[id_] for key, id_ in ids.items()} == {
        "failed": "done", "busy": "busy", "pruned": "pruned", "waiting": "passed"
    }  # fmt: skip
    assert deeds[0] == "passed"
    assert everything(admin, but=("work", "failed")) == before
    assert row(admin, "failed")["state"] == "pending"
    assert told(admin) == ["retry_requested"]


@pytest.mark.parametrize(("code", "deed"), [(None, "done"), ("handler_failed", "done"), ("another", "passed")])
def test_a_retry_by_code_is_for_that_code(hand: Hand, admin: Admin, code: str | None, deed: Deed) -> None:
    fail(hand, "k")
    assert list(reopen(hand, id_of(admin, "k"), code=code).values()) == [deed]


def pruned(hand: Hand, admin: Admin) -> None:
    fail(hand, "k")
    admin.execute("update pgworker.jobs set payload = null")


@pytest.mark.parametrize("code", [None, "another"])
def test_a_pruned_job_of_another_code_is_passed(hand: Hand, admin: Admin, code: str | None) -> None:
    pruned(hand, admin)
    assert list(reopen(hand, id_of(admin, "k"), code=code).values()) == ["passed" if code else "pruned"]


def waits(hand: Hand) -> None:
    hand.enqueue("k")


def runs(hand: Hand) -> None:
    hand.enqueue("k")
    hand.claim()


def has_succeeded(hand: Hand) -> None:
    hand.enqueue("k")
    hand.finish(hand.claim()[0], "1")


@pytest.mark.parametrize(("begin", "deed"), [(waits, "done"), (runs, "requested"), (has_succeeded, "done")])
def test_forget_deletes_a_job_and_its_result_only(
    hand: Hand, admin: Admin, begin: Callable[[Hand], None], deed: Deed
) -> None:
    for kind, key in (("work", "neighbour"), ("another", "k")):
        hand.kind = kind
        hand.enqueue(key)
        hand.finish(hand.claim()[0], '"kept"')
    hand.kind = "work"
    begin(hand)
    copy_of(admin, "k", kind="copy")
    others = everything(admin, but=("work", "k"))
    assert forget(hand, facts=1) == deed
    assert everything(admin, but=("", "")) == others
    assert result(admin, "k") is None
    assert None not in (result(admin, "neighbour"), result(admin, "k", kind="another"))
    assert told(admin) == ["forgotten"]
    assert forget(hand, facts=1) == "passed"
    assert told(admin) == ["forgotten"]


def test_a_run_that_is_held_is_not_forgotten(hand: Hand, dsn: str) -> None:
    runs(hand)
    with psycopg.connect(dsn) as other:
        other.execute("select from pgworker.jobs for update")
        assert forget(hand) == "busy"


def test_a_held_job_is_not_forgotten_and_keeps_its_result(hand: Hand, admin: Admin, dsn: str) -> None:
    has_succeeded(hand)
    with psycopg.connect(dsn) as other:
        other.execute("select from pgworker.jobs for update")
        assert forget(hand) == "busy"
    assert result(admin, "k") is not None
    admin.execute("delete from pgworker.jobs")
    assert forget(hand) == "done"
    assert result(admin, "k") is None


def ended(hand: Hand, after: Cursor = BEGINNING, until: str | None = None, code: str | None = None) -> list[Any]:
    statement = list_ended(hand.tables, hand.kind, "failed", after=after, until=until, code=code, limit=10)
    return hand.send(statement)


def test_a_list_of_ended_jobs_is_of_its_kind_and_state_and_bounds(hand: Hand, admin: Admin) -> None:
    hand.enqueue("waiting")
    hand.finish(hand.claim()[0])
    hand.kind = "another"
    fail(hand, "k")
    hand.kind = "work"
    for key in "abc":
        fail(hand, key)
    ids = [id_of(admin, key) for key in "abc"]
    first, second, third = ended(hand)
    assert [each.id for each in (first, second, third)] == ids
    assert [each.id for each in ended(hand, first.cursor)] == ids[1:]
    assert [each.id for each in ended(hand, until=second.at)] == ids[:2]
    assert [each.wanted for each in ended(hand)] == [each.wanted for each in ended(hand, code="handler_failed")]
    assert [each.wanted for each in ended(hand, code="another")] == [False] * 3
    assert third.cursor == (third.at, ids[2])


def test_a_list_of_pending_jobs_is_of_its_lane(hand: Hand, admin: Admin) -> None:
    fail(hand, "ended")
    admin.execute("update pgworker.jobs set priority = 0")
    hand.enqueue("a")
    hand.enqueue("b")
    hand.enqueue("catch-up", urgency="catch_up")
    hand.enqueue("second", priority=1)
    hand.kind = "another"
    hand.enqueue("k")
    ids = [id_of(admin, key) for key in "ab"]
    lane = Lane("work", 0, 0)
    found = hand.send(list_pending(hand.tables, lane, after=BEGINNING, limit=10))
    assert [each.id for each in found] == ids
    behind = hand.send(list_pending(hand.tables, lane, after=found[0].cursor, limit=10))
    assert [each.id for each in behind] == ids[1:]


def test_a_pending_job_is_wanted_by_a_cancel_that_is_not_under_way(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    hand.claim()

    def wanted() -> list[bool]:
        return [
            each.wanted for each in hand.send(list_pending(hand.tables, Lane("work", 0, 0), after=BEGINNING, limit=9))
        ]

    assert wanted() == [True]
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    assert wanted() == [False]
    age(admin, 61)
    assert wanted() == [True]


def test_a_job_is_found_by_kind_and_key(hand: Hand, admin: Admin) -> None:
    hand.kind = "another"
    hand.enqueue("k")
    hand.kind = "work"
    hand.enqueue("neighbour")
    assert hand.send(find_job(hand.tables, "work", "k")) == []
    hand.enqueue("k")
    assert hand.send(find_job(hand.tables, "work", "k")) == [id_of(admin, "k")]


def test_results_are_read_by_kind_key_and_revision(hand: Hand, admin: Admin) -> None:
    for kind, key in (("another", "k"), ("work", "neighbour")):
        hand.kind = kind
        hand.enqueue(key, "r")
        hand.finish(hand.claim()[0], f'"{kind} {key}"')
    hand.kind = "work"
    assert hand.send(read_results(hand.tables, [("work", "k")])) == []
    hand.enqueue("k", "r")
    assert [seen.value for seen in hand.send(read_results(hand.tables, [("work", "k")]))] == [None]
    hand.finish(hand.claim()[0], '"mine"')
    (seen,) = hand.send(read_results(hand.tables, [("work", "k")]))
    assert (seen.key, seen.id, seen.state, seen.value) == ("k", id_of(admin, "k"), "succeeded", '"mine"')
    admin.execute("update pgworker.results set revision = 'r0' where kind = 'work' and key = 'k'")
    assert [seen.value for seen in hand.send(read_results(hand.tables, [("work", "k")]))] == [None]
    admin.execute("update pgworker.results set revision = 'r'")
    admin.execute("update pgworker.jobs set has_result = false")
    assert [seen.value for seen in hand.send(read_results(hand.tables, [("work", "k")]))] == [None]


def test_old_results_are_deleted_of_the_jobs_of_a_page_only(hand: Hand, admin: Admin) -> None:
    def done(kind: str, key: str) -> None:
        hand.kind = kind
        hand.enqueue(key)
        hand.finish(hand.claim()[0], "1")

    def expire(after: Cursor = BEGINNING, limit: int = 10) -> tuple[int, int]:
        statement = expire_results(hand.tables, Shelf("work", "succeeded", 60, after), limit=limit)
        return hand.send(statement)[:2]

    for key in ("old", "old, too", "renewed"):
        done("work", key)
    for key in ("old", "renewed"):
        done("another", key)
    age(admin, 100)
    age(admin, 100, kind="another")
    admin.execute(
        "update pgworker.results set finished_at = finished_at - interval '100 s'"
        " where (kind, key) <> ('work', 'renewed')"
    )
    done("work", "young")
    fail(hand, "failed")
    admin.execute("update pgworker.jobs set finished_at = finished_at - interval '100 s' where key = 'failed'")
    admin.execute(
        "insert into pgworker.results (kind, key, revision, value, finished_at)"
        " values ('work', 'failed', '', '1', '2000-01-01')"
    )
    assert expire(limit=1) == (1, 1)
    left = set(admin.execute("select kind, key from pgworker.results").fetchall())
    ours, others = ("old, too", "renewed", "young", "failed"), ("old", "renewed")
    assert left == {*(("work", key) for key in ours), *(("another", key) for key in others)}
    first = row(admin, "old")
    assert expire(after=(first["finished_at"].isoformat(), first["id"])) == (2, 1)
    assert expire() == (3, 0)


PAUSED = [("clock_timestamp()", "null", True), ("clock_timestamp()", "clock_timestamp() + interval '1 hour'", True),
          ("clock_timestamp()", "clock_timestamp() - interval '1 hour'", False), ("null", "null", False)]  # fmt: skip


@pytest.mark.parametrize(("since", "until", "paused"), PAUSED)
def test_what_is_paused_can_be_resumed_once(hand: Hand, admin: Admin, *, since: str, until: str, paused: bool) -> None:
    for kind in ("work", "another"):
        admin.execute(
            f"insert into pgworker.kinds (kind, paused_at, paused_until) values ('{kind}', {since}, {until})".encode()
        )
    both = ["another", "work"] if paused else []
    assert [each.kind for each in hand.send(list_pauses(hand.tables))] == both
    assert hand.send(resume_kind(hand.tables, "work")) is paused
    assert [each.kind for each in hand.send(list_pauses(hand.tables))] == both[:1]
    assert hand.send(resume_kind(hand.tables, "work")) is False
    assert [each.kind for each in hand.send(list_pauses(hand.tables))] == both[:1]


def pause(hand: Hand, seconds: float | None, code: str) -> tuple[Any, str]:
    hand.send(pause_kind(hand.tables, "work", seconds, code))
    (found,) = hand.send(list_pauses(hand.tables))
    return found.since, found.code


def test_the_longer_pause_stays_and_begins_with_the_first(hand: Hand, admin: Admin) -> None:
    since, _ = pause(hand, 100, "first")
    assert pause(hand, 50, "shorter") == (since, "first")
    assert pause(hand, 200, "longer") == (since, "longer")
    assert pause(hand, None, "open") == (since, "open")
    assert pause(hand, 1000, "bounded") == (since, "open")
    assert pause(hand, None, "open again") == (since, "open")
    hand.send(resume_kind(hand.tables, "work"))
    again, code = pause(hand, 10, "new")
    assert (again > since, code) == (True, "new")
    admin.execute("update pgworker.kinds set paused_at = '2000-01-01', paused_until = '2000-01-02'")
    assert pause(hand, 10, "newest")[0] > again


def lags(hand: Hand, kind: str | None = None, bound: int = 100) -> dict[tuple[str, str], Lag]:
    return {(lag.kind, lag.urgency): lag for lag in hand.send(count_lag(hand.tables, kind, bound=bound))}


def test_lag_counts_by_kind_and_urgency_what_waits(hand: Hand, admin: Admin) -> None:
    def fill(kind: str, count: int, seconds: float, **options: Any) -> None:
        hand.kind = kind
        keys = [f"{options}{index}" for index in range(count)]
        for key in keys:
            hand.enqueue(key, **options)
        admin.execute(
            "update pgworker.jobs set ready_at = ready_at - %s where kind = %s and key = any(%s)",
            [timedelta(seconds=seconds), kind, keys],
        )

    fill("work", 2, 100)
    fill("work", 1, 300, priority=3)
    fill("work", 3, 200, urgency="catch_up")
    fill("work", 1, 0, delay=LATER)
    fill("a.kind.before", 1, 900)
    fill("scheduled", 1, 0, delay=LATER)
    hand.kind = "x.ended"
    fail(hand, "ended")
    fill("z.kind.behind", 1, 800, urgency="catch_up")
    hand.kind = "work"
    fail(hand, "ended")
    admin.execute(
        "update pgworker.jobs set priority = 3, ready_at = ready_at - interval '1 hour' where state = 'failed'"
    )
    hand.enqueue("running", priority=-5)
    hand.claim(priority=-5)
    admin.execute("update pgworker.jobs set ready_at = ready_at - interval '1 hour' where key = 'running'")
    found = lags(hand)
    counts = {each: (lag.pending, lag.ready, (lag.oldest_seconds or -1) // 100) for each, lag in found.items()}
    assert counts == {
        ("a.kind.before", "fresh"): (1, 1, 9),
        ("scheduled", "fresh"): (1, 0, -1),
        ("work", "fresh"): (5, 3, 3),
        ("work", "catch_up"): (3, 3, 2),
        ("z.kind.behind", "catch_up"): (1, 1, 8),
    }
    assert set(lags(hand, "work")) == {("work", "fresh"), ("work", "catch_up")}
    assert found["scheduled", "fresh"].oldest_seconds is None
    assert lags(hand, "nobody") == {}
    admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp() where key = 'running'")
    lapsed = lags(hand, "work")["work", "fresh"]
    assert (lapsed.pending, lapsed.ready, (lapsed.oldest_seconds or 0) // 100) == (5, 4, 36)


def test_a_kind_of_which_all_jobs_have_ended_has_no_lag(hand: Hand) -> None:
    hand.enqueue("k")
    hand.settle(hand.claim()[0], replace(FAIL))
    assert lags(hand) == lags(hand, "work") == {}
