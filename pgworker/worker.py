"""One process: the runners of several kinds in one task group, and what they share."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import psycopg

from pgworker import schema
from pgworker.config import Settings, connect_options, conninfo
from pgworker.db import Database, SyncDatabase
from pgworker.errors import AlreadyRunning, ConfigError, DatabaseUnavailable
from pgworker.events import Events
from pgworker.kind import Kind
from pgworker.leases import LeaseKeeper
from pgworker.listener import Listener
from pgworker.maintenance import reap_forever, report_forever, sign_off
from pgworker.middleware import Middleware
from pgworker.policy import STORE_TIMEOUT
from pgworker.queue import JobsTable
from pgworker.runner import Runner, RunnerStatus, Shared

_log = logging.getLogger("pgworker")

_CONNECTIONS = 4
_SAY_EVERY_SECONDS = 10.0


class Worker:
    """Runs the jobs of its kinds until it is stopped. It lives in one event loop and may be run again afterwards."""

    def __init__(
        self, settings: Settings, kinds: Sequence[Kind], *, events: Events, middleware: Sequence[Middleware] = ()
    ) -> None:
        if not kinds:
            msg = "a worker needs at least one kind with a handler"
            raise ConfigError(msg)
        for kind in kinds:
            if kind.handler is None:
                msg = f"kind {kind.name!r} is only declared here: register its handler with @app.kind({kind.name!r})"
                raise ConfigError(msg)
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._settings = settings
        self._kinds = kinds
        self._events = events
        self._middleware = middleware
        self._runners: list[Runner] = []
        self._running = False

    def drain(self) -> None:
        """Claim nothing more; run() returns when the running jobs have ended, or their grace has."""
        for runner in self._runners:
            runner.drain()

    def release(self) -> None:
        """Claim nothing more, cut running jobs short and give them back; run() returns within about five seconds."""
        for runner in self._runners:
            runner.release()

    def stop(self) -> None:
        """Stop each kind as its policy says."""
        for runner in self._runners:
            runner.stop()

    def status(self) -> dict[str, RunnerStatus]:
        """How each kind's runner fares right now."""
        return {runner.kind.name: runner.status() for runner in self._runners}

    async def run(self, *, startup_timeout: timedelta = timedelta(seconds=60)) -> None:
        """Run until stopped. Cancelling stops as the policies say, and returns when that is done.

        Waits for a database that does not answer yet, at most `startup_timeout`; later outages end nothing. Raises
        DatabaseUnavailable, SchemaMissing, SchemaTooNew, and AlreadyRunning when it runs already.
        """
        if self._running:
            msg = "this worker runs already"
            raise AlreadyRunning(msg)
        self._running = True
        try:
            await self._wait_for_schema(startup_timeout)
            await self._run()
        finally:
            self._running = False
            self._runners = []

    async def _run(self) -> None:
        database = Database(self._settings.dsn, "worker", deadline=STORE_TIMEOUT, connections=_CONNECTIONS)
        sync_database = SyncDatabase(self._settings.dsn, "apply", deadline=STORE_TIMEOUT, connections=_CONNECTIONS)
        leases = LeaseKeeper(self._settings, deadline=STORE_TIMEOUT)
        shared = Shared(self.name, database, sync_database, leases, self._events, self._middleware)
        self._runners = [Runner(kind, JobsTable(self._settings.tables, kind), shared) for kind in self._kinds]
        await database.open()
        sync_database.open()
        try:
            await self._run_runners(shared)
        finally:
            with anyio.CancelScope(shield=True):
                await sign_off(self._settings.tables, database, self.name)
                await database.close()
                await anyio.to_thread.run_sync(sync_database.close)

    async def _run_runners(self, shared: Shared) -> None:
        """All runners side by side; what serves them outlives the last of them, also when we are cancelled."""
        finished = anyio.Event()

        async def runners() -> None:
            try:
                async with anyio.create_task_group() as group:
                    for runner in self._runners:
                        group.start_soon(runner.run)
            finally:
                finished.set()

        async def services() -> None:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as group:
                    self._start_services(group, shared)
                    await finished.wait()
                    shared.leases.close()
                    group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(services)
            group.start_soon(runners)

    def _start_services(self, group: anyio.abc.TaskGroup, shared: Shared) -> None:
        tables, database = self._settings.tables, shared.database
        listener = Listener(self._settings.listen_dsn, connect_options("listen"), channel=tables.channel)
        for runner in self._runners:
            listener.subscribe(runner.kind.name, runner.wake.set)
            group.start_soon(reap_forever, JobsTable(tables, runner.kind), database, runner.wake.set)
        group.start_soon(listener.run)
        group.start_soon(report_forever, tables, database, self.name, self._statuses)
        limiter = anyio.CapacityLimiter(2)
        group.start_soon(_in_thread, shared.leases.run, limiter)
        group.start_soon(_in_thread, shared.leases.guard, limiter)

    def _statuses(self) -> Mapping[str, str]:
        return {name: msgspec.json.encode(status).decode() for name, status in self.status().items()}

    async def _wait_for_schema(self, within: timedelta) -> None:
        """Until the database answers and has our schema; one line now and then while it does not answer."""
        give_up_at = time.monotonic() + within.total_seconds()
        say_at = time.monotonic()
        while True:
            try:
                await anyio.to_thread.run_sync(_check_schema, self._settings)
            except psycopg.OperationalError as error:
                now = time.monotonic()
                if now >= give_up_at:
                    msg = f"the database did not answer within {within.total_seconds():g} s: {one_line(error)}"
                    raise DatabaseUnavailable(msg) from error
                if now >= say_at:
                    say_at = now + _SAY_EVERY_SECONDS
                    _log.warning("waiting for the database: %s", one_line(error))
                await anyio.sleep(min(0.5, give_up_at - now))
            else:
                return


def one_line(error: BaseException) -> str:
    """The last line of an error's text: libpq's own reason, without the list of hosts tried."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__


def _check_schema(settings: Settings) -> None:
    with psycopg.connect(conninfo(settings.dsn, "start"), autocommit=True) as connection:
        schema.check(connection, settings.tables)


async def _in_thread(function: Callable[[], None], limiter: anyio.CapacityLimiter) -> None:
    await anyio.to_thread.run_sync(function, limiter=limiter)
