"""Whether an app's own table fits what a kind says of it; looked up when a worker starts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, cast
from uuid import UUID

import psycopg
from psycopg import errors as pg

from pgworker.db import SyncConnection, is_conflict, is_outage, send_sync
from pgworker.errors import SchemaError
from pgworker.statements import BEGINNING, Lane, Row, Statement
from pgworker.tablemap import TableMap, quote
from pgworker.tablequeue import TableQueue
from pgworker.tablestatements import (
    OwnTable,
    claim_rows,
    finish_rows,
    literal,
    look_at,
    reap_rows,
    renew_rows,
    settle_rows,
    survey_table,
)

_log = logging.getLogger("pgworker")

_INSTANT: Final = ("timestamp with time zone",)
_NUMBER: Final = ("smallint", "integer", "bigint")
TYPES: Final[dict[str, tuple[str, ...]]] = {
    "token": ("uuid",),
    "lease_expires_at": _INSTANT,
    "ready_at": _INSTANT,
    "attempts": _NUMBER,
    "evictions": _NUMBER,
    "urgency": _NUMBER,
    "priority": _NUMBER,
    "cancel_requested_at": _INSTANT,
    "finished_at": _INSTANT,
    "runner": ("text", "character varying"),
    "code": ("text", "character varying"),
    "result": ("jsonb", "json", "text"),
}
"""The types that a column may have; any, if it is not named here."""
_NOT_NULL: Final = ("key", "urgency", "priority")
_DEFAULTS: Final = {
    "revision": "bigint not null default 1",
    "lease_expires_at": "timestamptz",
    "ready_at": "timestamptz not null default clock_timestamp()",
    "attempts": "integer not null default 0",
    "evictions": "integer not null default 0",
    "urgency": "smallint not null default 0",
    "priority": "smallint not null default 0",
}
_TEXT_LIKE: Final = ("character varying",)
_SHOWN_AS_SET: Final = (
    "bytea",
    "real",
    "double precision",
    "date",
    "timestamp without time zone",
    "timestamp with time zone",
    "time without time zone",
    "time with time zone",
    "interval",
)
"""Types whose text depends on a session's settings, which the app's own part of a completion may change."""
_LOCK_TIMEOUT: Final = "set local lock_timeout = '1s'"
"""Less than a statement has: who waits for a lock is no fault of the table's, and may be tried again."""


class _Column(NamedTuple):
    type: str
    not_null: bool
    is_composite: bool


def inspect(connection: SyncConnection, tables: TableMap, kind: str, queue: TableQueue) -> OwnTable:
    """The table as it is. Raises SchemaError, with the statements that would make it fit; psycopg.Error for an outage.

    Each of our statements is sent once, without a row to work on, and rolled back: what the role may not do, a
    condition that is no SQL, and one that takes too long show now.
    """
    try:
        with connection.transaction(force_rollback=True):
            connection.execute("set local search_path = ''")  # so that types of the app's own come with their schema
            found = send_sync(connection, look_at(queue))
        table = _own_table(kind, queue, found)
        _try(connection, kind, queue, _all(table, tables, kind))
    except psycopg.Error as error:
        if is_outage(error) or is_conflict(error):
            raise
        raise SchemaError(f"kind {kind!r}: {queue.table} cannot be worked on: {error.diag.message_primary}") from error
    return table


def _try(connection: SyncConnection, kind: str, queue: TableQueue, statements: Iterator[Statement[Any]]) -> None:
    """Send them and take them back. A standby says no to the first: what it would say as a primary shows later."""
    with contextlib.suppress(pg.ReadOnlySqlTransaction), connection.transaction(force_rollback=True):
        connection.execute(_LOCK_TIMEOUT)
        for statement in statements:
            try:
                connection.execute(statement.sql, statement.parameters)
            except pg.QueryCanceled as error:
                too_slow = f"{statement.name} takes too long. Does it lack its index? {index_for(queue)}"
                raise SchemaError(f"kind {kind!r}: {queue.table} cannot be worked on: {too_slow}") from error


