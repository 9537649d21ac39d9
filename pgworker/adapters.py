"""What `conn=` takes: how a statement is sent over a caller's connection, whatever package that is from."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Final, Protocol, TypeAlias, cast

import psycopg
from psycopg.pq import ConnStatus, TransactionStatus

from pgworker.db import AnyAsyncConnection, AnySyncConnection, send, send_sync
from pgworker.errors import PgworkerError
from pgworker.foreign import find_adapter
from pgworker.statements import Statement

# The second exception to "the core never imports an extra", as in pgworker.payload: top-level module of a connection's
# class or of its bases -> the module of ours that can send over it, loaded by name when the first one is met; its user
# has imported the package by then.
_ADAPTERS: Final = {
    "asyncpg": "pgworker.contrib.asyncpg",
    "django": "pgworker.contrib.django",
    "sqlalchemy": "pgworker.contrib.sqlalchemy",
}
_PLACEHOLDER: Final = re.compile(r"%(?:\(([^)]*)\)s|(.?))", re.DOTALL)

CLOSED: Final = "this connection is closed"
FAILED: Final = "this connection's transaction has failed: roll it back first"

OnCommit: TypeAlias = Callable[[Callable[[], None]], bool]
"""Has something called after the transaction has been committed, and not if it is rolled back; False if it cannot."""


@dataclass(frozen=True, slots=True)
class AsyncCaller:
    """A caller's connection that is awaited: how to send a statement over it, in whatever transaction it is."""

    send: Callable[[Statement[Any]], Awaitable[Any]]
    on_commit: OnCommit | None = None


@dataclass(frozen=True, slots=True)
class SyncCaller:
    """As AsyncCaller, for a synchronous connection.

    Without `on_commit` a hint waits for the id of the transaction, as the statement returns it.
    """

    send: Callable[[Statement[Any]], Any]
    on_commit: OnCommit | None = None


Caller: TypeAlias = AsyncCaller | SyncCaller


class Adapter(Protocol):
    """What a contrib module offers, so that another package's connections may be given."""

    def adapt(self, conn: object, /) -> Caller | None:
        """Say how to send over it, connecting to nothing yet; None for what is no connection.

        Raises TypeError for what has connections to give (an engine, a pool), saying how to get one; ConfigError for a
        connection that leads elsewhere than to Postgres, or by a driver that is not known. Sending raises the package's
        own errors, and PgworkerError before anything is sent for a connection that is closed, or whose transaction has
        failed.
        """
        ...


# --- what a type checker lets through: other packages' classes by what they have, as they may not be installed -------


class _Rows(Protocol):
    def fetchall(self) -> Sequence[object]: ...


class _SyncDriver(Protocol):
    def exec_driver_sql(self, statement: str, /) -> _Rows: ...


class _AsyncDriver(Protocol):
    def exec_driver_sql(self, statement: str, /) -> Awaitable[_Rows]: ...


class _SyncSession(Protocol):
    def connection(self) -> _SyncDriver: ...
    def flush(self) -> None: ...  # (AsyncConnection has a property `connection`, of any type)


class _AsyncSession(Protocol):
    def connection(self) -> Awaitable[_AsyncDriver]: ...


class _Asyncpg(Protocol):
    def is_in_transaction(self) -> bool: ...
    def is_closed(self) -> bool: ...


class _Django(Protocol):
    def ensure_connection(self) -> None: ...
    def get_autocommit(self) -> bool: ...


class _Proxy(Protocol):
    """What stands for a connection: asyncpg's pools and django.db hand out such."""

    def __getattr__(self, name: str, /) -> object: ...


AsyncConn: TypeAlias = AnyAsyncConnection | _AsyncSession | _AsyncDriver | _Asyncpg | _Proxy
"""What asynchronous calls take: connections of psycopg and asyncpg, sessions and connections of SQLAlchemy."""
SyncConn: TypeAlias = AnySyncConnection | _SyncSession | _SyncDriver | _Django | _Proxy
"""What synchronous calls take: connections of psycopg and Django, sessions and connections of SQLAlchemy."""


