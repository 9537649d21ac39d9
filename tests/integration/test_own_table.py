"""What only an app's own table has: a condition on its rows, columns that it may lack, and whether it fits at all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import uuid4

import anyio
import psycopg
import pytest
from psycopg.errors import LockNotAvailable

from pgworker import App, Job, Lease, SchemaError, TableQueue
from pgworker.db import send_sync
from pgworker.events import JobLost, JobSettled
from pgworker.job import Claim
from pgworker.outcome import Settlement, Success
from pgworker.queue import RowsQueue
from pgworker.statements import Lane
from pgworker.tablecheck import inspect
from pgworker.tablestatements import look_at
from tests.adapters import KIND, TABLES, Adapter, Messages, Threads
from tests.chaos.processes import until
from tests.handles import FAIL, RELEASE, RETRY, Hand, Recorder, running

Admin: TypeAlias = psycopg.Connection[Any]
LANE = Lane(KIND, 0, 0)


@pytest.fixture
def messages(admin: Admin) -> Iterator[Adapter]:
    made = Messages()
    made.create(admin)
    yield made
    admin.execute("drop schema if exists crawl cascade")


@pytest.fixture
def threads(admin: Admin) -> Iterator[Adapter]:
    made = Threads()
    made.create(admin)
    yield made
    admin.execute("drop schema if exists crawl cascade")


async def work(job: Job[Any]) -> None: ...


# --- the condition --------------------------------------------------------------------------------------------------


def test_rows_that_are_not_wanted_are_not_claimed(messages: Adapter, admin: Admin, hand: Hand) -> None:
    for number, body in ((1, "a"), (2, 'the "secret"'), (3, "b")):
        messages.put(admin, number, body=body)
    admin.execute("update crawl.messages set private = true where message_id = 3")
    queue = messages.open(hand.connection)
    claims = send_sync(hand.connection, queue.claim(LANE, limit=5, token=uuid4(), runner="r"))
    assert [claim.key for claim in claims] == ["1"]
    assert messages.of(admin, 1, "runner") == "r"


async def test_what_an_app_does_in_triggers_is_planned_as_ever(app: App, messages: Adapter, admin: Admin) -> None:
    """For the values at hand: a plan for any would read all of a table that the app looks into by a partial index."""
    admin.execute(
        "create table crawl.noted (mode text); grant insert on crawl.noted to public;"
        " create function crawl.note() returns trigger language plpgsql as $$ begin"
        " insert into crawl.noted values (current_setting('plan_cache_mode')); return new; end $$;"
        " create trigger note before update on crawl.messages for each row execute function crawl.note()"
    )

    async def look(job: Job[Any]) -> None: ...

    messages.register(app, look, poll=0.1)
    messages.put(admin, 1)
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    assert set(admin.execute("select mode from crawl.noted").fetchall()) == {("auto",)}


@pytest.mark.contract("A21")
@pytest.mark.parametrize("applies", [False, True])
async def test_a_row_that_is_made_private_meanwhile_is_given_back_without_its_result(
    app: App,
    messages: Adapter,
    admin: Admin,
    applies: bool,  # noqa: FBT001
) -> None:
    calls: list[str] = []

    async def hide(job: Job[Any]) -> int:
        calls.append(job.key)
        if len(calls) == 1:
            admin.execute("update crawl.messages set private = true")
        return 7

    async def apply(conn: psycopg.AsyncConnection[Any], job: Job[Any], value: int) -> None:
        await conn.execute("update crawl.messages set body = 'seen' where message_id = 1")

    messages.register(app, hide, apply=apply if applies else None, poll=0.1)
    messages.put(admin, 1)
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await seen.count(JobLost, 1)
        row = messages.row(admin, 1)
        assert (row["embed_state"], row["embed_token"], row["embedding"], row["body"]) == (0, None, None, "text")
        assert row["embed_attempts"] == 0
        assert worker.status()[KIND].superseded == 1
        admin.execute("update crawl.messages set private = false")
        await seen.count(JobSettled, 1)
    assert calls == ["1", "1"]
    assert messages.of(admin, 1, "result") == 7


@pytest.mark.parametrize("cancels", [False, True])
def test_the_success_of_a_row_that_is_not_wanted_frees_it(
    messages: Adapter,
    admin: Admin,
    hand: Hand,
    cancels: bool,  # noqa: FBT001
) -> None:
    messages.put(admin, 1)
    queue = rows_queue(hand, messages)
    (claim,) = claim_one(hand, queue)
    admin.execute("update crawl.messages set private = true")
    if cancels:
        messages.set(admin, 1, cancel_requested_at=datetime.now(UTC))
    assert send_sync(hand.connection, queue.check(claim)) not in (None, claim.generation)
    answer = send_sync(hand.connection, queue.finish([(claim, Success("1"))]))[claim.id]
    assert (answer.verdict, answer.state) == ("done", "cancelled" if cancels else "pending")
    row = messages.row(admin, 1)
    assert messages.of(admin, 1, "state") == answer.state
    assert (row["embedding"], row["embed_token"], row["embed_stop"]) == (None, None, None)
    assert (row["embed_done_at"] is not None) == cancels


# --- columns that it has --------------------------------------------------------------------------------------------


async def test_the_result_is_kept_in_the_tables_own_column(app: App, messages: Adapter, admin: Admin) -> None:
    async def length(job: Job[str]) -> dict[str, int] | None:
        return {"length": len(job.payload)} if job.key == "1" else None

    app.kind(KIND, queue=messages.queue)(length)
    for number in (1, 2):
        messages.put(admin, number, body="wörter")
    admin.execute("update crawl.messages set embedding = '1', embed_error = 'old', embed_evictions = 3")
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 2)
    assert messages.of(admin, 1, "result") == {"length": 6}
    assert messages.of(admin, 2, "result") is None
    for number in (1, 2):
        row = messages.row(admin, number)
        assert (row["embed_error"], row["embed_worker"], row["embed_evictions"]) == (None, None, 0)
        assert row["embed_done_at"] is not None


@pytest.mark.contract("A18")
def test_lanes_are_claimed_apart(messages: Adapter, admin: Admin, hand: Hand) -> None:
    lanes = [(0, -5), (0, 3), (1, -5), (1, 3)]
    for number, (urgency, priority) in enumerate(lanes):
        messages.put(admin, number)
        messages.set(admin, number, urgency=urgency, priority=priority)
    for number, values in enumerate(({"priority": -9}, {"priority": 9}), start=7):  # in lanes of their own, for nobody
        messages.put(admin, number, body='"secret"')
        messages.set(admin, number, **values)
        messages.put(admin, number + 2)
        messages.set(admin, number + 2, state="failed", **values)
    queue = messages.open(hand.connection)
    dues = send_sync(hand.connection, queue.survey())
    assert [(due.lane.urgency, due.lane.priority) for due in dues] == lanes
    for number, due in reversed(list(enumerate(dues))):
        (claim,) = send_sync(hand.connection, queue.claim(due.lane, limit=5, token=uuid4(), runner="r"))
        assert (claim.key, (claim.urgency, claim.priority)) == (str(number), lanes[number])


def test_each_lane_has_its_own_next_time(messages: Adapter, admin: Admin, hand: Hand) -> None:
    lanes = {(0, 0): 3, (0, 3): 2, (1, 0): 4, (1, 3): 1}
    for number, ((urgency, priority), hours) in enumerate(lanes.items()):
        messages.put(admin, number)
        ready = datetime.now(UTC) + timedelta(hours=hours)
        messages.set(admin, number, urgency=urgency, priority=priority, ready_at=ready)
    dues = send_sync(hand.connection, messages.open(hand.connection).survey())
    assert [round((due.due_in_seconds or 0) / 3600) for due in dues] == list(lanes.values())


LANE_COLUMNS = [("urgency", "priority"), ("urgency",), ("priority",), ()]


@pytest.mark.contract("A18")
@pytest.mark.parametrize("mapped", LANE_COLUMNS, ids=lambda mapped: " and ".join(mapped) or "neither")
def test_a_table_may_have_one_half_of_the_lanes(
    mapped: tuple[str, ...], messages: Adapter, admin: Admin, hand: Hand
) -> None:
    lanes = [(-1, 2), (0, -5), (0, 3), (1, -5), (1, 4), (2, 0)]
    for number, (urgency, priority) in enumerate(lanes):
        messages.put(admin, number)
        messages.set(admin, number, urgency=urgency, priority=priority)
    assert messages.queue is not None
    without: dict[str, Any] = {name: None for name in ("urgency", "priority") if name not in mapped}
    table = inspect(hand.connection, TABLES, KIND, replace(messages.queue, **without))
    dues = send_sync(hand.connection, RowsQueue(TABLES, messages.kind(), table).survey())
    wanted = {(urgency * ("urgency" in mapped), priority * ("priority" in mapped)) for urgency, priority in lanes}
    assert [(due.lane.urgency, due.lane.priority) for due in dues] == sorted(wanted)
    assert all((due.due_in_seconds or 0) < 0 for due in dues)


def test_a_survey_of_lanes_without_number_sees_the_first_thousand_of_each_class(
    messages: Adapter, admin: Admin, hand: Hand
) -> None:
    admin.execute(
        "insert into crawl.messages (message_id, body, embed_class, embed_rank)"
        " select 10000 * urgency + rank, 'b', urgency, rank"
        " from generate_series(0, 1) urgency, generate_series(1, 1500) rank"
    )
    queue = rows_queue(hand, messages)
    for first, last in ((1, 1000), (1001, 1500)):
        dues = send_sync(hand.connection, queue.survey())
        wanted = [Lane(KIND, urgency, rank) for urgency in (0, 1) for rank in range(first, last + 1)]
        assert [due.lane for due in dues] == wanted
        admin.execute("update crawl.messages set embed_state = 1 where embed_rank <= 1000")


def claim_one(hand: Hand, queue: RowsQueue) -> list[Claim]:
    return send_sync(hand.connection, queue.claim(LANE, limit=1, token=uuid4(), runner="r"))


def rows_queue(hand: Hand, adapter: Adapter, **options: Any) -> RowsQueue:
    queue = adapter.open(hand.connection, **options)
    assert isinstance(queue, RowsQueue)
    return queue


def test_a_row_that_loses_its_worker_too_often_fails(messages: Adapter, admin: Admin, hand: Hand) -> None:
    messages.put(admin, 1)
    # (short, as a lease from before the server's start does not count)
    queue = rows_queue(hand, messages, max_evictions=2, lease=Lease.renew(timedelta(seconds=0.3)))
    for evictions in (0, 1):
        (claim,) = claim_one(hand, queue)
        assert claim.evictions == evictions
        messages.age(admin, 0.3)
    assert claim_one(hand, queue) == []
    reaped = send_sync(hand.connection, queue.reap(LANE, limit=10))
    assert (reaped.read, reaped.ended_or_freed, reaped.freed) == (1, 1, 0)
    row = messages.row(admin, 1)
    assert (messages.of(admin, 1, "state"), row["embed_error"]) == ("failed", "evicted_too_often")
    assert (row["embed_evictions"], row["embed_token"], row["embed_worker"]) == (2, None, None)
    assert row["embed_done_at"] is not None


def test_a_renewal_of_a_busy_row_tells_of_no_cancel(messages: Adapter, admin: Admin, hand: Hand) -> None:
    """What was seen without the lock may be withdrawn by whoever holds it."""
    messages.put(admin, 1)
    queue = rows_queue(hand, messages)
    claims = claim_one(hand, queue)
    messages.set(admin, 1, cancel_requested_at=datetime.now(UTC))
    with admin.transaction():
        messages.set(admin, 1, attempts=0)
        renewed = send_sync(hand.connection, queue.renewals([(claims[0], 60.0)]))
    assert renewed == {claims[0].id: ("busy", False)}


@pytest.mark.parametrize("by", ["claim", "reap"])
@pytest.mark.parametrize(
    ("ttl", "token"),
    [(timedelta(days=3000), {}), (timedelta(seconds=0.3), {"token": None})],
    ids=["from before the server's start", "that the app has cleared in part"],
)
def test_a_lease_that_nobody_could_renew_is_no_eviction(
    messages: Adapter, admin: Admin, hand: Hand, *, by: str, ttl: timedelta, token: dict[str, Any]
) -> None:
    messages.put(admin, 1)
    queue = rows_queue(hand, messages, lease=Lease.renew(ttl))
    claim_one(hand, queue)
    messages.set(admin, 1, lease_expires_at=datetime.now(UTC) - timedelta(seconds=0.1), **token)
    if by == "claim":
        assert [claim.evictions for claim in claim_one(hand, queue)] == [0]
    else:
        messages.set(admin, 1, cancel_requested_at=datetime.now(UTC))
        assert send_sync(hand.connection, queue.reap(LANE, limit=10)).ended_or_freed == 1
    assert messages.of(admin, 1, "evictions") == 0


def test_reaping_keeps_to_its_lane_and_to_what_is_due(messages: Adapter, admin: Admin, hand: Hand) -> None:
    lanes = [(0, 0), (0, 3), (1, 0)]
    queue = rows_queue(hand, messages)
    for number, (urgency, priority) in enumerate(lanes):
        messages.put(admin, number)
        messages.set(admin, number, urgency=urgency, priority=priority)
        lane = Lane(KIND, urgency, priority)
        assert send_sync(hand.connection, queue.claim(lane, limit=1, token=uuid4(), runner="r"))
    messages.age(admin, 60)
    messages.put(admin, 9)
    messages.set(admin, 9, cancel_requested_at=datetime.now(UTC), ready_at=datetime.now(UTC) + timedelta(hours=1))
    for number in range(3):
        reaped = send_sync(hand.connection, queue.reap(Lane(KIND, *lanes[number]), limit=10))
        assert (reaped.read, reaped.freed) == (1, 1)
        tokens = [messages.of(admin, each, "token") is None for each in range(3)]
        assert tokens == [each <= number for each in range(3)]
    assert messages.of(admin, 9, "state") == "pending"


@pytest.mark.parametrize(
    "change",
    [
        {"lease_expires_at": datetime.max.replace(tzinfo=UTC)},
        {"state": "succeeded"},
        {"token": None, "lease_expires_at": None},
    ],
    ids=["renewed", "ended", "freed"],
)
def test_what_becomes_of_a_row_before_the_reaper_locks_it_stays(
    messages: Adapter, admin: Admin, hand: Hand, change: dict[str, Any]
) -> None:
    """The condition takes its time, between what the statement sees and the lock."""
    admin.execute(
        "create function crawl.slow() returns bool language plpgsql volatile as"
        " $$ begin if pg_try_advisory_lock(1) then perform pg_advisory_unlock(1);"
        " else perform pg_advisory_lock_shared(2), pg_advisory_unlock_shared(2); end if; return true; end $$"
    )
    messages.put(admin, 1)
    claim_one(hand, rows_queue(hand, messages))
    messages.age(admin, 60)
    assert messages.queue is not None
    slow = RowsQueue(
        TABLES, messages.kind(), inspect(hand.connection, TABLES, KIND, replace(messages.queue, where="crawl.slow()"))
    )
    admin.execute("select pg_advisory_lock(1), pg_advisory_lock(2)")
    reaped: list[int] = []
    thread = threading.Thread(
        target=lambda: reaped.append(send_sync(hand.connection, slow.reap(LANE, limit=10)).ended_or_freed)
    )
    thread.start()
    waits = "select 1 from pg_stat_activity where wait_event = 'advisory' and datname = current_database()"
    until(lambda: bool(admin.execute(waits).fetchone()))
    messages.set(admin, 1, **change)
    before = messages.row(admin, 1)
    admin.execute("select pg_advisory_unlock_all()")
    thread.join(10)
    assert reaped == [0]
    assert messages.row(admin, 1) == before


def test_without_a_column_for_evictions_there_is_no_limit_to_them(threads: Adapter, admin: Admin, hand: Hand) -> None:
    threads.put(admin, 1)
    queue = rows_queue(hand, threads, max_evictions=1)
    for _ in range(4):
        assert len(claim_one(hand, queue)) == 1
        threads.age(admin, 20)
    assert send_sync(hand.connection, queue.reap(LANE, limit=10)).read == 0


@pytest.mark.ruling("0.5")
def test_a_cancel_request_ends_a_waiting_row_and_a_returned_one(messages: Adapter, admin: Admin, hand: Hand) -> None:
    for number in (1, 2, 3, 4, 5):
        messages.put(admin, number)
    messages.set(admin, 4, state="failed")
    admin.execute("update crawl.messages set private = true, embed_stop = clock_timestamp() where message_id = 5")
    queue = rows_queue(hand, messages)
    (first,) = claim_one(hand, queue)
    for number in (1, 2):
        messages.set(admin, number, cancel_requested_at=datetime.now(UTC))
    renewed = send_sync(hand.connection, queue.renewals([(first, None)]))[first.id]
    assert renewed.cancel_requested
    assert [claim.key for claim in claim_one(hand, queue)] == ["3"]
    reaped = send_sync(hand.connection, queue.reap(LANE, limit=10))
    assert (reaped.read, reaped.ended_or_freed, reaped.freed) == (3, 1, 0)
    assert [messages.of(admin, number, "state") for number in (1, 2, 3)] == ["pending", "cancelled", "pending"]
    messages.age(admin, 20)
    reaped = send_sync(hand.connection, queue.reap(LANE, limit=10))
    assert (reaped.ended_or_freed, reaped.freed) == (2, 1)
    assert [messages.of(admin, number, "state") for number in (1, 2, 3)] == ["cancelled", "cancelled", "pending"]
    assert messages.row(admin, 1)["embed_stop"] is None


@pytest.mark.ruling("0.5")
@pytest.mark.parametrize("settlement", [RETRY, RELEASE, FAIL])
def test_a_row_that_returns_honours_a_cancel_request(
    messages: Adapter, admin: Admin, hand: Hand, settlement: Settlement
) -> None:
    for number in (1, 2):
        messages.put(admin, number)
    queue = rows_queue(hand, messages)
    claims = send_sync(hand.connection, queue.claim(LANE, limit=2, token=uuid4(), runner="r"))
    messages.set(admin, 1, cancel_requested_at=datetime.now(UTC))
    answers = send_sync(hand.connection, queue.settle([(claim, settlement) for claim in claims]))
    wanted = ["failed"] * 2 if settlement is FAIL else ["cancelled", "pending"]
    assert [answers[claim.id].state for claim in claims] == wanted
    assert [messages.of(admin, number, "state") for number in (1, 2)] == wanted
    assert messages.row(admin, 1)["embed_stop"] is None
    assert [messages.row(admin, number)["embed_done_at"] is None for number in (1, 2)] == [
        state == "pending" for state in wanted
    ]


def test_a_judged_run_ends_a_row_of_evictions_and_a_release_does_not(
    messages: Adapter, admin: Admin, hand: Hand
) -> None:
    for number in (1, 2):
        messages.put(admin, number)
        messages.set(admin, number, evictions=3, code="old")
    queue = rows_queue(hand, messages)
    judged, released = send_sync(hand.connection, queue.claim(LANE, limit=2, token=uuid4(), runner="r"))
    send_sync(hand.connection, queue.settle([(judged, RETRY), (released, RELEASE)]))
    seen = [(messages.of(admin, number, "evictions"), messages.of(admin, number, "code")) for number in (1, 2)]
    assert seen == [(0, "handler_failed"), (3, "old")]


async def test_a_cancel_request_of_the_app_stops_the_handler(app: App, messages: Adapter, admin: Admin) -> None:
    entered = anyio.Event()

    async def wait(job: Job[Any]) -> None:
        entered.set()
        await anyio.sleep_forever()

    messages.register(app, wait)
    messages.put(admin, 1)
    seen = Recorder(app)
    async with running(app.worker()):
        await entered.wait()
        messages.set(admin, 1, cancel_requested_at=datetime.now(UTC))
        await app.notify(KIND)
        await seen.count(JobSettled, 1)
    assert messages.of(admin, 1, "state") == "cancelled"


def test_a_row_without_a_revision_has_nothing_to_be_done(threads: Adapter, admin: Admin, hand: Hand) -> None:
    threads.put(admin, 1)
    admin.execute('update crawl."Thread Vectors" set "contentHash" = null')
    queue = rows_queue(hand, threads)
    assert claim_one(hand, queue) == []
    assert [due.due_in_seconds for due in send_sync(hand.connection, queue.survey())] == [None]


HINDRANCES: dict[str, tuple[type[Adapter], str]] = {
    "ended": (Messages, "embed_state = 2"),
    "not wanted": (Messages, "private = true"),
    "to be cancelled": (Messages, "embed_stop = clock_timestamp()"),
    "leased": (Messages, "embed_token = gen_random_uuid(), embed_lease = clock_timestamp() + interval '1 minute'"),
    "without a revision": (Threads, '"contentHash" = null'),
    "without a time": (Threads, '"not before" = null'),
}


@pytest.mark.parametrize("hindrance", HINDRANCES)
def test_what_cannot_be_claimed_is_not_due(hindrance: str, admin: Admin, hand: Hand) -> None:
    made, change = HINDRANCES[hindrance]
    adapter = made()
    adapter.create(admin)
    try:
        for number in (1, 2):
            adapter.put(admin, number)
        adapter.set(admin, 2, ready_at=datetime.now(UTC) + timedelta(hours=1))
        queue = rows_queue(hand, adapter)
        assert [(due.due_in_seconds or 0) < 0 for due in send_sync(hand.connection, queue.survey())] == [True]
        table = '"Thread Vectors"' if made is Threads else "messages"
        admin.execute(
            f'update crawl.{table} set {change} where "{adapter.columns["key"]}"::text = %s', [adapter.key(1)]
        )
        (due,) = send_sync(hand.connection, queue.survey())
        assert due.due_in_seconds is not None
        assert due.due_in_seconds > 3000
        assert claim_one(hand, queue) == []
        adapter.delete(admin, 2)
        assert [due for due in send_sync(hand.connection, queue.survey()) if due.due_in_seconds is not None] == []
    finally:
        admin.execute("drop schema crawl cascade")


@pytest.mark.parametrize("cleared", ["token", "lease_expires_at"])
def test_the_reaper_sees_a_lease_of_which_the_app_has_cleared_a_part(
    messages: Adapter, admin: Admin, hand: Hand, cleared: str
) -> None:
    messages.put(admin, 1)
    queue = rows_queue(hand, messages)
    claim_one(hand, queue)
    messages.set(admin, 1, cancel_requested_at=datetime.now(UTC), **{cleared: None})
    assert send_sync(hand.connection, queue.reap(LANE, limit=10)).ended_or_freed == 1
    assert messages.of(admin, 1, "state") == "cancelled"


@pytest.mark.parametrize("cleared", ["token", "lease_expires_at"])
def test_an_app_may_clear_a_part_of_the_lease_only(threads: Adapter, admin: Admin, hand: Hand, cleared: str) -> None:
    threads.put(admin, 1)
    queue = rows_queue(hand, threads)
    claim_one(hand, queue)
    threads.set(admin, 1, **{cleared: None})
    assert [due.due_in_seconds is None for due in send_sync(hand.connection, queue.survey())] == [False]
    assert len(claim_one(hand, queue)) == 1


KEY_TYPES = {  # a value, and another
    "bigint": ("9007199254740993", "9007199254740992"),
    "integer": ("-5", "5"),
    "numeric": ("1.50", "1.5"),
    "text": ("a b'c\\d", "a b'c\\D"),
    "character varying(20)": ("k{1}%", "k{1}%%"),
    "character(5)": ("ab", "a"),
    "name": ("n", "N"),
    "uuid": ("00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002"),
    "bytea": ("\\xdeadbeef00", "\\xdeadbeef"),
    "date": ("2026-01-31", "2026-02-01"),
    "timestamp with time zone": ("2026-01-31 12:00:00.000001+00", "2026-01-31 12:00:00.000002+00"),
    "crawl.level": ("high", "low"),
    "crawl.number": ("12", "21"),
    "inet": ("10.0.0.1", "10.0.0.1/8"),
}


@pytest.mark.contract("A11")
@pytest.mark.parametrize("type_", KEY_TYPES)
def test_keys_and_revisions_may_be_of_any_type(type_: str, messages: Adapter, admin: Admin, hand: Hand) -> None:
    admin.execute("create type crawl.level as enum ('low', 'high'); create domain crawl.number as bigint")
    admin.execute(
        f"create table crawl.odd (k {type_} primary key, r {type_} not null, s varchar(10) not null default 'todo',"
        " t uuid, l timestamptz, at timestamptz not null default clock_timestamp(), n bigint not null default 0);"
        " grant select, update on crawl.odd to public; grant usage on schema crawl to public"
    )
    admin.execute(f"insert into crawl.odd (k, r) values (%s::{type_}, %s::{type_})", [KEY_TYPES[type_][0]] * 2)
    (stored,) = admin.execute("select k::text from crawl.odd").fetchone() or ("",)
    queue = rows_queue(hand, _Odd())
    for _ in range(2):
        (claim,) = claim_one(hand, queue)
        assert claim.key == claim.revision == stored
        settled = send_sync(hand.connection, queue.renewals([(claim, 60.0)]))
        assert settled[claim.id].verdict == "done"
        admin.execute("update crawl.odd set l = clock_timestamp()")
    admin.execute("update crawl.odd set l = null, t = null")
    (claim,) = claim_one(hand, queue)
    assert send_sync(hand.connection, queue.check(claim)) == claim.generation
    lost = claim._replace(revision=KEY_TYPES[type_][1])
    assert send_sync(hand.connection, queue.check(lost)) is None


@pytest.mark.contract("A11", "A20")
@pytest.mark.parametrize("type_", ["timestamptz", "date", "bytea", "double precision", "interval", "json", "text"])
async def test_a_revision_is_the_same_whatever_the_apps_code_sets_in_its_session(
    type_: str, app: App, messages: Adapter, admin: Admin
) -> None:
    values = {
        "bytea": "\\x00ff",
        "double precision": "0.1",
        "interval": "1 day 02:03:04",
        "json": '{"a":1}',
        "text": "A b",
    }
    admin.execute(f"alter table crawl.messages add revised {type_}")
    messages.put(admin, 1)
    admin.execute("update crawl.messages set revised = %s", [values.get(type_, "2026-01-31 12:00:00+00")])

    async def value(job: Job[Any]) -> int:
        return 1

    async def meddle(conn: psycopg.AsyncConnection[Any], job: Job[Any], value: int) -> None:
        await conn.execute(
            "set local timezone = 'Asia/Tokyo'; set local datestyle = 'German'; set local extra_float_digits = -10;"
            " set local bytea_output = 'escape'; set local intervalstyle = 'iso_8601'"
        )

    assert messages.queue is not None
    app.kind(KIND, queue=replace(messages.queue, revision="revised"), apply=meddle)(value)
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    assert messages.of(admin, 1, "state") == "succeeded"


@pytest.mark.field("L28")
@pytest.mark.parametrize("payload", ["data", ("body", "data")])
async def test_a_payload_may_be_any_json(app: App, messages: Adapter, admin: Admin, payload: Any) -> None:
    got: list[Any] = []

    async def keep(job: Job[Any]) -> None:
        got.append(job.payload)

    text = '{"nul": "\\u0000", "big": 1180591620717411303424, "list": [1.5, null]}'
    admin.execute("alter table crawl.messages add data json")
    messages.put(admin, 1)
    admin.execute("update crawl.messages set data = %s", [text])
    assert messages.queue is not None
    app.kind(KIND, queue=replace(messages.queue, payload=payload))(keep)
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    whole = {"nul": "\0", "big": 2**70, "list": [1.5, None]}
    assert got == [whole if payload == "data" else {"body": "text", "data": whole}]


def test_a_partitioned_table_is_a_queue_as_well(messages: Adapter, admin: Admin, hand: Hand) -> None:
    """In each partition a row has the same place as one in another has."""
    admin.execute(
        "create table crawl.odd (k bigint primary key, r int not null default 1, s varchar(10) not null default 'todo',"
        " t uuid, l timestamptz, at timestamptz not null default clock_timestamp(), n int not null default 0)"
        " partition by range (k); create table crawl.odd_low partition of crawl.odd for values from (0) to (10);"
        " create table crawl.odd_high partition of crawl.odd for values from (10) to (20);"
        " create index on crawl.odd (at, k) where s = 'todo'; grant select, update on crawl.odd to public"
    )
    admin.execute("insert into crawl.odd (k) values (1), (11), (2), (12)")
    queue = rows_queue(hand, _Odd())
    assert [due.lane for due in send_sync(hand.connection, queue.survey())] == [LANE]
    claims = send_sync(hand.connection, queue.claim(LANE, limit=2, token=uuid4(), runner="r"))
    assert {claim.key for claim in claims} < {"1", "11", "2", "12"}
    renewed = send_sync(hand.connection, queue.renewals([(claim, 60.0) for claim in claims]))
    assert [renewed[claim.id].verdict for claim in claims] == ["done", "done"]
    assert send_sync(hand.connection, queue.finish([(claims[0], Success(None))]))[claims[0].id].verdict == "done"
    assert send_sync(hand.connection, queue.settle([(claims[1], FAIL)]))[claims[1].id].verdict == "done"
    states = dict(admin.execute("select k::text, s from crawl.odd").fetchall())
    ended = {claims[0].key: "done", claims[1].key: "dead"}
    assert states == dict.fromkeys(("1", "11", "2", "12"), "todo") | ended


class _Odd(Messages):
    table = "crawl.odd"
    queue = TableQueue(
        table,
        key="k",
        revision="r",
        state="s",
        states={"pending": "todo", "succeeded": "done", "failed": "dead", "cancelled": "dead"},
        token="t",
        lease_expires_at="l",
        ready_at="at",
        attempts="n",
    )


# --- whether it fits ------------------------------------------------------------------------------------------------


def refused(hand: Hand, queue: TableQueue) -> str:
    with pytest.raises(SchemaError) as raised:
        inspect(hand.connection, TABLES, KIND, queue)
    return str(raised.value)


def test_a_table_that_fits_not_is_told_with_what_would_make_it_fit(admin: Admin, hand: Hand, dsn: str) -> None:
    admin.execute(
        "create table public.bare (id bigint, hash text, lease timestamp); grant all on public.bare to public"
    )
    queue = TableQueue(
        "public.bare",
        key="id",
        revision="hash",
        state="state",
        token="token",
        lease_expires_at="lease",
        ready_at="at",
        attempts="tries",
        priority="rank",
        payload="body",
    )
    said = refused(hand, queue).splitlines()
    assert said == [
        "kind 'work': public.bare does not fit",
        (
            'it has no column state, token, at, tries, rank: alter table "public"."bare"'
            ' add column "state" text not null default \'pending\', add column "token" uuid,'
            ' add column "at" timestamptz not null default clock_timestamp(),'
            ' add column "tries" integer not null default 0, add column "rank" smallint not null default 0'
        ),
        "it has no column body, of which the payload is made",
        'id may be null: alter table "public"."bare" alter column "id" set not null',
        "lease (lease_expires_at) is timestamp without time zone, must be timestamp with time zone",
        'id needs a unique index of its own: create unique index concurrently on "public"."bare" ("id")',
    ]
    for line in said[1:]:
        if ": " in line:
            admin.execute(line.split(": ", 1)[1].encode())
    admin.execute("alter table public.bare add column body text, alter column lease type timestamptz")
    inspect(hand.connection, TABLES, KIND, queue)


UNFIT_INDEXES = {
    "not unique": "create index on crawl.odd (k)",
    "for some rows": "create unique index on crawl.odd (k) where k > 0",
    "with another column": "create unique index on crawl.odd (k, r)",
    "of an expression": "create unique index on crawl.odd ((k + 1))",
    "of another column": "create unique index on crawl.odd (r)",
    "of another table": "create table crawl.copy as select * from crawl.odd; create unique index on crawl.copy (k)",
    "not valid": "create unique index odd_key on crawl.odd (k);"
    " update pg_index set indisvalid = false where indexrelid = 'crawl.odd_key'::regclass",
}


@pytest.mark.parametrize("index", UNFIT_INDEXES)
def test_an_index_that_does_not_make_the_key_unique_is_none(
    index: str, messages: Adapter, admin: Admin, hand: Hand
) -> None:
    admin.execute(
        "create table crawl.odd (k int not null, r int, s text, t uuid, l timestamptz, at timestamptz, n int);"
        " grant select, update on crawl.odd to public"
    )
    admin.execute(UNFIT_INDEXES[index])
    assert _Odd.queue is not None
    assert "k needs a unique index of its own" in refused(hand, _Odd.queue)


def test_a_column_that_the_system_keeps_is_none(messages: Adapter, hand: Hand) -> None:
    assert messages.queue is not None
    assert "it has no column xmin" in refused(hand, replace(messages.queue, revision="xmin"))


def test_a_table_that_is_not_there_or_is_none_is_told(admin: Admin, hand: Hand, messages: Adapter) -> None:
    assert messages.queue is not None
    assert "there is no table crawl.nothing" in refused(hand, replace(messages.queue, table="crawl.nothing"))
    admin.execute("create view crawl.seen as select * from crawl.messages; grant all on crawl.seen to public")
    assert "is no table" in refused(hand, replace(messages.queue, table="crawl.seen"))


def test_an_array_is_no_key(admin: Admin, hand: Hand) -> None:
    admin.execute(
        "create table public.lists (k text[] primary key, r int, s text, t uuid, l timestamptz,"
        " at timestamptz, n int); grant all on public.lists to public"
    )
    assert _Odd.queue is not None
    assert "k is an array" in refused(hand, replace(_Odd.queue, table="public.lists"))


@pytest.mark.parametrize("type_", ["crawl.pair", "crawl.checked"])
def test_a_composite_is_no_key(type_: str, messages: Adapter, admin: Admin, hand: Hand) -> None:
    admin.execute(
        "create type crawl.pair as (x int, y text); create domain crawl.checked as crawl.pair check ((value).x > 0);"
        f"create table crawl.odd (k {type_} primary key, r int, s text, t uuid, l timestamptz, at timestamptz, n int);"
        "grant all on crawl.odd to public"
    )
    assert _Odd.queue is not None
    assert "k is of the composite type crawl.pair" in refused(hand, _Odd.queue)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"where": "not secret"}, 'column "secret" does not exist'),
        ({"where": "body ="}, "syntax error"),
        ({"states": {"pending": "x", "succeeded": 1, "failed": 2, "cancelled": 3}}, "invalid input syntax"),
    ],
)
def test_a_mapping_that_makes_no_sql_is_told(messages: Adapter, hand: Hand, change: dict[str, Any], said: str) -> None:
    assert messages.queue is not None
    told = refused(hand, replace(messages.queue, **change))
    assert "crawl.messages cannot be worked on" in told
    assert said in told


def test_a_table_on_which_a_statement_takes_too_long_is_told(messages: Adapter, admin: Admin, hand: Hand) -> None:
    messages.put(admin, 1)
    hand.connection.execute("set statement_timeout = '100ms'")
    assert messages.queue is not None
    told = refused(hand, replace(messages.queue, where="pg_sleep(10) is not null"))
    assert "table_survey takes too long. Does it lack its index? create index" in told


def test_a_table_that_somebody_locks_is_no_fault_of_the_tables(messages: Adapter, admin: Admin, hand: Hand) -> None:
    with admin.transaction():
        admin.execute("lock table crawl.messages")
        with pytest.raises(LockNotAvailable):
            messages.open(hand.connection)


def test_a_role_that_may_not_write_is_told(messages: Adapter, admin: Admin, make_role: str) -> None:
    assert messages.queue is not None
    admin.execute("revoke update on crawl.messages from public")
    expected = pytest.raises(SchemaError, match="permission denied for table messages")
    with psycopg.connect(make_role, autocommit=True) as connection, expected:
        inspect(connection, TABLES, KIND, messages.queue)


@pytest.fixture
def make_role(admin: Admin, worker_database: Any) -> Iterator[str]:
    """A DSN of a role that may do what everybody may, and use our schema."""
    name = f"{worker_database.name}_reader"
    admin.execute(f"create role {name} login password 'reader'")
    admin.execute(f"grant usage on schema pgworker to {name}; grant select on all tables in schema pgworker to {name}")
    yield psycopg.conninfo.make_conninfo(worker_database.admin_dsn, user=name, password="reader")
    admin.execute(f"drop owned by {name}; drop role {name}")


def test_a_look_at_a_table_leaves_it_as_it_is(messages: Adapter, admin: Admin, hand: Hand) -> None:
    messages.put(admin, 1)
    before = messages.row(admin, 1)
    messages.open(hand.connection)
    assert messages.row(admin, 1) == before


def test_a_column_is_looked_at_once_whatever_its_domain_is(threads: Adapter, admin: Admin, hand: Hand) -> None:
    assert threads.queue is not None
    admin.execute('alter table crawl."Thread Vectors" drop column tags')  # (it leaves its number behind)
    found = send_sync(hand.connection, look_at(threads.queue))
    types = [row[4] for row in found if row[3] == "Thread-Id"]
    assert types == ["character varying"]


def test_a_table_without_an_index_to_claim_along_is_told(
    messages: Adapter, admin: Admin, hand: Hand, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pgworker"):
        messages.open(hand.connection)
        assert caplog.messages == []
        admin.execute("drop index crawl.messages_to_embed")
        messages.open(hand.connection)
    (line,) = caplog.messages
    statement = line.split(": ", 2)[2]
    admin.execute(statement.encode())
    caplog.clear()
    messages.open(hand.connection)
    assert caplog.messages == []


async def test_a_worker_does_not_start_on_a_table_that_does_not_fit(app: App, messages: Adapter, admin: Admin) -> None:
    messages.register(app, work)
    admin.execute("alter table crawl.messages drop column embed_token")
    with pytest.raises(SchemaError, match='add column "embed_token" uuid'):
        await app.worker().run()


@pytest.mark.ruling("1.29")
def test_our_states_are_the_tables_own_words(threads: Adapter, admin: Admin, hand: Hand) -> None:
    threads.put(admin, 1)
    queue = rows_queue(hand, threads)
    (claim,) = claim_one(hand, queue)
    assert threads.row(admin, 1)["progress"] == "it's dirty"
    assert send_sync(hand.connection, queue.settle([(claim, FAIL)]))[claim.id].state == "failed"
    assert threads.row(admin, 1)["progress"] == "broken"
