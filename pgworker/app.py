"""The front door: the registry of kinds, enqueue in all its forms, and the worker."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Literal, Self, TypeAlias, TypeVar, cast

import anyio
import anyio.to_thread
import psycopg
from psycopg.pq import ConnStatus, TransactionStatus
from psycopg_pool import PoolTimeout

from pgworker.client import put_jobs
from pgworker.config import Settings
from pgworker.db import (
    NO_ANSWER,
    AnyAsyncConnection,
    AnySyncConnection,
    Database,
    Flow,
    SyncDatabase,
    drive,
    drive_sync,
    send,
    send_sync,
)
from pgworker.errors import ConfigError, DatabaseUnavailable, PgworkerError
from pgworker.events import Events
from pgworker.job import Enqueued, IfPending, NewJob, Urgency
from pgworker.kind import Apply, Handler, Kind, declare_kind, handled_kind
from pgworker.middleware import Middleware
from pgworker.policy import STORE_TIMEOUT, Lease, Policy, PolicyOptions, Stop, make_policy
from pgworker.registry import Registry
from pgworker.retry import Backoff
from pgworker.statements import Statement
from pgworker.worker import Worker

H = TypeVar("H", bound=Handler)
T = TypeVar("T")
_Databases: TypeAlias = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[int, Database]]

_CONNECTIONS = 4


class App:
    """The kinds of an application and its door to the jobs table.

    Making one connects to nothing: the DSN is looked up (argument, else PGWORKER_DSN) and pools are opened at first
    use, one for each event loop and process, so that a fork or a second loop shares no socket. `async with app` closes.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        schema: str | None = None,
        listen_dsn: str | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self._registry = Registry(dsn=dsn, schema=schema, listen_dsn=listen_dsn)
        self._middleware = tuple(middleware)
        self._databases: _Databases = weakref.WeakKeyDictionary()
        self.events = Events()
        self.sync = SyncApp(self._registry)

    # --- configuration ----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The effective settings. Raises ConfigError when no DSN was given and PGWORKER_DSN is not set."""
        return self._registry.settings

    def configure(self, *, dsn: str | None = None, schema: str | None = None, listen_dsn: str | None = None) -> None:
        """Settings that win over those given to App, as the command line's do. Raises ConfigError after first use."""
        self._registry.configure(dsn=dsn, schema=schema, listen_dsn=listen_dsn)

    @property
    def kinds(self) -> dict[str, Kind]:
        """The registered kinds by name, a copy."""
        return self._registry.kinds

    def kind(
        self,
        name: str,
        *,
        preset: str = "standard",
        batch: int | None = None,
        window: timedelta | float | None = None,
        concurrency: int | None = None,
        max_attempts: int | None = None,
        max_evictions: int | None = None,
        timeout: timedelta | float | None = None,
        poll: timedelta | float | None = None,
        lease: Lease | None = None,
        backoff: Backoff | None = None,
        stop: Stop | None = None,
        panic: Literal["retry", "permanent"] | None = None,
        apply: Apply | None = None,
        payload: object | None = None,
        payload_limit: int | None = None,
        version: int = 1,
    ) -> Callable[[H], H]:
        """Register a handler: `async def` runs in the event loop, `def` in a thread; with `batch` it gets a list.

        Numbers for times are seconds. None and zero mean the preset's value; -1 for max_attempts and max_evictions
        means no limit. `apply(connection, job, value)` makes the app's own writes in the transaction that completes
        the job. Raises ConfigError for options that cannot work together.
        """
        if callable(cast("object", name)):
            raise ConfigError('write @app.kind("name"): a kind is registered under a name of its own')
        policy = _policy(
            preset,
            {
                "batch": batch,
                "window": _duration(window),
                "concurrency": concurrency,
                "max_attempts": max_attempts,
                "max_evictions": max_evictions,
                "timeout": _duration(timeout),
                "poll": _duration(poll),
                "lease": lease,
                "backoff": backoff,
                "stop": stop,
                "panic": panic,
            },
        )

        def register(handler: H) -> H:
            self._registry.add(
                handled_kind(
                    name,
                    policy,
                    handler,
                    batch=bool(batch),
                    apply=apply,
                    payload=payload,
                    payload_limit=payload_limit,
                    version=version,
                )
            )
            return handler

        return register

    def declare(
        self, name: str, *, payload: object = object, payload_limit: int | None = None, version: int = 1
    ) -> None:
        """Make a kind known that is enqueued here and handled elsewhere."""
        policy = make_policy("standard", {})
        self._registry.add(declare_kind(name, policy, payload=payload, payload_limit=payload_limit, version=version))

    # --- enqueue ----------------------------------------------------------------------------------------------------

    async def enqueue(
        self,
        kind: str,
        payload: object = None,
        *,
        key: str | None = None,
        revision: str | None = None,
        delay: timedelta | float | None = None,
        ready_at: datetime | None = None,
        priority: int = 0,
        urgency: Urgency = "fresh",
        max_attempts: int | None = None,
        if_pending: IfPending = "replace",
        conn: AnyAsyncConnection | None = None,
    ) -> Enqueued:
        """Enqueue one job: in a transaction of its own, or in that of `conn`, a psycopg.AsyncConnection.

        Raises PayloadError, ConfigError or UnknownKind before anything is sent, then psycopg.Error as it comes, and
        DatabaseUnavailable when there is no answer. Locks the job's row, if it changes, until the transaction ends.
        When cancelled, the job may have been enqueued or not.
        """
        job = NewJob(payload, key, revision, delay, ready_at, priority, urgency, max_attempts)
        return (await self.enqueue_many(kind, [job], if_pending=if_pending, conn=conn))[0]

    async def enqueue_many(
        self,
        kind: str,
        jobs: Sequence[NewJob],
        *,
        if_pending: IfPending = "replace",
        conn: AnyAsyncConnection | None = None,
    ) -> list[Enqueued]:
        """Enqueue jobs of one kind, all or none, in one statement; the answers are in the order of the jobs."""
        flow = put_jobs(self.settings.tables, self._registry.known(kind), jobs, if_pending=if_pending)
        if conn is None:
            put = await drive(flow, self._run)
        else:
            _check_connection(conn, psycopg.AsyncConnection, "app.sync.enqueue")
            put = await drive(flow, lambda statement: send(conn, statement))
        return self._registry.hint(kind, put, committed=conn is None)

    async def _run(self, statement: Statement[T]) -> T:
        # The pool is opened by the first statement, not before: what is refused unsent must leave no pool behind.
        database = await self._database()
        try:
            return await database.run(statement)
        except NO_ANSWER as error:
            raise _unavailable(error) from error

    async def _database(self) -> Database:
        loop = asyncio.get_running_loop()
        pid, database = self._databases.get(loop, (0, None))
        if database is None or pid != os.getpid():
            self._abandon_closed_loops()
            database = Database(self.settings.dsn, "enqueue", deadline=STORE_TIMEOUT, connections=_CONNECTIONS)
            self._databases[loop] = (os.getpid(), database)
            await database.open()
        return database

    def _abandon_closed_loops(self) -> None:
        """Each asyncio.run() has a loop of its own, whose pool holds it: nothing else would ever let go of the two."""
        for loop in [loop for loop in list(self._databases) if loop.is_closed()]:
            pid, database = self._databases.pop(loop)
            if pid == os.getpid():
                database.abandon()

    async def run_flow(self, flow: Flow[T]) -> T:
        """Run a flow of statements on the app's own pool, each in a transaction of its own."""
        return await drive(flow, self._run)

    # --- work -------------------------------------------------------------------------------------------------------

    def worker(self, kinds: Sequence[str] | None = None) -> Worker:
        """A worker for these kinds, or for all that have a handler. Raises UnknownKind, ConfigError."""
        names = self._registry.handled() if kinds is None else kinds
        chosen = [self._registry.known(name) for name in dict.fromkeys(names)]
        return Worker(self.settings, chosen, events=self.events, middleware=self._middleware)

    async def run(self, kinds: Sequence[str] | None = None) -> None:
        """Work until cancelled; then stop as the kinds' policies say. See Worker.run."""
        await self.worker(kinds).run()

    # --- lifetime ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close this loop's pool and send what hints are left. The app may be used again afterwards."""
        _, database = self._databases.pop(asyncio.get_running_loop(), (0, None))
        if database is not None:
            await database.close()
        await anyio.to_thread.run_sync(self._registry.close, limiter=anyio.CapacityLimiter(1))


