"""The server goes away and comes back, or a connection does: workers live on, and nobody pays for it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psycopg
import pytest

from pgworker import App, Job, Lease, NewJob
from pgworker.db import Database
from pgworker.embedded import EmbeddedPostgres
from pgworker.events import JobLost, JobSettled, RunnerTrouble
from pgworker.queue import JobsTable
from pgworker.schema import migrate
from pgworker.statements import Due, Statement
from tests.chaos.audit import Admin, findings, install, read
from tests.databases import TABLES
from tests.handles import Recorder, hand, row, running


@pytest.fixture
def own_server() -> Iterator[EmbeddedPostgres]:
    """A server of this test's own, with our schema, and with the audit's trigger."""
    bin_dir = os.environ.get("PGWORKER_TEST_BIN_DIR")
    with tempfile.TemporaryDirectory(prefix="pgworker-tests-") as folder:
        Path(folder).chmod(0o711)  # as root the server runs as another user, who must get through
        server = EmbeddedPostgres(
            Path(folder) / "server",
            bin_dir=Path(bin_dir) if bin_dir else None,
            fsync=False,
            settings={"max_prepared_transactions": "1"},
        )
        server.start()
        try:
            with psycopg.connect(server.dsn, autocommit=True) as admin:
                migrate(admin, TABLES)
                install(admin)
            yield server
        finally:
            server.stop()


class Handlers:
    """Counts who is inside, and notes when each run of a job began and ended."""

    def __init__(self) -> None:
        self.inside: set[str] = set()
        self.runs: dict[str, list[tuple[float, float]]] = {}
        self._leave: dict[str, anyio.Event] = {}
        self._changed = anyio.Event()

    async def pass_through(self, key: str) -> None:
        self.inside.add(key)
        self._tell()
        began = time.monotonic()
        leave = self._leave[key] = anyio.Event()
        try:
            await leave.wait()
        finally:
            self.inside.discard(key)
            self.runs.setdefault(key, []).append((began, time.monotonic()))
            self._tell()

    def let_go(self, *keys: str) -> None:
        """Those, or all who are inside."""
        for key in keys or self.inside:
            self._leave[key].set()

    async def until(self, inside: int) -> None:
        with anyio.fail_after(20):
            while len(self.inside) != inside:
                await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class Pools:
    """The pools that workers make from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[Database] = []
        monkeypatch.setattr("pgworker.worker.Database", self._make)

    def _make(self, *given: Any, **options: Any) -> Database:
        self._made.append(Database(*given, **options))
        return self._made[-1]

    async def until_sound(self) -> None:
        """Until no connection lies in them that is of no use any more."""
        with anyio.fail_after(10):
            while not all(  # noqa: ASYNC110 - a pool has no event for it
                _is_alive(idle) for made in self._made for idle in made._pool._pool
            ):
                await anyio.sleep(0.05)  # a runner that polls takes and looks at them one after the other


def _is_alive(connection: psycopg.AsyncConnection[Any]) -> bool:
    try:
        for _ in range(2):  # the server's last words, then the end of the stream
            connection.pgconn.consume_input()
    except psycopg.OperationalError:
        return False
    return not connection.closed


def succeeded(admin: Admin) -> int:
    found = admin.execute("select count(*) from pgworker.jobs where state = 'succeeded'").fetchone()
    assert found is not None
    return int(found[0])


def check_log(dsn: str, jobs: int) -> None:
    """Nothing failed, nothing lost, no eviction counted."""
    with psycopg.connect(dsn) as admin:
        log = read(admin)
        states = admin.execute("select distinct state, attempts, evictions from pgworker.jobs").fetchall()
    assert states == [("succeeded", 0, 0)]
    assert sum(change.is_success for change in log) == jobs
    assert not any(change.evictions for change in log)
    assert not findings(log)


