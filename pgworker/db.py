"""Run a statement, sync or async: the two drivers, their pools, and what an error of the database means."""

from __future__ import annotations

import asyncio
import random
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from itertools import chain, groupby
from typing import Any, TypeAlias, TypeVar, cast
from uuid import UUID

import anyio
import psycopg
from psycopg import errors as pg
from psycopg.rows import tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool, PoolTimeout

from pgworker.config import conninfo
from pgworker.statements import Row, Statement

T = TypeVar("T")
AsyncConnection: TypeAlias = psycopg.AsyncConnection[tuple[object, ...]]
SyncConnection: TypeAlias = psycopg.Connection[tuple[object, ...]]
AnyAsyncConnection: TypeAlias = psycopg.AsyncConnection[object]
"""A caller's: whatever rows it makes, ours are tuples."""
AnySyncConnection: TypeAlias = psycopg.Connection[object]

SESSION = """
set default_transaction_isolation = 'read committed';
set default_transaction_read_only = off;
set row_security = off;
set jit = off;
set enable_seqscan = off;
set enable_bitmapscan = off;
set enable_sort = off;
set enable_partition_pruning = off;
set plan_cache_mode = {plan_cache_mode};
set log_parameter_max_length_on_error = 0;
do $$ begin set log_error_verbosity = terse; exception when insufficient_privilege then null; end $$;
set client_min_messages = warning;
set datestyle = 'ISO';
set idle_session_timeout = 0;
set statement_timeout = {timeout_ms};
set lock_timeout = {lock_timeout_ms};
set idle_in_transaction_session_timeout = {timeout_ms}
"""
"""What every session of the runtime says for itself, whatever the role's or the database's defaults are.

The fences rely on READ COMMITTED. Row security fails loudly instead of hiding rows. The driver reads instants in
ISO style only. An idle connection of a pool must not be ended under it. The planner settings pin the walk along
jobs_ready on tables whose statistics are young or missing. Partition pruning is off because PostgreSQL 18 (seen with
18.6) crashes where jobs is partitioned: when it prunes at run time, in a statement that had to look at a row anew.
Parameters never reach the server's log; nor do rows that a constraint refuses, which Postgres quotes in an error's
details, if the role may be terse there: a superuser, a role with SET on log_error_verbosity (PostgreSQL 15), or one
that was given the setting by ALTER ROLE.
"""

_WAIT_SHARE = 0.9  # of a deadline, for a connection: an error that comes before it says that nothing was sent
_SERVER_MARGIN = timedelta(milliseconds=500)  # the server gives up first, so that it frees the locks as well
_LONGEST_LOCK_WAITS_MS = {"worker": 500, "enqueue": 200}
"""Sessions that share their statements among many jobs: none may wait for a stranger's lock as long as it lasts.

Their errors tell the two apart: LockNotAvailable for what is locked, QueryCanceled for what is too much. All others
wait up to their deadline, as an enqueue does alone for a caller's open transaction. (The synchronous pool shares none.)
"""


