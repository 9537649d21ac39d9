"""Each statement of the runtime is killed before it, after it, and after its commit but before the answer.

The statements are those in the folder pgworker/queries, whatever its files are; each needs a scenario, in which the
runtime comes to send it while jobs are being done. Three injections a statement; one that did not fire fails.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest

import pgworker.maintenance
import pgworker.retention
import pgworker.waits
from tests.chaos.audit import Admin
from tests.chaos.proxy import Point, proxied
from tests.chaos.scenarios import SCENARIOS, Scenario
from tests.chaos.stage import STATEMENTS, Stage, build, check, pieces, recognize, working
from tests.handles import Hand


@pytest.fixture
def stage(dsn: str, hand: Hand, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    for name in ("REAP_EVERY", "REPORT_EVERY"):
        monkeypatch.setattr(pgworker.maintenance, name, timedelta(seconds=0.1))
    monkeypatch.setattr(pgworker.retention, "PRUNE_EVERY", timedelta(seconds=0.1))
    monkeypatch.setattr(pgworker.waits, "POLL_SECONDS", 0.1)
    with proxied(dsn) as proxy:
        stage = Stage(proxy, hand, admin)
        build(stage)
        yield stage


def test_each_statement_has_a_scenario() -> None:
    missing = [statement for statement in STATEMENTS if statement not in SCENARIOS]
    assert not missing, f"statement {', '.join(missing)} has no scenario: add one to SCENARIOS"
    gone = sorted(SCENARIOS.keys() - set(STATEMENTS))
    assert not gone, f"scenario without a statement in pgworker/queries: {', '.join(gone)}"


def test_no_statement_is_taken_for_another() -> None:
    for sent in STATEMENTS:
        text = b"$1".join(pieces(sent))
        assert [statement for statement in STATEMENTS if recognize(statement)(text)] == [sent]


async def crash(stage: Stage, statement: str, point: Point) -> None:
    stage.trap(statement, point)
    scenario = SCENARIOS.get(statement)
    assert scenario is not None, f"statement {statement} has no scenario: add one to SCENARIOS"
    await scenario(stage)
    await stage.until_fired()
    await stage.until_idle()


BY_SCENARIO: dict[Scenario, list[str]] = defaultdict(list)
for _statement, _scenario in SCENARIOS.items():
    BY_SCENARIO[_scenario].append(_statement)


async def crash_all(stage: Stage, statements: Sequence[str]) -> None:
    own_tables = any(statement.startswith("table_") for statement in statements)
    async with working(stage, own_tables=own_tables):
        for statement in statements:
            for point in Point:
                await crash(stage, statement, point)
    assert stage.proxy.fired == 3 * len(statements)
    check(stage)


@pytest.mark.ruling("0.1", "0.2")
@pytest.mark.race(3, 4)
@pytest.mark.parametrize("scenario", BY_SCENARIO, ids=lambda scenario: scenario.__name__)
async def test_a_job_succeeds_once_although_a_statement_is_killed_at_each_point(
    stage: Stage, scenario: Scenario
) -> None:
    await crash_all(stage, BY_SCENARIO[scenario])


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_injections_that_fire_are_three_for_each_statement(stage: Stage) -> None:
    await crash_all(stage, STATEMENTS)
