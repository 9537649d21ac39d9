"""How a runner of a fair kind claims, without a database: by shares first, then by age, and where each begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import permutations
from typing import Any, cast
from uuid import uuid4

import pytest

from pgworker import App, ConfigError, TableQueue
from pgworker.claimer import Claimer, ClaimRefused, Lanes
from pgworker.fairness import Shares, claim_fair
from pgworker.job import Claim
from pgworker.queue import JobsTable
from pgworker.statements import BEGINNING, Cursor, Due, Lane
from pgworker.surveys import Surveys
from pgworker.tablemap import TableMap
from tests.handles import untyped

LANE, SECOND = Lane("work", 0, 0), Lane("work", 0, 1)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> Cursor:
    return NOON + timedelta(seconds=seconds), 7


def due(lane: Lane, start: Cursor = BEGINNING, *, in_seconds: float | None = -1.0) -> Due:
    return Due(lane, in_seconds, paused=False, start=start)


def claim(number: int, token: Any = None) -> Claim:
    return Claim("work", number, "k", "", 1, token, 0, None, 0, 1, 0, 0, NOON, 0.0, "1")


def test_a_fair_lane_is_claimed_from_where_its_first_free_job_is() -> None:
    """Behind that there may be any of any tenant's, and what was claimed last says nothing of the others."""
    lanes = Lanes(fair=True)
    lanes.learn([due(LANE, at(5))])
    lanes.took(LANE, [claim(1)], 1)
    assert lanes.in_turn(0) == [(LANE, at(5))]
    lanes.learn([due(LANE, at(9))])
    assert lanes.in_turn(0) == [(LANE, at(9))]
    lanes.learn([due(LANE, at(4))])
    assert lanes.in_turn(0) == [(LANE, at(4))]
    lanes.learn([due(LANE, in_seconds=None)])
    lanes.poke()
    assert lanes.in_turn(0) == [(LANE, at(4))]


def test_each_lane_has_its_own_ring_as_long_as_it_is_remembered() -> None:
    lanes = Lanes(fair=True)
    lanes.learn([due(LANE), due(SECOND)])
    assert lanes.last_served(LANE) == ""
    lanes.serve(LANE, "a")
    lanes.serve(SECOND, "b")
    lanes.serve(SECOND, None)
    assert (lanes.last_served(LANE), lanes.last_served(SECOND)) == ("a", "b")
    lanes.learn([])
    lanes.learn([due(Lane("work", 1, priority)) for priority in range(8)])
    lanes.learn([])
    assert (lanes.last_served(LANE), lanes.last_served(SECOND)) == ("", "")


def test_tenants_take_turns_in_the_order_of_the_ring_whatever_the_order_of_the_answer() -> None:
    rows = {key: ("b", place, *claim(number)) for key, place, number in
            [("a1", 1, 3), ("a2", 1, 4), ("a3", 1, 8), ("b1", 2, 1), ("b2", 2, 9)]}  # fmt: skip
    statement = claim_fair(
        TableMap(), LANE, limit=9, token=uuid4(), runner="r", ttl_seconds=1.0, max_evictions=5, version=1
    )
    for keys in permutations(rows):
        shares = statement.read([rows[key] for key in keys])
        assert ([each.id for each in shares.claims], shares.served) == ([3, 1, 4, 9, 8], "b")
    assert statement.read([(None, None, *[None] * 15)]) == ([], None)


class Script:
    """A database that gives so many by shares, and so many by age; keeps what it was asked for."""

    def __init__(self) -> None:
        self.by_shares, self.by_age = 0, 0
        self.asked: list[str] = []
        self.begun: list[tuple[str, object]] = []
        self.error: Exception | None = None
        self.takes: Callable[[], object] = bool

    async def run(self, statement: Any, *, within: float = 0) -> Any:
        if statement.name == "survey_lanes":
            return [due(LANE, at(1))]
        given = statement.parameters
        fair = statement.name == "claim_fair"
        self.asked.append(f"{'shares' if fair else 'age'} {given['limit']}")
        if not fair and self.error is not None:
            raise self.error
        count = min(given["limit"], self.by_shares if fair else self.by_age)
        claims = [claim(number + 1000 * (not fair), given["token"]) for number in range(count)]
        if not fair:
            return claims
        self.takes()
        self.begun.append((given["after_tenant"], given["after_ready"]))
        return Shares(claims, f"t{len(self.begun)}")

    def claimer(self, *, fair: bool = True) -> Claimer:
        kind = untyped("work")
        kind = replace(kind, policy=replace(kind.policy, fair=fair))
        database = cast("Any", self)
        claimer = Claimer(JobsTable(TableMap(), kind), database, Surveys(database), "me")
        claimer.appetite.bytes_each = 1
        return claimer


