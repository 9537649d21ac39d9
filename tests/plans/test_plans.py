"""Each statement walks the index that its header names, on empty, young and big tables, whatever the plan was made for.

A plan that was made on an empty table (as after any deploy) is kept by the session and used when the rows have come,
and the statistics may be missing then. So all of this runs without ANALYZE, too, and counts pages, never time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias
from uuid import uuid4

import psycopg
import pytest

from pgworker import operations
from pgworker.client import event_keys
from pgworker.job import Claim
from pgworker.outcome import Success
from pgworker.statements import (
    BEGINNING,
    Cursor,
    Insert,
    Lane,
    Statement,
    claim_jobs,
    finish_jobs,
    insert_events,
    insert_jobs,
    insert_missing_events,
    reap_expired,
    renew_leases,
    settle_jobs,
    survey_lanes,
)
from pgworker.tablemap import TableMap
from tests.handles import RETRY, Hand, age

Admin: TypeAlias = psycopg.Connection[Any]
TABLES = TableMap()
LANE = Lane("work", 0, 0)


@dataclass
class Plan:
    """What EXPLAIN (ANALYZE, BUFFERS) says of one statement."""

    root: dict[str, Any]

    def nodes(self, below: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        node = self.root if below is None else below
        yield node
        for child in node.get("Plans", []):
            yield from self.nodes(child)

    def part(self, cte: str) -> Plan:
        """The part that makes up one CTE."""
        return Plan(next(node for node in self.nodes() if node.get("Subplan Name") == f"CTE {cte}"))

    @property
    def pages(self) -> int:
        return int(self.root["Shared Hit Blocks"] + self.root["Shared Read Blocks"])

    @property
    def types(self) -> set[str]:
        return {node["Node Type"] for node in self.nodes()}

    @property
    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes() if "Index Name" in node}

    @property
    def filtered(self) -> int:
        return sum(int(node.get("Rows Removed by Filter", 0) * node["Actual Loops"]) for node in self.nodes())

    @property
    def passed(self) -> int:
        """The most rows that one node, a CTE's scan too, has handed on in all its loops: a join of n by n shows."""
        return max(int(node["Actual Rows"] * node["Actual Loops"]) for node in self.nodes())

    @property
    def rows(self) -> int:
        """The most rows that one scan has handed on to a join (which drops what does not match, and counts nothing)."""
        scans = [node for node in self.nodes() if "Relation Name" in node]
        return max(int(node["Actual Rows"] * node["Actual Loops"]) for node in scans)


