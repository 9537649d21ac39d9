"""A schema of the benchmark's own in somebody's database: made by the migrations, dropped however a run ends.

Beside our tables it holds the floors' two: what one would write by hand.
"""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg.rows import tuple_row

from pgworker import schema as migrations
from pgworker.app import App
from pgworker.bench.app import NOOP, STAMP
from pgworker.config import conninfo
from pgworker.db import SyncConnection
from pgworker.tablemap import TableMap

PREFIX: Final = "pgworker_bench_"

_SESSION: Final = """
set default_transaction_isolation = 'read committed';
set client_min_messages = warning;
set statement_timeout = 0;
set idle_session_timeout = 0"""
_FLOORS: Final = """
create table {raw_jobs} (
    id         bigint generated always as identity primary key,
    kind       text        not null,
    priority   smallint    not null default 0,
    ready_at   timestamptz not null default clock_timestamp(),
    created_at timestamptz not null default clock_timestamp(),
    state      text        not null default 'ready',
    payload    jsonb       not null
);
create index on {raw_jobs} (kind, priority, ready_at, id) where state = 'ready';
create table {raw_inserts} (
    id         bigint generated always as identity primary key,
    created_at timestamptz not null default clock_timestamp(),
    state      text        not null default 'ready',
    payload    jsonb       not null
)"""
_EMPTY: Final = "truncate {jobs}, {results}, {facts}, {kinds}, {runners}, {raw_jobs}, {raw_inserts}"
_TABLES: Final = ("jobs", "results", "facts", "kinds", "runners", "raw_jobs", "raw_inserts")
_PENDING: Final = """
select exists (select from {jobs} where kind = %s and class = 0 and priority = 0 and state = 'pending'
               and ready_at <= (select clock_timestamp()))"""
_LAST: Final = "select extract(epoch from max(finished_at))::float8 from {jobs} where kind = %s and state = 'succeeded'"
_NOW: Final = "select extract(epoch from clock_timestamp())::float8"

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Arena:
    """One such schema, and the benchmark's own connection to it, in autocommit."""

    dsn: str
    tables: TableMap
    connection: SyncConnection
    asked: int = 0
    """How many statements the benchmark itself has sent over it: they are not those of the work."""

    def app(self) -> App:
        """A producer of the benchmarks' kinds; whoever makes it closes it."""
        made = App(self.dsn, schema=self.tables.schema)
        made.declare(NOOP, payload=str)
        made.declare(STAMP, payload=float)
        return made

    def connect(self, role: str = "bench") -> SyncConnection:
        """One more connection, in autocommit; whoever asks closes it."""
        return connect(self.dsn, role)

    def sql(self, text: str) -> bytes:
        """The text with our tables' names in it, in place of `{jobs}` and the like."""
        return text.format(**{name: self.tables.qualified(name) for name in _TABLES}).encode()

    def execute(self, text: str, *parameters: object) -> None:
        """Run and commit a statement."""
        self.asked += 1
        self.connection.execute(self.sql(text), parameters or None)

    def rows(self, text: str, *parameters: object) -> list[tuple[object, ...]]:
        """All rows of the answer."""
        self.asked += 1
        return self.connection.execute(self.sql(text), parameters or None).fetchall()

    def value(self, text: str, *parameters: object) -> object:
        """The first value of the answer's first row; None without one."""
        rows = self.rows(text, *parameters)
        return rows[0][0] if rows else None

    def number(self, text: str, *parameters: object) -> float:
        """As value, for a number; zero without one."""
        return float(str(self.value(text, *parameters) or 0))

    def empty(self) -> None:
        """Take out all rows, so that every run begins on small tables."""
        self.execute(_EMPTY)

    def now(self) -> float:
        """The database's clock, in seconds."""
        return self.number(_NOW)

    def is_drained(self) -> bool:
        """Whether no job of the no-op kind is due or runs."""
        return not self.value(_PENDING, NOOP)

    def last_finish(self) -> float:
        """When the last job of the no-op kind ended, by the database's clock."""
        return self.number(_LAST, NOOP)


@contextmanager
def open_arena(dsn: str, schema: str) -> Generator[Arena, None, None]:
    """Make the schema, and drop it at the end. Raises SchemaError, psycopg.Error."""
    with connect(dsn, "bench") as connection:
        arena = Arena(dsn, TableMap(schema), connection)
        try:
            migrations.migrate(connection, arena.tables)
            arena.execute(_FLOORS)
            yield arena
        finally:
            _drop(arena)


def new_schema() -> str:
    """A name that nobody uses."""
    return f"{PREFIX}{secrets.token_hex(4)}"


def connect(dsn: str, role: str) -> SyncConnection:
    """A connection in autocommit, READ COMMITTED, that no time-out of the role's ends."""
    connection = psycopg.connect(conninfo(dsn, role), autocommit=True, row_factory=tuple_row)
    connection.execute(_SESSION)
    return connection


def _drop(arena: Arena) -> None:
    """Over a connection of its own: ours may be in the middle of what was interrupted. A second Ctrl-C waits for it."""
    kept = {number: signal.getsignal(number) for number in _SIGNALS}
    ours = threading.current_thread() is threading.main_thread()  # no other may set a handler
    if ours:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    try:
        with connect(arena.dsn, "bench") as connection:
            connection.execute(f"drop schema if exists {arena.tables.schema_identifier} cascade".encode())
    finally:
        if ours:
            for number, handler in kept.items():
                signal.signal(number, handler)
