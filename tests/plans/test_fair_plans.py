"""The claim that is fair between tenants probes jobs_tenants once or twice a tenant, whatever the plan was made for."""

from __future__ import annotations

from typing import Any, TypeAlias
from uuid import uuid4

import psycopg
import pytest

from pgworker.fairness import Shares, claim_fair
from pgworker.statements import Statement
from pgworker.tablemap import TableMap
from tests.handles import Hand
from tests.plans.test_plans import LANE, Explainer, Plan, take_for_empty, without_autovacuum

Admin: TypeAlias = psycopg.Connection[Any]

FROM_AN_INDEX = {"Limit", "LockRows", "Index Scan", "Append", "Merge Append", "Result", "CTE Scan", "Nested Loop"}
PARTS = ("walk", "first", "more")


@pytest.fixture
def explainer(hand: Hand) -> Explainer:
    return Explainer(hand.connection)


def claim(limit: int = 100, *, served: str = "t5") -> Statement[Shares]:
    return claim_fair(
        TableMap(),
        LANE,
        limit=limit,
        token=uuid4(),
        runner="by hand",
        ttl_seconds=60.0,
        max_evictions=5,
        version=1,
        served=served,
    )


def fill(admin: Admin, ready: int, *, tenants: int, ended: int = 0, future: int = 0, strangers: int = 0) -> None:
    """Rows by SQL, with no statistics; `future` are of tenants without others, `strangers` of kinds without."""
    rows = [
        (
            "work",
            "t",
            ready,
            "clock_timestamp() - interval '1 hour' + i * interval '1 ms'",
            "pending",
            f"'t' || i %% {tenants}",
        ),
        ("work", "f", future, "clock_timestamp() + interval '1 hour'", "pending", "'f' || i"),
        ("work", "d", ended, "clock_timestamp()", "succeeded", f"'t' || i %% {tenants}"),
        ("plain", "p", strangers, "clock_timestamp()", "pending", "null"),
    ]
    for kind, key, count, at, state, tenant in rows:
        admin.execute(
            "insert into pgworker.jobs (kind, key, ready_at, state, finished_at, tenant, payload)"
            f" select %s, %s || i, {at}, %s, case %s when 'succeeded' then clock_timestamp() end, {tenant}, '{{}}'"
            " from generate_series(1, %s) i",
            [kind, key, state, state, count],
        )


def check(plan: Plan, *, taken: int, looks: int) -> None:
    for part in PARTS:
        assert not {"Seq Scan", "Sort"} & plan.part(part).types
    # (of partitions, each has an index of its own with a name made from the columns')
    indexes = {name for part in PARTS for name in plan.part(part).indexes if "kinds" not in name}
    assert all("tenant" in name for name in indexes), indexes
    walk, first = plan.part("walk"), plan.part("first")
    assert walk.pages <= 15 * looks + 60
    assert first.filtered <= taken + looks
    assert first.pages <= 25 * looks + 60
    assert plan.pages <= 25 * looks + 40 * taken + 160


SIZES: dict[str, dict[str, int]] = {
    "empty": {"ready": 0, "tenants": 1},
    "young": {"ready": 500, "tenants": 50},
    "one tenant": {"ready": 30_000, "tenants": 1},
    "few tenants": {"ready": 30_000, "tenants": 7},
    "many tenants": {"ready": 50_000, "tenants": 1000, "ended": 100_000, "strangers": 50_000},
    "a tenant a job": {"ready": 20_000, "tenants": 20_000},
}


@pytest.mark.contract("A19")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_fair_claim_reads_a_few_pages_a_tenant_and_what_it_takes(
    admin: Admin,
    explainer: Explainer,
    size: str,
    analyzed: bool,  # noqa: FBT001 - a parameter of the table of cases
) -> None:
    without_autovacuum(admin)
    kept = explainer.prepare(claim())
    fill(admin, **SIZES[size])
    if analyzed:
        admin.execute("analyze pgworker.jobs")
    looks, taken = min(SIZES[size]["tenants"], 100) + 1, min(SIZES[size]["ready"], 100)
    for plan in (explainer.prepared(kept, claim()), explainer.fresh(claim())):
        check(plan, taken=taken, looks=looks)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("analyzed", [False, True])
def test_tenants_of_whom_nothing_can_be_claimed_cost_so_many_looks(
    admin: Admin,
    explainer: Explainer,
    analyzed: bool,  # noqa: FBT001 - a parameter of the table of cases
) -> None:
    without_autovacuum(admin)
    kept = explainer.prepare(claim(served=""))
    fill(admin, 100, tenants=10, future=20_000)
    if analyzed:
        admin.execute("analyze pgworker.jobs")
    for plan in (explainer.prepared(kept, claim(served="")), explainer.fresh(claim(served=""))):
        check(plan, taken=100, looks=1000)


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
def test_a_plan_from_a_young_table_that_was_analysed_reads_no_more_once_it_has_grown(
    admin: Admin, explainer: Explainer
) -> None:
    without_autovacuum(admin)
    fill(admin, 500, tenants=20)
    admin.execute("analyze pgworker.jobs")
    kept = explainer.prepare(claim())
    admin.execute("update pgworker.jobs set key = 'old' || key")
    fill(admin, 30_000, tenants=1000)
    check(explainer.prepared(kept, claim()), taken=100, looks=200)


@pytest.mark.ruling("0.3")
@pytest.mark.timeout(120)
def test_a_table_that_is_taken_for_empty_is_probed_all_the_same(admin: Admin, explainer: Explainer) -> None:
    without_autovacuum(admin)
    fill(admin, 1000, tenants=20)
    take_for_empty(admin, "pgworker.jobs")
    kept = explainer.prepare(claim(1))
    fill(admin, 30_000, tenants=1000)
    for plan in (explainer.prepared(kept, claim()), explainer.fresh(claim())):
        check(plan, taken=100, looks=100)
        assert plan.rows <= 2 * 100
        assert plan.passed <= 2 * 100 * 100
