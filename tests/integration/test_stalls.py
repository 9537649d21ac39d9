"""Writes that get no answer in time, or meet a stranger's lock: they hold up nobody else, and come to an end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from typing import Any, TypeAlias, cast

import anyio
import psycopg
import pytest
from psycopg.errors import LockNotAvailable, QueryCanceled

from pgworker import App, Job, NewJob, Pause
from pgworker.db import Database
from pgworker.events import JobLost, JobSettled, RunnerTrouble
from pgworker.statements import Statement
from tests.adapters import Threads
from tests.handles import Hand, Recorder, jobs, row, running

Admin: TypeAlias = psycopg.Connection[Any]


async def pass_by(_: Statement[Any]) -> None: ...


class Wire:
    """The runtime's statements on their way: what was sent, and what each of them meets before it arrives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[Statement[Any]] = []
        self.meets: Callable[[Statement[Any]], Awaitable[None]] = pass_by
        run = Database.run

        async def watched(database: Database, statement: Statement[Any], *, within: float = float("inf")) -> Any:
            self.sent.append(statement)
            await self.meets(statement)
            return await run(database, statement, within=within)

        monkeypatch.setattr(Database, "run", watched)

    @property
    def finishes(self) -> list[list[str]]:
        """The values of each statement that finishes jobs."""
        return [of(statement) for statement in self.sent if of(statement)]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def of(statement: Statement[Any]) -> list[str]:
    """The values that a statement finishes jobs with; none for any other."""
    return cast("list[str]", statement.parameters["results"]) if statement.name == "finish_jobs" else []


