"""The statements over an app's own table walk its two indexes, whatever the plan was made for; see test_plans.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias
from uuid import uuid4

import psycopg
import pytest

from pgworker.db import send_sync
from pgworker.job import Claim
from pgworker.outcome import Success
from pgworker.queue import RowsQueue
from pgworker.statements import Lane, Statement
from pgworker.tablecheck import inspect
from pgworker.tablemap import TableMap
from pgworker.tablestatements import survey_table
from tests.adapters import KIND, Adapter, Messages, Threads
from tests.handles import RETRY, Hand
from tests.plans.test_plans import Explainer, Plan, take_for_empty

Admin: TypeAlias = psycopg.Connection[Any]
LANE = Lane(KIND, 0, 0)

FILL: dict[type[Adapter], str] = {
    Messages: "insert into crawl.messages (message_id, body, embed_at, embed_state)"
    " select %(from)s + i, 'b', clock_timestamp() + %(shift)s::interval + i * interval '1 ms', %(state)s"
    " from generate_series(1, %(rows)s) i",
    Threads: 'insert into crawl."Thread Vectors" ("Thread-Id", title, "contentHash", "not before", progress)'
    " select 'k' || (%(from)s + i), 't', 'h', clock_timestamp() + %(shift)s::interval + i * interval '1 ms',"
    " %(state)s::crawl.progress from generate_series(1, %(rows)s) i",
}
TABLES: dict[type[Adapter], str] = {Messages: "crawl.messages", Threads: 'crawl."Thread Vectors"'}


class Own:
    """An app's table without statistics, and the queue in it."""

    def __init__(self, admin: Admin, adapter: Adapter, hand: Hand) -> None:
        adapter.create(admin)
        admin.execute(f"alter table {TABLES[type(adapter)]} set (autovacuum_enabled = off)")
        queue = adapter.open(hand.connection)
        assert isinstance(queue, RowsQueue)
        self.admin, self.adapter, self.hand, self.queue = admin, adapter, hand, queue
        self.explainer = Explainer(hand.connection)
        self._rows = 0

    def fill(self, rows: int, *, shift: str = "-1 hour", state: str = "pending") -> None:
        values = {"from": self._rows, "rows": rows, "shift": shift, "state": dict(self.adapter.states)[state]}  # type: ignore[index]
        self.admin.execute(FILL[type(self.adapter)].encode(), values)
        self._rows += rows

    def claim(self, limit: int) -> Statement[list[Claim]]:
        return self.queue.claim(LANE, limit=limit, token=uuid4(), runner="r")

    def take(self, limit: int) -> list[Claim]:
        return send_sync(self.hand.connection, self.claim(limit))


@pytest.fixture(params=[Messages, Threads], ids=lambda adapter: adapter.name)
def own(request: pytest.FixtureRequest, admin: Admin, hand: Hand) -> Iterator[Own]:
    yield Own(admin, request.param(), hand)
    hand.connection.close()
    admin.execute("drop schema crawl cascade")


FENCED: dict[str, Callable[[RowsQueue, list[Claim]], Statement[Any]]] = {
    "table_finish": lambda queue, claims: queue.finish([(claim, Success("1")) for claim in claims]),
    "table_settle": lambda queue, claims: queue.settle([(claim, RETRY) for claim in claims]),
    "table_renew": lambda queue, claims: queue.renewals([(claim, 60.0) for claim in claims]),
    "table_renew, only looked": lambda queue, claims: queue.renewals([(claim, None) for claim in claims]),
}
PROBED = [
    (adapter, name)
    for adapter in TABLES
    for name in ("table_claim", "table_finish", "table_settle", "table_renew", "table_reap")
    if name != "table_reap" or "evictions" in adapter.columns  # else there is nothing to reap
]


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("name", FENCED)
def test_a_plan_from_the_empty_table_probes_once_a_row(
    own: Own,
    name: str,
    analyzed: bool,  # noqa: FBT001 - a parameter of the table of cases
) -> None:
    own.fill(1)
    kept = own.explainer.prepare(FENCED[name](own.queue, own.take(1)))
    own.fill(30_000)
    if analyzed:
        own.admin.execute(f"analyze {TABLES[type(own.adapter)]}")
    claims = own.take(100)
    assert len(claims) == 100
    statement = FENCED[name](own.queue, claims)
    for plan in (own.explainer.prepared(kept, statement), own.explainer.fresh(statement), in_apply(own, statement)):
        assert plan.pages <= 60 * len(claims) + 100
        assert plan.filtered <= len(claims)
        assert plan.rows <= len(claims)
        assert "Seq Scan" not in plan.types


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("own", "name"), PROBED, indirect=["own"])
def test_a_table_that_is_taken_for_empty_is_probed_all_the_same(own: Own, name: str) -> None:
    own.fill(1000)
    take_for_empty(own.admin, TABLES[type(own.adapter)])

    def statement(count: int) -> Statement[Any]:
        match name:
            case "table_claim":
                return own.claim(count)
            case "table_reap":
                own.take(count)
                own.adapter.age(own.admin, 3600)
                return own.queue.reap(LANE, limit=count)
            case _:
                return FENCED[name](own.queue, own.take(count))

    own.fill(1)
    kept = own.explainer.prepare(statement(1))
    own.admin.execute(f"delete from {TABLES[type(own.adapter)]}")
    own.fill(30_000)
    large = statement(100)
    for plan in (own.explainer.prepared(kept, large), own.explainer.fresh(large)):
        assert plan.rows <= 2 * 100
        assert plan.passed <= 2 * 100 * 100


