"""Read and change the schema in the database.

A migration and its row in the list of applied ones are one transaction, serialised by an advisory lock that ends
with it: nothing is half-done and nothing stays locked, behind a transaction pooler too.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, TypeAlias

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow, tuple_row

from pgworker.errors import SchemaError, SchemaMissing, SchemaTooNew
from pgworker.retry import Backoff
from pgworker.schema.files import Migration, fill, migrations, release
from pgworker.schema.script import bookkeeping, lock_key, record
from pgworker.tablemap import TableMap, quote

_log = logging.getLogger("pgworker")

Connection: TypeAlias = psycopg.Connection[object]
Cursor: TypeAlias = psycopg.Cursor[TupleRow]

_PAUSES = Backoff(base=timedelta(seconds=0.5), cap=timedelta(seconds=5), jitter="full")

_READING = """
set transaction isolation level read committed, read only;
set local search_path = pg_catalog, pg_temp"""
_WRITING = """
set transaction isolation level read committed, read write;
set local search_path = pg_catalog, pg_temp;
set local standard_conforming_strings = on;
set local statement_timeout = 0;
set local client_min_messages = warning;
set local lock_timeout = {milliseconds};
select pg_advisory_xact_lock({key})"""

_ACCESS = """
select has_schema_privilege(n.oid, 'usage'), c.oid is not null, has_table_privilege(c.oid, 'select')
from pg_namespace n left join pg_class c on c.relnamespace = n.oid and c.relname = 'migrations'
where n.nspname = {schema_name}"""
_APPLIED = "select number, name, breaking, checksum, release from {schema}.migrations order by number"

# An interrupted CREATE INDEX CONCURRENTLY leaves an invalid index, which IF NOT EXISTS would take for the real one.
_INVALID_INDEXES = """
select i.relname, exists (select from pg_stat_progress_create_index p where p.index_relid = i.oid)
from pg_index x
join pg_class i on i.oid = x.indexrelid and i.relkind = 'i'
join pg_namespace n on n.oid = i.relnamespace
where not x.indisvalid and n.nspname = {schema_name}"""

_HOLDERS = """
select distinct on (a.xact_start, l.pid) l.pid, coalesce(nullif(a.application_name, ''), '?'), coalesce(a.state, '?'),
       coalesce(extract(epoch from clock_timestamp() - a.xact_start)::bigint, 0)
from pg_locks l
join pg_database d on d.oid = l.database and d.datname = current_database()
left join pg_stat_activity a on a.pid = l.pid
left join pg_class c on c.oid = l.relation
left join pg_namespace n on n.oid = c.relnamespace
where l.granted
  and (n.nspname = {schema_name}
       or l.locktype = 'advisory' and l.objsubid = 1 and (l.classid::bigint << 32 | l.objid::bigint) = {key})
