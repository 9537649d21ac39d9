"""Enqueue inside the caller's transaction, what a claim takes of it, and in which order."""

from __future__ import annotations

import random
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Enqueued, Job, NewJob, Retry
from pgworker.claimer import Claimer, Taken
from pgworker.db import Database
from pgworker.events import JobSettled, RunnerTrouble
from pgworker.maintenance import Reaper
from pgworker.outcome import Settlement
from pgworker.policy import STORE_TIMEOUT
from pgworker.queue import JobsTable
from pgworker.surveys import Surveys
from pgworker.tablemap import TableMap
from tests.handles import Hand, Recorder, age, row, running, untyped
from tests.integration.test_hints import Ears

Admin: TypeAlias = psycopg.Connection[Any]

RETRY_AT_ONCE = Settlement("pending", "handler_failed", counts=True, delay_seconds=0.0)


@dataclass
class Caller:
    """An application with a connection and a transaction of its own, async or sync; it enqueues in that."""

    app: App
    conn: psycopg.AsyncConnection[tuple[Any, ...]] | psycopg.Connection[tuple[Any, ...]]

    async def enqueue(self, kind: str = "work", **job: Any) -> Enqueued:
        if isinstance(self.conn, psycopg.Connection):
            return self.app.sync.enqueue(kind, conn=self.conn, **job)
        return await self.app.enqueue(kind, conn=self.conn, **job)

    async def execute(self, text: str) -> list[tuple[Any, ...]]:
        query = text.encode()
        if isinstance(self.conn, psycopg.Connection):
            cursor = self.conn.execute(query)
            return cursor.fetchall() if cursor.description else []
        other = await self.conn.execute(query)
        return await other.fetchall() if other.description else []


@pytest.fixture(params=["async", "sync"])
async def caller(request: pytest.FixtureRequest, app: App, dsn: str) -> AsyncIterator[Caller]:
    app.declare("work")
    if request.param == "sync":
        with psycopg.connect(dsn) as sync_connection:
            sync_connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            yield Caller(app, sync_connection)
    else:
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            yield Caller(app, connection)


@pytest.fixture
def ears(admin: Admin, dsn: str, tables: TableMap) -> Iterator[Ears]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Ears(connection, tables.channel)


@pytest.fixture
def documents(admin: Admin) -> None:
    admin.execute("create table public.documents (key text primary key)")


def counted(admin: Admin) -> tuple[int, int]:
    """Documents and jobs, as another session sees them."""
    found = admin.execute(
        "select (select count(*) from public.documents), (select count(*) from pgworker.jobs)"
    ).fetchone()
    assert found is not None
    return found[0], found[1]


# --- the caller's transaction ---------------------------------------------------------------------------------------


@pytest.mark.contract("A6")
@pytest.mark.field("L36")
@pytest.mark.ruling("2.23")
@pytest.mark.usefixtures("documents")
async def test_the_apps_row_and_its_job_commit_or_roll_back_together(admin: Admin, caller: Caller) -> None:
    for end, there in (("rollback", 0), ("commit", 1)):
        await caller.execute("insert into public.documents values ('doc')")
        assert (await caller.enqueue(key="doc", revision="r1")).created
        assert counted(admin) == (0, 0)
        await caller.execute(end)
        assert counted(admin) == (there, there)


@pytest.mark.contract("A6")
@pytest.mark.field("L36")
@pytest.mark.usefixtures("documents")
async def test_a_savepoint_takes_back_its_own_jobs_only(admin: Admin, caller: Caller) -> None:
    await caller.execute("insert into public.documents values ('doc')")
    await caller.enqueue(key="kept")
    await caller.execute("savepoint here")
    await caller.enqueue(key="undone")
    await caller.enqueue(key="kept", payload="undone, too")
    await caller.execute("rollback to savepoint here")
    await caller.execute("commit")
    assert counted(admin) == (1, 1)
    assert row(admin, "kept")["payload"] is None


@pytest.mark.contract("A7")
@pytest.mark.ruling("1.4")
async def test_a_hint_is_heard_after_the_commit_and_not_before(app: App, dsn: str, ears: Ears, caller: Caller) -> None:
    app.declare("ended")
    await caller.enqueue()
    with psycopg.connect(dsn) as other:
        app.sync.enqueue("ended", conn=other)
    assert ears.hear_next().payload == "r:ended"  # asked about later than the first, so that has been asked about, too
    assert ears.payloads_so_far() == []
    await caller.execute("commit")
    assert ears.hear_next().payload == "r:work"