async def go_through_outages(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch, *, jobs: int, outages: int, longer: float
) -> None:
    handlers, pools = Handlers(), Pools(monkeypatch)
    app = App(server.dsn)

    @app.kind("work", concurrency=jobs, poll=0.2, lease=Lease.renew(timedelta(seconds=1)))
    async def work(job: Job[int]) -> int:
        await handlers.pass_through(job.key)
        return job.payload

    seen = Recorder(app)
    async with app, running(app.worker()) as worker:
        for outage in range(outages):
            keys = [f"{outage}-{number}" for number in range(jobs)]
            with psycopg.connect(
                server.dsn
            ) as connection:  # (the app's pool may still have connections to the old server)
                app.sync.enqueue_many(
                    "work", [NewJob(number, key, "r") for number, key in enumerate(keys)], conn=connection
                )
            await handlers.until(inside=jobs)
            await stop_amid_finishes_and_renewals(server, handlers, keys[:5])
            await handlers.until(inside=0)  # the local guard stops them all
            with anyio.move_on_after(longer):
                await anyio.sleep_forever()
            assert worker.status()["work"].lifecycle != "stopped"
            await anyio.to_thread.run_sync(server.start)
            with psycopg.connect(server.dsn, autocommit=True) as admin:
                admin.execute("rollback prepared 'stranger'")
            await handlers.until(inside=jobs)
            handlers.let_go()
            so_far = jobs * (outage + 1)
            await seen.wait(lambda so_far=so_far: len(seen.of(JobSettled)) == so_far)  # type: ignore[misc]
            await pools.until_sound()
        assert worker.status()["work"].succeeded == jobs * outages
    assert len(seen.of(JobLost)) == jobs * outages
    for runs in handlers.runs.values():
        (_, first_end), (second_begin, _) = runs
        assert first_end < second_begin
    check_log(server.dsn, jobs * outages)


async def stop_amid_finishes_and_renewals(server: EmbeddedPostgres, handlers: Handlers, keys: Sequence[str]) -> None:
    """Stop it while jobs that have ended, and leases that are due, wait for rows that somebody holds.

    Who holds them must not let go as the server ends, before the worker's own sessions do: hence a prepared transaction.
    """
    with psycopg.connect(server.dsn) as stranger:
        stranger.execute("select from pgworker.jobs where key = any(%s) for update", [keys])
        stranger.execute("prepare transaction 'stranger'")
    inside = len(handlers.inside)
    handlers.let_go(*keys)
    await handlers.until(inside=inside - len(keys))
    await anyio.to_thread.run_sync(server.stop)


