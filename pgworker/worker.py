"""One process: the runners of several kinds in one task group, and what they share."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import psycopg

from pgworker import schema
from pgworker.config import Settings, conninfo
from pgworker.db import Database, SyncConnection, SyncDatabase, session_settings
from pgworker.errors import AlreadyRunning, ConfigError, DatabaseUnavailable
from pgworker.events import Events
from pgworker.hints import Hints
from pgworker.kind import Kind
from pgworker.leases import LeaseKeeper
from pgworker.listener import Listener
from pgworker.maintenance import reap_forever, report_forever, sign_off
from pgworker.middleware import Middleware
from pgworker.policy import STORE_TIMEOUT
from pgworker.polls import Polls
from pgworker.queue import JobsTable, Queue, RowsQueue
from pgworker.retention import prune_forever
from pgworker.runner import Runner, run_to_its_end
from pgworker.shared import Shared
from pgworker.status import RunnerStatus
from pgworker.surveys import Surveys
from pgworker.tablecheck import inspect

_log = logging.getLogger("pgworker")

_CONNECTIONS = 4
_SAY_EVERY_SECONDS = 10.0
_ASK_EVERY_SECONDS = 0.5
_SHORT_LEASE = timedelta(seconds=1)


class Worker:
    """Runs the jobs of its kinds until it is stopped. It lives in one event loop and may be run again afterwards."""

    def __init__(
        self, settings: Settings, kinds: Sequence[Kind], *, events: Events, middleware: Sequence[Middleware] = ()
    ) -> None:
        if not kinds:
            raise ConfigError("a worker needs at least one kind with a handler")
        for kind in kinds:
            if kind.handler is None:
                raise ConfigError(
                    f"kind {kind.name!r} is only declared here: register its handler with @app.kind({kind.name!r})"
                )
        self.name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self._settings = settings
        self._kinds = kinds
        self._events = events
        self._middleware = middleware
        self._hints = Hints(conninfo(settings.dsn, "hints"), channel=settings.tables.channel)
        self._queues: dict[str, Queue] = {}
        self._runners: list[Runner] = []
        self._asked = anyio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None

    def drain(self) -> None:
        """Claim nothing more; run() returns when the running jobs have ended, or their grace has."""
        self._ask(Runner.drain)

    def release(self) -> None:
        """Claim nothing more, cut running jobs short and give them back; run() returns within about five seconds."""
        self._ask(Runner.release)

    def stop(self) -> None:
        """Stop each kind as its policy says."""
        self._ask(Runner.stop)

    def _ask(self, order: Callable[[Runner], None]) -> None:
        """Pass an order on; from another thread, such as a `def` handler's, through the loop's own."""
        if self._thread in (None, threading.get_ident()):
            self._order(order)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._order, order)

    def _order(self, order: Callable[[Runner], None]) -> None:
        self._asked.set()  # also for a run that still waits for its database
        for runner in self._runners:
            order(runner)

    def status(self) -> dict[str, RunnerStatus]:
        """How each kind's runner fares right now."""
        return {runner.kind.name: runner.status() for runner in self._runners}

    async def run(self, *, startup_timeout: timedelta = timedelta(seconds=60)) -> None:
        """Run until stopped. Cancelling stops as the policies say, and returns when that is done.

        Waits for a database that does not answer yet, at most `startup_timeout`; later outages end nothing. Raises
        DatabaseUnavailable, SchemaMissing, SchemaTooNew, and AlreadyRunning when it runs already.
        """
        if self._loop is not None:
            raise AlreadyRunning("this worker runs already")
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        try:
            await self._wait_for_schema(startup_timeout)
            if not self._asked.is_set():
                _warn_of_short_leases(self._kinds)
                await self._run()
        finally:
            self._loop = self._thread = None
            self._asked = anyio.Event()

    async def _run(self) -> None:
        dsn, tables = self._settings.dsn, self._settings.tables
        ours = all(kind.queue is None for kind in self._kinds)
        database = Database(dsn, "worker", deadline=STORE_TIMEOUT, connections=_CONNECTIONS, ready=1, keep_plans=ours)
        apply_database = Database(dsn, "apply", deadline=STORE_TIMEOUT, connections=_CONNECTIONS, keep_plans=False)
        sync_apply_database = SyncDatabase(
            dsn, "apply", deadline=STORE_TIMEOUT, connections=_CONNECTIONS, keep_plans=False
        )
        call_soon = asyncio.get_running_loop().call_soon_threadsafe
        leases = LeaseKeeper(self._settings, deadline=STORE_TIMEOUT, call_soon=call_soon)
        shared = Shared(
            self.name,
            tables,
            database,
            apply_database,
            sync_apply_database,
            Surveys(database),
            Polls(),
            leases,
            self._events,
            self._hints.done,
            self._middleware,
        )
        self._runners = [Runner(kind, self._queues[kind.name], shared) for kind in self._kinds]
        try:
            await database.open()
            await apply_database.open()
            sync_apply_database.open()
            await run_to_its_end(partial(self._run_runners, shared), self.stop)
        finally:
            with anyio.CancelScope(shield=True):
                await sign_off(tables, database, self.name)
                await database.close()
                await apply_database.close()
                # with a limiter of their own: the app's threads may fill the shared one, and a stop must come to an end
                limiter = anyio.CapacityLimiter(1)
                await anyio.to_thread.run_sync(sync_apply_database.close, limiter=limiter)
                await anyio.to_thread.run_sync(self._hints.close, limiter=limiter)

    async def _run_runners(self, shared: Shared) -> None:
        """All runners side by side with what serves them. The lease keeper's threads outlive the last runner."""
        limiter = anyio.CapacityLimiter(2)
        async with anyio.create_task_group() as threads:
            for each in (shared.leases.run, shared.leases.guard):
                threads.start_soon(partial(anyio.to_thread.run_sync, each, limiter=limiter))
            try:
                async with anyio.create_task_group() as services:
                    self._start_services(services, shared)
                    async with anyio.create_task_group() as runners:
                        for runner in self._runners:
                            runners.start_soon(runner.run)
                        # after them, so that the first report finds them running
                        tables, database = self._settings.tables, shared.database
                        services.start_soon(report_forever, tables, database, self.name, self._statuses)
                    services.cancel_scope.cancel()
            finally:
                shared.leases.close()

    def _start_services(self, group: anyio.abc.TaskGroup, shared: Shared) -> None:
        tables, database = self._settings.tables, shared.database
        listener = Listener(conninfo(self._settings.listen_dsn, "listen"), channel=tables.channel)
        for runner in self._runners:
            kind = runner.kind.name
            listener.subscribe(kind, runner.wake.set)
            listener.subscribe_control(kind, partial(shared.leases.verify, kind))
            listener.subscribe_control(kind, runner.wake.set)  # for a pause: the status shows it with the next survey
        wakes = {runner.kind.name: runner.wake.set for runner in self._runners}
        group.start_soon(reap_forever, list(self._queues.values()), shared.surveys, database, wakes)
        group.start_soon(prune_forever, tables, self._kinds, database)
        group.start_soon(listener.run)

    def _statuses(self) -> Mapping[str, str]:
        return {name: msgspec.json.encode(status).decode() for name, status in self.status().items()}

    async def _wait_for_schema(self, within: timedelta) -> None:
        """Until the database answers and has our schema; one line now and then while it does not answer."""
        give_up_at = time.monotonic() + within.total_seconds()
        say_at = time.monotonic()
        while True:
            try:
                look_up = partial(_look_up, self._settings, self._kinds)
                self._queues = await anyio.to_thread.run_sync(look_up, limiter=anyio.CapacityLimiter(1))
            except psycopg.OperationalError as error:
                now = time.monotonic()
                if now >= give_up_at:
                    raise DatabaseUnavailable(
                        f"the database did not answer within {within.total_seconds():g} s: {one_line(error)}"
                    ) from error
                if now >= say_at:
                    say_at = now + _SAY_EVERY_SECONDS
                    _log.warning("waiting for the database: %s", one_line(error))
                with anyio.move_on_after(min(_ASK_EVERY_SECONDS, give_up_at - now)):
                    await self._asked.wait()
                    return
            else:
                return