class SyncApp:
    """The same front door for synchronous code: `app.sync.enqueue(...)`. Any thread may use it; `with` closes it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._databases: dict[int, SyncDatabase] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def enqueue(
        self,
        kind: str,
        payload: object = None,
        *,
        key: str | None = None,
        revision: str | None = None,
        delay: timedelta | float | None = None,
        ready_at: datetime | None = None,
        priority: int = 0,
        urgency: Urgency = "fresh",
        max_attempts: int | None = None,
        if_pending: IfPending = "replace",
        conn: AnySyncConnection | None = None,
    ) -> Enqueued:
        """As App.enqueue; `conn` is a psycopg.Connection."""
        job = NewJob(payload, key, revision, delay, ready_at, priority, urgency, max_attempts)
        return self.enqueue_many(kind, [job], if_pending=if_pending, conn=conn)[0]

    def enqueue_many(
        self,
        kind: str,
        jobs: Sequence[NewJob],
        *,
        if_pending: IfPending = "replace",
        conn: AnySyncConnection | None = None,
    ) -> list[Enqueued]:
        """As App.enqueue_many."""
        flow = put_jobs(self._registry.settings.tables, self._registry.known(kind), jobs, if_pending=if_pending)
        if conn is None:
            put = drive_sync(flow, self._run)
        else:
            _check_connection(conn, psycopg.Connection, "app.enqueue")
            put = drive_sync(flow, lambda statement: send_sync(conn, statement))
        return self._registry.hint(kind, put, committed=conn is None)

    def run_flow(self, flow: Flow[T]) -> T:
        """As App.run_flow."""
        return drive_sync(flow, self._run)

    def _run(self, statement: Statement[T]) -> T:
        try:
            return self._database().run(statement)
        except NO_ANSWER as error:
            raise _unavailable(error) from error

    def _database(self) -> SyncDatabase:
        database = self._databases.get(os.getpid())
        if database is None:
            dsn = self._registry.settings.dsn
            new = SyncDatabase(dsn, "enqueue", deadline=STORE_TIMEOUT, connections=_CONNECTIONS)
            new.open()
            # Threads may meet here: one pool wins. No lock, as another thread might hold it at a fork.
            database = self._databases.setdefault(os.getpid(), new)
            if database is not new:
                new.close()
        return database

    def close(self) -> None:
        """Close the pool and send what hints are left. The app may be used again afterwards."""
        database = self._databases.pop(os.getpid(), None)
        if database is not None:
            database.close()
        self._registry.close()


def _unavailable(error: BaseException) -> DatabaseUnavailable:
    seconds = STORE_TIMEOUT.total_seconds()
    if isinstance(error, PoolTimeout):
        return DatabaseUnavailable(f"no connection to the database within {seconds:g} s: nothing was sent")
    return DatabaseUnavailable(f"the database did not answer within {seconds:g} s; what was sent may have been written")


def _check_connection(conn: object, wanted: type[object], other_door: str) -> None:
    """Raise TypeError for a connection of another kind, PgworkerError for one that cannot carry an enqueue."""
    if not isinstance(conn, wanted):
        given = type(conn)
        hint = f"; use {other_door} for it" if issubclass(given, (psycopg.Connection, psycopg.AsyncConnection)) else ""
        msg = f"conn must be a psycopg.{wanted.__name__} here, got {given.__module__}.{given.__name__}{hint}"
        raise TypeError(msg)
    info = cast("AnyAsyncConnection | AnySyncConnection", conn).info
    if info.status != ConnStatus.OK:
        msg = "this connection is closed"
        raise PgworkerError(msg)
    if info.encoding == "ascii":
        msg = "this connection's client_encoding is SQL_ASCII, by which no text can be told from bytes: set it to UTF8"
        raise PgworkerError(msg)
    if info.transaction_status == TransactionStatus.INERROR:
        msg = "this connection's transaction has failed: roll it back before you enqueue in it"
        raise PgworkerError(msg)


def _duration(value: timedelta | float | None) -> timedelta | None:
    return timedelta(seconds=value) if isinstance(value, (int, float)) else value


def _policy(preset: str, options: dict[str, object]) -> Policy:
    given = {name: value for name, value in options.items() if value is not None}
    return make_policy(preset, cast("PolicyOptions", given))
