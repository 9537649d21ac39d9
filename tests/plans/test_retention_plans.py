"""Retention reads what is to go and nothing of what stays, on tables that are nearly all the latter."""

from __future__ import annotations

from typing import Any

import pytest

from pgworker.operations import Shelf, expire_results, list_ended, prune_facts, prune_jobs
from pgworker.statements import Statement
from tests.databases import TABLES, Connection
from tests.handles import Hand
from tests.plans.test_plans import Explainer, fill, take_for_empty, without_autovacuum

NOBODYS = 2**40  # an id that says of what type ids are
DAY = 86_400.0


@pytest.fixture
def plans(hand: Hand) -> Explainer:
    return Explainer(hand.connection)


def leaves(admin: Connection) -> int:
    """How many tables `jobs` is: where it is partitioned, each partition is asked."""
    return max(1, len(admin.execute("select from pg_partition_tree('pgworker.jobs') where isleaf").fetchall()))


def prune(limit: int = 100) -> Statement[Any]:
    shelves = [Shelf("work", "failed", 30 * DAY), Shelf("work", "succeeded", 7 * DAY), Shelf("idle", "succeeded", DAY)]
    return prune_jobs(TABLES, shelves, limit=limit)


def kept_rows(admin: Connection, count: int) -> None:
    """Keyed jobs that retention has been at, some that have failed, and young ones; each with a result."""
    admin.execute(
        "insert into pgworker.jobs (kind, key, revision, state, finished_at, has_result, payload)"
        " select 'work', 's' || i, 'r', case when i %% 5 = 0 then 'failed' else 'succeeded' end,"
        " clock_timestamp() - (case when i %% 5 = 1 then 1 else 100 end) * interval '1 day' + i * interval '1 ms',"
        " true, case when i %% 5 < 2 then '{}'::jsonb end from generate_series(1, %s) i",
        (count,),
    )
    admin.execute(
        "insert into pgworker.results (kind, key, revision, value, finished_at)"
        " select kind, key, revision, '1', finished_at from pgworker.jobs where has_result"
    )


def old_rows(admin: Connection, count: int) -> None:
    """Events and keyed jobs that are to go, in turns, among the others by their age; each with a result."""
    admin.execute(
        "with old as (insert into pgworker.jobs (kind, key, event, state, finished_at, has_result, payload)"
        " select 'work', 'o' || i, i %% 2 = 0, 'succeeded',"
        " clock_timestamp() - interval '50 days' + i * interval '1 s', true, '{}'"
        " from generate_series(1, %s) i returning kind, key, revision, finished_at)"
        " insert into pgworker.results (kind, key, revision, value, finished_at)"
        " select kind, key, revision, '1', finished_at from old",
        (count,),
    )


@pytest.mark.ruling("1.7")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("old", [0, 2000])
@pytest.mark.parametrize("statistics", ["none", "emptied", "analyzed"])
def test_a_page_of_retention_reads_what_goes_and_nothing_of_what_stays(
    hand: Hand, admin: Connection, plans: Explainer, statistics: str, old: int
) -> None:
    without_autovacuum(admin)
    admin.execute("alter table pgworker.results set (autovacuum_enabled = off)")
    if statistics == "emptied":
        fill(admin, 1000)
        kept_rows(admin, 1000)
        take_for_empty(admin, "pgworker.jobs", "pgworker.results")
    kept = plans.prepare(prune())
    fill(admin, 5000, future=1000)
    kept_rows(admin, 40_000)
    old_rows(admin, old)
    if statistics == "analyzed":
        admin.execute("analyze pgworker.jobs")
        admin.execute("analyze pgworker.results")
    found = min(old, 100)
    for plan in (plans.prepared(kept, prune()), plans.fresh(prune())):
        assert not {"Seq Scan", "Bitmap Heap Scan"} & plan.types
        page = plan.part("page")
        assert not {"Sort", "Incremental Sort"} & page.types
        assert page.pages <= 2 * found + 15 * leaves(admin)
        assert page.filtered == 0
        assert plan.rows <= found + leaves(admin)
        assert plan.passed <= 2 * found + 5
        # looked at, locked, changed, its entries in three indexes; and its result likewise
        assert plan.pages <= 60 * leaves(admin) * max(1, found) + 15 * leaves(admin)
    if old:
        assert hand.send(prune())[1][:3] == (100, 50, 50)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["list_ended", "expire_results"])
def test_a_list_of_what_has_ended_reads_a_page_of_either_part(admin: Connection, plans: Explainer, name: str) -> None:
    without_autovacuum(admin)

    def page(after: tuple[str, int]) -> Statement[Any]:
        if name == "list_ended":
            return list_ended(TABLES, "work", "succeeded", after=after, until=None, code=None, limit=100)
        return expire_results(TABLES, Shelf("work", "succeeded", DAY, after), limit=100)

    kept = plans.prepare(page(("-infinity", NOBODYS)))
    kept_rows(admin, 40_000)
    old_rows(admin, 2000)
    (at,) = admin.execute("select finished_at::text from pgworker.jobs where key = 'o1000'").fetchone() or ("",)
    for plan in (plans.prepared(kept, page((str(at), 0))), plans.fresh(page((str(at), 0)))):
        assert "Seq Scan" not in plan.types
        for part in (plan.part("going"), plan.part("staying")):
            assert part.pages <= 2 * 100 + 15 * leaves(admin)
            assert part.filtered <= 1
            assert not {"Sort", "Incremental Sort"} & part.types


@pytest.mark.timeout(240)
@pytest.mark.parametrize("torn", [0, 30_000])
def test_a_page_of_the_journal_is_bounded_by_what_it_reads(
    hand: Hand, admin: Connection, plans: Explainer, torn: int
) -> None:
    admin.execute("alter table pgworker.facts set (autovacuum_enabled = off)")

    def page(after: int = 0) -> Statement[Any]:
        return prune_facts(TABLES, keep_seconds=30 * DAY, after=after, limit=100)

    kept = plans.prepare(page(NOBODYS))
    admin.execute(
        "insert into pgworker.facts (at, job_id, generation, attempts, kind, key, revision, what)"
        " select clock_timestamp() - interval '31 days' + i * interval '1 minute', i, 1, 0, 'work', 'k', '', 'enqueued'"
        " from generate_series(1, 40000) i"
    )

    after = 0
    if torn:
        (after,) = admin.execute("select min(id) + %s from pgworker.facts", [torn]).fetchone() or (0,)
    for plan in (plans.prepared(kept, page(int(after))), plans.fresh(page(int(after)))):
        assert not {"Seq Scan", "Sort"} & plan.types
        assert plan.rows <= 100
        assert plan.pages <= 100 * 6 + 20
    assert hand.send(page(int(after))).read == 100