def one_line(error: BaseException) -> str:
    """The last line of an error's text: libpq's own reason, without the hosts tried and its (indented) hints."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    return lines[-1].strip() if lines else type(error).__name__


def _look_up(settings: Settings, kinds: Sequence[Kind]) -> dict[str, Queue]:
    """Each kind's queue, once the schema has been found to be there, and the apps' own tables to fit."""
    with psycopg.connect(conninfo(settings.dsn, "start"), autocommit=True) as connection:
        # Nothing can cancel this thread, and somebody may hold a lock on what it reads.
        connection.execute(session_settings(STORE_TIMEOUT))
        schema.check(connection, settings.tables)
        return {kind.name: _queue_of(connection, settings, kind) for kind in kinds}


def _queue_of(connection: SyncConnection, settings: Settings, kind: Kind) -> Queue:
    if kind.queue is None:
        return JobsTable(settings.tables, kind)
    table = inspect(connection, settings.tables, kind.name, kind.queue)
    return RowsQueue(settings.tables, kind, table)


def _warn_of_short_leases(kinds: Sequence[Kind]) -> None:
    """They are for tests: a loop or an interpreter that is busy for so long is no lost worker, but looks like one."""
    for kind in kinds:
        ttl = kind.policy.lease.ttl
        if ttl < _SHORT_LEASE:
            _log.warning(
                "a lease of %gs is lost whenever this process is busy for that long, and a job that loses it again and "
                "again ends as evicted_too_often kind=%s: give it some seconds",
                ttl.total_seconds(), kind.name,
            )  # fmt: skip