def session_settings(deadline: timedelta, role: str = "", *, keep_plans: bool = True) -> bytes:
    """The SET commands for a session of this role, whose statements have this deadline.

    With `keep_plans` each statement is planned once, as no plan of ours on the jobs table is to depend on statistics:
    by itself the server plans surveys and finishes anew each time, which takes longer than to carry them out (on an
    idle server, a finish of one job 1.0 ms and not 0.4, a survey 0.6 and not 0.3). Not where an app's own table, its
    triggers or its statements are planned, too.
    """
    timeout_ms = int((deadline - _SERVER_MARGIN).total_seconds() * 1000)
    longest = _LONGEST_LOCK_WAITS_MS.get(role)
    lock_timeout_ms = 0 if longest is None else max(1, min(longest, timeout_ms // 2))
    mode = "force_generic_plan" if keep_plans else "auto"
    return SESSION.format(timeout_ms=timeout_ms, lock_timeout_ms=lock_timeout_ms, plan_cache_mode=mode).encode()


PINNED = b"""
set local enable_seqscan = off; set local enable_bitmapscan = off; set local enable_sort = off;
set local enable_partition_pruning = off"""
"""The planner settings of SESSION for the rest of a transaction, after the app's own statements went without them."""


NO_ANSWER = (TimeoutError, PoolTimeout)
"""What a call raises that got no connection, or no answer, before its deadline."""


def is_outage(error: BaseException) -> bool:
    """Whether the connection or the server failed, rather than the statement: worth another try on a new connection."""
    if isinstance(error, (TimeoutError, psycopg.InterfaceError)):
        return True
    if not isinstance(error, psycopg.OperationalError):
        return isinstance(error, pg.ReadOnlySqlTransaction)  # connected to a server that has become a standby
    return error.sqlstate is None or error.sqlstate[:2] in ("08", "53", "57", "58")


def is_conflict(error: BaseException) -> bool:
    """Whether the statement lost against another transaction and may be sent again as it is."""
    return isinstance(error, (pg.SerializationFailure, pg.DeadlockDetected, pg.LockNotAvailable, pg.QueryCanceled))


def is_data_error(error: BaseException) -> bool:
    """Whether a value is at fault (SQLSTATE classes 22 and 23): the same statement would fail again."""
    return isinstance(error, psycopg.Error) and (error.sqlstate or "")[:2] in ("22", "23")


_CONFLICT_TRIES = 3


def _pause_after_conflict(tried: int) -> float:
    """Seconds to wait before sending again what lost against another transaction: short, growing, spread."""
    return random.uniform(0.005, 0.02) * float(2**tried)  # noqa: S311 - spreads retries, guards nothing


def _parameters(statement: Statement[T]) -> Mapping[str, object]:
    """A statement's parameters, its long and empty lists as literals: psycopg's own ones cost several times as much."""
    lists = statement.lists
    return {
        name: array_literal(cast("Sequence[Element]", value)) if name in lists or value == [] else value
        for name, value in statement.parameters.items()
    }


Element: TypeAlias = str | int | float | UUID | None


def array_literal(values: Sequence[Element]) -> str:
    """The literal of an array of numbers, of UUIDs, or of texts; psycopg.DataError for a NUL that would part a text.

    (Where all are the same, or some are None, the driver itself refuses it.)
    """
    if not values:
        return "{}"
    first = values[0]
    if values.count(first) == len(values):  # as it mostly is with revisions, results and the tokens of one claim
        return f"{{{','.join([_element(first)] * len(values))}}}"
    if isinstance(first, UUID) or None in values:
        runs = [[_element(value)] * len([*equal]) for value, equal in groupby(values)]
        return f"{{{','.join(chain.from_iterable(runs))}}}"
    if isinstance(first, (int, float)):
        return f"{{{','.join(map(str, values))}}}"
    texts = _escaped("\0".join(cast("Sequence[str]", values)))
    if texts.count("\0") >= len(values):  # each would be taken for the end of a value, and all behind it be another's
        raise psycopg.DataError("a text holds a NUL, which PostgreSQL cannot store")
    return '{"' + texts.replace("\0", '","') + '"}'


def _element(value: Element) -> str:
    if value is None:
        return "NULL"
    return f'"{_escaped(value)}"' if isinstance(value, str) else str(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


async def send(connection: AnyAsyncConnection, statement: Statement[T]) -> T:
    """Run a statement on this connection, whatever its cursor and row factories are; nothing is committed here."""
    async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
        await cursor.execute(statement.sql, _parameters(statement))
        piped = connection.pgconn.pipeline_status  # then nothing is known before it is fetched
        rows = await cursor.fetchall() if piped or cursor.description else []
    return statement.read(cast("list[Row]", rows))


def send_sync(connection: AnySyncConnection, statement: Statement[T]) -> T:
    """As send, for a synchronous connection."""
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(statement.sql, _parameters(statement))
        piped = connection.pgconn.pipeline_status
        rows = cursor.fetchall() if piped or cursor.description else []
    return statement.read(cast("list[Row]", rows))


def _is_alive(connection: AsyncConnection | SyncConnection) -> bool:
    """Whether a connection has not ended while it lay in the pool, seen without asking the server.

    Else the first statements after a restart of the server would fail, one for each connection that lay there. Not by
    the pool's own `check`: it pauses after each that it finds, longer and longer.
    """
    try:
        for _ in range(2):  # the server's last words, then the end of the stream
            connection.pgconn.consume_input()
    except psycopg.OperationalError:
        return False
    return True


class Database:
    """Statements of one event loop, each in a transaction of its own on a pooled connection.

    At most `connections` at once, `ready` of them kept open. Every call is shielded from cancellation and has a
    deadline: a cancelled statement may still have been committed, so it is seen through, and the caller looks at its
    cancellation afterwards.
    """

    def __init__(
        self, dsn: str, role: str, *, deadline: timedelta, connections: int, ready: int = 0, keep_plans: bool = True
    ) -> None:
        self.deadline = deadline
        self._session = session_settings(deadline, role, keep_plans=keep_plans)
        self._closed = asyncio.Event()
        self._warden: asyncio.Task[None] | None = None
        self._made: weakref.WeakSet[AsyncConnection] = weakref.WeakSet()
        self._pool: AsyncConnectionPool[AsyncConnection] = AsyncConnectionPool(
            conninfo(dsn, role),
            kwargs={"autocommit": True},
            min_size=ready,
            max_size=connections,
            open=False,
            timeout=deadline.total_seconds() * _WAIT_SHARE,
            configure=self._configure,
            name=f"pgworker {role}",
            reconnect_timeout=deadline.total_seconds(),  # the longer, the farther apart are its last tries
        )

    async def _configure(self, connection: AsyncConnection) -> None:
        self._made.add(connection)
        await connection.execute(self._session)

    async def open(self) -> None:
        """Start the pool; connections are made in the background."""
        await self._pool.open(wait=False)
        # Beside the pool's own tasks, and as they are: an app that only enqueues has no task group to put it into.
        self._warden = asyncio.create_task(self._close_at_loops_end())  # noqa: TID251 - said above

    async def close(self) -> None:
        """Close the pool's connections."""
        self._closed.set()
        await self._pool.close(timeout=1)

    async def _close_at_loops_end(self) -> None:
        """Close a pool that nobody has closed, when asyncio.run() cancels what is left and waits for it.

        The pool's own tasks may take that for one more failure to connect, and live on; asyncio.run() never returned.
        """
        try:
            await self._closed.wait()
        except asyncio.CancelledError:
            try:
                await self._pool.close(timeout=1)
            finally:
                self.abandon()
            raise

    def abandon(self) -> None:
        """Close the connections of a pool whose event loop has been closed."""
        for connection in self._made:
            connection.pgconn.finish()

    async def run(self, statement: Statement[T], *, within: float = float("inf")) -> T:
        """Run and commit one statement, three times if it loses a deadlock or a serialization conflict.

        Raises psycopg.Error, or TimeoutError when the deadline passes, or so many seconds if they are fewer.
        """
        with anyio.fail_after(min(within, self.deadline.total_seconds()), shield=True):
            for tried in range(1, _CONFLICT_TRIES):
                try:
                    return await self._once(statement)
                except (pg.SerializationFailure, pg.DeadlockDetected):
                    await anyio.sleep(_pause_after_conflict(tried))
            return await self._once(statement)
        raise AssertionError  # fail_after has raised

    async def _once(self, statement: Statement[T]) -> T:
        async with self._connection() as connection:
            return await send(connection, statement)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[AsyncConnection, None]:
        """One transaction: committed at the end, rolled back by an exception; shielded and bounded like run.

        Waiting for a connection has its own bound (psycopg_pool.PoolTimeout): it is no fault of what is done with it.
        """
        with anyio.CancelScope(shield=True):
            async with self._connection() as connection:
                with anyio.fail_after(self.deadline.total_seconds()):
                    async with connection.transaction():
                        yield connection

    @asynccontextmanager
    async def _connection(self) -> AsyncGenerator[AsyncConnection, None]:
        while not _is_alive(connection := await self._pool.getconn()):
            await self._pool.putconn(connection)  # which makes a new one in its place
        try:
            async with connection:
                yield connection
        except pg.ReadOnlySqlTransaction:
            await connection.close()  # a failover made this server a standby: the pool makes a new connection
            raise
        finally:
            await self._pool.putconn(connection)


class SyncDatabase:
    """As Database, for threads."""

    def __init__(self, dsn: str, role: str, *, deadline: timedelta, connections: int, keep_plans: bool = True) -> None:
        self.deadline = deadline
        self._session = session_settings(deadline, keep_plans=keep_plans)
        self._pool: ConnectionPool[SyncConnection] = ConnectionPool(
            conninfo(dsn, role),
            kwargs={"autocommit": True},
            min_size=0,
            max_size=connections,
            open=False,
            timeout=deadline.total_seconds() * _WAIT_SHARE,
            configure=self._configure,
            name=f"pgworker {role}",
            reconnect_timeout=deadline.total_seconds(),  # the longer, the farther apart are its last tries
        )

    def _configure(self, connection: SyncConnection) -> None:
        connection.execute(self._session)

    def open(self) -> None:
        """Start the pool; connections are made when they are needed."""
        self._pool.open(wait=False)

    def close(self) -> None:
        """Close the pool's connections."""
        self._pool.close(timeout=1)

    def run(self, statement: Statement[T]) -> T:
        """As Database.run; without a connection it raises psycopg_pool.PoolTimeout."""
        for tried in range(1, _CONFLICT_TRIES):
            try:
                return self._once(statement)
            except (pg.SerializationFailure, pg.DeadlockDetected):
                time.sleep(_pause_after_conflict(tried))
        return self._once(statement)

    def _once(self, statement: Statement[T]) -> T:
        with self._connection() as connection:
            return send_sync(connection, statement)

    @contextmanager
    def transaction(self) -> Generator[SyncConnection, None, None]:
        """One transaction: committed at the end, rolled back by an exception."""
        with self._connection() as connection, connection.transaction():
            yield connection

    @contextmanager
    def _connection(self) -> Generator[SyncConnection, None, None]:
        while not _is_alive(connection := self._pool.getconn()):
            self._pool.putconn(connection)
        try:
            with connection:
                yield connection
        except pg.ReadOnlySqlTransaction:
            connection.close()
            raise
        finally:
            self._pool.putconn(connection)


Flow: TypeAlias = Generator[Statement[Any], Any, T]
"""Several statements in a row, decided without I/O: yields each, is sent what it read, returns the end result."""


async def drive(flow: Flow[T], run: Callable[[Statement[Any]], Awaitable[Any]]) -> T:
    """Run a flow's statements one after the other, however `run` does that."""
    try:
        statement = next(flow)
        while True:
            statement = flow.send(await run(statement))
    except StopIteration as end:
        return cast("T", end.value)


def drive_sync(flow: Flow[T], run: Callable[[Statement[Any]], Any]) -> T:
    """As drive, for threads."""
    try:
        statement = next(flow)
        while True:
            statement = flow.send(run(statement))
    except StopIteration as end:
        return cast("T", end.value)
