"""Many events in one call: what is stored, all or none of it, once; by either statement and by every door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import psycopg
import pytest
from psycopg import errors as pg

from pgworker import App, Enqueued, NewJob
from pgworker.groups import MAX_ROWS
from pgworker.policy import Facts
from pgworker.statements import Insert, insert_events, insert_missing_events
from tests.chaos.proxy import Point, Proxy, proxied
from tests.chaos.stage import recognize
from tests.handles import Hand, copy_of, row
from tests.integration.test_group_commit import TOO_LATE

Admin: TypeAlias = psycopg.Connection[Any]
Put: TypeAlias = Callable[[list[NewJob]], Any]

COUNT = MAX_ROWS * 2
"""More than share a statement with others."""
AT = datetime(2031, 5, 6, 7, 8, 9, 123456, UTC)


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with proxied(dsn) as proxy:
        yield proxy


@pytest.fixture
def far_app(proxy: Proxy) -> Iterator[App]:
    """An app whose way to the database leads through the proxy."""
    app = App(proxy.dsn)
    app.declare("work")
    yield app
    app.sync.close()


@pytest.fixture(params=["exceptional", "all"])
def work(app: App, request: pytest.FixtureRequest) -> App:
    """Either statement: facts about what is enqueued are written by one of them only."""
    facts: Facts = request.param
    app.declare("work", facts=facts, version=7)
    return app


async def put(app: App, door: str, dsn: str, jobs: list[NewJob]) -> list[Enqueued]:
    """Enqueue them by one of the doors, in a transaction of its own or in the caller's."""
    match door:
        case "async":
            async with app:
                return await app.enqueue_many("work", jobs)
        case "sync":
            with app.sync:
                return await anyio.to_thread.run_sync(lambda: app.sync.enqueue_many("work", jobs))
        case "async conn":
            async with app, await psycopg.AsyncConnection.connect(dsn) as connection:
                return await app.enqueue_many("work", jobs, conn=connection)
        case _:
            with app.sync, psycopg.connect(dsn) as given:
                return await anyio.to_thread.run_sync(lambda: app.sync.enqueue_many("work", jobs, conn=given))


DOORS = ["async", "sync", "async conn", "sync conn"]


def facts(admin: Admin) -> list[Any]:
    return admin.execute(
        "select key, kind, what, generation, attempts, revision, job_id from pgworker.facts order by id"
    ).fetchall()


@pytest.mark.parametrize("door", DOORS)
async def test_each_job_is_stored_as_it_was_asked_for(work: App, dsn: str, admin: Admin, door: str) -> None:
    jobs = [
        NewJob("plain"),
        NewJob("later", delay=timedelta(hours=1)),
        NewJob("then", ready_at=AT),
        NewJob("first", priority=-3),
        NewJob("backfill", urgency="catch_up"),
        NewJob("twice", max_attempts=2),
        NewJob({"a": ['quotes " and \\ and ,{}', None, 1.5, "\N{SNOWMAN}"]}),
    ]
    began = datetime.now(UTC)
    answers = await put(work, door, dsn, jobs)
    assert [(each.kind, each.revision, each.status, each.state) for each in answers] == [
        ("work", None, "created", "pending")
    ] * len(jobs)
    rows = [row(admin, each.key) for each in answers]
    assert [each["payload"] for each in rows] == [job.payload for job in jobs]
    (created,) = {each["created_at"] for each in rows}
    assert began <= created <= datetime.now(UTC)
    expected = [timedelta(microseconds=number) for number in range(1, len(jobs) + 1)]
    expected[1] += timedelta(hours=1)
    expected[2] = AT - created
    assert [each["ready_at"] - created for each in rows] == expected
    assert [each["priority"] for each in rows] == [0, 0, 0, -3, 0, 0, 0]
    assert [each["class"] for each in rows] == [0, 0, 0, 0, 1, 0, 0]
    assert [each["max_attempts"] for each in rows] == [None, None, None, None, None, 2, None]
    assert {(each["version"], each["event"], each["generation"], each["token"]) for each in rows} == {
        (7, True, 1, None)
    }
    told = [(each["key"], "work", "enqueued", 1, 0, "", each["id"]) for each in rows]
    assert facts(admin) == (told if work.kinds["work"].policy.facts == "all" else [])


@pytest.mark.parametrize("door", DOORS)
async def test_many_are_in_the_order_of_the_call(work: App, dsn: str, admin: Admin, door: str) -> None:
    answers = await put(work, door, dsn, [NewJob(number) for number in range(COUNT)])
    for order in ("ready_at", "key"):
        found = admin.execute(f"select key, payload from pgworker.jobs order by {order}").fetchall()
        assert found == [(each.key, number) for number, each in enumerate(answers)]


@pytest.mark.parametrize("door", DOORS)
async def test_one_that_the_database_refuses_leaves_none(work: App, dsn: str, admin: Admin, door: str) -> None:
    jobs = [NewJob(number, delay=TOO_LATE if number == COUNT // 2 else None) for number in range(COUNT)]
    with pytest.raises(psycopg.DataError):
        await put(work, door, dsn, jobs)
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)


async def test_those_of_a_transaction_that_is_rolled_back_are_not_there(work: App, dsn: str, admin: Admin) -> None:
    jobs = [NewJob(number) for number in range(COUNT)]
    async with work, await psycopg.AsyncConnection.connect(dsn) as connection:
        await work.enqueue_many("work", jobs, conn=connection)
        await connection.rollback()
    with work.sync, psycopg.connect(dsn) as given:
        work.sync.enqueue_many("work", jobs, conn=given)
        given.rollback()
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)