def _own_table(kind: str, queue: TableQueue, found: Sequence[Row]) -> OwnTable:
    if not found:
        raise SchemaError(f"kind {kind!r}: there is no table {queue.table}")
    can_lock, has_unique, has_index = found[0][:3]
    columns = {
        cast("str", name): _Column(cast("str", type_), cast("bool", not_null), cast("bool", is_composite))
        for *_, name, type_, not_null, is_composite in found
    }
    problems = [] if can_lock else [f"{queue.table} is no table: rows of it cannot be locked"]
    problems += [*_missing(queue, columns), *_misfits(queue, columns)]
    if not has_unique and queue.key in columns:
        unique = f"create unique index concurrently on {queue.qualified} ({quote(queue.key)})"
        problems.append(f"{queue.key} needs a unique index of its own: {unique}")
    if problems:
        raise SchemaError("\n".join([f"kind {kind!r}: {queue.table} does not fit", *problems]))
    if not has_index:
        _log.warning("kind=%s: without an index each claim reads the whole table: %s", kind, index_for(queue))
    revision = columns[queue.revision].type
    return OwnTable(
        queue,
        key_type=_compared(columns[queue.key].type),
        revision_type=revision if revision in _SHOWN_AS_SET else "text",
        state_type=columns[queue.state].type,
        result_type=columns[queue.result].type if queue.result is not None else None,
    )


def index_for(queue: TableQueue) -> str:
    """The statement that makes the index along which rows are claimed."""
    condition = f"{quote(queue.state)} = {literal(queue.states['pending'])}"
    if queue.where is not None:
        condition += f" and ({queue.where}" + ("\n)" if "--" in queue.where else ")")
    columns = ", ".join(map(quote, queue.claim_index))
    return f"create index concurrently on {queue.qualified} ({columns}) where {condition}"


def _compared(type_: str) -> str:
    """The type in which a key is compared: its own, or text where Postgres compares as text anyway.

    (Then `=` means the one of pg_catalog, whatever else lies on the search path.)
    """
    return "text" if type_ in _TEXT_LIKE else type_


def _missing(queue: TableQueue, columns: dict[str, _Column]) -> Iterator[str]:
    """What to say of columns that the table has not."""
    lacks = {name: column for name, column in queue.columns.items() if column not in columns}
    adds = [f"add column {quote(column)} {_definition(queue, name)}" for name, column in lacks.items() if name != "key"]
    if lacks:
        remedy = f": alter table {queue.qualified} {', '.join(adds)}" if adds else ""
        yield f"it has no column {', '.join(lacks.values())}{remedy}"
    for column in queue.payload_columns:
        if column not in columns:
            yield f"it has no column {column}, of which the payload is made"


def _definition(queue: TableQueue, name: str) -> str:
    if name == "state":
        return f"text not null default {literal(queue.states['pending'])}"
    return _DEFAULTS.get(name, TYPES[name][0] if name in TYPES else "text")


def _misfits(queue: TableQueue, columns: dict[str, _Column]) -> Iterator[str]:
    """What to say of columns that are not of the type that they need."""
    for name, column in queue.columns.items():
        if column not in columns:
            continue
        type_, not_null, is_composite = columns[column]
        wanted = TYPES.get(name, (type_,))
        if name == "key" and type_.endswith("[]"):
            yield f"{column} is an array, by which no row can be asked for"
        if name == "key" and is_composite:
            yield f"{column} is of the composite type {type_}, by which no row can be asked for"
        if type_ not in wanted:
            yield f"{column} ({name}) is {type_}, must be {' or '.join(wanted)}"
        if name in _NOT_NULL and not not_null:
            yield f"{column} may be null: alter table {queue.qualified} alter column {quote(column)} set not null"


def _all(table: OwnTable, tables: TableMap, kind: str) -> Iterator[Statement[Any]]:
    """Each statement, with nothing to do."""
    lane = Lane(kind, 0, 0)
    yield survey_table(table, tables, kind)
    yield claim_rows(table, tables, lane, limit=0, token=UUID(int=0), runner="", ttl_seconds=0.0, max_evictions=None)
    yield finish_rows(table, [])
    yield settle_rows(table, [])
    yield renew_rows(table, [])
    yield reap_rows(table, lane, limit=0, ttl_seconds=0.0, max_evictions=None, after=BEGINNING)
