"""The app's own tables, in a schema of their own: which folders there are, and their documents.

Locks go in one order everywhere: the folder's row (whoever writes it anew), documents, jobs.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, LiteralString, NamedTuple, cast

import anyio
import psycopg
from psycopg import IsolationLevel, sql

from pgworker import schema
from pgworker.config import conninfo
from pgworker.db import AsyncConnection, SyncConnection
from pgworker.demo.report import Failures
from pgworker.demo.text import Indexed
from pgworker.errors import SchemaError
from pgworker.tablemap import TableMap, quote

KIND: Final = "index_file"

_KEY_BYTES: Final = 512

_TABLES: Final = """
select pg_advisory_xact_lock(hashtext('pgworker_demo'));
do $$ begin  -- "if not exists" would ask for the right to create schemas, although there is one
    if to_regnamespace('pgworker_demo') is null then create schema pgworker_demo; end if;
end $$;
create table if not exists pgworker_demo.folders (
    id   integer generated always as identity primary key,
    root text    not null unique
);
create table if not exists pgworker_demo.documents (
    key              text collate "C" primary key,   -- of its job, too
    folder           integer not null references pgworker_demo.folders on delete cascade,
    path             text    not null,
    revision         text    not null,               -- of the file as it was last seen; its job has the same
    size             bigint  not null,
    indexed_revision text,                           -- of the file that the columns below were made from
    lines            integer,
    words            integer,
    distinct_words   integer,
    search           tsvector
);
create index if not exists documents_folder on pgworker_demo.documents (folder);
create index if not exists documents_search on pgworker_demo.documents using gin (search)"""

_FOLDER: Final = """
insert into pgworker_demo.folders (root) values (%(root)s) on conflict (root) do update set root = excluded.root
returning id"""
_LOCK_FOLDER: Final = "select id from pgworker_demo.folders where id = %(folder)s for no key update"
_PATHS: Final = "select path from pgworker_demo.documents where folder = %(folder)s"

_WRITE: Final = """
insert into pgworker_demo.documents as d (key, folder, path, revision, size)
select f.key, %(folder)s, f.path, f.revision, f.size
from unnest(%(keys)s::text[], %(paths)s::text[], %(revisions)s::text[], %(sizes)s::bigint[])
     as f(key, path, revision, size)
where not exists (select from pgworker_demo.documents d where d.key = f.key and d.revision = f.revision)
order by f.key collate "C"
on conflict (key) do update set revision = excluded.revision, size = excluded.size"""

_STORE: Final = """
update pgworker_demo.documents
set search = to_tsvector('pg_catalog.english', %(text)s::text), indexed_revision = %(revision)s,
    lines = %(lines)s, words = %(words)s, distinct_words = %(distinct_words)s
where key = %(key)s"""

_FORGET_DOCUMENTS: Final = "delete from pgworker_demo.documents where key = any(%(keys)s)"
_FORGET_JOBS: Final = "delete from {jobs} where kind = %(kind)s and key = any(%(keys)s)"
_FORGET_RESULTS: Final = "delete from {results} where kind = %(kind)s and key = any(%(keys)s)"

_FAILED: Final = """
select j.key from pgworker_demo.documents d join {jobs} j on j.kind = %(kind)s and j.key = d.key
where d.folder = %(folder)s and j.state in ('failed', 'cancelled')
  and not coalesce(j.last_code, '') = any(%(lasting)s)"""
_WAITING: Final = "select key from {jobs} where kind = %(kind)s and state = 'pending' and key = any(%(keys)s)"
_FAILURES: Final = """
select coalesce(j.last_code, j.state), count(*), (array_agg(d.path order by d.path))[1:%(examples)s::int]
from pgworker_demo.documents d join {jobs} j on j.kind = %(kind)s and j.key = d.key
where d.folder = %(folder)s and j.state in ('failed', 'cancelled')
group by 1 order by 2 desc, 1"""


class Seen(NamedTuple):
    """A file as it was seen; the path is a text (files.to_text)."""

    path: str
    revision: str
    size: int


def key_of(folder: int, path: str) -> str:
    """The key of a file's document and job: readable, unless the path is too long for a key."""
    key = f"{folder}/{path}"
    if len(key.encode()) <= _KEY_BYTES:
        return key
    return f"{folder}/ {hashlib.sha256(path.encode()).hexdigest()}"


