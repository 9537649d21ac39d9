"""The front door for asynchronous code: what an app asks of the database, in whatever event loop it is asked."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Self, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
from psycopg_pool import PoolClosed

from pgworker.adapters import AsyncCaller, AsyncConn, async_caller
from pgworker.db import NO_ANSWER, Database, Flow, drive
from pgworker.groups import Groups
from pgworker.job import Enqueued, IfPending, NewJob, Urgency
from pgworker.operations import KindPause, Lag, count_lag, list_pauses
from pgworker.policy import STORE_TIMEOUT
from pgworker.registry import DOOR_CONNECTIONS, Registry, unavailable
from pgworker.statements import Statement
from pgworker.verbs import Progress, Selection

T = TypeVar("T")


class _Door:
    """What one event loop of one process has of an app: its pools, each opened at first use, and its group commit."""

    def __init__(self, registry: Registry) -> None:
        self.pid = os.getpid()
        self._registry = registry
        self._databases: dict[str, Database] = {}
        self._is_closed = False
        self.groups = Groups(
            registry.settings.tables,
            shared=partial(self._run, "enqueue"),
            alone=self.run,
            committed=registry.wake,
            patience=STORE_TIMEOUT.total_seconds(),
        )

    async def run(self, statement: Statement[T], /, *, within: float = float("inf")) -> T:
        """As Database.run, for what one caller asks: it may wait for a row that somebody holds."""
        return await self._run("calls", statement, within=within)

    async def _run(self, role: str, statement: Statement[T], /, *, within: float = float("inf")) -> T:
        database = self._databases.get(role)
        if database is None:
            if self._is_closed:
                raise PoolClosed("the app was closed")
            dsn = self._registry.settings.dsn
            database = Database(dsn, role, deadline=STORE_TIMEOUT, connections=DOOR_CONNECTIONS)
            self._databases[role] = database
            await database.open()
        return await database.run(statement, within=within)

    async def close(self) -> None:
        """Close the pools, once what is under way for callers that are gone has ended, or a second has passed."""
        await self.groups.close(1)
        self._is_closed = True  # what comes later finds its pool closed, and opens none, which nobody would close
        for database in self._databases.values():
            await database.close()

    def abandon(self) -> None:
        """Close the connections when the event loop has been closed."""
        for database in self._databases.values():
            database.abandon()


class AsyncApp:
    """Enqueue, and the operator's verbs, on a pool for each event loop and process. `async with` closes it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._doors: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Door] = weakref.WeakKeyDictionary()

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
        tenant: str | None = None,
        if_pending: IfPending = "replace",
        conn: AsyncConn | None = None,
    ) -> Enqueued:
        """Enqueue one job: in a transaction of its own, or in that of `conn`.

        That is a connection of psycopg or asyncpg, or a session or connection of SQLAlchemy. Raises PayloadError,
        ConfigError or UnknownKind before anything is sent, then psycopg.Error as it comes (or what else `conn` raises),
        and DatabaseUnavailable when there is no answer. Locks the job's row, if it changes, until the transaction ends.
        When cancelled, the job may have been enqueued or not. Without `conn`, calls that wait at the same time share a
        statement and its commit, but no error; and an event whose answer is lost is sent once more, to the same effect.
        """
        job = NewJob(payload, key, revision, delay, ready_at, priority, urgency, max_attempts, tenant)
        return (await self.enqueue_many(kind, [job], if_pending=if_pending, conn=conn))[0]

    async def enqueue_many(
        self,
        kind: str,
        jobs: Sequence[NewJob],
        *,
        if_pending: IfPending = "replace",
        conn: AsyncConn | None = None,
    ) -> list[Enqueued]:
        """As enqueue, for jobs of one kind: in one statement, all or none; the answers are in the order of the jobs.

        With one exception, without `conn`: what another transaction has put the same at that very moment is asked for
        once more, in a statement of its own. If that fails, there is an error, although the other jobs are there.
        """
        caller = async_caller(conn)
        if caller is not None:
            return await self._drive(self._registry.put(kind, jobs, if_pending=if_pending, caller=caller), caller)
        order = self._registry.order(kind, jobs, if_pending=if_pending)
        if not order.rows:
            return []
        await anyio.lowlevel.checkpoint_if_cancelled()  # then nothing is to be sent
        try:
            return await self._door().groups.put(order)
        except NO_ANSWER as error:
            raise unavailable(error) from error

    async def notify(self, kind: str, *, conn: AsyncConn | None = None) -> None:
        """Tell the workers that there is work of this kind, for an app that writes its own table.

        A hint: calls in quick succession become one, it is sent by another thread, and one that is lost costs a poll.
        With `conn` it waits for that connection's transaction to be committed, which is asked for its id.
        """
        caller = async_caller(conn)
        await self._drive(self._registry.notify(kind, caller=caller), caller)

    # --- results ----------------------------------------------------------------------------------------------------

    async def result(
        self,
        kind: str,
        key: str,
        *,
        revision: str | None = None,
        timeout: timedelta | float | None = None,  # noqa: ASYNC109 - the same call as in threads
    ) -> object:
        """Wait until a job has succeeded, and return its value: as the type that its handler declares, else plain JSON.

        It is the revision that is current now, or the one given. Raises JobFailed or JobCancelled when it has ended
        so, Superseded when other work has taken its place, UnknownJob when there is none or it was deleted, ResultGone
        when the value is not kept any more, TimeoutError when the time is up. Until then an outage is waited out. All
        who wait in a process share one thread and two connections; cancelling takes this one off, and nothing else.
        """
        settings, known = self._registry.settings, self._registry.in_jobs_table(kind)
        return await self._registry.results.wait(settings, known, key, revision=revision, within=timeout)

    # --- operate ----------------------------------------------------------------------------------------------------

    async def retry(
        self,
        kind: str,
        *,
        key: str | None = None,
        code: str | None = None,
        all: bool = False,  # noqa: A002 - reads as what is meant
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Put failed and cancelled jobs back to work, due now and as if they had not been tried; returns how many.

        Give exactly one of a key, a code and all=True; `limit` bounds the number. Jobs in other states stay as they
        are. Raises PayloadPruned for those that have no payload any more, when the others are done.

        This and rebuild and cancel change 500 jobs a statement, each committed by itself, and tell `progress` the
        count so far: one that is cut short, or cancelled, has done a part of it. A row that another transaction holds
        is passed over, and asked for again at the end, for about half a second; if one is still held then,
        PgworkerError says how many were left as they are.
        """
        chosen = Selection(key, code, all, limit, takes_code=True)
        return await self._drive(self._registry.reopen(kind, chosen, progress, rebuild=False))

    async def rebuild(
        self,
        kind: str,
        *,
        key: str | None = None,
        all: bool = False,  # noqa: A002 - the operator's own word
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """As retry, and for succeeded jobs, too; an old result stays until there is a new one."""
        return await self._drive(self._registry.reopen(kind, Selection(key, None, all, limit), progress, rebuild=True))

    async def cancel(
        self,
        kind: str,
        *,
        key: str | None = None,
        all: bool = False,  # noqa: A002 - the operator's own word
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> int:
        """End jobs as cancelled, at once if they do not run, else by a request to their runner; returns how many.

        A job that has ended, or has been asked to stop, is not counted. One whose handler comes to its end all the
        same ends as the handler says, but is not tried again. Rows that are held: as retry.
        """
        return await self._drive(self._registry.cancel(kind, Selection(key, None, all, limit), progress))

    async def forget(self, kind: str, key: str) -> bool:
        """Delete a key's job and its result, in whatever state; says whether there was one.

        A run in progress loses its lease. The key's revision is forgotten, too: enqueued again, it runs again. Raises
        PgworkerError for a row that another transaction holds for more than half a second.
        """
        return await self._drive(self._registry.forget(kind, key))

    async def pause(
        self,
        kind: str,
        *,
        until: datetime | None = None,
        for_: timedelta | float | None = None,
        code: str = "paused",
    ) -> None:
        """Let no worker claim jobs of this kind: until an instant, for a time, or until it is resumed.

        What runs goes on, and jobs may be enqueued. It is kept in the database, so restarts do not end it. A kind that
        is paused for longer already stays so: to shorten a pause, resume first.
        """
        await self._drive(self._registry.pause(kind, until=until, for_=for_, code=code))

    async def resume(self, kind: str) -> bool:
        """End a kind's pause; says whether there was one."""
        return await self._drive(self._registry.resume(kind))

    async def pauses(self) -> list[KindPause]:
        """The kinds that are paused, this app's or not."""
        return await self._run(list_pauses(self._registry.settings.tables))

    async def lag(self, kind: str | None = None) -> list[Lag]:
        """What waits, by kind (this one, or all that have pending jobs) and urgency. Reads an index, locks nothing."""
        return await self._run(count_lag(self._registry.settings.tables, kind))

    # --- the database -----------------------------------------------------------------------------------------------

    async def _drive(self, flow: Flow[T], caller: AsyncCaller | None = None) -> T:
        return await drive(flow, self._run if caller is None else caller.send)

    async def _run(self, statement: Statement[T]) -> T:
        await anyio.lowlevel.checkpoint_if_cancelled()  # each statement is seen through: a flow ends between two
        try:
            return await self._door().run(statement)
        except NO_ANSWER as error:
            raise unavailable(error) from error

    def _door(self) -> _Door:
        """This event loop's. Asked for by what is to be sent: what is refused unsent must leave nothing behind."""
        loop = asyncio.get_running_loop()
        door = self._doors.get(loop)
        if door is None or door.pid != os.getpid():
            self._abandon_closed_loops()
            door = self._doors[loop] = _Door(self._registry)
        return door

    def _abandon_closed_loops(self) -> None:
        """Each asyncio.run() has a loop of its own, whose pools hold it: nothing else would ever let go of the two."""
        for loop in [loop for loop in list(self._doors) if loop.is_closed()]:
            door = self._doors.pop(loop)
            if door.pid == os.getpid():
                door.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close this loop's pools, end waits for results, send what hints are left. The app may be used again."""
        door = self._doors.pop(asyncio.get_running_loop(), None)
        if door is not None:
            await door.close()
        await anyio.to_thread.run_sync(self._registry.close, limiter=anyio.CapacityLimiter(1))