def sleep_on(admin: Admin, condition: str, seconds: float) -> None:
    """From now on each such result takes the database so long."""
    admin.execute(
        "create function public.dawdle() returns trigger language plpgsql as"
        f" $$ begin perform pg_catalog.pg_sleep({seconds}); return new; end $$;"
        f"create trigger dawdle before insert on pgworker.results for each row when ({condition})"
        " execute function public.dawdle()"
    )


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements of the worker have 0.8 s, of which the server takes 0.3 s, and half of these for a lock."""
    monkeypatch.setattr("pgworker.worker.STORE_TIMEOUT", timedelta(seconds=0.8))


# --- too much for one statement -------------------------------------------------------------------------------------


async def test_values_that_are_too_large_together_go_apart(
    app: App, admin: Admin, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.finisher._MOST_BYTES", 1000)
    sizes = [300, 300, 300, 300, 2000, 10, 10, 500, 500]

    @app.kind("work", batch=len(sizes), concurrency=1)
    async def work(batch: list[Job[int]]) -> list[str]:
        return ["x" * (sizes[job.payload] - 2) for job in batch]  # (and two quotes)

    seen = Recorder(app)
    await app.enqueue_many("work", jobs(len(sizes)))
    async with running(app.worker()):
        await seen.count(JobSettled, len(sizes))
    assert [[len(value) for value in values] for values in wire.finishes] == [
        [300, 300, 300],
        [300],
        [2000],
        [10, 10, 500],
        [500],
    ]


@pytest.mark.usefixtures("short_deadline")
async def test_what_the_server_cannot_store_in_time_together_it_stores_apart(app: App, admin: Admin) -> None:
    sleep_on(admin, "true", 0.03)

    @app.kind("work", batch=24)
    async def work(batch: list[Job[int]]) -> list[int]:
        return [job.payload for job in batch]

    seen = Recorder(app)
    await app.enqueue_many("work", jobs(24))
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 24)
        assert worker.status()["work"].succeeded == 24
    assert "QueryCanceled" in {trouble.error for trouble in seen.of(RunnerTrouble)}


@pytest.mark.parametrize("error", [TimeoutError, QueryCanceled, LockNotAvailable])
async def test_what_one_of_many_jobs_cannot_have_costs_the_others_a_few_statements(
    app: App, wire: Wire, error: type[Exception]
) -> None:
    @app.kind("work", batch=100)
    async def work(batch: list[Job[int]]) -> list[int]:
        return [job.payload for job in batch]

    async def strike(statement: Statement[Any]) -> None:
        if "77" in of(statement):
            raise error

    wire.meets = strike
    seen = Recorder(app)
    await app.enqueue_many("work", jobs(100))
    async with running(app.worker()):
        await seen.count(JobSettled, 99)
        assert len(wire.finishes) < 25
        wire.meets = pass_by
        await seen.count(JobSettled, 100)
    assert {event.state for event in seen.of(JobSettled)} == {"succeeded"}


@pytest.mark.ruling("1.18")
@pytest.mark.usefixtures("short_deadline")
async def test_a_success_that_is_too_much_by_itself_becomes_a_failure(
    app: App, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.finisher._REFUSED_SECONDS", 3.0)
    sleep_on(admin, "new.value = '3'", 30)

    @app.kind("work", batch=8, max_attempts=1)
    async def work(batch: list[Job[int]]) -> list[int]:
        return [job.payload for job in batch]

    seen = Recorder(app)
    await app.enqueue_many("work", jobs(8))
    async with running(app.worker()):
        await seen.count(JobSettled, 8)
    found = admin.execute("select payload, state, attempts, last_code, last_error from pgworker.jobs order by id")
    assert [each for each in found.fetchall() if each[1] != "succeeded"] == [
        (3, "failed", 1, "queue_complete_failed", "QueryCanceled")
    ]
    alone = [trouble for trouble in seen.of(RunnerTrouble) if trouble.code == "queue_complete_failed"]
    assert len(alone) > 3  # it was tried again: the server might only have been busy


@pytest.mark.contract("X8")
@pytest.mark.parametrize(("outage", "state"), [(True, "succeeded"), (False, "failed")])
async def test_a_timeout_of_ours_counts_only_when_the_server_answers_something_else(
    app: App, admin: Admin, wire: Wire, monkeypatch: pytest.MonkeyPatch, *, outage: bool, state: str
) -> None:
    monkeypatch.setattr("pgworker.finisher._REFUSED_SECONDS", 0.0)

    @app.kind("work", max_attempts=1, poll=60)
    async def work(job: Job[int]) -> int:
        wire.meets = strike
        return 1

    async def strike(statement: Statement[Any]) -> None:
        frozen = outage and statement.name == "survey_lanes"
        if len(wire.finishes) <= 3 and (frozen or of(statement)):
            raise TimeoutError

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    assert (row(admin, "k")["state"], row(admin, "k")["attempts"]) == (state, int(not outage))


# --- locked by a stranger -------------------------------------------------------------------------------------------


@pytest.mark.ruling("4.1")
async def test_one_locked_row_of_results_holds_up_its_own_job_only(
    app: App, dsn: str, admin: Admin, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.finisher._REFUSED_SECONDS", 0.0)  # it is locked, not refused

    @app.kind("work", batch=50, window=0.05)
    async def work(batch: list[Job[int]]) -> list[int]:
        return [job.payload for job in batch]

    seen = Recorder(app)
    admin.execute("insert into pgworker.results values (clock_timestamp(), 'work', 'k0007', '', '1')")
    with psycopg.connect(dsn) as stranger:
        stranger.execute("select from pgworker.results where key = 'k0007' for share")
        await app.enqueue_many("work", jobs(50))
        async with running(app.worker()):
            await seen.count(JobSettled, 49, within=4)
            assert row(admin, "k0007")["state"] == "pending"
            stranger.rollback()
            await seen.count(JobSettled, 50)
    assert {event.state for event in seen.of(JobSettled)} == {"succeeded"}
    assert {trouble.error for trouble in seen.of(RunnerTrouble)} == {"LockNotAvailable"}
    assert len(wire.finishes) < 30
    assert not seen.of(JobLost)


async def test_what_has_stalled_goes_on_beside_the_rest(app: App, wire: Wire) -> None:
    waits, unlocked = anyio.Event(), anyio.Event()

    @app.kind("work", batch=2, concurrency=2, window=0.05)
    async def work(batch: list[Job[int]]) -> list[int]:
        return [job.payload for job in batch]

    async def lock(statement: Statement[Any]) -> None:
        if of(statement) == ["7"] and not unlocked.is_set():
            waits.set()
            await unlocked.wait()
        elif "7" in of(statement):
            raise LockNotAvailable

    wire.meets = lock
    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(8), NewJob(7)])
    async with running(app.worker()):
        with anyio.fail_after(10):
            await waits.wait()
        await app.enqueue("work", 9, key="late")
        try:
            await seen.count(JobSettled, 2)
        finally:
            unlocked.set()
        await seen.count(JobSettled, 3)


@pytest.mark.contract("A29")
async def test_a_pause_for_all_waits_for_somebodys_that_is_not_committed(app: App, dsn: str, admin: Admin) -> None:
    asked = anyio.Event()

    @app.kind("work")
    async def work(job: Job[int]) -> Pause:
        asked.set()
        return Pause(timedelta(seconds=60), code="down", shared=True)

    seen = Recorder(app)
    admin.execute("insert into pgworker.kinds (kind) values ('work')")
    async with await psycopg.AsyncConnection.connect(dsn) as stranger:
        await stranger.execute("select from pgworker.kinds for no key update")
        await app.enqueue("work", 1)
        async with running(app.worker()) as worker:
            await asked.wait()
            await seen.count(JobSettled, 1)
            await anyio.sleep(0.8)  # longer than the runtime's sessions wait for a lock
            await stranger.rollback()
            with anyio.fail_after(5):
                while not _is_paused(admin):  # noqa: ASYNC110 - nothing tells of it
                    await anyio.sleep(0.02)
            assert worker.status()["work"].last_error != "queue_pause_failed"


def _is_paused(admin: Admin) -> bool:
    return admin.execute("select from pgworker.kinds where paused_at is not null").fetchone() is not None


async def in_the_loop(app: App) -> str:
    return (await app.enqueue("work", 2, key="k", revision="2")).status


async def in_a_thread(app: App) -> str:
    return await anyio.to_thread.run_sync(lambda: app.sync.enqueue("work", 2, key="k", revision="2").status)


@pytest.mark.parametrize("enqueue", [in_the_loop, in_a_thread], ids=lambda f: f.__name__)
async def test_an_enqueue_waits_for_an_open_transaction_of_its_key(
    app: App, dsn: str, hand: Hand, enqueue: Callable[[App], Awaitable[str]]
) -> None:
    app.declare("work")
    hand.enqueue("k", "1")
    statuses: list[str] = []

    async def enqueue_it() -> None:
        statuses.append(await enqueue(app))

    async with await psycopg.AsyncConnection.connect(dsn) as caller:
        await caller.execute("select from pgworker.jobs where key = 'k' for no key update")
        async with anyio.create_task_group() as group:
            group.start_soon(enqueue_it)
            await anyio.sleep(0.8)
            assert statuses == []
            await caller.rollback()
    assert statuses == ["replaced"]


# --- claims ---------------------------------------------------------------------------------------------------------


async def test_large_payloads_are_claimed_by_the_answer_and_none_waits_for_a_poll(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.claimer._MOST_BYTES", 100_000)
    sizes: list[int] = []

    @app.kind("work", batch=50, concurrency=4, poll=60)
    async def work(batch: list[Job[str]]) -> None:
        sizes.append(len(batch))

    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob("x" * 10_000, key=f"k{index}") for index in range(100)])
    async with running(app.worker()):
        await seen.count(JobSettled, 100)
    assert max(sizes) == 9  # of 10,002 bytes each
    assert not seen.of(RunnerTrouble)


@pytest.fixture
def threads(admin: Admin) -> Iterator[Threads]:
    made = Threads()
    made.create(admin)
    yield made
    admin.execute("drop schema if exists crawl cascade")


@pytest.mark.contract("A58")
async def test_an_empty_text_is_a_key_of_an_apps_own_table_like_any_other(
    app: App, admin: Admin, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.execute("alter domain crawl.thread_id drop constraint thread_id_check")
    monkeypatch.setattr(Threads, "key", lambda _, number: ("a", "", "b")[number])
    keys: list[str] = []

    async def work(job: Job[Any]) -> None:
        keys.append(job.key)

    threads.register(app, work)
    for number in range(3):
        threads.put(admin, number)
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 3)
    assert sorted(keys) == ["", "a", "b"]
    assert threads.count(admin, "succeeded") == 3
    assert not seen.of(RunnerTrouble)