@pytest.mark.field("L16")
@pytest.mark.ruling("1.9", "4.9")
async def test_an_outage_longer_than_the_leases(own_server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    await go_through_outages(own_server, monkeypatch, jobs=30, outages=2, longer=0.1)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.field("L16")
@pytest.mark.ruling("4.9")
async def test_six_outages_of_three_leases_with_200_jobs(
    own_server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    await go_through_outages(own_server, monkeypatch, jobs=200, outages=6, longer=2)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.field("L16")
async def test_45_seconds_without_a_server(own_server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    await go_through_outages(own_server, monkeypatch, jobs=20, outages=1, longer=44)


@pytest.mark.contract("X8")
@pytest.mark.field("L16")
@pytest.mark.ruling("1.18")
async def test_what_ends_during_an_outage_shorter_than_its_lease_is_written_afterwards(
    own_server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.worker.STORE_TIMEOUT", timedelta(seconds=2))  # a completion gives up sooner
    handlers = Handlers()
    app = App(own_server.dsn)

    @app.kind("work", concurrency=20, poll=0.2, lease=Lease.renew(timedelta(seconds=20), timedelta(seconds=0.2)))
    async def work(job: Job[int]) -> int:
        await handlers.pass_through(job.key)
        return job.payload

    seen = Recorder(app)
    async with app, running(app.worker()):
        await app.enqueue_many("work", [NewJob(number, f"k{number}", "r") for number in range(20)])
        await handlers.until(inside=20)
        await anyio.to_thread.run_sync(own_server.stop)
        await anyio.sleep(0.7)  # some renewals fail, which cancels nobody
        assert len(handlers.inside) == 20
        handlers.let_go()
        await seen.wait(lambda: "queue_complete_failed" in {each.code for each in seen.of(RunnerTrouble)})
        await anyio.to_thread.run_sync(own_server.start)
        await seen.wait(lambda: len(seen.of(JobSettled)) == 20)
    assert {key: len(runs) for key, runs in handlers.runs.items()} == {f"k{number}": 1 for number in range(20)}
    assert not seen.of(JobLost)
    check_log(own_server.dsn, 20)


@pytest.mark.field("L17")
async def test_a_recovery_that_an_outage_interrupts_is_completed(own_server: EmbeddedPostgres) -> None:
    orphans = 250
    app = App(own_server.dsn)

    @app.kind("work", poll=0.2, lease=Lease.renew(timedelta(seconds=1)))
    async def work(job: Job[int]) -> int:
        await anyio.sleep(0.02)
        return job.payload

    by_hand = hand(own_server.dsn)
    by_hand.enqueue_many([NewJob(number, f"k{number}", "r") for number in range(orphans)])
    assert len(by_hand.claim(orphans, ttl_seconds=0.01)) == orphans  # by a worker that is no more
    by_hand.connection.close()
    seen = Recorder(app)
    async with app, running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) >= 50)
        await anyio.to_thread.run_sync(own_server.stop)
        await anyio.to_thread.run_sync(own_server.start)
        with psycopg.connect(own_server.dsn, autocommit=True) as admin:
            await seen.wait(lambda: succeeded(admin) == orphans)
            log = read(admin)
    assert sum(change.is_success for change in log) == orphans
    assert not findings(log)


async def test_a_claim_that_comes_after_a_long_wait_for_a_connection_is_not_taken_for_old(
    app: App, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = JobsTable.survey

    def slow_survey(table: JobsTable) -> Statement[list[Due]]:
        statement = survey(table)
        monkeypatch.setattr(JobsTable, "survey", survey)  # the others need not wait
        slow = b"select s.* from (select pg_sleep(0.8)) as p, (" + statement.sql + b") as s"
        return replace(statement, sql=slow)

    @app.kind("work", lease=Lease.renew(timedelta(seconds=0.6)))
    async def work(job: Job[int]) -> None: ...

    monkeypatch.setattr(JobsTable, "survey", slow_survey)
    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.events))
    assert not seen.of(JobLost)
    assert (row(admin, "k")["state"], row(admin, "k")["lease_epoch"]) == ("succeeded", 1)


@pytest.mark.field("L10")
async def test_a_killed_listener_hears_again(app: App, admin: Admin) -> None:
    @app.kind("work", poll=30.0)  # so it is not the poll that finds the job
    async def work(job: Job[int]) -> None: ...

    seen = Recorder(app)
    async with running(app.worker()):
        await app.enqueue("work", 0)
        await seen.wait(lambda: len(seen.of(JobSettled)) == 1)
        first = await _listener(admin, other_than=None)
        admin.execute("select pg_terminate_backend(%s)", [first])
        await _listener(admin, other_than=first)
        await app.enqueue("work", 1)
        await seen.wait(lambda: len(seen.of(JobSettled)) == 2, within=5)


async def _listener(admin: Admin, *, other_than: int | None) -> int:
    """The server's process that listens, once there is one."""
    with anyio.fail_after(10):
        while True:
            found = admin.execute(
                "select pid from pg_stat_activity where application_name = 'pgworker listen' and state = 'idle'"
                " and datname = current_database() and query <> '' and pid is distinct from %s",
                [other_than],
            ).fetchone()
            if found is not None:
                return int(found[0])
            await anyio.sleep(0.01)
