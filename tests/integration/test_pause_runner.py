"""Pauses: a runner's own, and those of a kind in the table; and what may happen just before and just after."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Job, Pause, Retry
from pgworker.claimer import Claimer, Taken
from pgworker.ending import Ending
from pgworker.events import JobSettled, RunnerTrouble
from pgworker.finisher import Finisher
from pgworker.job import Claim
from pgworker.operations import pause_kind, resume_kind
from pgworker.queue import JobsTable
from pgworker.statements import Due, Lane
from pgworker.worker import Worker
from tests.handles import Gate, Hand, Recorder, jobs, row, running

Admin: TypeAlias = psycopg.Connection[Any]


def pause(hand: Hand, seconds: float | None = None) -> None:
    hand.send(pause_kind(hand.tables, "work", seconds, "maintenance"))


def resume(hand: Hand, worker: Worker) -> None:
    """As `resume` does: the table, and a hint that jobs are ready."""
    assert hand.send(resume_kind(hand.tables, "work"))
    worker._runners[0].wake.set()


async def until_lifecycle(worker: Worker, lifecycle: str) -> None:
    with anyio.fail_after(10):
        while [each.lifecycle for each in worker.status().values()] != [lifecycle]:  # noqa: ASYNC110 - a status has no event
            await anyio.sleep(0.01)


@pytest.fixture
def claims_sent(monkeypatch: pytest.MonkeyPatch) -> list[Lane]:
    """The lanes that claims were sent for."""
    sent: list[Lane] = []
    claim = JobsTable.claim

    def noted(self: JobsTable, lane: Lane, **options: Any) -> Any:
        sent.append(lane)
        return claim(self, lane, **options)

    monkeypatch.setattr(JobsTable, "claim", noted)
    return sent


# --- the runner's own -----------------------------------------------------------------------------------------------


@pytest.mark.contract("A52")
@pytest.mark.parametrize("first", ["short", "long"])
async def test_of_two_pauses_the_longer_holds_and_the_other_calls_end_first(
    app: App, admin: Admin, claims_sent: list[Lane], first: str
) -> None:
    seconds = {"short": 0.3, "long": 0.9}
    second = {"short": "long", "long": "short"}[first]
    started: list[tuple[float, str]] = []
    paused: dict[str, float] = {}
    gates = {"first": anyio.Event(), "second": anyio.Event(), "third": anyio.Event()}

    @app.kind("work", concurrency=3)
    async def work(job: Job[str]) -> Pause | None:
        started.append((time.monotonic(), job.payload))
        length = {"first": first, "second": second}.get(job.payload, "")
        if job.payload != "later":
            await gates[job.payload].wait()
        if not length or length in paused:
            return None
        paused[length] = time.monotonic()
        return Pause(seconds[length], "down")

    seen = Recorder(app)
    for name in ("first", "second", "third"):
        await app.enqueue("work", name, key=name)
    async with running(app.worker()) as worker:
        with anyio.fail_after(10):
            while len(started) < 3:  # noqa: ASYNC110 - a list has no event
                await anyio.sleep(0.01)
        await app.enqueue("work", "later", key="later")
        for count, name in enumerate(("first", "second", "third"), start=1):
            gates[name].set()
            await seen.count(JobSettled, count)
            assert worker.status()["work"].lifecycle == "paused"
        before = len(claims_sent)
        await seen.wait(lambda: row(admin, "later")["state"] == "succeeded")
    assert len(claims_sent) - before < 10  # it waited, and did not ask over and over again
    ((at, _),) = [each for each in started if each[1] == "later"]
    assert at - paused["long"] >= seconds["long"]
    assert at - paused["short"] >= seconds["short"]


@pytest.mark.contract("A51", "X12")
@pytest.mark.race(11)
async def test_what_a_claim_brings_after_a_sibling_has_paused_is_given_back(
    app: App, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    may_pause, paused = anyio.Event(), anyio.Event()
    take_round = Claimer.round

    async def pausing(self: Claimer, limit: int) -> Taken:
        taken = await take_round(self, limit)
        if called and taken.claims and not paused.is_set():
            may_pause.set()  # the claim has its rows, but not yet handed them over
            await seen.count(JobSettled, 1)
            paused.set()
        return taken

    monkeypatch.setattr(Claimer, "round", pausing)

    @app.kind("work", concurrency=2)
    async def work(job: Job[int]) -> Pause | None:
        called.append(job.payload)
        if job.payload == 0:
            await may_pause.wait()
            return Pause(0.5, "down")
        assert paused.is_set()
        return None

    seen = Recorder(app)
    await app.enqueue("work", 0, key="k0")
    async with running(app.worker()) as worker:
        with anyio.fail_after(10):
            while not called:  # noqa: ASYNC110 - a list has no event
                await anyio.sleep(0.01)
        await app.enqueue("work", 1, key="k1")
        await paused.wait()
        with anyio.fail_after(5):
            while row(admin, "k1")["token"] is not None:  # noqa: ASYNC110 - a row has no event
                await anyio.sleep(0.01)
        assert (called, worker.status()["work"].lifecycle) == ([0], "paused")
        assert row(admin, "k1")["attempts"] == 0
        await seen.wait(lambda: worker.status()["work"].succeeded == 1)
    assert called[1] == 1


@pytest.mark.contract("A51")
async def test_no_call_of_the_same_turn_begins_after_one_that_has_asked_for_a_pause(app: App) -> None:
    called: list[int] = []

    @app.kind("work", concurrency=8, prefetch=20)
    async def work(job: Job[int]) -> Pause | None:
        called.append(job.payload)
        if job.payload == 1:
            return Pause(60, "down")
        await anyio.sleep(0.2)
        return None

    seen = Recorder(app)
    await app.enqueue_many("work", jobs(12))
    async with running(app.worker()):
        await seen.count(JobSettled, 12)  # with those that are given back
    assert called[-1] == 1
    assert called == sorted(called)


@pytest.mark.contract("A51")
@pytest.mark.race(11)
async def test_no_call_begins_while_the_job_that_asked_for_the_pause_is_being_written(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    writing, go_on = anyio.Event(), anyio.Event()
    rounds: list[Taken] = []
    write, take_round = Finisher.write, Claimer.round

    async def held(self: Finisher, endings: Sequence[Ending]) -> None:
        writing.set()
        await go_on.wait()
        await write(self, endings)

    async def counted(self: Claimer, limit: int) -> Taken:
        rounds.append(await take_round(self, limit))
        return rounds[-1]

    monkeypatch.setattr(Finisher, "write", held)
    monkeypatch.setattr(Claimer, "round", counted)

    @app.kind("work", concurrency=2, poll=0.05)
    async def work(job: Job[int]) -> Pause:
        called.append(job.payload)
        return Pause(60, "down")

    seen = Recorder(app)
    await app.enqueue("work", 0, key="k0")
    async with running(app.worker()) as worker:
        await writing.wait()
        asked = len(rounds)
        await app.enqueue("work", 1, key="k1")
        await anyio.sleep(0.3)  # several polls, and a hint
        assert worker.status()["work"].lifecycle == "paused"
        go_on.set()
        await seen.count(JobSettled, 1)
    assert called == [0]
    assert len(rounds) <= asked + 1  # one may have been under way


@pytest.mark.contract("A63")
@pytest.mark.race(11)
@pytest.mark.parametrize("order", ["pause, then the others", "the others, then the pause"])
async def test_the_status_is_paused_whatever_becomes_of_the_siblings(app: App, order: str) -> None:
    gates = [anyio.Event() for _ in range(3)]
    begun: list[int] = []

    @app.kind("work", concurrency=3)
    async def work(job: Job[int]) -> Pause | Retry | None:
        begun.append(job.payload)
        await gates[job.payload].wait()
        outcomes: list[Pause | Retry | None] = [Pause(60, "down"), Retry(code="upstream"), None]
        return outcomes[job.payload]

    sequence = [0, 1, 2] if order.startswith("pause") else [1, 2, 0]
    seen = Recorder(app)
    await app.enqueue_many("work", jobs(3))
    async with running(app.worker()) as worker:
        with anyio.fail_after(10):
            while len(begun) < 3:  # noqa: ASYNC110 - a list has no event
                await anyio.sleep(0.01)
        for count, number in enumerate(sequence, start=1):
            gates[number].set()
            await seen.count(JobSettled, count)
            if 0 in sequence[:count]:
                assert worker.status()["work"].lifecycle == "paused"
        status = worker.status()["work"]
    assert (status.parked, status.retried, status.succeeded) == (1, 1, 1)
    assert status.retry_in_seconds is not None
    assert 50 < status.retry_in_seconds <= 60


# --- the kind's, in the table ---------------------------------------------------------------------------------------


@pytest.mark.ruling("2.25")
async def test_a_paused_kind_is_not_claimed_until_it_is_resumed(
    app: App, admin: Admin, hand: Hand, claims_sent: list[Lane]
) -> None:
    gate = Gate()

    @app.kind("work", poll=0.05)
    async def work(job: Job[int]) -> None:
        await gate.pass_through()

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k1")
    async with running(app.worker()) as worker:
        await gate.until(1)
        pause(hand)
        await app.enqueue("work", 2, key="k2")
        await until_lifecycle(worker, "paused")
        before = len(claims_sent)
        gate.open()  # what runs already goes on
        await seen.count(JobSettled, 1)
        await anyio.sleep(0.2)  # several polls
        assert len(claims_sent) == before
        assert (worker.status()["work"].lifecycle, worker.status()["work"].succeeded) == ("paused", 1)
        assert row(admin, "k2")["lease_epoch"] == 0
        resume(hand, worker)
        await seen.count(JobSettled, 2)
        assert worker.status()["work"].lifecycle == "running"


@pytest.mark.ruling("2.25")
async def test_a_pause_with_an_end_ends_by_itself_and_outlives_a_restart(app: App, admin: Admin, hand: Hand) -> None:
    @app.kind("work", poll=0.1)
    async def work(job: Job[int]) -> None: ...

    seen = Recorder(app)
    pause(hand, 60)
    await app.enqueue("work", 1, key="k")
    for _ in range(2):
        async with running(app.worker()) as worker:
            await until_lifecycle(worker, "paused")
    admin.execute("update pgworker.kinds set paused_until = clock_timestamp() + interval '0.2 seconds'")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    ended = admin.execute(
        "select j.finished_at > k.paused_until from pgworker.jobs j join pgworker.kinds k using (kind)"
    ).fetchone()
    assert ended == (True,)


@pytest.mark.race(13)
@pytest.mark.parametrize("flips", ["to paused", "to running"])
async def test_a_pause_that_flips_between_the_survey_and_the_claim(
    app: App, admin: Admin, hand: Hand, monkeypatch: pytest.MonkeyPatch, flips: str
) -> None:
    called: list[int] = []
    claim = Claimer._claim
    flipped = anyio.Event()

    async def flipping(self: Claimer, preferred: int, limit: int, claims: Sequence[Claim] = ()) -> list[Claim]:
        if self._lanes.dues and not flipped.is_set():
            (pause if flips == "to paused" else lambda hand: hand.send(resume_kind(hand.tables, "work")))(hand)
            flipped.set()
        return await claim(self, preferred, limit, claims)

    monkeypatch.setattr(Claimer, "_claim", flipping)
    if flips == "to running":  # as if the survey had been asked before: it saw no pause
        unpaused = [Due(Lane("work", 0, 0), -1.0, paused=False)]
        survey = JobsTable.survey
        monkeypatch.setattr(JobsTable, "survey", lambda self: _answering(survey(self), unpaused))
        pause(hand)

    @app.kind("work", poll=0.1)
    async def work(job: Job[int]) -> None:
        called.append(job.payload)

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k", revision="r")
    before = row(admin, "k")
    async with running(app.worker()) as worker:
        await flipped.wait()
        if flips == "to paused":
            await until_lifecycle(worker, "paused")
            assert (called, row(admin, "k")) == ([], before)
            resume(hand, worker)
        await seen.count(JobSettled, 1)
    assert called == [1]
    after = row(admin, "k")
    assert (after["state"], after["attempts"], after["lease_epoch"]) == ("succeeded", 0, 1)


def _answering(statement: Any, answer: object) -> Any:
    return type(statement)(statement.name, statement.sql, statement.parameters, lambda rows: answer if rows else [])


# --- for all, by a handler ------------------------------------------------------------------------------------------


@pytest.mark.contract("X12")
@pytest.mark.ruling("2.25")
async def test_a_shared_pause_stops_the_other_workers_and_a_resume_ends_it_in_all(
    app: App, dsn: str, admin: Admin, hand: Hand
) -> None:
    called: list[str] = []

    async def work(job: Job[str]) -> Pause | None:
        called.append(job.key)
        return Pause(3600, "provider_down", shared=True) if len(called) == 1 else None

    app.kind("work", poll=0.1, concurrency=1)(work)
    seen = Recorder(app)
    await app.enqueue("work", "", key="k0")
    async with App(dsn) as other, running(app.worker()) as worker:
        other.kind("work", poll=0.1, concurrency=1)(work)
        await seen.count(JobSettled, 1)
        with anyio.fail_after(10):
            while worker.status()["work"].in_flight:  # noqa: ASYNC110 - a status has no event
                await anyio.sleep(0.01)
        assert worker.status()["work"].lifecycle == "paused"
        paused = admin.execute(
            "select pause_code, paused_until - clock_timestamp() between interval '59 min' and interval '1 hour'"
            " from pgworker.kinds where kind = 'work'"
        ).fetchall()
        assert paused == [("provider_down", True)]
        await app.enqueue("work", "", key="k1")
        async with running(other.worker()) as second:
            await until_lifecycle(second, "paused")
            await until_lifecycle(worker, "paused")
            assert called == ["k0"]
        resume(hand, worker)
        await seen.count(JobSettled, 2)  # by the worker that had paused itself
    assert called == ["k0", "k1"]
    parked = row(admin, "k0")
    assert (parked["state"], parked["attempts"], parked["last_code"]) == ("pending", 0, "provider_down")


async def test_a_shared_pause_that_cannot_be_written_is_told_and_holds_here(app: App, admin: Admin) -> None:
    admin.execute(
        "create function public.refuse() returns trigger language plpgsql as"
        " $$ begin raise insufficient_privilege; end $$;"
        "create trigger refuse before insert on pgworker.kinds for each row execute function public.refuse()"
    )

    @app.kind("work")
    async def work(job: Job[int]) -> Pause:
        return Pause(60, "down", shared=True)

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()) as worker:
        await seen.count(RunnerTrouble, 1)
        status = worker.status()["work"]
    (trouble,) = seen.of(RunnerTrouble)
    assert (trouble.code, trouble.error) == ("queue_pause_failed", "InsufficientPrivilege")
    assert (status.lifecycle, status.parked) == ("paused", 1)
    assert status.retry_in_seconds is not None
    assert status.retry_in_seconds > 50


async def test_the_longest_of_a_batchs_pauses_counts(app: App, admin: Admin) -> None:
    @app.kind("work", batch=4)
    async def work(batch: list[Job[int]]) -> list[Pause | None]:
        return [Pause(10), Pause(40, "longest", shared=True), Pause(20, shared=True), None]

    seen = Recorder(app)
    await app.enqueue_many("work", jobs(4))
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 4)
        status = worker.status()["work"]
    assert (status.lifecycle, status.parked, status.succeeded) == ("paused", 3, 1)
    told = admin.execute("select pause_code from pgworker.kinds").fetchall()
    assert told == [("longest",)]
