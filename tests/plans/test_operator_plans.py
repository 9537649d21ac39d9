"""The operator's statements read pages of an index, however many jobs there are."""

from __future__ import annotations

from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker import operations
from pgworker.statements import Lane, Statement
from pgworker.tablemap import TableMap
from tests.handles import Hand
from tests.plans.test_plans import Explainer, Plan, fill, take_for_empty, without_autovacuum

Admin: TypeAlias = psycopg.Connection[Any]
TABLES = TableMap()


@pytest.fixture
def plans(hand: Hand) -> Explainer:
    return Explainer(hand.connection)


def ended(admin: Admin, jobs: int, *, state: str = "failed") -> None:
    admin.execute(
        "insert into pgworker.jobs (kind, key, state, payload, last_code, finished_at)"
        " select 'work', 'e' || n, %s, '1', 'c' || n %% 2, clock_timestamp() - interval '1 day' + n * interval '1 ms'"
        " from generate_series(1, %s) n",
        (state, jobs),
    )


def both(explainer: Explainer, kept: str, statement: Statement[Any]) -> list[Plan]:
    """By the plan from the empty table, and by one made now."""
    plans = [explainer.prepared(kept, statement), explainer.fresh(statement)]
    for plan in plans:
        assert "Seq Scan" not in plan.types
    return plans


@pytest.mark.contract("A67")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", [None, "work"])
@pytest.mark.parametrize("analyzed", [False, True])
def test_lag_reads_a_bounded_part_of_a_big_table(
    hand: Hand,
    admin: Admin,
    plans: Explainer,
    *,
    analyzed: bool,
    kind: str | None,
) -> None:
    without_autovacuum(admin)
    kept = plans.prepare(operations.count_lag(TABLES, kind))
    fill(admin, 150_000, future=50_000, priorities=3)
    if analyzed:
        admin.execute("analyze pgworker.jobs")
    hand.claim(100)
    for plan in both(plans, kept, operations.count_lag(TABLES, kind)):
        # 10,001 rows for each of two counts: the index, and a row's page unless it is known to be visible
        assert plan.pages <= 2 * 10_001 + 500
        assert plan.rows <= 10_001
        # (a partition's has a name of its own)
        assert {index for index in plan.indexes if not index.endswith("_kind_class_priority_ready_at_id_idx")} <= {
            "jobs_ready"
        }
        assert plan.filtered <= 2 * 100 + 10  # the leased rows, for a count and for an age


def page_of(state: str, after: operations.Cursor) -> Statement[Any]:
    if state == "pending":
        return operations.list_pending(TABLES, Lane("work", 0, 0), after=after, limit=500)
    return operations.list_ended(TABLES, "work", "failed", after=after, until=None, code="c1", limit=500)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize(("state", "column"), [("failed", "finished_at"), ("pending", "ready_at")])
def test_a_page_of_a_list_is_read_and_no_more(
    admin: Admin, plans: Explainer, *, state: str, column: str, analyzed: bool
) -> None:
    without_autovacuum(admin)
    kept = plans.prepare(page_of(state, ("-infinity", 2**40)))  # an id that says of what type ids are
    fill(admin, 50_000, future=1000)
    ended(admin, 50_000)
    if analyzed:
        admin.execute("analyze pgworker.jobs")
    middle = f"select {column}::text, id from pgworker.jobs where state = '{state}' order by {column}, id offset 25000"
    row = admin.execute(middle.encode()).fetchone()
    assert row is not None
    for plan in both(plans, kept, page_of(state, (str(row[0]), int(row[1])))):
        assert plan.pages <= 60 + 2 * 500
        assert plan.rows <= 500 + 1
        assert plan.filtered <= 1  # the cursor's own row


@pytest.mark.timeout(240)
@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("verb", ["reopen", "cancel"])
def test_a_verb_probes_once_a_job(admin: Admin, plans: Explainer, verb: str, *, emptied: bool) -> None:
    without_autovacuum(admin)
    if emptied:
        fill(admin, 1000)
        take_for_empty(admin, "pgworker.jobs")

    def statement(ids: list[int]) -> Statement[Any]:
        if verb == "cancel":
            return operations.cancel_jobs(TABLES, "work", ids, facts=1)
        states: list[Any] = ["failed", "cancelled"]
        return operations.reopen_jobs(TABLES, "work", ids, states=states, what="retry_requested", code=None, facts=1)

    kept = plans.prepare(statement([1]))
    fill(admin, 30_000)
    ended(admin, 30_000)
    state = "pending" if verb == "cancel" else "failed"
    rows = admin.execute("select id from pgworker.jobs where state = %s limit 100", (state,)).fetchall()
    ids = [int(row[0]) for row in rows]
    for plan in both(plans, kept, statement(ids)):
        # both probes of a row, its new version and the index entries for it, and its fact
        assert plan.pages <= 60 * len(ids) + 100
        assert plan.filtered <= len(ids)
        assert plan.rows <= len(ids)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("emptied", [False, True])
def test_a_forgotten_job_is_found_by_its_key(admin: Admin, plans: Explainer, *, emptied: bool) -> None:
    without_autovacuum(admin)
    if emptied:
        fill(admin, 1000)
        take_for_empty(admin, "pgworker.jobs")
    kept = plans.prepare(operations.forget_job(TABLES, "work", "k1", facts=1))
    fill(admin, 30_000)
    admin.execute(
        "insert into pgworker.results (finished_at, kind, key, revision, value)"
        " select clock_timestamp(), 'work', 'k' || n, '', '1' from generate_series(1, 30000) n"
    )
    for plan in both(plans, kept, operations.forget_job(TABLES, "work", "k20000", facts=1)):
        assert plan.pages <= 60
        assert plan.rows <= 1
