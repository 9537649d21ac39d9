"""asyncpg's connections as `conn=`; `pgworker.adapters` loads this module by name when it meets the first one."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any, Protocol, cast

# (asyncpg is annotated in part only; what is needed of it is written down below)
import asyncpg  # pyright: ignore[reportMissingTypeStubs]
from asyncpg.pool import PoolConnectionProxy  # pyright: ignore[reportMissingTypeStubs]

from pgworker.adapters import CLOSED, FAILED, AsyncCaller, numbered
from pgworker.errors import PgworkerError
from pgworker.statements import Statement


class _Connection(Protocol):
    def is_closed(self) -> bool: ...
    def fetch(self, query: str, /, *values: object) -> Awaitable[Sequence[Sequence[object]]]: ...


def adapt(conn: object, /) -> AsyncCaller | None:
    """Send over a connection, of a pool or not; outside of `conn.transaction()` it commits each statement itself."""
    if isinstance(conn, asyncpg.Pool):
        raise TypeError("conn must be one connection, got asyncpg's pool of them: async with pool.acquire() as conn")
    if not isinstance(conn, asyncpg.Connection | PoolConnectionProxy):
        return None
    return AsyncCaller(partial(_send, cast("_Connection", conn)))


async def _send(conn: _Connection, statement: Statement[Any]) -> object:
    try:
        closed = conn.is_closed()
    except asyncpg.exceptions.InterfaceError as error:  # given back to its pool
        raise PgworkerError(CLOSED) from error
    if closed:
        raise PgworkerError(CLOSED)
    text, values = numbered(statement)
    try:
        records = await conn.fetch(text, *values)
    except asyncpg.InFailedSQLTransactionError as error:  # asyncpg does not tell before; the server has done nothing
        raise PgworkerError(FAILED) from error
    return statement.read([tuple(record) for record in records])