@pytest.mark.contract("A7")
@pytest.mark.ruling("1.4")
async def test_no_hint_is_heard_after_a_rollback(app: App, ears: Ears, caller: Caller) -> None:
    await caller.enqueue()
    await caller.execute("rollback")
    await app.close()  # sends what there is to send
    assert ears.payloads_so_far() == []


@pytest.mark.contract("A7")
async def test_a_savepoint_that_was_rolled_back_costs_a_hint_at_most(app: App, ears: Ears, caller: Caller) -> None:
    await caller.execute("savepoint here")
    await caller.enqueue()
    await caller.execute("rollback to savepoint here")
    await caller.execute("commit")
    await app.close()
    assert ears.payloads_so_far() in ([], ["r:work"])


@pytest.mark.ruling("1.4")
async def test_a_connection_that_goes_on_at_once_does_not_hide_its_commit(ears: Ears, caller: Caller) -> None:
    await caller.enqueue()
    await caller.execute("commit")
    await caller.execute("select 1")  # the next transaction, which stays open
    assert ears.hear_next().payload == "r:work"


@pytest.mark.contract("A7")
@pytest.mark.field("L26")
async def test_an_enqueue_of_its_own_hints_once_and_shortly_whatever_its_size(
    app: App, ears: Ears, caller: Caller
) -> None:
    await app.enqueue("work", "x" * 1_000_000)
    assert ears.hear_next().payload == "r:work"
    await app.enqueue_many("work", [NewJob(index, f"k{index}", "r") for index in range(200)])
    assert ears.hear_next().payload == "r:work"
    await app.enqueue("work", 0, key="k0", revision="r")  # changes nothing, so there is nothing to tell
    await app.close()
    assert ears.payloads_so_far() == []


@pytest.mark.ruling("2.4")
async def test_an_enqueue_that_changes_nothing_locks_nothing(hand: Hand, caller: Caller) -> None:
    hand.enqueue("k", "r1")
    assert (await caller.enqueue(key="k", revision="r1")).status == "unchanged"
    assert (await caller.enqueue(key="k", revision="r2", if_pending="keep")).status == "kept"
    assert await caller.execute("select pg_current_xact_id_if_assigned()") == [(None,)]
    assert len(hand.claim()) == 1  # a claim skips locked rows
    await caller.execute("rollback")


@pytest.mark.ruling("1.11")
async def test_a_serializable_caller_gets_its_conflict_as_it_is(hand: Hand, dsn: str, caller: Caller) -> None:
    hand.enqueue("k", "r1")
    await caller.execute("set transaction isolation level serializable")
    await caller.execute("select count(*) from pgworker.jobs")
    assert (await caller.enqueue(key="other")).created
    hand.enqueue("k", "r2")
    with pytest.raises(psycopg.errors.SerializationFailure):
        await caller.enqueue(key="k", revision="r3")
    assert caller.conn.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
    await caller.execute("rollback")
    await caller.execute("set transaction isolation level serializable")
    assert (await caller.enqueue(key="k", revision="r3")).status == "replaced"
    await caller.execute("commit")


@pytest.mark.ruling("2.5")
async def test_event_keys_are_distinct_and_ordered_by_time(app: App) -> None:
    app.declare("work")
    keys = [uuid.UUID((await app.enqueue("work", index)).key) for index in range(50)]
    keys += [uuid.UUID(put.key) for put in await app.enqueue_many("work", [NewJob(index) for index in range(200)])]
    assert len(set(keys)) == 250
    assert {(key.version, key.variant) for key in keys} == {(7, uuid.RFC_4122)}
    milliseconds = [key.int >> 80 for key in keys]
    assert milliseconds == sorted(milliseconds)
    now = datetime.now(UTC).timestamp() * 1000
    assert now - 60_000 < milliseconds[0] <= milliseconds[-1] <= now + 1


# --- claims ---------------------------------------------------------------------------------------------------------


