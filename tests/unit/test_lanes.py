"""Where claims begin, and when the lanes are looked at, without a database and by a clock of the test's own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast
from zoneinfo import ZoneInfo

import anyio
import psycopg
import pytest
from psycopg.errors import QueryCanceled

from pgworker.claimer import Claimer, ClaimRefused, Lanes
from pgworker.job import Claim
from pgworker.queue import JobsTable
from pgworker.statements import BEGINNING, Cursor, Due, Lane
from pgworker.statements import due as read_due
from pgworker.surveys import Surveys
from pgworker.tablemap import TableMap
from tests.handles import untyped

FRESH, URGENT, OLD = Lane("work", 0, 0), Lane("work", 0, -5), Lane("work", 1, 0)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds: float, id_: int = 0) -> Cursor:
    return NOON + timedelta(seconds=seconds), id_


def claim(lane: Lane, cursor: Cursor, token: Any = None) -> Claim:
    ready_at, id_ = cursor
    assert isinstance(id_, int)
    return Claim("work", id_, "k", "", 1, token, 0, None, 0, 1, lane.priority, lane.urgency, ready_at, 0.0, "1")


def due(lane: Lane, start: Cursor = BEGINNING, *, in_seconds: float | None = -1.0, took: float = 0.001) -> Due:
    return Due(lane, in_seconds, paused=False, start=start, seconds=took)


# --- lanes ----------------------------------------------------------------------------------------------------------


def test_a_claim_begins_where_the_one_before_ended() -> None:
    lanes = Lanes()
    lanes.learn([due(FRESH)])
    assert lanes.in_turn(0) == [(FRESH, BEGINNING)]
    lanes.took(FRESH, [claim(FRESH, at(1, 7)), claim(FRESH, at(2, 3))], 2)
    assert lanes.in_turn(0) == [(FRESH, at(2, 3))]


def test_what_a_survey_finds_before_that_place_is_claimed_next() -> None:
    lanes = Lanes()
    lanes.learn([due(FRESH)])
    lanes.took(FRESH, [claim(FRESH, at(9))], 1)
    lanes.learn([due(FRESH, at(4, 1))])
    assert lanes.in_turn(0) == [(FRESH, at(4, 1))]


def test_what_a_survey_finds_behind_that_place_moves_it_nowhere() -> None:
    """Others may have put something between the two since."""
    lanes = Lanes()
    lanes.learn([due(FRESH)])
    lanes.took(FRESH, [claim(FRESH, at(4))], 1)
    lanes.learn([due(FRESH, at(9))])
    assert lanes.in_turn(0) == [(FRESH, at(4))]


def test_a_lane_that_gave_less_than_was_asked_for_is_left_alone_until_something_may_be_new() -> None:
    lanes = Lanes()
    lanes.learn([due(FRESH), due(OLD)])
    lanes.took(FRESH, [claim(FRESH, at(1))], 2)
    assert lanes.in_turn(0) == [(OLD, BEGINNING)]
    lanes.poke()
    assert lanes.in_turn(0) == [(FRESH, at(1)), (OLD, BEGINNING)]
    lanes.took(FRESH, [], 2)
    lanes.learn([due(FRESH, at(3))])
    assert lanes.in_turn(0) == [(FRESH, at(1))]


@pytest.mark.parametrize(("preferred", "first"), [(0, [URGENT, FRESH, OLD]), (1, [OLD, URGENT, FRESH])])
def test_lanes_are_in_turn_by_the_preferred_class_then_by_priority(preferred: int, first: list[Lane]) -> None:
    lanes = Lanes()
    lanes.learn([due(OLD), due(FRESH), due(URGENT)])
    assert [lane for lane, _ in lanes.in_turn(preferred)] == first


@pytest.mark.parametrize("in_seconds", [None, 3.0], ids=["all are leased", "later"])
def test_a_lane_whose_first_job_is_not_due_waits_for_a_poke(in_seconds: float | None) -> None:
    lanes = Lanes()
    lanes.learn([due(FRESH, in_seconds=in_seconds)])
    assert lanes.in_turn(0) == []
    lanes.poke()
    assert lanes.in_turn(0) == [(FRESH, BEGINNING)]


def test_a_lane_that_is_not_due_keeps_its_place() -> None:
    lanes = Lanes()
    lanes.learn([due(FRESH)])
    lanes.took(FRESH, [claim(FRESH, at(4))], 1)
    lanes.learn([due(FRESH, in_seconds=None)])
    lanes.poke()
    assert lanes.in_turn(0) == [(FRESH, at(4))]


def test_places_are_compared_as_instants_in_the_hour_that_clocks_show_twice() -> None:
    """The driver reads instants in the session's time zone; Python compares those of one zone by the clock's hands."""
    zone = ZoneInfo("Europe/Berlin")
    early, late = datetime(2026, 10, 25, 2, 50, tzinfo=zone), datetime(2026, 10, 25, 2, 10, fold=1, tzinfo=zone)
    assert late < early, "by the hands"
    lanes = Lanes()
    lanes.learn([due(FRESH)])
    lanes.took(FRESH, [claim(FRESH, (late, 1))], 1)
    lanes.learn([read_due("work", 0, 0, -1.0, False, 0.001, early, 8)])
    assert lanes.in_turn(0) == [(FRESH, (datetime(2026, 10, 25, 0, 50, tzinfo=UTC), 7))]


def test_a_few_empty_lanes_are_remembered() -> None:
    lanes = Lanes()
    lanes.learn([due(Lane("work", 0, priority)) for priority in range(20)])
    lanes.learn([])
    lanes.poke()
    assert [lane.priority for lane, _ in lanes.in_turn(0)] == list(range(12, 20))


# --- claimer --------------------------------------------------------------------------------------------------------


class Script:
    """A database in which surveys take their time, and lanes have so many ready jobs, a second apart."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.survey_seconds = 0.001
        self.away_seconds = 0.0
        self.ready = {FRESH: 0}
        self.hidden: set[Lane] = set()
        self.sent: list[str] = []
        self.fails = False

    async def run(self, statement: Any, *, within: float = 0) -> Any:
        self.sent.append(statement.name)
        if self.fails:
            raise TimeoutError
        if statement.name == "survey_lanes":
            self.clock[0] += max(self.survey_seconds, self.away_seconds)
            return [
                due(lane, took=self.survey_seconds)
                for lane, count in self.ready.items()
                if count and lane not in self.hidden
            ]
        given = statement.parameters
        lane = Lane(given["kind"], given["class"], given["priority"])
        count = min(self.ready.get(lane, 0), given["limit"])
        self.ready[lane] = self.ready.get(lane, 0) - count
        return [claim(lane, at(number, number), given["token"]) for number in range(count)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("pgworker.claimer.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def script(clock: list[float]) -> Script:
    return Script(clock)


@pytest.fixture
def claimer(script: Script) -> Claimer:
    database = cast("Any", script)
    return Claimer(JobsTable(TableMap(), untyped("work")), database, Surveys(database), "me")


async def test_full_claims_follow_each_other_without_a_look_for_a_twentieth_of_a_second(
    script: Script, claimer: Claimer, clock: list[float]
) -> None:
    script.ready[FRESH] = 100
    for _ in range(3):
        assert (await claimer.round(5)).full
    assert script.sent == ["survey_lanes", "claim_jobs", "claim_jobs", "claim_jobs"]
    clock[0] += 0.05
    await claimer.round(5)
    assert script.sent[4:] == ["survey_lanes", "claim_jobs"]


async def test_a_hint_is_looked_after_at_once(script: Script, claimer: Claimer) -> None:
    script.ready[FRESH] = 100
    await claimer.round(5)
    script.ready[URGENT] = 1
    claimer.poke()
    assert [each.priority for each in (await claimer.round(1)).claims] == [-5]


@pytest.mark.contract("A17")
async def test_a_round_that_is_not_filled_looks_for_more(script: Script, claimer: Claimer) -> None:
    script.ready = {FRESH: 7}
    await claimer.round(5)
    script.ready[OLD] = 9
    taken = await claimer.round(5)
    assert [each.urgency for each in taken.claims] == [0, 0, 1, 1, 1]
    assert taken.full


async def test_a_look_that_fails_loses_nothing_of_what_was_claimed_before_it(
    script: Script, claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.ready = {FRESH: 7}
    await claimer.round(5)

    async def fail(*_: object) -> list[Due]:
        raise psycopg.OperationalError

    monkeypatch.setattr(Surveys, "look", fail)
    taken = await claimer.round(5)
    assert (len(taken.claims), taken.full) == (2, False)
    with pytest.raises(ClaimRefused):
        await claimer.round(5)


async def test_costly_looks_are_rare_and_what_is_known_is_claimed_meanwhile(
    script: Script, claimer: Claimer, clock: list[float]
) -> None:
    """As behind a session with an old snapshot, where each look passes over all that is dead."""
    script.survey_seconds = 0.5
    script.ready[FRESH] = 1
    await claimer.round(5)
    clock[0] += 1
    await claimer.round(5)  # two that are slow: it is no chance
    script.sent.clear()
    script.ready[FRESH] = 1
    claimer.poke()
    taken = await claimer.round(5)
    assert len(taken.claims) == 1
    assert script.sent == ["claim_jobs"]
    assert taken.due_in_seconds == pytest.approx(20 * 0.49)
    clock[0] += 20 * 0.49
    await claimer.round(5)
    assert script.sent == ["claim_jobs", "survey_lanes"]


async def test_between_costly_looks_a_job_that_has_come_due_is_claimed_on_time_and_waited_for_no_more(
    script: Script, claimer: Claimer, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    script.survey_seconds = 0.5
    await claimer.round(5)

    async def look(*_: object) -> list[Due]:
        clock[0] += 0.5
        return [due(FRESH, in_seconds=2.0, took=0.5)]

    monkeypatch.setattr(Surveys, "look", look)
    clock[0] += 10
    assert (await claimer.round(5)).due_in_seconds == pytest.approx(1.5)
    clock[0] += 1.5
    script.ready[FRESH] = 1
    taken = await claimer.round(5)
    assert len(taken.claims) == 1
    assert taken.due_in_seconds == pytest.approx(20 * 0.49 - 1.5)


async def test_looks_at_a_database_that_is_far_away_are_not_costly(script: Script, claimer: Claimer) -> None:
    """Nor are those that come back to an event loop which others keep busy: the server's own time is what counts."""
    script.away_seconds = 0.5
    script.ready[FRESH] = 1
    await claimer.round(5)
    await claimer.round(5)
    script.sent.clear()
    script.ready[FRESH] = 1
    claimer.poke()
    await claimer.round(5)
    assert script.sent == ["survey_lanes", "claim_jobs"]


async def test_who_cannot_see_what_there_is_claims_what_comes_to_the_usual_lanes(
    script: Script, claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker that was started while each survey takes too long."""

    async def fail(*_: object) -> list[Due]:
        raise QueryCanceled

    monkeypatch.setattr(Surveys, "look", fail)
    script.ready = {FRESH: 3, OLD: 1}
    taken = await claimer.round(5)
    assert [each.urgency for each in taken.claims] == [0, 0, 0, 1]
    assert taken.trouble == "QueryCanceled"


async def test_a_pause_that_was_seen_before_surveys_failed_holds_up_nobody(
    script: Script, claimer: Claimer, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """A claim asks for it anyway."""

    async def paused(*_: object) -> list[Due]:
        return [due(FRESH)._replace(paused=True)]

    async def fail(*_: object) -> list[Due]:
        raise TimeoutError

    monkeypatch.setattr(Surveys, "look", paused)
    script.ready = {FRESH: 3}
    assert (await claimer.round(5)).paused
    monkeypatch.setattr(Surveys, "look", fail)
    clock[0] += 1
    assert len((await claimer.round(5)).claims) == 3


async def test_between_costly_looks_lanes_that_seem_empty_are_claimed_from_in_a_while(
    script: Script, claimer: Claimer, clock: list[float]
) -> None:
    script.survey_seconds = 0.5
    script.ready = {FRESH: 1, OLD: 1_000}
    await claimer.round(5)
    clock[0] += 1
    await claimer.round(5)  # two that are slow: it is no chance
    script.ready[FRESH] = 1  # nobody has told
    assert [each.urgency for each in (await claimer.round(5)).claims] == [1] * 5
    clock[0] += 0.05
    assert [each.urgency for each in (await claimer.round(5)).claims] == [0, 1, 1, 1, 1]


async def test_a_job_that_comes_due_is_waited_for_from_when_it_was_seen(
    script: Script, claimer: Claimer, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(*_: object) -> list[Due]:
        return [due(OLD, in_seconds=3.0), due(FRESH)]

    monkeypatch.setattr(Surveys, "look", look)
    script.ready[FRESH] = 100
    await claimer.round(1)
    clock[0] += 0.04
    assert (await claimer.round(1)).due_in_seconds == pytest.approx(2.96)


async def test_a_job_that_comes_due_while_the_survey_is_answered_is_looked_for_at_once(
    claimer: Claimer, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lane was not due in that round; waiting for the poll would make it late by as much."""

    async def look(*_: object) -> list[Due]:
        clock[0] += 0.02
        return [due(OLD, in_seconds=3.0), due(FRESH, in_seconds=0.002)]

    monkeypatch.setattr(Surveys, "look", look)
    assert (await claimer.round(1)).due_in_seconds == 0


# --- surveys --------------------------------------------------------------------------------------------------------


class Asked:
    """A database that notes for which kinds it was asked, and answers when told to."""

    def __init__(self) -> None:
        self.kinds: list[list[str]] = []
        self.go_on = anyio.Event()
        self.error: Exception | None = None
        self.slow = ""

    async def run(self, statement: Any, *, within: float = 0) -> list[Due]:
        self.kinds.append(statement.parameters["kinds"])
        await self.go_on.wait()
        if self.slow in statement.parameters["kinds"]:
            raise QueryCanceled
        if self.error is not None:
            raise self.error
        return [due(Lane(kind, 0, 0)) for kind in statement.parameters["kinds"]]


def queue(kind: str) -> JobsTable:
    return JobsTable(TableMap(), untyped(kind))


async def test_who_asks_in_the_same_turn_shares_a_statement_and_gets_its_own_lanes() -> None:
    asked, seen = Asked(), dict[str, list[Due]]()
    surveys = Surveys(cast("Any", asked))

    async def look(kind: str) -> None:
        seen[kind] = await surveys.look(queue(kind))

    async with anyio.create_task_group() as group:
        for kind in "abc":
            group.start_soon(look, kind)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(look, "late")
        await anyio.wait_all_tasks_blocked()
        asked.go_on.set()
    assert asked.kinds == [["a", "b", "c"], ["late"]]
    assert {kind: [each.lane.kind for each in dues] for kind, dues in seen.items()} == {
        kind: [kind] for kind in ("a", "b", "c", "late")
    }


async def test_an_error_reaches_all_who_share_the_statement() -> None:
    asked, failed = Asked(), list[str]()
    surveys = Surveys(cast("Any", asked))
    asked.error = TimeoutError()
    asked.go_on.set()

    async def look(kind: str) -> None:
        with pytest.raises(TimeoutError):
            await surveys.look(queue(kind))
        failed.append(kind)

    async with anyio.create_task_group() as group:
        for kind in "ab":
            group.start_soon(look, kind)
    assert sorted(failed) == ["a", "b"]


async def test_one_whose_survey_takes_too_long_holds_up_no_other() -> None:
    asked, seen, failed = Asked(), dict[str, list[Due]](), list[str]()
    surveys = Surveys(cast("Any", asked))
    asked.slow = "a"
    asked.go_on.set()

    async def look(kind: str) -> None:
        try:
            seen[kind] = await surveys.look(queue(kind))
        except QueryCanceled:
            failed.append(kind)

    async def both() -> list[list[str]]:
        asked.kinds.clear()
        async with anyio.create_task_group() as group:
            for kind in "ab":
                group.start_soon(look, kind)
        return sorted(asked.kinds)

    assert await both() == [["a"], ["a", "b"], ["b"]]
    assert (list(seen), failed) == (["b"], ["a"])
    assert await both() == [["a"], ["b"]], "nobody asks for both again"
    asked.slow = ""
    await look("a")
    assert await both() == [["a", "b"]]


async def test_one_who_is_cancelled_holds_up_nobody() -> None:
    asked, seen = Asked(), list[Due]()
    surveys = Surveys(cast("Any", asked))
    first = anyio.CancelScope()

    async def leader() -> None:
        with first:
            await surveys.look(queue("a"))

    async def follower() -> None:
        seen.extend(await surveys.look(queue("b")))

    async with anyio.create_task_group() as group:
        group.start_soon(leader)
        group.start_soon(follower)
        await anyio.wait_all_tasks_blocked()
        first.cancel()
        asked.go_on.set()
    assert [each.lane.kind for each in seen] == ["b"]


async def test_what_has_just_been_seen_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("pgworker.surveys.time.monotonic", lambda: now[0])
    asked = Asked()
    surveys = Surveys(cast("Any", asked))
    asked.go_on.set()
    first = await surveys.recent(queue("a"), within=15.0)
    now[0] += 15.0
    assert await surveys.recent(queue("a"), within=15.0) == first
    assert asked.kinds == [["a"]]
    await surveys.recent(queue("b"), within=15.0)  # another's is of no use
    now[0] += 0.1
    await surveys.recent(queue("a"), within=15.0)
    assert asked.kinds == [["a"], ["b"], ["a"]]
