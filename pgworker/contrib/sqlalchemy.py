"""SQLAlchemy's sessions and connections as `conn=`; `pgworker.adapters` loads this module when it meets the first one.

Statements are sent by `exec_driver_sql`: a session knows of them, begins its transaction for them, and their errors are
SQLAlchemy's. Nothing is flushed: rows that a session has yet to write are written when it does so by itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pgworker.adapters import CLOSED, FAILED, AsyncCaller, Caller, SyncCaller, check_session, numbered
from pgworker.errors import ConfigError, PgworkerError
from pgworker.statements import Statement

_NAMED: Final = frozenset({"psycopg", "psycopg2"})
_OPTIONS: Final = {"stream_results": False, "yield_per": None}  # no server-side cursor, whatever the caller's reads use
_IN_FAILED_TRANSACTION: Final = "25P02"


def adapt(conn: object, /) -> Caller | None:
    """Send over a session or connection, scoped sessions included, in the transaction that it has or begins."""
    match conn:
        case Session():
            return SyncCaller(partial(_send_session, conn))
        case Connection():
            return SyncCaller(partial(_send, conn))
        case scoped_session():
            return adapt(conn())
        case Engine():
            raise TypeError("conn must be one connection, got SQLAlchemy's engine: with engine.begin() as conn")
        case sessionmaker():
            raise TypeError("conn must be one session, got SQLAlchemy's maker of them: with maker.begin() as session")
        case _:
            return _adapt_async(conn)


def _adapt_async(conn: object) -> Caller | None:
    if not any(base.__module__.startswith("sqlalchemy.ext.asyncio") for base in type(conn).__mro__):
        return None
    from sqlalchemy.ext import asyncio  # noqa: PLC0415 - needs greenlet, which synchronous users need not have

    match conn:
        case asyncio.AsyncSession():
            return AsyncCaller(lambda statement: conn.run_sync(_send_session, statement))
        case asyncio.AsyncConnection():
            return AsyncCaller(lambda statement: conn.run_sync(_send, statement))
        case asyncio.async_scoped_session():
            return adapt(conn())
        case asyncio.AsyncEngine():
            raise TypeError("conn must be one connection, got SQLAlchemy's engine: async with engine.begin() as conn")
        case asyncio.async_sessionmaker():
            raise TypeError(
                "conn must be one session, got SQLAlchemy's maker of them: async with maker.begin() as session"
            )
        case _:
            return None


def _send_session(session: Session, statement: Statement[Any]) -> object:
    try:
        connection = session.connection()
    except PendingRollbackError as error:
        raise PgworkerError(FAILED) from error
    return _send(connection, statement)


def _send(connection: Connection, statement: Statement[Any]) -> object:
    text, values = _translate(connection, statement)
    try:
        _check(connection)
        rows = connection.exec_driver_sql(text, values, execution_options=_OPTIONS).fetchall()
    except PendingRollbackError as error:
        raise PgworkerError(FAILED) from error
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) == _IN_FAILED_TRANSACTION:  # the server has done nothing
            raise PgworkerError(FAILED) from error
        error.hide_parameters = True  # its text would quote them, and what is in a payload is for no log
        raise
    return statement.read([tuple(row) for row in rows])


def _translate(connection: Connection, statement: Statement[Any]) -> tuple[str, dict[str, object] | tuple[object, ...]]:
    """The statement as this driver takes it."""
    dialect = connection.dialect
    if dialect.name != "postgresql" or dialect.driver not in {*_NAMED, "asyncpg"}:
        raise ConfigError(
            f"conn goes by SQLAlchemy's {dialect.name}+{dialect.driver}: "
            "use postgresql+psycopg, postgresql+asyncpg or postgresql+psycopg2"
        )
    if dialect.driver in _NAMED:
        return statement.sql.decode(), dict(statement.parameters)
    return numbered(statement)


def _check(connection: Connection) -> None:
    if connection.closed:
        raise PgworkerError(CLOSED)
    driver = connection.connection.driver_connection
    if driver is None or connection.dialect.driver == "asyncpg":  # which does not tell: it is asked by sending
        return
    if connection.dialect.driver == "psycopg":
        check_session(driver.info)
    elif driver.info.transaction_status == TransactionStatus.INERROR:  # psycopg2 has the same numbers
        raise PgworkerError(FAILED)