# --- again ----------------------------------------------------------------------------------------------------------


def inserts(*keys: str) -> list[Insert]:
    return [Insert(key, "", 0, 0, 0.0, None, None, "1") for key in keys]


def test_the_first_time_it_fails_on_what_is_there(hand: Hand, admin: Admin) -> None:
    statement = insert_events(hand.tables, "work", inserts("a", "b"), version=1)
    assert {key: each.status for key, each in hand.send(statement).items()} == {"a": "created", "b": "created"}
    with pytest.raises(pg.UniqueViolation):
        hand.send(insert_events(hand.tables, "work", inserts("c", "b"), version=1))
    assert admin.execute("select key from pgworker.jobs order by key").fetchall() == [("a",), ("b",)]


def test_again_it_adds_what_is_not_there_and_its_facts(hand: Hand, admin: Admin) -> None:
    hand.send(insert_events(hand.tables, "work", inserts("a", "b"), version=1))
    copy_of(admin, "a", kind="another")
    before = [row(admin, key) for key in "ab"]
    statement = insert_missing_events(hand.tables, "work", inserts("a", "b", "c"), version=1, facts=2)
    for _ in range(2):
        assert {key: each.status for key, each in hand.send(statement).items()} == dict.fromkeys("abc", "created")
    assert [row(admin, key) for key in "ab"] == before
    assert facts(admin) == [("c", "work", "enqueued", 1, 0, "", row(admin, "c")["id"])]


@pytest.mark.parametrize("level", [0, 1])
def test_again_it_writes_no_facts_that_are_not_asked_for(hand: Hand, admin: Admin, level: int) -> None:
    hand.send(insert_missing_events(hand.tables, "work", inserts("a"), version=1, facts=level))
    assert row(admin, "a")["generation"] == 1
    assert facts(admin) == []


def test_again_it_tells_no_transaction_of_what_it_did_not_write(hand: Hand) -> None:
    events = inserts("a")
    assert hand.send(insert_events(hand.tables, "work", events, version=1))["a"].transaction is not None
    again = insert_missing_events(hand.tables, "work", events, version=1)
    assert hand.send(again)["a"].transaction is None


@pytest.mark.parametrize("point", Point)
async def test_many_whose_answer_is_lost_are_there_once(far_app: App, proxy: Proxy, admin: Admin, point: Point) -> None:
    async with far_app:
        proxy.set_trap(recognize("insert_events"), point)
        answers = await far_app.enqueue_many("work", [NewJob(number) for number in range(COUNT)])
    assert proxy.fired == 1
    found = admin.execute("select key, payload from pgworker.jobs order by payload::int").fetchall()
    assert found == [(each.key, number) for number, each in enumerate(answers)]
    assert {each.status for each in answers} == {"created"}


@pytest.mark.parametrize("point", Point)
def test_in_threads_the_caller_hears_that_it_is_unknown(far_app: App, proxy: Proxy, admin: Admin, point: Point) -> None:
    proxy.set_trap(recognize("insert_events"), point)
    with pytest.raises(psycopg.OperationalError):
        far_app.sync.enqueue_many("work", [NewJob(number) for number in range(COUNT)])
    assert proxy.fired == 1
    written = COUNT if point is Point.COMMITTED else 0
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (written,)


# --- in the middle --------------------------------------------------------------------------------------------------


async def waiting(dsn: str) -> int:
    """The process of the server that waits for the table."""
    with psycopg.connect(dsn, autocommit=True) as connection, anyio.fail_after(10):
        while True:
            found = connection.execute(
                "select pid from pg_locks where not granted and relation = 'pgworker.jobs'::regclass"
            ).fetchone()
            if found is not None:
                return int(found[0])
            await anyio.sleep(0.01)


@pytest.mark.parametrize("killed", [0, 1], ids=["cancelled", "killed"])
async def test_in_the_middle_of_it_nothing_or_all(dsn: str, admin: Admin, killed: int) -> None:
    app = App(dsn)
    app.declare("work")
    answers: list[Enqueued] = []
    scope = anyio.CancelScope()

    async def enqueue() -> None:
        with scope:
            answers.extend(await app.enqueue_many("work", [NewJob(number) for number in range(COUNT)]))

    async with app, anyio.create_task_group() as group:
        with admin.transaction():
            admin.execute("lock table pgworker.jobs in exclusive mode")
            group.start_soon(enqueue)
            pid = await waiting(dsn)
            if killed:
                admin.execute("select pg_terminate_backend(%s)", [pid])
                while await waiting(dsn) == pid:  # noqa: ASYNC110 - no event tells of it
                    await anyio.sleep(0.01)
            else:
                scope.cancel()
            assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)
    assert len(answers) == COUNT or not killed
    assert admin.execute("select count(*), count(distinct key) from pgworker.jobs").fetchone() == (COUNT, COUNT)
