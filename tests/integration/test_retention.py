"""What has been kept for its time goes, a page at a time and by one process; all else stays, and nobody waits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeAlias, cast

import anyio
import psycopg
import pytest
from psycopg.errors import ForeignKeyViolation

import pgworker.retention as retention_module
from pgworker import App, Job, NewJob, PayloadPruned, ResultGone, TableQueue, UnknownJob
from pgworker.db import Database, drive_sync
from pgworker.job import State
from pgworker.kind import Kind
from pgworker.operations import (
    BEGINNING,
    Cursor,
    PrunedJobs,
    Shelf,
    expire_results,
    list_ended,
    prune_facts,
    prune_jobs,
)
from pgworker.outcome import Settlement
from pgworker.policy import STORE_TIMEOUT
from pgworker.retention import Pruned, Retention, prune_apart, prune_forever
from pgworker.statements import Statement
from tests.databases import TABLES
from tests.handles import FAIL, Hand, age, copy_of, result, row, running
from tests.handles import hand as make_hand
from tests.integration.test_statement_terms_races import halted, meanwhile

Admin: TypeAlias = psycopg.Connection[Any]

DAY = 86_400.0
STATES: tuple[State, ...] = ("succeeded", "cancelled", "failed")


@pytest.fixture(autouse=True)
def nobodys_turn(admin: Admin) -> None:
    """A worker of the test before may have been cut off from its statement, which goes on for a moment."""
    until = time.monotonic() + 5
    locks = (
        "select count(*) from pg_locks l join pg_database d on d.oid = l.database"
        " where l.locktype = 'advisory' and d.datname = current_database()"
    )
    while admin.execute(locks).fetchone() != (0,):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def other(dsn: str) -> Iterator[Hand]:
    other = make_hand(dsn)
    yield other
    other.connection.close()


def end(
    hand: Hand, key: str | None, revision: str | None = None, *, state: State = "succeeded", days: float = 0
) -> str:
    """A job that ended so many days ago, with a result of its own, or of a success before."""
    key = hand.enqueue(key, revision, {"secret": 1}).key
    (claim,) = hand.claim()
    match state:
        case "succeeded":
            hand.finish(claim, '"value"')
        case "cancelled":
            hand.settle(claim, Settlement("cancelled", "unwanted"))
        case _:
            hand.settle(claim, FAIL)
    hand.connection.execute(
        "update pgworker.jobs set finished_at = finished_at - %s where kind = %s and key = %s",
        [timedelta(days=days), hand.kind, key],
    )
    hand.connection.execute(
        "insert into pgworker.results values (clock_timestamp(), %s, %s, 'older', '1') on conflict do nothing",
        [hand.kind, key],
    )
    return key


def keys(admin: Admin) -> set[str]:
    return {key for (key,) in admin.execute("select key from pgworker.jobs").fetchall()}


def payloads(admin: Admin) -> set[str]:
    return {key for (key,) in admin.execute("select key from pgworker.jobs where payload is not null").fetchall()}


def results(admin: Admin) -> set[str]:
    return {key for (key,) in admin.execute("select key from pgworker.results").fetchall()}


def shelf(state: State = "succeeded", *, kind: str = "work", days: float = 7, after: Cursor = BEGINNING) -> Shelf:
    return Shelf(kind, state, days * DAY, after)


def prune(*shelves: Shelf, limit: int = 1000) -> Statement[dict[int, PrunedJobs]]:
    return prune_jobs(TABLES, shelves or [shelf()], limit=limit)


def kinds(app: App, *names: str, **options: Any) -> list[Kind]:
    def handler(job: Job[Any]) -> None: ...

    for name in names:
        app.kind(name, **options)(handler)
    return list(app.kinds.values())


def clear(hand: Hand, retention: Retention) -> Pruned:
    return drive_sync(retention.prune(), hand.send)


# --- what goes ------------------------------------------------------------------------------------------------------


@pytest.mark.ruling("2.1", "2.15", "1.24")
@pytest.mark.parametrize(("key", "revision"), [(None, None), ("k", "r"), ("k", None)])
@pytest.mark.parametrize(("state", "days"), [("succeeded", 7), ("cancelled", 7), ("failed", 30)])
def test_by_default_an_event_goes_and_a_key_stays(
    app: App, hand: Hand, admin: Admin, *, state: State, days: int, key: str | None, revision: str | None
) -> None:
    key = end(hand, key, revision, state=state, days=days - 0.01)
    retention = Retention(TABLES, kinds(app, "work"))
    before = row(admin, key)
    assert clear(hand, retention) == (0, 0, 0, 0)
    assert (row(admin, key), results(admin)) == (before, {key})
    admin.execute("update pgworker.jobs set finished_at = finished_at - interval '0.02 days'")
    before = row(admin, key)
    pruned = clear(hand, retention)
    if before["event"]:
        assert (pruned, keys(admin), results(admin)) == ((1, 0, 0, 0), set(), set())
    elif state == "failed":
        assert (pruned, row(admin, key), results(admin)) == ((0, 0, 0, 0), before, {key})
    else:
        assert (pruned, row(admin, key), results(admin)) == ((0, 1, 0, 0), {**before, "payload": None}, set())


@pytest.mark.ruling("2.1")
def test_what_has_not_ended_stays_however_old(app: App, hand: Hand, admin: Admin) -> None:
    hand.enqueue_many([NewJob(1), NewJob(1), NewJob(1, key="k")])
    hand.claim(1)
    age(admin, 1000 * DAY)
    admin.execute("update pgworker.jobs set finished_at = ready_at where key = 'k'")  # which nothing of ours would do
    assert clear(hand, Retention(TABLES, kinds(app, "work"))) == (0, 0, 0, 0)
    assert len(payloads(admin)) == 3


@pytest.mark.ruling("2.15", "1.23")
async def test_what_is_asked_of_a_job_that_was_pruned(app: App, hand: Hand, admin: Admin) -> None:
    event = end(hand, None, days=8)
    end(hand, "k", "r", days=8)
    app.declare("work")
    assert await app.result("work", "k") == "value"
    hand.send(prune())
    with pytest.raises(UnknownJob):
        await app.result("work", event)
    with pytest.raises(ResultGone):
        await app.result("work", "k")
    with pytest.raises(PayloadPruned):
        await app.rebuild("work", key="k")
    assert (await app.enqueue("work", 1, key="k", revision="r")).status == "unchanged"
    assert (await app.enqueue("work", 1, key="k", revision="r2")).status == "requeued"
    hand.finish(hand.claim()[0], '"anew"')
    assert await app.result("work", "k", revision="r2") == "anew"
    assert payloads(admin) == {"k"}


def test_an_event_is_told_by_how_it_was_enqueued(app: App, hand: Hand, admin: Admin) -> None:
    event = hand.enqueue(payload=1).key
    (sql_event,) = admin.execute("select job_key from pgworker.enqueue('work', '1')").fetchone() or ("",)
    hand.enqueue("k", "r", 1)
    hand.enqueue(event.replace(event[:8], "0" * 8), payload=1)  # looks like one
    admin.execute("select pgworker.enqueue('work', '1', key => 's')")
    told = "select key from pgworker.jobs where event"
    assert set(admin.execute(told).fetchall()) == {(event,), (sql_event,)}
    hand.enqueue(event, payload=2)
    assert admin.execute(told).fetchall() == [(sql_event,)], "a key that somebody knows"
    admin.execute("select pgworker.enqueue('work', '2', key => %s)", [sql_event])
    assert admin.execute(told).fetchall() == []


# --- for how long ---------------------------------------------------------------------------------------------------


def test_a_kind_says_for_how_long(app: App, hand: Hand, admin: Admin) -> None:
    kinds(app, "work", keep=3600, keep_failed=timedelta(hours=2))
    retention = Retention(TABLES, kinds(app, "always", keep=-1, keep_failed=-1))
    stay = {end(hand, None, days=0.9 / 24), end(hand, None, state="failed", days=1.9 / 24)}
    for state in STATES:
        end(hand, None, state=state, days=2.1 / 24)
        hand.kind = "always"
        stay.add(end(hand, None, state=state, days=4000))
        hand.kind = "work"
    assert clear(hand, retention).jobs == 3
    assert keys(admin) == stay


def test_a_kind_may_keep_only_what_has_failed(app: App, hand: Hand, admin: Admin) -> None:
    retention = Retention(TABLES, kinds(app, "work", keep_failed=-1))
    failed = end(hand, None, state="failed", days=4000)
    end(hand, None, days=8)
    assert clear(hand, retention) == (1, 0, 0, 0)
    assert keys(admin) == {failed}


@pytest.mark.parametrize("key", [None, "k"])
def test_of_other_kinds_nothing_goes(app: App, hand: Hand, admin: Admin, key: str | None) -> None:
    key = end(hand, key, days=1000)
    copy_of(admin, key, kind="another")  # its id, key and end, too
    admin.execute(
        "insert into pgworker.results select finished_at, 'another', key, revision, value from pgworker.results"
    )
    hand.kind = "another"
    own = end(hand, None, days=1000)
    before = (row(admin, key, kind="another"), row(admin, own, kind="another"))
    assert sum(clear(hand, Retention(TABLES, kinds(app, "work")))) == 1
    assert (row(admin, key, kind="another"), row(admin, own, kind="another")) == before
    assert set(admin.execute("select kind, key from pgworker.results").fetchall()) == {
        ("another", key),
        ("another", own),
    }


# --- a page ---------------------------------------------------------------------------------------------------------


@pytest.mark.ruling("1.7")
def test_a_page_takes_the_oldest_of_each_shelf_and_says_where_it_ended(hand: Hand, admin: Admin) -> None:
    events = [end(hand, None, days=20 - number) for number in range(5)]
    end(hand, "k", "r", state="cancelled", days=9)
    young = end(hand, None, state="failed", days=9)
    shelves = [shelf("failed", days=30), shelf("succeeded"), shelf("cancelled"), shelf("succeeded", kind="another")]
    pages = hand.send(prune(*shelves, limit=2))
    assert keys(admin) == {*events[2:], "k", young}
    assert {number: page[:3] for number, page in pages.items()} == {1: (2, 2, 0), 2: (1, 0, 1)}
    assert hand.send(prune(shelf(after=pages[1].cursor), limit=2))[0][:3] == (2, 2, 0)
    at, last = pages[1].cursor
    assert hand.send(prune(shelf(after=(at, last + 100)), limit=2))[0][:3] == (1, 1, 0)
    assert keys(admin) == {"k", young}
    assert results(admin) == {young}


def test_the_cursor_is_the_last_of_a_page_that_ended_at_one_instant(hand: Hand, admin: Admin) -> None:
    for _ in range(3):
        end(hand, None, days=8)
    admin.execute("update pgworker.jobs set finished_at = (select min(finished_at) from pgworker.jobs)")
    ids = [each for (each,) in admin.execute("select id from pgworker.jobs order by id").fetchall()]
    with hand.connection.transaction(force_rollback=True):
        assert hand.send(prune(limit=2))[0].cursor[1] == ids[1]
    after = hand.send(prune(limit=2))[0].cursor
    assert hand.send(prune(shelf(after=after)))[0][:2] == (1, 1)


@pytest.mark.ruling("1.7")
def test_a_pass_goes_on_page_after_page_and_keeps_its_place(
    app: App, hand: Hand, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "_PAGE", 6)
    for number in range(9):
        end(hand, None, days=8)
        end(hand, f"k{number}", "r", state="cancelled", days=8)
    asked: list[tuple[int, int]] = []

    def send(statement: Statement[Any]) -> Any:
        if statement.name == "prune_jobs":
            parameters = cast("dict[str, Any]", statement.parameters)
            asked.append((len(parameters["kinds"]), parameters["limit"]))
        return hand.send(statement)

    retention = Retention(TABLES, kinds(app, "work", "second"))
    assert drive_sync(retention.prune(), send) == (9, 9, 0, 0)
    assert all(shelves * limit <= 6 for shelves, limit in asked), "no statement looks at more than a page"
    assert asked[0] == (6, 1)
    assert asked[1] == (2, 3)  # those that had more
    assert (keys(admin), payloads(admin)) == ({f"k{number}" for number in range(9)}, set())
    end(hand, None, days=9)  # behind where the pass went
    assert clear(hand, retention) == (0, 0, 0, 0)
    retention.begin_anew()
    assert clear(hand, retention) == (1, 0, 0, 0)


@pytest.mark.ruling("1.7")
def test_a_pass_over_results_goes_on_page_after_page_and_keeps_its_place(
    app: App, hand: Hand, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "_PAGE", 2)
    for number in range(5):
        end(hand, f"s{number}", "r", days=8)
    end(hand, "f", "r", state="failed", days=8)
    young = end(hand, "young", "r")
    admin.execute("update pgworker.results set finished_at = finished_at - interval '8 days' where key <> 'young'")
    sent: list[tuple[str, int, Cursor]] = []

    def send(statement: Statement[Any]) -> Any:
        if statement.name == "expire_results":
            parameters = cast("dict[str, Any]", statement.parameters)
            assert len(sent) < 20, "it reads the same page for ever"
            sent.append((parameters["state"], parameters["limit"], (parameters["after"], parameters["after_id"])))
        return hand.send(statement)

    def pages(state: State) -> list[Cursor]:
        return [after for of, _, after in sent if of == state]

    retention = Retention(TABLES, kinds(app, "work", result_ttl=DAY, keep=-1, keep_failed=-1))
    assert drive_sync(retention.prune(), send) == (0, 0, 6, 0)
    assert results(admin) == {young}
    assert {limit for _, limit, _ in sent} == {2}, "no statement looks at more than a page"
    # two full pages and what is left; one that was not full is the last
    assert (len(pages("succeeded")), len(pages("failed")), len(pages("cancelled"))) == (3, 1, 1)
    assert pages("succeeded")[0] == pages("failed")[0] == BEGINNING
    ids = dict(admin.execute("select key, id from pgworker.jobs").fetchall())
    assert [id_ for _, id_ in pages("succeeded")[1:]] == [ids["s1"], ids["s3"]]
    sent.clear()
    assert drive_sync(retention.prune(), send) == (0, 0, 0, 0)
    assert [(state, after[1]) for state, _, after in sent] == [
        ("succeeded", ids["s4"]),
        ("failed", ids["f"]),
        ("cancelled", -1),
    ]
    retention.begin_anew()
    sent.clear()
    drive_sync(retention.prune(), send)
    assert [pages(state)[0] for state in ("succeeded", "failed", "cancelled")] == [BEGINNING] * 3


def test_many_kinds_take_several_statements(
    app: App, hand: Hand, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "_PAGE", 2)
    names = ["a", "b", "c"]
    retention = Retention(TABLES, kinds(app, *names), facts=False)
    for hand.kind in names:
        for _ in range(2):
            end(hand, None, days=8)
    assert clear(hand, retention) == (6, 0, 0, 0)
    assert keys(admin) == set()


def test_each_shelf_of_a_statement_is_answered_for_by_itself(hand: Hand, admin: Admin) -> None:
    for hand.kind, count in (("a", 1), ("b", 2)):
        for number in range(count):
            end(hand, None, days=8)
            end(hand, f"k{number}", days=8)
    pages = hand.send(prune(shelf(kind="a"), shelf(kind="b")))
    assert {number: page[:3] for number, page in pages.items()} == {0: (2, 1, 1), 1: (4, 2, 2)}


# --- who else is there ----------------------------------------------------------------------------------------------


@pytest.mark.ruling("1.7")
def test_one_process_at_a_time_prunes_a_kind_and_others_pass_it_over(hand: Hand, other: Hand, admin: Admin) -> None:
    def served(hand: Hand, *shelves: Shelf) -> list[int]:
        pages = hand.send(prune(*shelves))
        return list(pages)

    first = end(hand, None, days=8)
    hand.kind = "second"
    end(hand, None, days=8)
    shelves = [shelf(), shelf("failed"), shelf(kind="second")]
    with other.connection.transaction(force_rollback=True):
        assert served(other) == [0]
        assert served(hand, *shelves) == [2]
    assert (keys(admin), results(admin)) == ({first}, {first})
    assert served(hand, *shelves) == [0], "the turn ends with the transaction"


def test_a_row_that_somebody_holds_is_left_for_another_time(hand: Hand, other: Hand, admin: Admin) -> None:
    event, bystander = end(hand, None, days=8), end(hand, None, days=8)
    end(hand, "k", "r", days=8)
    with other.connection.transaction():
        other.connection.execute("select 1 from pgworker.jobs where key <> %s for update", [bystander])
        assert hand.send(prune())[0][:3] == (3, 1, 0)
    assert (keys(admin), results(admin)) == ({event, "k"}, {event, "k"})
    assert hand.send(prune())[0][:3] == (2, 1, 1)


def test_a_row_that_a_new_row_refers_to_is_not_waited_for(hand: Hand, other: Hand, admin: Admin) -> None:
    event = end(hand, None, days=8)
    end(hand, "k", "r", days=8)
    with other.connection.transaction():
        other.connection.execute("select 1 from pgworker.jobs for key share")  # as a foreign key does
        assert hand.send(prune())[0][:3] == (2, 0, 1)
    assert (keys(admin), payloads(admin)) == ({event, "k"}, {event})


CHANGES = {
    "is put back to work": "update pgworker.jobs set state = 'pending', finished_at = null",
    "is said to be pending": "update pgworker.jobs set state = 'pending'",
    "ends anew": "update pgworker.jobs set finished_at = clock_timestamp()",
}


@pytest.mark.race(4)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("key", [None, "k"])
def test_what_changes_between_look_and_lock_stays(
    hand: Hand, other: Hand, admin: Admin, key: str | None, change: str
) -> None:
    key = end(hand, key, days=8)
    pages = meanwhile(hand, other, admin, halted(prune(), "page", "p"), CHANGES[change])
    assert pages[0][:3] == (1, 0, 0)
    assert (payloads(admin), results(admin)) == ({key}, {key})


@pytest.mark.race(4)
@pytest.mark.parametrize("key", [None, "k"])
def test_an_enqueue_between_look_and_lock_wins(hand: Hand, other: Hand, admin: Admin, key: str | None) -> None:
    key = end(hand, key, days=8)
    enqueue = f"select pgworker.enqueue('work', '2', key => '{key}', revision => 'r2')"
    assert meanwhile(hand, other, admin, halted(prune(), "page", "p"), enqueue)[0][:3] == (1, 0, 0)
    (claim,) = hand.claim()
    assert (claim.payload, claim.revision, results(admin)) == ("2", "r2", {key})


@pytest.mark.race(4)
@pytest.mark.parametrize("key", [None, "k"])
def test_an_enqueue_after_the_lock_waits_and_finds_what_is_left(
    hand: Hand, other: Hand, admin: Admin, key: str | None
) -> None:
    key = end(hand, key, days=8)
    with ThreadPoolExecutor(1) as pool:
        with other.connection.transaction():
            other.send(prune())
            answer = pool.submit(hand.enqueue, key, "r2", 2)
            while not admin.execute("select 1 from pg_locks where not granted").fetchone():
                admin.execute("select pg_sleep(0.005)")
        assert answer.result(10).status in {"created", "requeued"}
    (claim,) = hand.claim()
    assert (claim.payload, claim.revision, result(admin, key)) == ("2", "r2", None)


# --- lists of what has ended ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
def test_what_goes_and_what_stays_are_one_list_of_ended_jobs(hand: Hand, admin: Admin, state: State) -> None:
    for number in range(12):
        end(hand, None if number % 2 else f"k{number}", state=state, days=20 - number)
    admin.execute("update pgworker.jobs set payload = null where id % 3 = 0")
    in_order = admin.execute("select id, key, finished_at::text from pgworker.jobs order by finished_at").fetchall()
    for _, key, _ in in_order:
        copy_of(admin, key, kind="another")
    admin.execute(
        "insert into pgworker.results select finished_at, 'another', key, revision, value from pgworker.results"
    )
    renewed = in_order[5][1]
    admin.execute(
        "update pgworker.results set finished_at = '2000-01-01' where kind = 'another' or key <> %s", [renewed]
    )
    ids, until = [each for each, _, _ in in_order[:9]], in_order[8][2]
    for limit in (1, 5, 100):
        listed: list[int] = []
        after = BEGINNING
        while page := hand.send(list_ended(TABLES, "work", state, after=after, until=until, code=None, limit=limit)):
            listed += [found.id for found in page]
            after = page[-1].cursor
        assert listed == ids
    read = deleted = 0
    after = BEGINNING
    while (old := hand.send(expire_results(TABLES, Shelf("work", state, 11.5 * DAY, after), limit=5))).cursor:
        after, read, deleted = old.cursor, read + old.read, deleted + old.deleted
    left = admin.execute("select key from pgworker.results where kind = 'work'").fetchall()
    assert (read, deleted, {key for (key,) in left}) == (9, 8, {renewed} | {key for _, key, _ in in_order[9:]})


# --- facts ----------------------------------------------------------------------------------------------------------


def tell(admin: Admin, *days: float) -> list[int]:
    """Facts of so many days ago, in order; their ids."""
    told = [
        admin.execute(
            "insert into pgworker.facts (at, job_id, generation, attempts, kind, key, revision, what)"
            " values (clock_timestamp() - %s, 1, 1, 0, 'any', 'k', '', 'enqueued') returning id",
            [timedelta(days=each)],
        ).fetchone()
        for each in days
    ]
    return [one[0] for one in told if one]


def facts(admin: Admin) -> list[int]:
    return [each for (each,) in admin.execute("select id from pgworker.facts order by id").fetchall()]


def tear(after: int = 0, limit: int = 1000) -> Statement[Any]:
    return prune_facts(TABLES, keep_seconds=30 * DAY, after=after, limit=limit)


@pytest.mark.ruling("2.1")
def test_facts_go_after_thirty_days_from_the_beginning_of_the_journal(
    app: App, hand: Hand, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "_PAGE", 3)
    told = tell(admin, 40, 39, 38, 37, 36, 35, 34, 29, 33, 28, 27, 26, 32)
    retention = Retention(TABLES, kinds(app, "work"))
    assert clear(hand, retention) == (0, 0, 0, 8)
    assert facts(admin) == [told[7], *told[9:]], "it ends at the first page with young ones"
    assert clear(hand, retention) == (0, 0, 0, 0)
    assert clear(hand, Retention(TABLES, [], facts=False)) == (0, 0, 0, 0)
    admin.execute("update pgworker.facts set at = at - interval '10 days'")
    assert clear(hand, retention) == (0, 0, 0, 5)
    tell(admin, 40, 39, 38)
    assert clear(hand, retention) == (0, 0, 0, 3)
    assert clear(hand, retention) == (0, 0, 0, 0)
    tell(admin, 40)
    assert clear(hand, retention) == (0, 0, 0, 1), "an empty page, or another's turn, loses no place"
    admin.execute("update pgworker.facts set id = 1 where id = %s", tell(admin, 40))
    assert clear(hand, retention) == (0, 0, 0, 0)
    retention.begin_anew()
    assert clear(hand, retention) == (0, 0, 0, 1)


def test_a_page_of_facts_begins_after_an_id_and_is_one_process_turn(hand: Hand, other: Hand, admin: Admin) -> None:
    told = tell(admin, 40, 39, 38, 37)
    assert hand.send(tear(told[0], 2)) == (2, 2, told[2], False)
    with other.connection.transaction(force_rollback=True):
        assert other.send(tear(limit=1)) == (1, 1, told[0], False)
        assert hand.send(tear()) == (0, 0, None, False)
    assert hand.send(tear()) == (2, 2, told[3], False)
    assert facts(admin) == []


def test_facts_of_the_future_hold_up_nothing(
    app: App, hand: Hand, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "_PAGE", 2)
    told = tell(admin, 40, -1, -2, -3, 40, 40, 40)  # written while the clock was ahead
    assert clear(hand, Retention(TABLES, [])) == (0, 0, 0, 4)
    assert facts(admin) == told[1:4]
    young = tell(admin, 29)
    assert hand.send(tear(told[2])) == (2, 0, young[0], True)
    assert hand.send(tear(told[2], 1)) == (1, 0, told[3], False)


def test_the_command_ends_when_nothing_is_left_although_another_process_had_a_turn(
    app: App, hand: Hand, other: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "_PAGE", 3)
    for _ in range(4):
        end(hand, None, days=8)
    sent = 0

    def send(statement: Statement[Any]) -> Any:
        nonlocal sent
        if statement.name != "prune_jobs":
            return hand.send(statement)
        sent += 1
        if sent != 2:
            return hand.send(statement)
        with other.connection.transaction(force_rollback=True):
            other.send(prune(shelf(days=9)))
            return hand.send(statement)

    assert drive_sync(Retention(TABLES, kinds(app, "work")).prune_all(), send) == (4, 0, 0, 0)


# --- in a worker ----------------------------------------------------------------------------------------------------


async def test_a_worker_lets_go_of_what_is_old_and_never_of_an_apps_own_rows(
    app: App, hand: Hand, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "PRUNE_EVERY", timedelta(seconds=0.02))
    kinds(app, "work")
    end(hand, None, days=8)
    tell(admin, 31)
    async with running(app.worker()):
        with anyio.fail_after(20):
            while keys(admin) or facts(admin):  # noqa: ASYNC110 - it is the database that tells
                await anyio.sleep(0.02)
        end(hand, None, days=1)
        admin.execute("update pgworker.jobs set finished_at = finished_at - interval '10 days'")
        with anyio.fail_after(20):
            while keys(admin):  # noqa: ASYNC110 - it is the database that tells
                await anyio.sleep(0.02)


def test_kinds_of_own_tables_are_passed_over(app: App, hand: Hand, admin: Admin) -> None:
    (kind,) = kinds(app, "work")
    columns = ("key", "revision", "state", "token", "lease_expires_at", "ready_at", "attempts")
    queue = TableQueue("public.things", **cast("dict[str, Any]", {column: column for column in columns}))
    end(hand, None, days=8)
    assert clear(hand, Retention(TABLES, [replace(kind, queue=queue)])) == (0, 0, 0, 0)
    assert clear(hand, Retention(TABLES, [kind])) == (1, 0, 0, 0)


def _middle(low: float, high: float) -> float:
    return (low + high) / 2


class Clock:
    """Takes the place of anyio and of the database: a statement takes a second, and nobody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: Sequence[Exception] = ()) -> None:
        self.now = 0.0
        self.did: list[str | float] = []
        self._errors = list(errors)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(anyio, "sleep", self.sleep)
        monkeypatch.setattr(random, "uniform", _middle)

    async def sleep(self, seconds: float) -> None:
        self.did.append(round(seconds, 3))
        if len(self.did) > 500:
            raise KeyboardInterrupt

    async def run(self, statement: Statement[Any]) -> Any:
        self.did.append(statement.name)
        self.now += 1
        if self._errors:
            raise self._errors.pop()
        return {} if statement.name == "prune_jobs" else statement.read([(0, 0, None, False)])

    async def forever(self, kinds: list[Kind]) -> None:
        with pytest.raises(KeyboardInterrupt):
            await prune_forever(TABLES, kinds, cast("Any", self))