class Explainer:
    """Explains statements as the runtime's session runs them: freshly planned, or by the plan prepared earlier."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.literal = psycopg.ClientCursor(connection)

    def fresh(self, statement: Statement[Any]) -> Plan:
        """By a plan made now for these values; what the statement did is rolled back."""
        with self.connection.transaction(force_rollback=True):
            self.literal.execute(b"explain (analyze, buffers, format json) " + statement.sql, statement.parameters)
            return self._plan()

    def prepared(self, name: str, statement: Statement[Any]) -> Plan:
        """By the plan that the session keeps under this name; what the statement did is rolled back."""
        arguments = self._arguments(statement)
        places = ", ".join(["%s"] * len(arguments))
        with self.connection.transaction(force_rollback=True):
            query = f"explain (analyze, buffers, format json) execute {name}({places})"
            self.literal.execute(query.encode(), arguments)
            return self._plan()

    def prepare(self, statement: Statement[Any]) -> str:
        """Run it once, planned for all values alike; its name in the session."""
        self.connection.execute(statement.sql, statement.parameters, prepare=True)
        # by the driver's number: the time of two may be the same, or go backwards
        newest = (
            "select name, generic_plans from pg_prepared_statements"
            " order by substring(name from '[0-9]+$')::int desc limit 1"
        )
        found = self.literal.execute(newest).fetchone()
        assert found is not None
        assert found[1] > 0, "not planned for all values: this test would prove nothing"
        return str(found[0])

    @staticmethod
    def _arguments(statement: Statement[Any]) -> list[object]:
        """The parameters in the order in which psycopg numbers them: by first mention in the text."""
        names = sorted(statement.parameters, key=lambda name: statement.sql.index(f"%({name})s".encode()))
        return [statement.parameters[name] for name in names]

    def _plan(self) -> Plan:
        row = self.literal.fetchone()
        assert row is not None
        value = row[0] if not isinstance(row[0], str) else json.loads(row[0])
        return Plan(value[0]["Plan"])


@pytest.fixture
def explainer(hand: Hand) -> Explainer:
    return Explainer(hand.connection)


def fill(admin: Admin, ready: int, *, ended: int = 0, future: int = 0, priorities: int = 1) -> None:
    """Rows by SQL, with no statistics: autovacuum stays away until `analyze` is asked for."""
    admin.execute(
        "insert into pgworker.jobs (kind, key, revision, ready_at, priority, payload)"
        " select 'work', 'k' || i, 'r', clock_timestamp() - interval '1 hour' + i * interval '1 ms', i %% %s, '{}'"
        " from generate_series(1, %s) i",
        (priorities, ready),
    )
    admin.execute(
        "insert into pgworker.jobs (kind, key, revision, ready_at, payload)"
        " select 'work', 'f' || i, 'r', clock_timestamp() + interval '1 hour', '{}' from generate_series(1, %s) i",
        (future,),
    )
    admin.execute(
        "insert into pgworker.jobs (kind, key, revision, state, finished_at, payload)"
        " select 'work', 'd' || i, 'r', 'succeeded', clock_timestamp(), '{}' from generate_series(1, %s) i",
        (ended,),
    )


def without_autovacuum(admin: Admin) -> None:
    """Keep the tables as a test makes them, from nothing on: the dead rows of earlier tests would be read, too."""
    admin.execute("truncate pgworker.jobs")
    found = admin.execute(
        "select oid::regclass::text from pg_class"
        " where relnamespace = 'pgworker'::regnamespace and relkind = 'r' and relname like 'jobs%'"
    ).fetchall()
    for (name,) in found:
        admin.execute(f"alter table {name} set (autovacuum_enabled = off)")


def take_for_empty(admin: Admin, *tables: str) -> None:
    """Leave tables that hold no rows but have pages: the planner then believes that they stay so, however they grow."""
    for table in tables:
        admin.execute(f"delete from {table}")
        give_up_at = time.monotonic() + 10
        while not is_taken_for_empty(admin, table):  # autovacuum may just have an older snapshot, for its analyze
            assert time.monotonic() < give_up_at
            admin.execute(f"vacuum (truncate off) {table}")
        admin.execute(f"reindex table {table}")  # whatever the tests before have left in them


def is_taken_for_empty(admin: Admin, table: str) -> bool:
    partitions = admin.execute(
        "select relpages, reltuples from pg_class where oid = %s::regclass and relkind = 'r'"
        " union all select relpages, reltuples from pg_class join pg_inherits on oid = inhrelid"
        " where inhparent = %s::regclass",
        (table, table),
    ).fetchall()
    return any(pages > 0 and rows == 0 for pages, rows in partitions)


def claim(limit: int, after: Cursor = BEGINNING) -> Statement[list[Claim]]:
    token = uuid4()
    return claim_jobs(
        TABLES,
        LANE,
        limit=limit,
        token=token,
        runner="by hand",
        ttl_seconds=60.0,
        max_evictions=5,
        version=1,
        after=after,
    )


def insert(count: int) -> Statement[Any]:
    rows = [Insert(f"new{index}", "r", 0, 0, 0.0, None, None, "{}") for index in range(count)]
    return insert_jobs(TABLES, "work", rows, version=1, keep=False)


def insert_of_events(name: str, count: int) -> Statement[Any]:
    rows = [Insert(key, "", 0, 0, 0.0, None, None, "{}") for key in islice(event_keys(), count)]
    if name == "insert_events":
        return insert_events(TABLES, "work", rows, version=1)
    return insert_missing_events(TABLES, "work", rows, version=1, facts=2)


def fenced(name: str, claims: list[Claim]) -> Statement[Any]:
    match name:
        case "finish_jobs":
            return finish_jobs(TABLES, "work", [(each, Success("1")) for each in claims])
        case "settle_jobs":
            return settle_jobs(TABLES, "work", [(each, RETRY) for each in claims])
        case _:
            return renew_leases(TABLES, [(each, 60.0) for each in claims])


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["finish_jobs", "settle_jobs", "renew_leases"])
def test_a_plan_from_the_empty_table_probes_once_a_row(
    hand: Hand, admin: Admin, explainer: Explainer, name: str
) -> None:
    without_autovacuum(admin)
    hand.enqueue("only", "r")
    kept = explainer.prepare(fenced(name, hand.claim()))
    fill(admin, 30_000)
    claims = hand.claim(100)
    assert len(claims) == 100
    for plan in (explainer.prepared(kept, fenced(name, claims)), explainer.fresh(fenced(name, claims))):
        assert "Seq Scan" not in plan.types
        # both probes of a row, its new version and the index entries for it; a plan gone wrong reads all 30,000 rows
        assert plan.pages <= 60 * len(claims) + 100
        assert plan.filtered <= len(claims)
        assert plan.rows <= len(claims)


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
def test_an_insert_planned_on_the_empty_table_probes_once_a_key(hand: Hand, admin: Admin, explainer: Explainer) -> None:
    without_autovacuum(admin)
    kept = explainer.prepare(insert(1))
    fill(admin, 30_000)
    for plan in (explainer.prepared(kept, insert(100)), explainer.fresh(insert(100))):
        assert plan.pages <= 60 * 100 + 100
        assert plan.filtered <= 2 * 100  # what was seen of each key is asked for twice: is it unchanged, may it rise
        assert plan.rows <= 100
    assert hand.claim(1)


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("size", ["empty", "young", "big"])
@pytest.mark.parametrize("name", ["insert_events", "insert_missing_events"])
def test_an_insert_of_events_looks_nothing_up(
    admin: Admin,
    explainer: Explainer,
    name: str,
    size: str,
    analyzed: bool,  # noqa: FBT001 - a parameter of the table of cases
) -> None:
    without_autovacuum(admin)
    kept = explainer.prepare(insert_of_events(name, 1))
    fill(admin, **TABLE_SIZES[size])
    if analyzed:
        admin.execute("analyze pgworker.jobs")
    events = insert_of_events(name, 100)
    for plan in (explainer.prepared(kept, events), explainer.fresh(events)):
        assert not [node for node in plan.nodes() if "Relation Name" in node and node["Node Type"] != "ModifyTable"]
        assert plan.pages <= 30 * 100 + 100  # to put it into the table and three indexes


@pytest.mark.timeout(120)
@pytest.mark.parametrize("revision", ["r", "r2"])
def test_an_insert_of_known_keys_looks_at_each_once(admin: Admin, explainer: Explainer, revision: str) -> None:
    """Not once for each other: the planner expects ten keys, and 20,000 unchanged ones had taken 6 s."""
    without_autovacuum(admin)
    kept = explainer.prepare(insert(1))
    fill(admin, 1000)
    rows = [Insert(f"k{index}", revision, 0, 0, 0.0, None, None, "{}") for index in range(1, 1001)]
    known = insert_jobs(TABLES, "work", rows, version=1, keep=False)
    for plan in (explainer.prepared(kept, known), explainer.fresh(known)):
        assert plan.passed <= 2 * 1000


TABLE_SIZES = {
    "empty": {"ready": 0},
    "young": {"ready": 500},
    "big": {"ready": 50_000, "ended": 200_000, "future": 20_000},
}


@pytest.mark.contract("A19")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("size", TABLE_SIZES)
def test_a_claim_reads_what_it_takes(
    admin: Admin,
    explainer: Explainer,
    size: str,
    analyzed: bool,  # noqa: FBT001 - a parameter of the table of cases
) -> None:
    without_autovacuum(admin)
    kept = explainer.prepare(claim(100))
    fill(admin, **TABLE_SIZES[size])
    if analyzed:
        admin.execute("analyze pgworker.jobs")
    for plan in (explainer.prepared(kept, claim(100)), explainer.fresh(claim(100))):
        pick = plan.part("pick")
        assert pick.types <= {"Limit", "LockRows", "Index Scan", "Append", "Merge Append", "Result", "CTE Scan"}
        # LockRows reads and dirties each row it takes, beside the scan that finds it
        assert pick.pages <= 3 * 100 + 30
        assert pick.filtered <= 100
        assert plan.pages <= 30 * 100 + 100  # with the update of each row, which must find it by the primary key


@pytest.mark.contract("A19")
@pytest.mark.timeout(120)
def test_a_claim_that_is_not_filled_reads_nothing_of_what_is_planned(admin: Admin, explainer: Explainer) -> None:
    without_autovacuum(admin)
    kept = explainer.prepare(claim(100))
    fill(admin, 50, future=20_000)
    for plan in (explainer.prepared(kept, claim(100)), explainer.fresh(claim(100))):
        pick = plan.part("pick")
        assert pick.filtered == 0
        assert pick.pages <= 3 * 50 + 30


@pytest.mark.contract("A19")
@pytest.mark.timeout(120)
def test_a_claim_that_begins_behind_others_reads_nothing_of_these(
    hand: Hand, admin: Admin, explainer: Explainer
) -> None:
    without_autovacuum(admin)
    kept = explainer.prepare(claim(100))
    fill(admin, 11_000)
    last = hand.claim(10_000)[-1]
    behind = claim(100, (last.ready_at, last.id))
    for plan in (explainer.prepared(kept, behind), explainer.fresh(behind)):
        pick = plan.part("pick")
        assert pick.filtered == 0
        assert pick.pages <= 3 * 100 + 30


@pytest.mark.ruling("0.4")
@pytest.mark.timeout(120)
def test_a_survey_of_many_lanes_reads_a_few_pages_a_lane(hand: Hand, admin: Admin, explainer: Explainer) -> None:
    without_autovacuum(admin)
    kept = explainer.prepare(survey_lanes(TABLES, ["work"]))
    fill(admin, 30_000, future=20_000, priorities=20)
    leaves = admin.execute("select count(*) from pg_partition_tree('pgworker.jobs') where isleaf").fetchone()
    assert leaves is not None
    survey = survey_lanes(TABLES, ["work"])
    for plan in (explainer.prepared(kept, survey), explainer.fresh(survey)):
        assert plan.pages <= (20 * 12 + 30) * max(1, leaves[0])  # where jobs is partitioned, each partition is asked
    assert hand.lanes() == [Lane("work", 0, priority) for priority in range(20)]


@pytest.mark.ruling("1.7")
@pytest.mark.timeout(120)
def test_a_page_of_the_reaper_is_bounded_by_what_it_reads(hand: Hand, admin: Admin, explainer: Explainer) -> None:
    without_autovacuum(admin)
    statement = reap_expired(TABLES, LANE, limit=1000, ttl_seconds=60.0, max_evictions=5, after=BEGINNING)
    kept = explainer.prepare(statement)
    fill(admin, 30_000)
    hand.claim(50, ttl_seconds=0.0)
    for plan in (explainer.prepared(kept, statement), explainer.fresh(statement)):
        assert plan.part("page").pages <= 3 * 1000 + 30
        assert not {"Seq Scan", "Sort"} & plan.part("page").types


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["claim_jobs", "finish_jobs", "settle_jobs", "renew_leases", "insert_jobs"])
def test_a_plan_from_a_young_table_that_was_analysed_reads_no_more_once_it_has_grown(
    hand: Hand, admin: Admin, explainer: Explainer, name: str
) -> None:
    """Statistics that say 500 rows make a walk over all of them look as good as 100 probes."""
    without_autovacuum(admin)
    fill(admin, 500)
    admin.execute("analyze pgworker.jobs")

    def statement() -> Statement[Any]:
        match name:
            case "claim_jobs":
                return claim(100)
            case "insert_jobs":
                return insert(100)
            case _:
                return fenced(name, hand.claim(100))

    kept = explainer.prepare(statement())
    admin.execute("update pgworker.jobs set key = 'old' || key")
    fill(admin, 30_000)
    plan = explainer.prepared(kept, statement())
    assert plan.rows <= 2 * 100
    assert plan.pages <= 60 * 100 + 100


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", ["claim_jobs", "finish_jobs", "settle_jobs", "renew_leases", "reap_expired", "insert_jobs"]
)
def test_a_table_that_is_taken_for_empty_is_probed_all_the_same(
    hand: Hand, admin: Admin, explainer: Explainer, name: str
) -> None:
    """Without an array of ids in the joins, 100 rows of 30,000 took half a second, until the next analyze."""
    without_autovacuum(admin)
    fill(admin, 1000)
    take_for_empty(admin, "pgworker.jobs")

    def statement(count: int) -> Statement[Any]:
        match name:
            case "claim_jobs":
                return claim(count)
            case "reap_expired":
                hand.claim(count)
                age(admin, 3600)
                return reap_expired(TABLES, LANE, after=BEGINNING, limit=count, ttl_seconds=60.0, max_evictions=5)
            case "insert_jobs":  # which promote waiting catch-up work
                keys = [f"k{number}" for number in range(1, 1 + count)]
                rows = [Insert(key, "r", 0, 0, 0.0, None, None, "{}") for key in keys]
                return insert_jobs(TABLES, "work", rows, version=1, keep=False)
            case _:
                return fenced(name, hand.claim(count))

    fill(admin, 1)
    kept = explainer.prepare(statement(1))
    admin.execute("update pgworker.jobs set key = 'old' || key")
    fill(admin, 30_000)
    if name == "insert_jobs":
        admin.execute("update pgworker.jobs set class = 1")
    large = statement(100)
    for plan in (explainer.prepared(kept, large), explainer.fresh(large)):
        assert plan.pages <= 60 * 100 + 100
        assert plan.rows <= 2 * 100
        assert plan.passed <= 2 * 100 * 100


BY_KEY = {
    "insert": (insert(1), insert(100)),
    "results": tuple(operations.read_results(TABLES, [("work", f"k{n}") for n in range(1, 1 + m)]) for m in (1, 100)),
    "find": (operations.find_job(TABLES, "work", "k1"), operations.find_job(TABLES, "work", "k29999")),
    "forget": tuple(operations.forget_job(TABLES, "work", key, facts=0) for key in ("k1", "k29999")),
}


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "part"), [("insert", "looked"), ("results", None), ("find", None), ("forget", "seen")]
)
def test_a_plan_from_a_table_with_a_bloated_index_of_keys_looks_up_by_the_key_all_the_same(
    admin: Admin, explainer: Explainer, name: str, part: str | None
) -> None:
    """Where the index of keys is deep and that of ids is not, a walk over the whole kind looks as cheap as a probe."""
    without_autovacuum(admin)
    fill(admin, 20_000)
    admin.execute("update pgworker.jobs set key = repeat('x', 400) || key")
    admin.execute("delete from pgworker.jobs")
    admin.execute("reindex index pgworker.jobs_pkey")
    admin.execute("vacuum (index_cleanup off) pgworker.jobs")
    small, large = BY_KEY[name]
    kept = explainer.prepare(small)
    fill(admin, 30_000)
    plan = explainer.prepared(kept, large)
    lookup = plan if part is None else plan.part(part)
    assert lookup.pages <= 10 * 100
    assert lookup.rows <= 100
    assert lookup.filtered == 0