def prepare(dsn: str, tables: TableMap, root: str) -> int:
    """Migrate, make the app's own tables, and name the folder's id. Raises SchemaError, psycopg.Error."""
    with psycopg.connect(conninfo(dsn, "demo"), autocommit=True) as connection:
        schema.migrate(connection, tables)
        connection.isolation_level = IsolationLevel.READ_COMMITTED
        try:
            with connection.transaction():
                connection.execute("set local client_min_messages = warning")
                connection.execute(_TABLES)
        except psycopg.errors.InsufficientPrivilege as error:
            raise SchemaError(
                f"the demo's own tables: {error.diag.message_primary}. A superuser may run: "
                f"create schema pgworker_demo authorization {quote(connection.info.user)}"
            ) from error
        row = connection.execute(_FOLDER, {"root": root}).fetchone()
    assert row is not None  # noqa: S101 - both branches of the statement return the row
    return int(row[0])


class Store:
    """One folder's documents, on a connection of the app's own."""

    def __init__(self, tables: TableMap, folder: int) -> None:
        self._folder = folder
        self._names = {name: sql.Identifier(tables.schema, name) for name in ("jobs", "results")}

    @asynccontextmanager
    async def connection(self, dsn: str) -> AsyncGenerator[AsyncConnection, None]:
        """A connection while the block lasts; transactions on it are READ COMMITTED whatever the default is.

        Cancelling waits for one that is being made, five seconds at most: half-made ones would hang about.
        """
        connection: AsyncConnection | None = None
        with anyio.CancelScope(shield=True):
            connection = await psycopg.AsyncConnection.connect(conninfo(dsn, "demo"), autocommit=True)
        assert connection is not None  # noqa: S101 - a shield swallows nothing
        try:
            await connection.set_isolation_level(IsolationLevel.READ_COMMITTED)
            yield connection
        finally:
            # The driver's own block rolls back first, and leaves the connection open when that is cancelled.
            await connection.close()

    def key(self, path: str) -> str:
        """The key of a path's document and job."""
        return key_of(self._folder, path)

    async def lock(self, conn: AsyncConnection) -> None:
        """Until the transaction ends, be the only one who brings this folder up to date."""
        await conn.execute(_LOCK_FOLDER, {"folder": self._folder})

    async def paths(self, conn: AsyncConnection) -> list[str]:
        """The paths of all documents."""
        rows = await (await conn.execute(_PATHS, {"folder": self._folder})).fetchall()
        return [str(path) for (path,) in rows]

    async def write(self, conn: AsyncConnection, files: Sequence[Seen]) -> None:
        """Write the documents that are new or changed; what is indexed of them stays until their jobs are done."""
        await conn.execute(
            _WRITE,
            {
                "folder": self._folder,
                "keys": [self.key(file.path) for file in files],
                "paths": [file.path for file in files],
                "revisions": [file.revision for file in files],
                "sizes": [file.size for file in files],
            },
        )

    async def forget(self, conn: AsyncConnection, keys: Sequence[str], *, documents: bool) -> None:
        """Delete jobs with their results, and their documents if that is said.

        A job that stayed would remember its revision, and the same file coming back would be no work. A worker that
        is at one of them finds its lease lost.
        """
        if documents:
            await conn.execute(_FORGET_DOCUMENTS, {"keys": list(keys)})
        # Two statements: the first may wait for a completion, whose result only a later snapshot sees.
        for text in (_FORGET_JOBS, _FORGET_RESULTS):
            await conn.execute(self._sql(text), {"kind": KIND, "keys": list(keys)})

    async def failed_for_now(self, conn: AsyncConnection, lasting: Iterable[str]) -> list[str]:
        """The keys of jobs that ended without success, but for those with a code that says it would be so again."""
        given = {"kind": KIND, "folder": self._folder, "lasting": list(lasting)}
        return [str(key) for (key,) in await (await conn.execute(self._sql(_FAILED), given)).fetchall()]

    async def waiting(self, conn: AsyncConnection, keys: Iterable[str]) -> set[str]:
        """Those of the keys whose jobs have not ended."""
        given = {"kind": KIND, "keys": list(keys)}
        return {str(key) for (key,) in await (await conn.execute(self._sql(_WAITING), given)).fetchall()}

    async def failures(self, conn: AsyncConnection, *, examples: int) -> list[Failures]:
        """What stands as failed, by code, the most frequent first."""
        given = {"kind": KIND, "folder": self._folder, "examples": examples}
        rows = await (await conn.execute(self._sql(_FAILURES), given)).fetchall()
        return [Failures(str(code), cast("int", files), cast("list[str]", paths)) for code, files, paths in rows]

    def _sql(self, text: LiteralString) -> sql.Composed:
        return sql.SQL(text).format(**self._names)


def store_words(conn: SyncConnection, key: str, revision: str | None, found: Indexed) -> None:
    """Make a document searchable by the words of this revision.

    If it is at another one by now, the job's lease is gone, and the completion takes this back.
    """
    conn.execute(_STORE, {**found, "text": found.words, "key": key, "revision": revision})
