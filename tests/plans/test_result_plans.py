"""The statements about results probe once a key, and read no more of the ended jobs than a page."""

from __future__ import annotations

import psycopg
import pytest

from pgworker.operations import BEGINNING, Cursor, PrunedResults, Seen, Shelf, expire_results, read_results
from pgworker.outcome import Success
from pgworker.statements import Statement, finish_jobs
from tests.databases import TABLES, Connection
from tests.handles import Hand
from tests.plans.test_plans import Explainer, fill, take_for_empty, without_autovacuum


@pytest.fixture
def results_explainer(hand: Hand) -> Explainer:
    return Explainer(hand.connection)


def fill_results(admin: psycopg.Connection[tuple[object, ...]], ended: int) -> None:
    """Ended jobs, a second apart, the newest now; each has a result."""
    fill(admin, 0, ended=ended)
    admin.execute(
        "update pgworker.jobs set has_result = true,"
        " finished_at = clock_timestamp() - substr(key, 2)::int * interval '1 s' where key like 'd%'"
    )
    admin.execute(
        "insert into pgworker.results (kind, key, revision, value, finished_at)"
        " select kind, key, revision, '1', finished_at from pgworker.jobs where has_result"
    )


def read(count: int) -> Statement[list[Seen]]:
    return read_results(TABLES, [("work", f"d{number}") for number in range(1, count + 1)])


def expire(after: Cursor = BEGINNING) -> Statement[PrunedResults]:
    return expire_results(TABLES, Shelf("work", "succeeded", 10_000, after), limit=100)


@pytest.mark.ruling("2.14")
@pytest.mark.timeout(120)
def test_reading_results_probes_once_a_key(hand: Hand, admin: Connection, results_explainer: Explainer) -> None:
    without_autovacuum(admin)
    kept = results_explainer.prepare(read(1))
    fill_results(admin, 30_000)
    leaves = len(admin.execute("select from pg_partition_tree('pgworker.jobs') where isleaf").fetchall())
    for plan in (results_explainer.prepared(kept, read(100)), results_explainer.fresh(read(100))):
        assert "Seq Scan" not in plan.types
        assert plan.pages <= 100 * (8 + 4 * max(1, leaves)) + 50
        assert plan.rows <= 100
        assert plan.filtered == 0
    assert [(seen.key, seen.value) for seen in hand.send(read(3))] == [("d1", "1"), ("d2", "1"), ("d3", "1")]


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
def test_a_success_without_a_value_drops_the_older_ones_by_their_keys(
    hand: Hand, admin: Connection, results_explainer: Explainer
) -> None:
    without_autovacuum(admin)
    fill_results(admin, 1)
    take_for_empty(admin, "pgworker.results")
    admin.execute("delete from pgworker.jobs")
    hand.enqueue("only")
    kept = results_explainer.prepare(finish_jobs(TABLES, "work", [(hand.claim()[0], Success(None))]))
    fill_results(admin, 30_000)
    admin.execute(
        "update pgworker.jobs set state = 'pending', finished_at = null, ready_at = clock_timestamp()"
        " where id in (select id from pgworker.jobs where has_result order by id limit 100)"
    )
    finish = finish_jobs(TABLES, "work", [(claim, Success(None)) for claim in hand.claim(100)])
    for plan in (results_explainer.prepared(kept, finish), results_explainer.fresh(finish)):
        dropped = plan.part("dropped")
        assert dropped.root["Plans"][0]["Actual Rows"] == 100
        assert dropped.passed <= 2 * 100


@pytest.mark.ruling("2.14")
@pytest.mark.timeout(120)
def test_a_page_of_old_results_is_bounded_by_what_it_reads(
    hand: Hand, admin: Connection, results_explainer: Explainer
) -> None:
    without_autovacuum(admin)
    kept = results_explainer.prepare(expire((BEGINNING[0], 2**40)))  # an id that says of what type ids are
    fill_results(admin, 30_000)
    middle = hand.send(expire())
    assert (middle.read, middle.deleted) == (100, 100)
    assert middle.cursor is not None
    leaves = len(admin.execute("select from pg_partition_tree('pgworker.jobs') where isleaf").fetchall())
    for plan in (
        results_explainer.prepared(kept, expire(middle.cursor)),
        results_explainer.fresh(expire(middle.cursor)),
    ):
        assert "Seq Scan" not in plan.types
        assert plan.part("page").pages <= 100 + 30 * max(1, leaves)
        assert plan.rows <= 100 + max(1, leaves)
        assert plan.pages <= 100 * 15 + 200
    assert hand.send(expire(middle.cursor)).deleted == 100
