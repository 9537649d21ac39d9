"""Django's database connections as `conn=`; `pgworker.adapters` loads this module by name when it meets the first one.

Statements are sent by Django's own cursor: they belong to its atomic block, and their errors are Django's. The hint
waits for `on_commit`, so a block that is rolled back sends none, be it a savepoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, cast

# (Django is not annotated; what is needed of it is written down below)
from django.db.backends.base.base import BaseDatabaseWrapper  # pyright: ignore[reportMissingTypeStubs]
from django.utils.connection import ConnectionProxy  # pyright: ignore[reportMissingTypeStubs]
from psycopg.pq import TransactionStatus

from pgworker.adapters import FAILED, SyncCaller
from pgworker.errors import ConfigError, PgworkerError
from pgworker.statements import Row, Statement


class _Cursor(Protocol):
    def execute(self, sql: str, params: Mapping[str, object]) -> object: ...
    def fetchall(self) -> Sequence[Row]: ...


class _Connection(Protocol):
    alias: str
    vendor: str
    connection: Any
    in_atomic_block: bool
    needs_rollback: bool

    def ensure_connection(self) -> None: ...
    def get_autocommit(self) -> bool: ...
    def cursor(self) -> AbstractContextManager[_Cursor]: ...
    def on_commit(self, func: Callable[[], None]) -> None: ...


def adapt(conn: object, /) -> SyncCaller | None:
    """Send over `django.db.connection`, or one of `django.db.connections`."""
    if not isinstance(conn, BaseDatabaseWrapper | ConnectionProxy):
        return None
    given = cast("_Connection", conn)
    if given.vendor != "postgresql":
        raise ConfigError(f"conn is Django's {given.alias!r}, a {given.vendor} database: jobs live in Postgres")
    return SyncCaller(partial(_send, given), partial(_on_commit, given))


def _send(conn: _Connection, statement: Statement[Any]) -> object:
    conn.ensure_connection()
    # (psycopg2 has the same numbers)
    if conn.needs_rollback or conn.connection.info.transaction_status == TransactionStatus.INERROR:
        raise PgworkerError(FAILED)
    with conn.cursor() as cursor:
        cursor.execute(statement.sql.decode(), dict(statement.parameters))
        return statement.read(cursor.fetchall())


def _on_commit(conn: _Connection, call: Callable[[], None]) -> bool:
    has_hooks = conn.in_atomic_block or conn.get_autocommit()  # in a transaction that is managed by hand it has none
    if has_hooks:
        conn.on_commit(call)
    return has_hooks