async def test_it_takes_a_few_percent_of_a_processes_time_and_none_of_its_start(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    await clock.forever(kinds(app, "work"))
    assert clock.did[:6] == [37.5, "prune_facts", 24, "prune_jobs", 24, 300]
    assert clock.did[6:11] == ["prune_facts", 24, "prune_jobs", 24, 300]


async def test_now_and_then_a_pass_begins_at_the_oldest(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "_PASSES_ON", 3)
    clock = Clock(monkeypatch)
    asked: list[Cursor] = []
    page = {0: PrunedJobs(1, 1, 0, ("2031-05-01 00:00:00+00", 7))}

    async def run(statement: Statement[Any]) -> Any:
        if statement.name != "prune_jobs":
            return statement.read([(0, 0, None, False)])
        parameters = cast("dict[str, Any]", statement.parameters)
        asked.append((parameters["afters"][0], parameters["after_ids"][0]))
        return page

    monkeypatch.setattr(clock, "run", run)
    await clock.forever(kinds(app, "work"))
    assert asked[:6] == [BEGINNING, page[0].cursor, BEGINNING, page[0].cursor, page[0].cursor, BEGINNING]


async def test_an_error_is_told_and_outwaited(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch, [TimeoutError(), psycopg.OperationalError("secret")])
    await clock.forever(kinds(app, "work"))
    assert clock.did[:7] == [37.5, "prune_facts", "prune_jobs", 300, "prune_facts", 24, "prune_jobs"]
    assert [record.message.partition("of=")[2] for record in caplog.records] == [
        "facts error=OperationalError",
        "work error=TimeoutError",
    ]
    assert "secret" not in caplog.text


async def test_what_stops_it_for_one_kind_stops_it_for_no_other(
    app: App, dsn: str, hand: Hand, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    for each in (hand, Hand(hand.connection, kind="other")):
        end(each, None, days=8)
    tell(admin, 31)
    admin.execute(
        "create table invoices (job bigint, kind text, foreign key (job, kind) references pgworker.jobs (id, kind))"
    )
    admin.execute("insert into invoices select id, kind from pgworker.jobs where kind = 'work'")
    database = Database(dsn, "maintenance", deadline=STORE_TIMEOUT, connections=1)
    await database.open()
    try:
        both = kinds(app, "work", "other")
        await prune_apart(Retention(TABLES, both), database.run)
        await prune_apart(Retention(TABLES, both[:1]), database.run)  # which has been tried alone by then
    finally:
        await database.close()
    assert admin.execute("select kind from pgworker.jobs").fetchall() == [("work",)]
    assert not facts(admin)
    assert [record.message.partition("of=")[2] for record in caplog.records] == [
        "work, other error=ForeignKeyViolation",
        "work error=ForeignKeyViolation",
        "work error=ForeignKeyViolation",
    ]


@pytest.mark.parametrize(
    ("error", "statements"), [(None, 1), (psycopg.OperationalError("gone"), 1), (ForeignKeyViolation("of one"), 3)]
)
async def test_kinds_are_tried_apart_only_if_one_may_be_at_fault(
    app: App, error: Exception | None, statements: int
) -> None:
    sent: list[str] = []

    async def run(statement: Statement[Any]) -> Any:
        sent.append(statement.name)
        if statement.name == "prune_facts":
            return statement.read([(0, 0, None, False)])
        if error is not None:
            raise error
        return {}

    await prune_apart(Retention(TABLES, kinds(app, "work", "other")), run)
    assert sent == ["prune_facts", *["prune_jobs"] * statements]
