"""The database of a command: which one, a connection to it, and its name for people."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from pgworker.app import App
from pgworker.config import Settings, conninfo
from pgworker.db import SyncConnection
from pgworker.errors import ConfigError, DatabaseUnavailable
from pgworker.tablemap import TableMap
from pgworker.worker import one_line

_SCHEMES = ("postgresql://", "postgres://")


def settings(dsn: str | None, schema: str | None) -> Settings:
    """What the options and the environment say. Raises ConfigError without a DSN, and for one that cannot be read."""
    found = Settings.load(dsn, schema=schema)
    check_dsn(found.dsn)
    return found


def app_settings(app: App, *, dsn: str | None, schema: str | None, listen_dsn: str | None = None) -> Settings:
    """An app's settings, with what the options say instead of its own. Raises ConfigError as settings does."""
    if dsn or schema or listen_dsn:  # an app that is in use from its import on can be run, but not led elsewhere
        app.configure(dsn=dsn, schema=schema, listen_dsn=listen_dsn)
    check_dsn(app.settings.dsn)
    check_dsn(app.settings.listen_dsn)
    return app.settings


def tables(schema: str | None) -> TableMap:
    """Our schema's tables, for what needs no database. Raises ConfigError."""
    return TableMap(schema or os.environ.get("PGWORKER_SCHEMA") or "pgworker")


def check_dsn(dsn: str) -> None:
    """Raise ConfigError, which quotes nothing, for a DSN that libpq cannot read, or would read wrongly.

    A stray `@` or `/` in a password makes its rest the host's name, which then stands in every error message.
    """
    if dsn.startswith(_SCHEMES):
        address = dsn.partition("://")[2].partition("?")[0]
        userinfo, at, _ = address.rpartition("@")
        if at and ("@" in userinfo or "/" in userinfo):
            msg = "the DSN has a bare @ or / in its user's name or password: write %40 for @, %2F for /"
            raise ConfigError(msg)
    try:
        conninfo_to_dict(dsn)
    except psycopg.Error:
        msg = "the DSN cannot be read: it is like postgresql://user:password@host:5432/database, or host=... dbname=..."
        raise ConfigError(msg) from None


@contextmanager
def connected(found: Settings, role: str) -> Generator[SyncConnection, None, None]:
    """An autocommit connection, closed at the end. Raises DatabaseUnavailable."""
    try:
        connection = psycopg.connect(conninfo(found.dsn, role), autocommit=True, row_factory=tuple_row)
    except psycopg.OperationalError as error:
        msg = f"no database: {one_line(error)}. Does the server run, and does --dsn or PGWORKER_DSN lead to it?"
        raise DatabaseUnavailable(msg) from error
    with connection:
        yield connection


def describe(dsn: str) -> str:
    """A DSN without its password: `user@host:port/database`, with libpq's defaults and environment filled in."""
    defaults = {each.keyword.decode(): each.val.decode() for each in pq.Conninfo.get_defaults() if each.val}
    parts = {**defaults, **{name: str(value) for name, value in conninfo_to_dict(dsn).items() if value}}
    if "service" in parts:
        return f"service {parts['service']}"
    user = parts.get("user", "")
    host = parts.get("host") or parts.get("hostaddr") or "(local)"
    return f"{user}@{host}:{parts.get('port', '5432')}/{parts.get('dbname', user)}"