order by a.xact_start, l.pid
limit 3"""


class _Applied(NamedTuple):
    number: int
    name: str
    breaking: bool
    checksum: str
    release: str


def pending(conn: Connection, tables: TableMap) -> tuple[Migration, ...]:
    """What `migrate` would apply; plain reads.

    Raises SchemaTooNew, and SchemaError for a file that is no longer what was applied.
    """
    with _transaction(conn, _READING) as cursor:
        return _missing(cursor, tables)


def check(conn: Connection, tables: TableMap) -> None:
    """Raise SchemaMissing or SchemaTooNew, with the remedy, unless this release can work on the schema.

    Reads the catalog and the list of applied migrations alone: waits for no lock on a table of jobs.
    """
    with _transaction(conn, _READING) as cursor:
        applied = _applied(cursor, tables)
    _refuse_newer(applied, tables)
    done = {each.number for each in applied}
    if not done:
        msg = f"database {conn.info.dbname!r} has no pgworker schema {tables.schema!r}: run `pgworker migrate`"
        raise SchemaMissing(msg)
    lacking = ", ".join(each.title for each in migrations() if each.number not in done)
    if lacking:
        msg = f"schema {tables.schema!r} lacks {lacking}, which pgworker {release()} needs: run `pgworker migrate`"
        raise SchemaMissing(msg)


def migrate(
    conn: Connection, tables: TableMap, *, lock_timeout: timedelta = timedelta(seconds=3), tries: int = 10
) -> tuple[Migration, ...]:
    """Apply what is pending and return what this call applied: nothing, when called again or when another was faster.

    No lock is waited for longer than `lock_timeout`, since other sessions queue behind the waiter; after a pause the
    migration is tried again, `tries` times in all. Raises SchemaError when there was no lock to be had (it names who
    held it), for a changed file and for a missing right, and SchemaTooNew. Interrupted at any point, a migration is
    both applied and recorded, or neither.
    """
    return tuple(each for each in pending(conn, tables) if _patiently(conn, tables, each, lock_timeout, tries))


@contextmanager
def _transaction(conn: Connection, settings: str) -> Generator[Cursor, None, None]:
    """A transaction with settings of its own, whatever the connection, the role or the database prefers."""
    if conn.info.transaction_status is not TransactionStatus.IDLE:
        msg = "the schema is read and changed in transactions of its own: give it a connection that is in none"
        raise SchemaError(msg)
    with conn.transaction(), psycopg.Cursor(conn, row_factory=tuple_row) as cursor:
        _run(cursor, settings)
        yield cursor


@contextmanager
def _locked(conn: Connection, tables: TableMap, lock_timeout: timedelta) -> Generator[Cursor, None, None]:
    """A writing transaction that holds the schema's migration lock to its end, with the list of migrations in place."""
    milliseconds = max(1, round(lock_timeout / timedelta(milliseconds=1)))  # 0 would mean to wait for ever
    others = {"{milliseconds}": str(milliseconds), "{key}": str(lock_key(tables))}
    with _transaction(conn, fill(_WRITING, tables, others)) as cursor:
        _run(cursor, bookkeeping(tables))
        yield cursor


def _run(cursor: Cursor, text: str) -> None:
    """Send any number of statements at once: without parameters and never prepared, either would allow only one."""
    cursor.execute(text.encode(cursor.connection.info.encoding), prepare=False)


def _rows(cursor: Cursor, text: str) -> list[TupleRow]:
    _run(cursor, text)
    return cursor.fetchall()


def _applied(cursor: Cursor, tables: TableMap) -> tuple[_Applied, ...]:
    """The list of applied migrations, empty where there is none; SchemaMissing when this role may not read it."""
    access = _rows(cursor, fill(_ACCESS, tables))
    if not access or access[0][:2] == (True, False):
        return ()
    if access[0] != (True, True, True):
        role = cursor.connection.info.user
        msg = (
            f"role {role!r} may not read schema {tables.schema!r}: "
            f"let the schema's owner run what `pgworker migrate --role {role}` prints"
        )
        raise SchemaMissing(msg)
    try:
        return tuple(_Applied(*row) for row in _rows(cursor, fill(_APPLIED, tables)))
    except errors.UndefinedColumn as error:
        msg = f"schema {tables.schema!r} has a table migrations that is not pgworker's: choose another schema"
        raise SchemaError(msg) from error


def _missing(cursor: Cursor, tables: TableMap) -> tuple[Migration, ...]:
    """What is not applied; refuses a schema that is too new or whose history differs from ours."""
    applied = {each.number: each for each in _applied(cursor, tables)}
    _refuse_newer(applied.values(), tables)
    for migration in migrations():
        old = applied.get(migration.number)
        if old is not None and old.checksum != migration.checksum:
            msg = (
                f"migration {migration.title} is not the text that pgworker {old.release} applied to schema "
                f"{tables.schema!r} (checksum now {migration.checksum[:12]}, then {old.checksum[:12]}): released "
                f"migrations never change, so install an unaltered pgworker"
            )
            raise SchemaError(msg)
    return tuple(each for each in migrations() if each.number not in applied)