# --- adapt ----------------------------------------------------------------------------------------------------------


def async_caller(conn: object) -> AsyncCaller | None:
    """How to send over a caller's connection, None without one.

    Raises TypeError for one that is not asynchronous, or is none; PgworkerError for one that cannot carry a statement.
    """
    if conn is None:
        return None
    caller = _adapt(conn)
    if isinstance(caller, AsyncCaller):
        return caller
    if caller is None:
        raise TypeError(
            f"conn must be a psycopg.AsyncConnection here, got {_name(conn)}; "
            "asyncpg's connections and SQLAlchemy's asynchronous ones will do as well"
        )
    raise TypeError(
        "conn must be asynchronous, as a psycopg.AsyncConnection here, "
        f"got {_name(conn)}; use app.sync.enqueue or .notify for it"
    )


def sync_caller(conn: object) -> SyncCaller | None:
    """As async_caller, for a synchronous connection."""
    if conn is None:
        return None
    caller = _adapt(conn)
    if isinstance(caller, SyncCaller):
        return caller
    if caller is None:
        raise TypeError(
            f"conn must be a psycopg.Connection here, got {_name(conn)}; "
            "Django's connections and SQLAlchemy's synchronous ones will do as well"
        )
    raise TypeError(
        f"conn must be synchronous, as a psycopg.Connection here, got {_name(conn)}; use app.enqueue or .notify for it"
    )


def _adapt(conn: object) -> Caller | None:
    if isinstance(conn, psycopg.AsyncConnection):
        given = cast("AnyAsyncConnection", conn)
        return AsyncCaller(partial(_send_async, given))
    if isinstance(conn, psycopg.Connection):
        return SyncCaller(partial(_send_sync, cast("AnySyncConnection", conn)))
    kind: type = type(conn)
    adapter = _adapter(kind)
    return None if adapter is None else adapter.adapt(conn)


@lru_cache(maxsize=256)
def _adapter(kind: type) -> Adapter | None:
    return cast("Adapter | None", find_adapter(kind, _ADAPTERS))


def _name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__name__}"


# --- psycopg --------------------------------------------------------------------------------------------------------


async def _send_async(conn: AnyAsyncConnection, statement: Statement[Any]) -> object:
    _check(conn.info)
    return await send(conn, statement)


def _send_sync(conn: AnySyncConnection, statement: Statement[Any]) -> object:
    _check(conn.info)
    return send_sync(conn, statement)


def _check(info: psycopg.ConnectionInfo) -> None:
    if info.status != ConnStatus.OK:
        raise PgworkerError(CLOSED)
    check_session(info)


def check_session(info: psycopg.ConnectionInfo) -> None:
    """Raise PgworkerError for a session that cannot carry a statement at present. Whether it is open is not asked."""
    if info.encoding == "ascii":
        raise PgworkerError(
            "this connection's client_encoding is SQL_ASCII, by which no text can be told from bytes: set it to UTF8"
        )
    if info.transaction_status == TransactionStatus.INERROR:
        raise PgworkerError(FAILED)


# --- for adapters ---------------------------------------------------------------------------------------------------


def numbered(statement: Statement[Any]) -> tuple[str, tuple[object, ...]]:
    """A statement's text with `$1`, `$2`, ... for its named parameters, and their values in that order."""
    text, names = _numbered(statement.sql)
    return text, tuple(statement.parameters[name] for name in names)


@cache  # as many as there are texts, each made once for a schema
def _numbered(sql: bytes) -> tuple[str, tuple[str, ...]]:
    numbers: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        name, other = found.groups()
        if name is not None:
            return f"${numbers.setdefault(name, len(numbers) + 1)}"
        if other != "%":
            raise ValueError(f"a percent sign at {found.start()} that is neither %% nor a named parameter")
        return "%"

    return _PLACEHOLDER.sub(number, sql.decode()), tuple(numbers)
