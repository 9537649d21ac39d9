"""How many jobs a claim asks for, without a database: payloads may be too large for one answer."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, cast

import anyio
import psycopg
import pytest
from psycopg.errors import LockNotAvailable, QueryCanceled

from pgworker.claimer import Claimer, ClaimRefused
from pgworker.job import Claim
from pgworker.queue import JobsTable
from pgworker.statements import Due, Lane
from pgworker.surveys import Surveys
from pgworker.tablemap import TableMap
from tests.handles import untyped

MIB = 1024 * 1024
LANE = Lane("work", 0, 0)


class Backlog:
    """A database with more ready jobs than anybody asks for, of payloads of one size; keeps what it was asked for."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.lanes = [LANE]
        self.error: Exception | None = None
        self.survey_error: Exception | None = None
        self.survey_seconds = 0.0
        self.has_jobs = True
        self.asked: list[int] = []
        self.surveyed = 0
        self.stops_after: int | None = None
        """After so many statements the worker is told to stop."""

    def is_stopping(self) -> bool:
        return self.stops_after is not None and self.surveyed + len(self.asked) >= self.stops_after

    async def run(self, statement: Any, *, within: float = 0) -> Any:
        if statement.name == "survey_lanes":
            self.surveyed += 1
            await anyio.sleep(self.survey_seconds)
            if self.survey_error is not None:
                raise self.survey_error
            return [Due(lane, -1.0, paused=False) for lane in self.lanes]
        limit = statement.parameters["limit"]
        self.asked.append(limit)
        if self.error is not None:
            raise self.error
        return list(self._claims(limit, statement.parameters["token"])) if self.has_jobs else []

    def _claims(self, limit: int, token: Any) -> Iterator[Claim]:
        payload = "x" * self.size
        for id_ in range(limit):
            at = datetime(2026, 1, 1, tzinfo=UTC)
            yield Claim("work", id_, f"k{id_}", "", 1, token, 0, None, 0, 1, 0, 0, at, 0.0, payload)

    def claimer(self) -> Claimer:
        database = cast("Any", self)
        queue = JobsTable(TableMap(), untyped("work"))
        return Claimer(queue, database, Surveys(database), "me", is_stopping=self.is_stopping)


async def rounds(claimer: Claimer, count: int, limit: int = 1000) -> list[int]:
    """What so many rounds took; 0 for one that was refused."""
    taken: list[int] = []
    for _ in range(count):
        try:
            taken.append(len((await claimer.round(limit)).claims))
        except ClaimRefused:
            taken.append(0)
    return taken


async def test_payloads_of_a_mebibyte_are_claimed_by_the_32() -> None:
    claimer = Backlog(MIB).claimer()
    assert await rounds(claimer, 3) == [128, 32, 32]  # before anything is known, it is taken to be large


async def test_small_payloads_soon_do_not_count() -> None:
    assert await rounds(Backlog().claimer(), 5) == [128, 255, 511, 1000, 1000]


async def test_a_payload_larger_than_an_answer_should_be_is_claimed_alone() -> None:
    assert await rounds(Backlog(33 * MIB).claimer(), 2, limit=1) == [1, 1]
    claimer = Backlog().claimer()
    claimer.appetite.bytes_each = 100.0 * MIB
    assert (await claimer.round(10)).claims != []


async def test_large_payloads_are_heeded_at_once_and_forgotten_slowly() -> None:
    backlog = Backlog()
    claimer = backlog.claimer()
    await rounds(claimer, 12)
    backlog.size = MIB
    assert await rounds(claimer, 2) == [1000, 32]
    backlog.size = 10
    assert await rounds(claimer, 3) == [32, 63, 127]


async def test_a_round_that_asked_for_less_is_full_all_the_same() -> None:
    """So that the rest is claimed at once, and not at the next poll."""
    taken = await Backlog(MIB).claimer().round(1000)
    assert (len(taken.claims), taken.full) == (128, True)


@pytest.mark.parametrize("error", [TimeoutError(), QueryCanceled()], ids=lambda error: type(error).__name__)
async def test_a_claim_that_timed_out_is_halved_down_to_one_job_and_grows_again(error: Exception) -> None:
    backlog = Backlog()
    backlog.error = error
    claimer = backlog.claimer()
    await rounds(claimer, 9, limit=100)
    assert backlog.asked == [100, 50, 25, 12, 6, 3, 1, 1, 1]
    backlog.error = None
    backlog.asked.clear()
    await rounds(claimer, 8, limit=100)
    assert backlog.asked == [1, 2, 4, 8, 16, 32, 64, 100]


