"""Fresh jobs and catch-up jobs: whose turn it is, and what becomes of a turn that nobody needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import anyio
import anyio.lowlevel
import psycopg
import pytest

from pgworker import App, Job
from pgworker.claimer import Claimer, Taken
from pgworker.events import JobSettled
from pgworker.queue import JobsTable
from pgworker.statements import Due, Lane, Statement
from pgworker.surveys import Surveys
from tests.handles import RETRY, Gate, Hand, Recorder, jobs, row, running, untyped

Admin: TypeAlias = psycopg.Connection[Any]
FRESH, CATCH_UP = 0, 1


def put(hand: Hand, urgency: str, count: int, **options: Any) -> None:
    for index in range(count):
        hand.enqueue(f"{urgency}{index}{options}", "r", payload=urgency[0], urgency=urgency, **options)


@pytest.mark.contract("A18")
@pytest.mark.ruling("1.30")
async def test_a_claim_takes_one_class_only_and_the_class_outlives_its_runs(app: App, hand: Hand, admin: Admin) -> None:
    put(hand, "fresh", 2)
    put(hand, "catch_up", 3)
    assert {claim.payload for claim in hand.claim(10, urgency=FRESH)} == {'"f"'}
    gate = Gate()

    @app.kind("work", concurrency=5)
    async def work(job: Job[str]) -> None:
        await gate.pass_through()

    async with running(app.worker(), stop="release"):
        await gate.until(3)
    classes = admin.execute("select payload, class from pgworker.jobs where token is null").fetchall()
    assert classes == [("c", CATCH_UP)] * 3
    assert hand.claim(10, urgency=FRESH) == []
    assert len(hand.claim(10, urgency=CATCH_UP)) == 3


@pytest.mark.contract("A35")
@pytest.mark.ruling("1.30")
@pytest.mark.parametrize("batch", [None, 1])
@pytest.mark.parametrize(("weights", "pattern"), [(None, "ffffc"), ((2, 3), "ffccc"), ((1, 0), "f"), ((0, 1), "c")])
async def test_the_classes_take_turns_by_their_weights(
    app: App, hand: Hand, weights: Any, pattern: str, batch: int | None
) -> None:
    order: list[str] = []

    async def work(job: Job[str]) -> None:
        order.append(job.payload)

    async def work_on_batch(batch: list[Job[str]]) -> None:
        order.extend(job.payload for job in batch)

    handler: Any = work if batch is None else work_on_batch
    app.kind("work", concurrency=1, batch=batch, weights=weights, window=0)(handler)
    put(hand, "fresh", 20)
    put(hand, "catch_up", 20)
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 40)
    while_both_wait = next(n for n in range(40) if 20 in (order[:n].count("f"), order[:n].count("c")))
    assert "".join(order[:while_both_wait]) == (pattern * 20)[:while_both_wait]
    assert len(set(order[while_both_wait:])) == 1  # the other class has all the turns that are left


@pytest.mark.contract("A36")
@pytest.mark.ruling("1.30")
async def test_the_turns_are_counted_once_for_all_calls_of_a_runner(
    app: App, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[list[int]] = []
    take_round, claim = Claimer.round, JobsTable.claim

    async def counted(self: Claimer, limit: int) -> Taken:
        rounds.append([])
        return await take_round(self, limit)

    def noted(self: JobsTable, lane: Lane, **options: Any) -> Any:
        rounds[-1].append(lane.urgency)
        return claim(self, lane, **options)

    monkeypatch.setattr(Claimer, "round", counted)
    monkeypatch.setattr(JobsTable, "claim", noted)

    @app.kind("work", concurrency=2)
    async def work(job: Job[str]) -> None:
        await anyio.lowlevel.checkpoint()

    put(hand, "fresh", 100)
    put(hand, "catch_up", 100)
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(rounds) > 50)
    assert [asked[0] for asked in rounds[:50]] == [FRESH, FRESH, FRESH, FRESH, CATCH_UP] * 10


class Script:
    """A database that answers the surveys from a list, and every claim with nothing; it keeps what it was sent."""

    def __init__(self, surveys: Sequence[Sequence[Due]]) -> None:
        self.surveys = iter(surveys)
        self.sent: list[list[str]] = []

    async def run(self, statement: Statement[Any], *, within: float = 0) -> Any:
        if statement.name == "survey_lanes":
            self.sent.append([])
            return list(next(self.surveys))
        self.sent[-1].append(f"{'fc'[cast('int', statement.parameters['class'])]}{statement.parameters['priority']}")
        return []


def due(urgency: int, priority: int = 0, *, due_in_seconds: float | None = -1.0) -> Due:
    return Due(Lane("work", urgency, priority), due_in_seconds, paused=False)


async def rounds_of(surveys: Sequence[Sequence[Due]], tables: Any) -> list[str]:
    script = Script(surveys)
    claimer = Claimer(JobsTable(tables, untyped("work")), cast("Any", script), Surveys(cast("Any", script)), "me")
    for _ in surveys:
        await claimer.round(10)
    return [" ".join(claims) for claims in script.sent]


@pytest.mark.contract("A36")
async def test_a_round_that_finds_nothing_is_a_turn_as_well(tables: Any) -> None:
    nothing: list[Due] = []
    both = [due(FRESH), due(CATCH_UP)]
    asked = await rounds_of([[due(FRESH)], nothing, nothing, nothing, both, both], tables)
    assert asked[-2:] == ["c0 f0", "f0 c0"]


@pytest.mark.contract("X22")
async def test_within_a_class_the_priorities_keep_their_order_and_only_what_is_due_is_asked_for(tables: Any) -> None:
    lanes = [due(FRESH, -1), due(FRESH, 3), due(FRESH, 7, due_in_seconds=5), due(CATCH_UP, 2), due(CATCH_UP, 9)]
    asked = await rounds_of([lanes] * 5, tables)
    assert asked == ["f-1 f3 c2 c9"] * 4 + ["c2 c9 f-1 f3"]


@pytest.mark.contract("A37")
async def test_a_turn_that_its_class_does_not_fill_is_lent_in_the_same_round(
    app: App, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    take_round = Claimer.round

    async def noted(self: Claimer, limit: int) -> Taken:
        answer = await take_round(self, limit)
        taken.append("".join("fc"[claim.urgency] for claim in answer.claims))
        return answer

    monkeypatch.setattr(Claimer, "round", noted)

    @app.kind("work", batch=4, concurrency=1, window=0)
    async def work(batch: list[Job[str]]) -> None: ...

    put(hand, "fresh", 5)
    put(hand, "catch_up", 16)
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 21)
    assert taken[:6] == ["ffff", "fccc", "cccc", "cccc", "cccc", "c"]


@pytest.mark.contract("A37")
@pytest.mark.parametrize("urgency", ["fresh", "catch_up"])
async def test_one_class_alone_has_all_the_turns(
    app: App, hand: Hand, urgency: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: list[bool] = []
    take_round = Claimer.round

    async def noted(self: Claimer, limit: int) -> Taken:
        answer = await take_round(self, limit)
        full.append(answer.full)
        return answer

    monkeypatch.setattr(Claimer, "round", noted)

    @app.kind("work", batch=2, concurrency=1, window=0)
    async def work(batch: list[Job[int]]) -> None: ...

    hand.enqueue_many(jobs(20, urgency=urgency))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 20)
    assert full[:10] == [True] * 10


async def test_a_class_is_kept_by_a_retry(hand: Hand, admin: Admin) -> None:
    put(hand, "catch_up", 1)
    (claim,) = hand.claim(urgency=CATCH_UP)
    hand.settle(claim, RETRY)
    assert row(admin, claim.key)["class"] == CATCH_UP
