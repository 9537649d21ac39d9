"""The front door for synchronous code: `app.sync`, the same calls as AsyncApp's for threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Self, TypeVar

from pgworker.adapters import SyncCaller, SyncConn, sync_caller
from pgworker.db import NO_ANSWER, Flow, SyncDatabase, drive_sync
from pgworker.job import Enqueued, IfPending, NewJob, Urgency
from pgworker.operations import KindPause, Lag, count_lag, list_pauses
from pgworker.policy import STORE_TIMEOUT
from pgworker.registry import DOOR_CONNECTIONS, Registry, unavailable
from pgworker.statements import Statement
from pgworker.verbs import Progress, Selection

T = TypeVar("T")


class SyncApp:
    """The same front door for synchronous code: `app.sync.enqueue(...)`. Any thread may use it; `with` closes it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._databases: dict[int, SyncDatabase] = {}

    # --- enqueue ----------------------------------------------------------------------------------------------------

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
        tenant: str | None = None,
        if_pending: IfPending = "replace",
        conn: SyncConn | None = None,
    ) -> Enqueued:
        """As App.enqueue; `conn` is a connection of psycopg or Django, or a session or connection of SQLAlchemy."""
        job = NewJob(payload, key, revision, delay, ready_at, priority, urgency, max_attempts, tenant)
        return self.enqueue_many(kind, [job], if_pending=if_pending, conn=conn)[0]

    def enqueue_many(
        self,
        kind: str,
        jobs: Sequence[NewJob],
        *,
        if_pending: IfPending = "replace",
        conn: SyncConn | None = None,
    ) -> list[Enqueued]:
        """As App.enqueue_many."""
        caller = sync_caller(conn)
        return self._drive(self._registry.put(kind, jobs, if_pending=if_pending, caller=caller), caller)

    def notify(self, kind: str, *, conn: SyncConn | None = None) -> None:
        """As App.notify."""
        caller = sync_caller(conn)
        self._drive(self._registry.notify(kind, caller=caller), caller)

    # --- results ----------------------------------------------------------------------------------------------------

    def result(
        self, kind: str, key: str, *, revision: str | None = None, timeout: timedelta | float | None = None
    ) -> object:
        """As App.result."""
        settings, known = self._registry.settings, self._registry.in_jobs_table(kind)
        return self._registry.results.wait_sync(settings, known, key, revision=revision, within=timeout)

    # --- operate ----------------------------------------------------------------------------------------------------

    def retry(
        self,
        kind: str,
        *,
        key: str | None = None,
        code: str | None = None,
        all: bool = False,  # noqa: A002 - reads as what is meant
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """As App.retry."""
        chosen = Selection(key, code, all, limit, takes_code=True)
        return self._drive(self._registry.reopen(kind, chosen, progress, rebuild=False))

    def rebuild(
        self,
        kind: str,
        *,
        key: str | None = None,
        all: bool = False,  # noqa: A002 - the operator's own word
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """As App.rebuild."""
        return self._drive(self._registry.reopen(kind, Selection(key, None, all, limit), progress, rebuild=True))

    def cancel(
        self,
        kind: str,
        *,
        key: str | None = None,
        all: bool = False,  # noqa: A002 - the operator's own word
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """As App.cancel."""
        return self._drive(self._registry.cancel(kind, Selection(key, None, all, limit), progress))

    def forget(self, kind: str, key: str) -> bool:
        """As App.forget."""
        return self._drive(self._registry.forget(kind, key))

    def pause(
        self,
        kind: str,
        *,
        until: datetime | None = None,
        for_: timedelta | float | None = None,
        code: str = "paused",
    ) -> None:
        """As App.pause."""
        self._drive(self._registry.pause(kind, until=until, for_=for_, code=code))

    def resume(self, kind: str) -> bool:
        """As App.resume."""
        return self._drive(self._registry.resume(kind))

    def pauses(self) -> list[KindPause]:
        """As App.pauses."""
        return self._run(list_pauses(self._registry.settings.tables))

    def lag(self, kind: str | None = None) -> list[Lag]:
        """As App.lag."""
        return self._run(count_lag(self._registry.settings.tables, kind))

    # --- the database -----------------------------------------------------------------------------------------------

    def _drive(self, flow: Flow[T], caller: SyncCaller | None = None) -> T:
        return drive_sync(flow, self._run if caller is None else caller.send)

    def _run(self, statement: Statement[T]) -> T:
        try:
            return self._database().run(statement)
        except NO_ANSWER as error:
            raise unavailable(error) from error

    def _database(self) -> SyncDatabase:
        database = self._databases.get(os.getpid())
        if database is None:
            dsn = self._registry.settings.dsn
            new = SyncDatabase(dsn, "enqueue", deadline=STORE_TIMEOUT, connections=DOOR_CONNECTIONS)
            new.open()
            # Threads may meet here: one pool wins. No lock, as another thread might hold it at a fork.
            database = self._databases.setdefault(os.getpid(), new)
            if database is not new:
                new.close()
        return database

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the pool, end waits for results, send what hints are left. The app may be used again."""
        database = self._databases.pop(os.getpid(), None)
        if database is not None:
            database.close()
        self._registry.close()