async def test_a_claim_that_brought_nothing_says_nothing_about_the_next() -> None:
    backlog = Backlog()
    backlog.error = TimeoutError()
    claimer = backlog.claimer()
    await rounds(claimer, 1, limit=100)
    backlog.error, backlog.has_jobs = None, False
    await rounds(claimer, 3, limit=100)
    assert backlog.asked[0] == 100
    assert set(backlog.asked[1:]) == {50}


@pytest.mark.parametrize("error", [LockNotAvailable(), psycopg.OperationalError()], ids=lambda e: type(e).__name__)
async def test_no_other_error_makes_a_claim_smaller(error: Exception) -> None:
    backlog = Backlog()
    backlog.error = error
    await rounds(backlog.claimer(), 3, limit=100)
    assert backlog.asked == [100, 100, 100]


@pytest.mark.parametrize("statements", [1, 2, 3, 4, 5, 6])
async def test_a_round_sends_nothing_more_once_the_worker_stops(statements: int) -> None:
    """Each statement may take its whole deadline: one after another would outlast the time that a stop has."""
    backlog = Backlog()
    backlog.lanes = [LANE, Lane("work", 0, 1)]
    backlog.has_jobs = False
    backlog.stops_after = statements
    await rounds(backlog.claimer(), 2)  # each of a survey and two claims
    assert backlog.surveyed + len(backlog.asked) == statements


@pytest.mark.parametrize("error", [TimeoutError(), QueryCanceled()], ids=lambda error: type(error).__name__)
async def test_a_survey_that_takes_too_long_stops_no_claims(error: Exception) -> None:
    """As when it passes over millions of dead rows, for as long as some session holds an old snapshot."""
    backlog = Backlog()
    claimer = backlog.claimer()
    assert await rounds(claimer, 1) == [128]
    backlog.survey_error = error
    claimer.poke()
    taken = await claimer.round(100)
    assert (len(taken.claims), taken.trouble) == (100, type(error).__name__)


async def test_a_survey_that_takes_too_long_is_made_again_after_a_multiple_of_its_time() -> None:
    backlog = Backlog()
    claimer = backlog.claimer()
    await rounds(claimer, 1)
    backlog.survey_error, backlog.survey_seconds = QueryCanceled(), 0.03
    for _ in range(5):
        claimer.poke()
        assert (await claimer.round(100)).claims
    assert backlog.surveyed == 2
    backlog.survey_error = None
    await anyio.sleep(0.5)
    assert (await claimer.round(100)).trouble == ""
    assert backlog.surveyed == 3


async def test_a_lane_that_gave_nothing_is_tried_when_surveys_take_too_long() -> None:
    backlog = Backlog()
    claimer = backlog.claimer()
    backlog.has_jobs = False
    await rounds(claimer, 1)
    backlog.survey_error, backlog.has_jobs = QueryCanceled(), True
    assert len((await claimer.round(100)).claims) == 100


async def test_a_survey_that_is_no_slower_than_the_claims_refuses_the_round() -> None:
    backlog = Backlog()
    claimer = backlog.claimer()
    await rounds(claimer, 1)
    backlog.survey_error = backlog.error = TimeoutError()
    backlog.survey_seconds = 0.03
    for _ in range(3):
        claimer.poke()
        assert await rounds(claimer, 1) == [0]
    assert backlog.surveyed == 4  # an outage is no reason to look less often


@pytest.mark.parametrize("error", [TimeoutError(), psycopg.OperationalError()], ids=lambda e: type(e).__name__)
async def test_without_any_lane_a_survey_that_fails_refuses_the_round(error: Exception) -> None:
    backlog = Backlog()
    backlog.survey_error = error
    with pytest.raises(ClaimRefused, match=type(error).__name__):
        await backlog.claimer().round(100)


async def test_a_survey_that_fails_in_another_way_refuses_the_round() -> None:
    backlog = Backlog()
    claimer = backlog.claimer()
    await rounds(claimer, 1)
    backlog.survey_error = psycopg.OperationalError()
    claimer.poke()
    assert await rounds(claimer, 1) == [0]