@pytest.fixture
def script() -> Script:
    return Script()


async def test_what_the_shares_leave_is_taken_by_age_in_the_same_round(script: Script) -> None:
    script.by_shares, script.by_age = 6, 100
    taken = await script.claimer().round(10)
    assert script.asked == ["shares 10", "age 4"]
    assert (len(taken.claims), taken.full) == (10, True)


async def test_shares_that_fill_the_round_are_all_that_is_asked_for(script: Script) -> None:
    script.by_shares = 100
    claimer = script.claimer()
    for _ in range(3):
        assert (await claimer.round(10)).full
    assert script.asked == ["shares 10"] * 3
    assert script.begun == [("", at(1)[0]), ("t1", at(1)[0]), ("t2", at(1)[0])]


async def test_one_round_in_ten_is_by_age(script: Script) -> None:
    """Under a steady backlog no other would ever reach what has no tenant at all."""
    script.by_shares = script.by_age = 100
    claimer = script.claimer()
    claimer.weights = (1, 0)
    for _ in range(21):
        await claimer.round(1)
    assert [number for number, asked in enumerate(script.asked, start=1) if asked == "age 1"] == [10, 20]


async def test_both_classes_have_their_rounds_by_age(script: Script) -> None:
    script.by_shares = script.by_age = 100
    claimer = script.claimer()
    for _ in range(50):
        await claimer.round(1)
    by_age = [number for number, asked in enumerate(script.asked, start=1) if asked == "age 1"]
    assert by_age == [12, 24, 37, 49, 50]  # of four in five that prefer fresh jobs, and of the fifth that does not


async def test_shares_that_take_long_leave_time_for_claims_by_age(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("pgworker.claimer.time.monotonic", lambda: now[0])
    script.by_shares = script.by_age = 100

    def slow() -> None:
        now[0] += 0.5

    def too_slow() -> None:
        now[0] += 5
        raise TimeoutError

    script.takes = slow
    claimer = script.claimer()
    for wait in (0.0, 0.0, 0.0, 0.39, 0.02):  # a single slow one says nothing
        now[0] += wait
        await claimer.round(1)
    assert script.asked == ["shares 1", "shares 1", "age 1", "age 1", "shares 1"]
    now[0] += 1
    script.takes = too_slow
    with pytest.raises(ClaimRefused):
        await claimer.round(1)
    await claimer.round(1)
    assert script.asked[5:] == ["shares 1", "age 1"]


async def test_an_error_behind_the_shares_loses_nothing_of_them(script: Script) -> None:
    script.by_shares, script.error = 6, TimeoutError()
    taken = await script.claimer().round(10)
    assert len(taken.claims) == 6
    script.by_shares = 0
    with pytest.raises(ClaimRefused):
        await script.claimer().round(10)


async def test_a_kind_that_is_not_fair_is_claimed_by_age_only(script: Script) -> None:
    script.by_shares = script.by_age = 100
    await script.claimer(fair=False).round(10)
    assert script.asked == ["age 10"]


def test_rows_of_an_apps_own_table_have_no_tenants() -> None:
    app = App("dsn")
    columns = ("key", "revision", "state", "token", "lease_expires_at", "ready_at", "attempts")
    things = TableQueue("public.things", **{column: column for column in columns})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'work': fair= is for jobs in the jobs table, the rows of public"):
        app.kind("work", fair=True, queue=things)(lambda job: None)
    with pytest.raises(ConfigError, match="fair= is for jobs in the jobs table"):
        app.declare("work", fair=True, queue=things)
