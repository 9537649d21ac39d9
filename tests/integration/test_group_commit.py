"""Enqueues that wait at the same time share a statement and its commit, and nothing else: no error, no lock, no end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Enqueued, NewJob
from pgworker.errors import PayloadError
from tests.chaos.proxy import Point, Proxy, proxied
from tests.chaos.stage import recognize
from tests.handles import Hand, row
from tests.integration.test_hints import Ears

Admin: TypeAlias = psycopg.Connection[Any]

TOO_LATE = timedelta(days=300_000 * 365)
"""A delay that no instant of the database can hold: what it refuses that we let pass."""


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with proxied(dsn) as proxy:
        yield proxy


@pytest.fixture
def far_app(proxy: Proxy) -> App:
    """An app whose way to the database leads through the proxy."""
    app = App(proxy.dsn)
    app.declare("work")
    return app


@pytest.fixture
def work(app: App) -> App:
    app.declare("work")
    return app


def sent(proxy: Proxy, statement: str) -> int:
    return sum(recognize(statement)(text) for _, text in proxy.sent)


def stored(admin: Admin) -> list[Any]:
    return [payload for (payload,) in admin.execute("select payload from pgworker.jobs order by id")]


# --- shared ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [0, 1], ids=["events", "keyed"])
async def test_fifty_at_once_are_few_statements(far_app: App, proxy: Proxy, admin: Admin, keyed: int) -> None:
    async with far_app:
        await far_app.enqueue("work", "first")
        enqueued = await asyncio.gather(
            *(far_app.enqueue("work", number, key=f"k{number:02}" if keyed else None) for number in range(50))
        )
    assert [each.status for each in enqueued] == ["created"] * 50
    assert len({each.key for each in enqueued}) == 50
    assert sent(proxy, "insert_jobs") + sent(proxy, "insert_events") <= 4
    assert sorted(stored(admin)[1:]) == list(range(50))


async def test_each_caller_has_the_answer_to_its_own_jobs(work: App, hand: Hand) -> None:
    hand.enqueue("unchanged", "r")
    hand.enqueue("replaced", "r")
    async with work:
        put = await asyncio.gather(
            work.enqueue("work", key="new"),
            work.enqueue("work", key="unchanged", revision="r"),
            work.enqueue_many("work", [NewJob(1, "replaced", "r2"), NewJob(2, "other")]),
            work.enqueue("work", key="unchanged", revision="r", if_pending="keep"),
        )
    answers = [each if isinstance(each, Enqueued) else each[0] for each in put]
    assert [(each.key, each.status) for each in answers] == [
        ("new", "created"),
        ("unchanged", "unchanged"),
        ("replaced", "replaced"),
        ("unchanged", "unchanged"),
    ]


async def test_jobs_of_one_flush_are_ready_in_the_order_of_the_calls(work: App, hand: Hand) -> None:
    async with work:
        await asyncio.gather(*(work.enqueue("work", key=key) for key in "dacb"))
    assert [claim.key for claim in hand.claim(4)] == list("dacb")


async def test_a_flush_is_followed_by_a_hint(work: App, dsn: str, hand: Hand) -> None:
    hand.enqueue("k", "r1")
    hand.claim()
    with psycopg.connect(dsn, autocommit=True) as connection:
        ears = Ears(connection, hand.tables.channel)
        async with work:
            await asyncio.gather(*(work.enqueue("work", key=key, revision="r2") for key in "kl"))
        assert sorted(ears.hear_next().payload for _ in range(2)) == ["c:work", "r:work"]
        async with work:
            await work.enqueue("work")
        assert ears.hear_next().payload == "r:work"


# --- equal keys -----------------------------------------------------------------------------------------------------


@pytest.mark.ruling("2.6")
async def test_of_the_latest_values_of_one_key_the_last_wins(work: App, admin: Admin) -> None:
    async with work:
        put = await asyncio.gather(*(work.enqueue("work", number, key="k") for number in range(5)))
    assert [each.status for each in put] == ["replaced"] * 4 + ["created"]
    assert (row(admin, "k")["payload"], row(admin, "k")["generation"]) == (4, 1)


@pytest.mark.ruling("2.6")
async def test_revisions_of_one_key_come_one_after_the_other(work: App, admin: Admin) -> None:
    revisions = ["r1", "r1", "r2", None, "r1", "r3"]
    async with work:
        put = await asyncio.gather(
            *(work.enqueue("work", number, key="k", revision=revision) for number, revision in enumerate(revisions))
        )
    assert [each.revision for each in put] == revisions
    assert [each.status for each in put] == ["created", "unchanged", "replaced", "replaced", "replaced", "replaced"]
    assert (row(admin, "k")["revision"], row(admin, "k")["payload"], row(admin, "k")["generation"]) == ("r3", 5, 5)


async def test_a_later_fresh_call_lifts_what_an_earlier_one_put(work: App, admin: Admin) -> None:
    async with work:
        put = await asyncio.gather(
            work.enqueue("work", key="k", revision="r", urgency="catch_up"),
            work.enqueue("work", key="k", revision="r"),
        )
    assert [each.status for each in put] == ["created", "unchanged"]
    assert row(admin, "k")["class"] == 0


# --- who is at fault ------------------------------------------------------------------------------------------------


@pytest.mark.ruling("2.8")
@pytest.mark.parametrize("keyed", [0, 1], ids=["events", "keyed"])
async def test_a_row_that_the_database_refuses_costs_its_caller_alone(work: App, admin: Admin, keyed: int) -> None:
    delays: list[timedelta | float] = [0, 0, 0, 0, 0, TOO_LATE, 0, 0, 0]
    async with work:
        put = await asyncio.gather(
            *(
                work.enqueue("work", number, key=f"k{number}" if keyed else None, delay=delay)
                for number, delay in enumerate(delays)
            ),
            return_exceptions=True,
        )
    assert isinstance(put[5], psycopg.DataError)
    assert [each.status for each in put if isinstance(each, Enqueued)] == ["created"] * 8
    assert sorted(stored(admin)) == [number for number in range(9) if number != 5]


@pytest.mark.ruling("2.8")
async def test_a_payload_that_cannot_be_is_refused_before_it_meets_others(work: App, admin: Admin) -> None:
    payloads = [1, float("nan"), 2]
    async with work:
        put = await asyncio.gather(*(work.enqueue("work", each) for each in payloads), return_exceptions=True)
    assert isinstance(put[1], PayloadError)
    assert stored(admin) == [1, 2]


@pytest.mark.ruling("2.8")
@pytest.mark.parametrize("code", ["P0001", "QU001"])
async def test_what_a_trigger_refuses_costs_its_caller_alone(work: App, admin: Admin, code: str) -> None:
    admin.execute(
        f"""create function pg_temp.refuse() returns trigger language plpgsql as
        $$ begin raise exception 'over quota' using errcode = '{code}'; end $$;
        create trigger refuse before insert on pgworker.jobs for each row when (new.key = 'k1')
        execute function pg_temp.refuse()"""
    )
    async with work:
        put = await asyncio.gather(*(work.enqueue("work", key=f"k{n}") for n in range(4)), return_exceptions=True)
    assert isinstance(put[1], psycopg.Error)
    assert put[1].sqlstate == code
    assert [each.status for each in put if isinstance(each, Enqueued)] == ["created"] * 3


@pytest.mark.ruling("2.8")
async def test_a_call_of_many_that_is_refused_leaves_nothing_of_its_own(work: App, admin: Admin) -> None:
    async with work:
        put = await asyncio.gather(
            work.enqueue_many("work", [NewJob(1, "a"), NewJob(2, "b", delay=TOO_LATE)]),
            work.enqueue_many("work", [NewJob(3, "c"), NewJob(4, "d")]),
            return_exceptions=True,
        )
    assert isinstance(put[0], psycopg.DataError)
    assert stored(admin) == [3, 4]


async def test_an_app_that_waits_for_a_key_it_holds_itself_blocks_nobody_else(
    work: App, dsn: str, admin: Admin
) -> None:
    """Half of this cycle is in Python: no deadlock is found in it."""
    await work.enqueue("work", 0, key="held", revision="r0")
    others = [f"k{number:02}" for number in range(30)]
    loop = asyncio.get_running_loop()
    async with work, await psycopg.AsyncConnection.connect(dsn) as connection:
        async with connection.transaction(force_rollback=True):
            await work.enqueue("work", 1, key="held", revision="r1", conn=connection)
            began = loop.time()
            blocked = loop.create_task(work.enqueue("work", 2, key="held", revision="r2"))
            put = await asyncio.gather(*(work.enqueue("work", key=key, revision="r") for key in others))
            assert [each.status for each in put] == ["created"] * 30
            first = loop.time() - began
            put = await asyncio.gather(*(work.enqueue("work", key=key, revision="r2") for key in others))
            assert [each.status for each in put] == ["replaced"] * 30
            assert first < 2.5  # within its lock's time-out, and some halves of it; the deadline is at 5
            assert loop.time() - began - first < 1.5  # beside the one that waits
            assert not blocked.done()
        assert (await blocked).status == "replaced"
    assert row(admin, "held")["revision"] == "r2"


# --- cancelled callers ----------------------------------------------------------------------------------------------


@pytest.mark.ruling("2.7")
@pytest.mark.parametrize("native", [0, 1], ids=["anyio", "asyncio"])
@pytest.mark.parametrize("cancelled", [0, 7])
async def test_a_cancelled_caller_cancels_nobody_else(work: App, admin: Admin, cancelled: int, native: int) -> None:
    answers: dict[int, str] = {}

    async def put(number: int) -> None:
        answers[number] = (await work.enqueue("work", number)).status

    async def put_and_be_cancelled(number: int) -> None:
        if native:
            task = asyncio.get_running_loop().create_task(put(number))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task])
        else:
            with anyio.move_on_after(0.05):
                await put(number)

    async with work:
        await work.enqueue("work", -1)
        async with anyio.create_task_group() as group:
            with admin.transaction():
                admin.execute("lock table pgworker.jobs")
                for number in range(8):
                    group.start_soon(put_and_be_cancelled if number == cancelled else put, number)
                await anyio.sleep(0.1)  # it is cancelled while all of them wait for the table
                assert answers == {}
    assert answers == {number: "created" for number in range(8) if number != cancelled}
    assert set(stored(admin)) - {-1, cancelled} == answers.keys()


@pytest.mark.ruling("2.7")
async def test_one_that_is_cancelled_while_another_flush_is_under_way_is_not_put(work: App, admin: Admin) -> None:
    async with work, anyio.create_task_group() as group:
        with admin.transaction():
            admin.execute("lock table pgworker.jobs")
            group.start_soon(work.enqueue, "work", 1)
            await anyio.sleep(0.05)
            with anyio.move_on_after(0.05):
                await work.enqueue("work", 2)
            group.start_soon(work.enqueue, "work", 3)
            await anyio.sleep(0.05)
    assert sorted(stored(admin)) == [1, 3]


# --- lost answers ---------------------------------------------------------------------------------------------------


@pytest.mark.ruling("2.5", "2.7", "4.7")
@pytest.mark.parametrize("point", Point)
@pytest.mark.parametrize("cancelled", [0, 9])
async def test_sixteen_events_whose_commit_was_not_acknowledged_are_sixteen(
    far_app: App, proxy: Proxy, admin: Admin, point: Point, cancelled: int
) -> None:
    answers: dict[int, str] = {}
    scope = anyio.CancelScope()

    async def put(number: int) -> None:
        answers[number] = (await far_app.enqueue("work", number)).status

    async def put_and_be_cancelled(number: int) -> None:
        with scope:
            await put(number)

    async with far_app:
        await far_app.enqueue("work", "first")
        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                with admin.transaction():
                    admin.execute("lock table pgworker.jobs in exclusive mode")
                    for number in range(16):
                        group.start_soon(put_and_be_cancelled if number == cancelled else put, number)
                    with anyio.fail_after(5):
                        while sent(proxy, "insert_events") < 2:  # noqa: ASYNC110 - no event tells of it
                            await anyio.sleep(0.005)
                    scope.cancel()
                    proxy.set_trap(recognize("insert_events"), point)
    others = {number for number in range(16) if number != cancelled}
    assert answers == dict.fromkeys(others, "created")
    rows = stored(admin)
    assert len(rows) == len(set(map(str, rows)))
    assert others <= set(rows) <= {*others, cancelled, "first"}


@pytest.mark.ruling("4.7")
async def test_an_event_that_has_run_meanwhile_is_not_run_again(
    far_app: App, proxy: Proxy, hand: Hand, admin: Admin
) -> None:
    """Its worker was faster than the news that the answer was lost."""
    async with far_app:
        await far_app.enqueue("work", "first")
        hand.claim(1)

        def work_in_between(text: bytes) -> bool:
            if recognize("insert_missing_events")(text) and (claims := hand.claim(1)):
                hand.finish(claims[0])
            return False

        proxy.set_trap(recognize("insert_events"), Point.COMMITTED)
        proxy.set_trap(work_in_between, Point.BEFORE)
        assert (await far_app.enqueue("work", "second")).status == "created"
    assert proxy.fired == 1
    found = admin.execute("select state, generation from pgworker.jobs where payload = '\"second\"'").fetchall()
    assert found == [("succeeded", 1)]


@pytest.mark.ruling("4.7")
@pytest.mark.parametrize("point", [Point.RAN, Point.COMMITTED])
async def test_callers_with_keys_of_their_own_each_hear_that_it_is_unknown(
    far_app: App, proxy: Proxy, admin: Admin, point: Point
) -> None:
    async with far_app:
        await far_app.enqueue("work", key="first")
        proxy.set_trap(recognize("insert_jobs"), point)
        calls = [partial(far_app.enqueue, "work", number, key=f"k{number}", revision="r") for number in range(16)]
        with anyio.fail_after(10):
            put = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
        lost = [each for each in put if isinstance(each, psycopg.OperationalError)]
        assert len({id(error) for error in lost}) == len(lost) == 16
        again = await asyncio.gather(*(call() for call in calls))
    assert proxy.fired == 1
    assert {each.status for each in again} == {"unchanged" if point is Point.COMMITTED else "created"}
    assert len(stored(admin)) == 17