@pytest.mark.contract("A16")
@pytest.mark.ruling("0.1")
async def test_eight_claimers_take_each_row_once_with_a_new_token_for_each_call(
    hand: Hand, dsn: str, admin: Admin
) -> None:
    hand.enqueue_many([NewJob(urgency="fresh" if index % 2 else "catch_up") for index in range(500)])
    calls: list[tuple[tuple[Any, ...], Taken]] = []

    async def claim_all(database: Database, name: str) -> None:
        claimer = Claimer(JobsTable(hand.tables, untyped("work")), database, Surveys(database), name)
        while (taken := await claimer.round(13)).claims:
            calls.append(((name, len(calls)), taken))

    database = Database(dsn, "worker", deadline=STORE_TIMEOUT, connections=8)
    await database.open()
    async with anyio.create_task_group() as group:
        for index in range(8):
            group.start_soon(claim_all, database, f"runner {index}")
    await database.close()
    claims = [claim for _, taken in calls for claim in taken.claims]
    assert len({claim.id for claim in claims}) == len(claims) == 500
    users: dict[uuid.UUID, set[tuple[Any, ...]]] = defaultdict(set)
    for call, taken in calls:
        assert len(taken.claims) <= 13
        for claim in taken.claims:
            users[claim.token].add((*call, claim.urgency))  # a round claims once a lane
    assert all(len(each) == 1 for each in users.values())
    assert len(users) >= 500 / 13
    leased = admin.execute(
        "select count(*) from pgworker.jobs where lease_expires_at between created_at + %(ttl)s and"
        " clock_timestamp() + %(ttl)s",
        {"ttl": untyped("work").policy.lease.ttl},
    )
    assert leased.fetchone() == (500,)
    stored = admin.execute("select id, token from pgworker.jobs where lease_expires_at > clock_timestamp()").fetchall()
    assert dict(stored) == {claim.id: claim.token for claim in claims}


@pytest.mark.contract("A17")
@pytest.mark.ruling("2.9")
@pytest.mark.parametrize(
    "off",
    [(), ("hashjoin", "mergejoin"), ("nestloop",), ("nestloop", "hashjoin"), ("nestloop", "mergejoin", "indexscan")],
    ids=lambda off: "+".join(off) or "as it is",
)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_claim_takes_as_many_as_were_asked_for(
    hand: Hand, admin: Admin, off: tuple[str, ...], *, prepared: bool
) -> None:
    for name in off:
        hand.connection.execute(f"set enable_{name} = off".encode())
    hand.connection.prepare_threshold = 0 if prepared else None
    hand.enqueue_many([NewJob(index, key=f"k{99 - index:02}") for index in range(100)])  # their ids fall
    for first in range(0, 21, 7):
        assert [claim.payload for claim in hand.claim(7)] == [str(index) for index in range(first, first + 7)]
        leased = admin.execute("select count(*) from pgworker.jobs where token is not null").fetchone()
        assert leased == (first + 7,)


@pytest.mark.ruling("0.4", "2.9")
@pytest.mark.parametrize("batch", [None, 100])
async def test_jobs_run_in_the_order_in_which_they_were_enqueued(app: App, batch: int | None) -> None:
    order: list[int] = []
    if batch:

        @app.kind("work", batch=batch, concurrency=1)
        async def work_many(jobs: list[Job[int]]) -> None:
            order.extend(job.payload for job in jobs)
    else:

        @app.kind("work", concurrency=1)
        async def work(job: Job[int]) -> None:
            order.append(job.payload)

    keys = [f"k{index:03}" for index in range(40)]
    random.Random(7).shuffle(keys)  # noqa: S311 - any order that is not the keys' own
    await app.enqueue_many("work", [NewJob(index, key) for index, key in enumerate(keys[:30])])
    for index, key in enumerate(keys[30:], 30):
        await app.enqueue("work", index, key=key)
    await app.enqueue("work", -1, ready_at=datetime.now(UTC) - timedelta(hours=1))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 41)
    assert order == [-1, *range(40)]


@pytest.mark.ruling("2.9")
def test_a_lost_job_keeps_its_place_and_a_retried_one_goes_to_the_end(hand: Hand, admin: Admin) -> None:
    hand.enqueue_many([NewJob(key="a"), NewJob(key="b"), NewJob(key="c")])
    retried, lost = hand.claim(2)
    hand.settle(retried, RETRY_AT_ONCE)
    age(admin, 61)  # the lease of the other has run out
    assert [claim.key for claim in hand.claim(3)] == ["b", "c", "a"]
    assert row(admin, "b")["ready_at"] < row(admin, "c")["ready_at"]
    assert lost.key == "b"