def in_apply(own: Own, statement: Statement[Any]) -> Plan:
    """By the planner as the app's own statements have it, in a completion that they are part of."""
    with own.hand.connection.transaction():
        send_sync(own.hand.connection, own.queue.check(own.take(1)[0]))
        return own.explainer.fresh(statement)


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
def test_a_check_planned_on_the_empty_table_reads_one_row(own: Own) -> None:
    own.fill(1)
    kept = own.explainer.prepare(own.queue.check(own.take(1)[0]))
    own.fill(30_000)
    (claim,) = own.take(1)
    for plan in (own.explainer.prepared(kept, own.queue.check(claim)), own.explainer.fresh(own.queue.check(claim))):
        assert plan.pages <= 20


SIZES = {"empty": {}, "young": {"pending": 500}, "big": {"pending": 50_000, "ended": 100_000, "future": 20_000}}


@pytest.mark.contract("A19")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_claim_reads_what_it_takes(
    own: Own,
    size: str,
    analyzed: bool,  # noqa: FBT001 - a parameter of the table of cases
) -> None:
    kept = own.explainer.prepare(own.claim(100))
    rows = SIZES[size]
    own.fill(rows.get("pending", 0))
    own.fill(rows.get("ended", 0), state="succeeded")
    own.fill(rows.get("future", 0), shift="1 hour")
    if analyzed:
        own.admin.execute(f"analyze {TABLES[type(own.adapter)]}")
    for plan in (own.explainer.prepared(kept, own.claim(100)), own.explainer.fresh(own.claim(100))):
        pick = plan.part("pick")
        assert pick.types <= {"Limit", "LockRows", "Index Scan", "Result", "CTE Scan"}
        assert pick.indexes <= {"messages_to_embed", "threads_to_do"}
        assert pick.pages <= 3 * 100 + 30
        assert pick.filtered <= 100
        assert plan.pages <= 40 * 100 + 100  # with two indexes' entries for each new version of a row
        assert plan.rows <= 100


@pytest.mark.timeout(120)
def test_a_survey_reads_a_few_pages_a_lane(own: Own) -> None:
    kept = own.explainer.prepare(own.queue.survey())
    own.fill(10_000, state="succeeded")
    own.fill(30_000)
    own.fill(10_000, shift="1 hour")
    if own.adapter.name == "messages":
        own.admin.execute("update crawl.messages set embed_rank = message_id % 10")
    own.take(100)
    for plan in (own.explainer.prepared(kept, own.queue.survey()), own.explainer.fresh(own.queue.survey())):
        # (a hundred leased rows at the head of the first lane)
        assert plan.pages <= 11 * 12 + 3 * 100 + 30
    assert len(send_sync(own.hand.connection, own.queue.survey())) == (10 if own.adapter.name == "messages" else 1)


@pytest.mark.ruling("0.4")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("mapped", "lanes"), [("urgency", 2), ("priority", 10)])
def test_a_survey_of_a_table_with_half_a_lane_reads_a_few_pages_a_lane(
    admin: Admin, hand: Hand, mapped: str, lanes: int
) -> None:
    """Each lane is found by a probe of the index, not by reading the one before it."""
    messages = Messages()
    queue = replace(messages.queue, urgency=None) if mapped == "priority" else replace(messages.queue, priority=None)
    messages.create(admin)
    column = messages.columns[mapped]
    admin.execute(
        f"drop index crawl.messages_to_embed; create index on crawl.messages ({column}, embed_at, message_id)"
        " where embed_state = 0 and not private and body not like '%\"secret\"%'"
    )
    admin.execute(
        f"insert into crawl.messages (message_id, body, {column})"
        " select i, 'b', i %% %s from generate_series(1, 30000) i",
        [lanes],
    )
    survey = survey_table(inspect(hand.connection, TableMap(), KIND, queue), TableMap(), KIND)
    assert Explainer(hand.connection).fresh(survey).pages <= 12 * (lanes + 2)
    assert len(send_sync(hand.connection, survey)) == lanes
    admin.execute("drop schema crawl cascade")


@pytest.mark.ruling("1.7")
@pytest.mark.timeout(120)
def test_a_page_of_the_reaper_is_bounded_by_what_it_reads(own: Own) -> None:
    first = own.queue.reap(LANE, limit=1000)
    if own.adapter.name == "threads":
        assert first.sql == b"select where false"
        return
    kept = own.explainer.prepare(first)
    own.fill(30_000)
    own.take(50)
    own.adapter.age(own.admin, 60)
    cursor = send_sync(own.hand.connection, first).cursor
    assert cursor is not None
    later = own.queue.reap(LANE, limit=1000, after=cursor)
    for plan in (own.explainer.prepared(kept, first), own.explainer.fresh(first), own.explainer.fresh(later)):
        assert plan.rows <= 1000
        assert plan.pages <= 3 * 1000 + 30 * 50 + 100  # and no probe for those whose lease holds
        page = plan.part("page")
        assert page.pages <= 3 * 1000 + 30
        assert not {"Seq Scan", "Sort"} & page.types
