"""The runtime's transactions are small, and whatever an app does on connections of its own is no concern of theirs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool

from pgworker import App, Job, NewJob, Permanent
from pgworker.events import JobSettled
from pgworker.policy import STORE_TIMEOUT
from pgworker.queue import JobsTable
from tests.handles import Recorder, running

Admin: TypeAlias = psycopg.Connection[Any]

OURS = (
    "select pid, state, xact_start, application_name, clock_timestamp() - xact_start from pg_stat_activity"
    " where application_name like 'pgworker%%' and datname = current_database() and pid <> pg_backend_pid()"
    " and application_name <> 'pgworker start'"  # reads the schema's version, before there is any load
)
PREPARING = (
    "select count(*) from pg_stat_activity where state = 'active' and query like 'select pg_sleep%%/* costly */'"
)


@pytest.mark.contract("A29")
async def test_a_costly_preparation_on_the_apps_own_readers_disturbs_neither_enqueues_nor_claims(
    app: App, dsn: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The app's pool and the worker's have one connection each: a preparation that took it would stop everything."""
    monkeypatch.setattr("pgworker.asyncapp.DOOR_CONNECTIONS", 1)
    monkeypatch.setattr("pgworker.worker._CONNECTIONS", 1)
    readers: AsyncConnectionPool[psycopg.AsyncConnection[Any]] = AsyncConnectionPool(
        dsn, min_size=0, max_size=2, open=False, kwargs={"autocommit": True, "application_name": "readers"}
    )

    @app.kind("costly", concurrency=2)
    async def costly(job: Job[int]) -> None:
        async with readers.connection() as connection:
            await connection.execute("select pg_sleep(60) /* costly */")

    @app.kind("work")
    async def work(job: Job[int]) -> int:
        return job.payload

    seen = Recorder(app)
    async with readers:
        await app.enqueue_many("costly", [NewJob(1), NewJob(2)])
        async with running(app.worker()):
            with anyio.fail_after(10):
                while admin.execute(PREPARING).fetchone() != (2,):  # noqa: ASYNC110 - another session's state
                    await anyio.sleep(0.02)
            for number in range(50):
                await app.enqueue("work", number)
            await seen.count(JobSettled, 50, within=20)
            assert admin.execute(PREPARING).fetchone() == (2,)
            assert {event.kind for event in seen.of(JobSettled)} == {"work"}


@pytest.mark.contract("A30")
async def test_no_transaction_of_the_runtime_waits_for_anything_but_its_own_statement(app: App, admin: Admin) -> None:
    """Sampled under load: a transaction is one statement, bounded by the server itself; handlers run outside."""
    apart: list[tuple[Any, ...]] = []
    oldest = 0.0
    samples = 0

    @app.kind("work", concurrency=20)
    async def work(job: Job[int]) -> int:
        await anyio.sleep(0.02)
        return job.payload

    @app.kind("batches", batch=50, window=0.01)
    async def batches(batch: list[Job[int]]) -> list[int]:
        await anyio.sleep(0.02)
        return [job.payload for job in batch]

    async def sample() -> None:
        nonlocal oldest, samples
        while True:
            for row in admin.execute(OURS).fetchall():
                samples += 1
                apart.extend([row] if str(row[1]).startswith("idle in transaction") else [])
                oldest = max(oldest, row[4].total_seconds() if row[2] is not None else 0.0)
            await anyio.sleep(0.003)

    seen = Recorder(app)
    async with running(app.worker()), anyio.create_task_group() as group:
        group.start_soon(sample)
        for _ in range(10):
            await app.enqueue_many("work", [NewJob(number) for number in range(40)])
            await app.enqueue_many("batches", [NewJob(number) for number in range(40)])
        await seen.count(JobSettled, 800, within=40)
        group.cancel_scope.cancel()
    assert samples > 50
    assert apart == []
    assert oldest < STORE_TIMEOUT.total_seconds()


@pytest.mark.contract("A30", "X37")
@pytest.mark.parametrize("door", ["async", "sync"])
async def test_the_server_itself_ends_a_statement_or_a_transaction_of_the_runtime_that_takes_too_long(
    app: App, door: str
) -> None:
    settings: list[tuple[Any, ...]] = []
    ask = (
        "select current_setting('statement_timeout')::interval,"
        " current_setting('idle_in_transaction_session_timeout')::interval"
    )
    if door == "async":

        async def apply(conn: psycopg.AsyncConnection[Any], job: Job[int], value: object) -> None:
            settings.extend(await (await conn.execute(ask)).fetchall())

        @app.kind("work", apply=apply)
        async def work(job: Job[int]) -> None: ...

    else:

        def apply_in_thread(conn: psycopg.Connection[Any], job: Job[int], value: object) -> None:
            settings.extend(conn.execute(ask).fetchall())

        @app.kind("work", apply=apply_in_thread)
        def work_in_thread(job: Job[int]) -> None: ...

    seen = Recorder(app)
    await app.enqueue("work", 1)
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    assert [timedelta(0) < timeout < STORE_TIMEOUT for timeout in settings[0]] == [True, True]  # (zero is no limit)


@pytest.mark.contract("A30")
async def test_however_many_runs_end_together_a_statement_writes_a_bounded_number_of_them(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, list[int]] = {"finish": [], "settle": []}
    monkeypatch.setattr("pgworker.finisher.MOST_AT_ONCE", 3)
    finish, settle = JobsTable.finish, JobsTable.settle

    def noted_finish(self: JobsTable, finished: Any) -> Any:
        sizes["finish"].append(len(finished))
        return finish(self, finished)

    def noted_settle(self: JobsTable, settled: Any) -> Any:
        sizes["settle"].append(len(settled))
        return settle(self, settled)

    monkeypatch.setattr(JobsTable, "finish", noted_finish)
    monkeypatch.setattr(JobsTable, "settle", noted_settle)

    @app.kind("work", batch=20, window=0, concurrency=1)
    async def work(batch: list[Job[int]]) -> list[int | Permanent]:
        return [job.payload if job.payload < 10 else Permanent("no") for job in batch]

    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(number) for number in range(20)])
    async with running(app.worker()):
        await seen.count(JobSettled, 20)
    assert sum(sizes["finish"]) == sum(sizes["settle"]) == 10
    assert max(*sizes["finish"], *sizes["settle"]) == 3