@pytest.mark.contract("X22")
async def test_fresh_before_catch_up_then_the_smaller_priority_then_first_come(app: App) -> None:
    order: list[str] = []

    @app.kind("work", concurrency=1)
    async def work(job: Job[str]) -> None:
        order.append(job.payload)

    await app.enqueue("work", "catch-up, urgent", urgency="catch_up", priority=-9)
    await app.enqueue("work", "low", priority=5)
    await app.enqueue("work", "first")
    await app.enqueue("work", "second")
    await app.enqueue("work", "high", priority=-1)
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 5)
    assert order == ["high", "first", "second", "low", "catch-up, urgent"]


@pytest.mark.contract("A8")
async def test_a_hundred_hints_are_a_few_rounds(app: App, admin: Admin) -> None:
    @app.kind("work", poll=30.0)
    async def work(job: Job[int]) -> None: ...

    rounds = 0
    seen = Recorder(app)
    await app.enqueue("work", 0)
    async with running(app.worker()) as worker:
        await seen.wait(lambda: len(seen.of(JobSettled)) == 1)
        claimer = worker._runners[0]._claimer
        original = claimer.round

        async def counted(limit: int) -> Taken:
            nonlocal rounds
            rounds += 1
            return await original(limit)

        worker._runners[0]._claimer = type("Counting", (), {"round": staticmethod(counted), "poke": claimer.poke})()
        hints = app._registry._hints
        assert hints is not None
        for _ in range(100):
            hints.ready("work")
        await app.enqueue("work", 1)
        await seen.wait(lambda: len(seen.of(JobSettled)) == 2)
    assert rounds <= 4


# --- one key, over and over -----------------------------------------------------------------------------------------


@pytest.mark.field("L20")
@pytest.mark.parametrize("revisions", [(None, None), ("r1", "r2"), (None, "r1"), ("r1", "r1")])
async def test_a_retry_meets_new_work_of_its_key(app: App, admin: Admin, revisions: tuple[str | None, ...]) -> None:
    entered, leave = anyio.Event(), anyio.Event()
    calls: list[int] = []

    @app.kind("work", max_attempts=2)
    async def work(job: Job[int]) -> Retry | None:
        calls.append(job.payload)
        if len(calls) > 1:
            return None
        entered.set()
        await leave.wait()
        return Retry()

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k", revision=revisions[0])
    async with running(app.worker()) as worker:
        with anyio.fail_after(10):
            await entered.wait()
        await app.enqueue("work", 2, key="k", revision=revisions[1])
        leave.set()
        await seen.wait(lambda: any(event.state == "succeeded" for event in seen.of(JobSettled)))
        assert worker.status()["work"].failed == 0
    assert calls == ([1, 1] if revisions == ("r1", "r1") else [1, 2])
    assert seen.of(RunnerTrouble) == []
    assert admin.execute("select state, count(*) from pgworker.jobs group by state").fetchall() == [("succeeded", 1)]


@pytest.mark.contract("D89")
@pytest.mark.field("L18")
async def test_a_kind_that_nobody_here_knows_waits_for_a_worker_that_does(app: App, dsn: str, admin: Admin) -> None:
    @app.kind("work")
    async def work(job: Job[int]) -> None: ...

    admin.execute(
        "select pgworker.enqueue('later', '1', key => 'new');"
        "insert into pgworker.jobs (kind, key, token, lease_expires_at, ready_at) values"
        " ('later', 'expired', gen_random_uuid(), clock_timestamp() - interval '1 hour',"
        " clock_timestamp() - interval '2 hours')"
    )
    before = [row(admin, key, kind="later") for key in ("new", "expired")]
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await app.enqueue("work", 1)
        await seen.wait(lambda: bool(seen.of(JobSettled)))
        await app.enqueue("work", 1, delay=timedelta(hours=1))  # so that there is a lane to be reaped
        runner = worker._runners[0]
        await Reaper(runner._shared.surveys, runner._shared.database).reap(runner._queue)
    assert [row(admin, key, kind="later") for key in ("new", "expired")] == before

    async with App(dsn) as newer:

        @newer.kind("later")
        async def later(job: Job[int | None]) -> None: ...

        seen = Recorder(newer)
        async with running(newer.worker()):
            await seen.wait(lambda: len(seen.of(JobSettled)) == 2)