def _refuse_newer(applied: Iterable[_Applied], tables: TableMap) -> None:
    known = {(each.number, each.name) for each in migrations()}
    for each in applied:
        if each.breaking and (each.number, each.name) not in known:
            msg = (
                f"schema {tables.schema!r} has the breaking migration {each.number:04d} {each.name}, which pgworker "
                f"{release()} does not know: upgrade this pgworker to {each.release} or later"
            )
            raise SchemaTooNew(msg)


def _patiently(conn: Connection, tables: TableMap, migration: Migration, lock_timeout: timedelta, tries: int) -> bool:
    """Apply one migration, again while a lock is not to be had; False when somebody else has applied it."""
    for attempt in range(1, tries + 1):
        try:
            return _apply(conn, tables, migration, lock_timeout)
        except (errors.LockNotAvailable, errors.DeadlockDetected):
            _log.warning("migration %s: a lock is not to be had, try %d of %d", migration.title, attempt, tries)
        except errors.InsufficientPrivilege as error:
            msg = (
                f"migration {migration.title}: {error.diag.message_primary}. Migrate as the owner of the schema, or "
                f"let a superuser run: create schema {tables.schema_identifier} authorization {quote(conn.info.user)}"
            )
            raise SchemaError(msg) from error
        if attempt < tries:
            _pause(attempt)
    msg = (
        f"migration {migration.title} got no lock within {lock_timeout.total_seconds():g} s, {tries} times over, "
        f"and has changed nothing. {_holders(conn, tables)}"
    )
    raise SchemaError(msg)


def _pause(attempt: int) -> None:
    """Let pass what queued behind our request for the lock; with jitter, so that several migrators fall out of step."""
    time.sleep(_PAUSES.delay(attempt, chance=random.SystemRandom().random()).total_seconds())


def _apply(conn: Connection, tables: TableMap, migration: Migration, lock_timeout: timedelta) -> bool:
    """Run and record a migration; one that no transaction may hold is recorded when it has succeeded.

    No lock can be held while that one runs, so two may be at it at once: one of them sees the other's index, or dies of
    a deadlock, and comes back.
    """
    with _locked(conn, tables, lock_timeout) as cursor:
        if migration not in _missing(cursor, tables):
            return False
        if migration.transactional:
            _run(cursor, migration.rendered(tables))
            _run(cursor, record(tables, migration))
            return True
        invalid = _rows(cursor, fill(_INVALID_INDEXES, tables))
        if any(under_way for _, under_way in invalid):
            raise errors.LockNotAvailable
    drops = [f"drop index concurrently if exists {tables.qualified(name)}" for name, _ in invalid]
    _run_alone(conn, *drops, migration.rendered(tables))
    with _locked(conn, tables, lock_timeout) as cursor:
        if _rows(cursor, fill(_INVALID_INDEXES, tables)):
            raise errors.LockNotAvailable
        if migration not in _missing(cursor, tables):
            return False
        _run(cursor, record(tables, migration))
        return True


def _run_alone(conn: Connection, *texts: str) -> None:
    """In autocommit, with nothing set for the session: behind a transaction pooler it would stay set for strangers."""
    autocommit = conn.autocommit
    conn.autocommit = True
    try:
        with psycopg.Cursor(conn, row_factory=tuple_row) as cursor:
            for text in texts:
                _run(cursor, text)
    finally:
        conn.autocommit = autocommit


def _holders(conn: Connection, tables: TableMap) -> str:
    """Who holds locks in the schema now, the oldest transaction first, and what to do about it."""
    with _transaction(conn, _READING) as cursor:
        rows = _rows(cursor, fill(_HOLDERS, tables, {"{key}": str(lock_key(tables))}))
    if not rows:
        return "Nobody holds one any more: run `pgworker migrate` again"
    names = ", ".join(f"pid {pid} ({name}, {state}, in its transaction for {age} s)" for pid, name, state, age in rows)
    remedy = f"select pg_terminate_backend({rows[0][0]})"
    return f"In its way: {names}. End that transaction (at worst `{remedy}`), then run `pgworker migrate` again"
