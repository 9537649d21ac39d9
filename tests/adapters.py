"""The three tables that a queue may live in, each with the verbs of the app that writes it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar, TypeAlias, cast, get_args

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from pgworker import App, TableQueue
from pgworker.client import put_jobs
from pgworker.db import SyncConnection, drive_sync, send_sync
from pgworker.job import NewJob, State
from pgworker.kind import Kind, handled_kind
from pgworker.policy import PolicyOptions, make_policy
from pgworker.queue import JobsTable, Queue, RowsQueue
from pgworker.tablecheck import inspect
from pgworker.tablemap import TableMap

Admin: TypeAlias = psycopg.Connection[Any]
KIND = "work"
TABLES = TableMap()


async def _nothing(job: object) -> None: ...


class Adapter(ABC):
    """One table, its columns by our names, and what its app does with it. Keys and revisions are made from numbers."""

    name: ClassVar[str]
    table: ClassVar[str]
    queue: ClassVar[TableQueue | None]
    columns: ClassVar[Mapping[str, str]]
    """Ours to the table's: key, revision, state, token, lease_expires_at, ready_at, attempts and whatever it has."""
    states: ClassVar[Mapping[State, str]] = {state: state for state in get_args(State)}

    @abstractmethod
    def create(self, admin: Admin) -> None:
        """Make the table, and let anybody work on it."""

    @abstractmethod
    def key(self, number: int) -> str: ...

    @abstractmethod
    def revision(self, number: int) -> str: ...

    @abstractmethod
    def put(self, admin: Admin, number: int, revision: int = 1, body: str = "text") -> None:
        """The app inserts a row, or changes it to a new revision, as new work."""

    @abstractmethod
    def payload(self, body: str) -> object:
        """What a handler gets of such a row."""

    def open(self, connection: SyncConnection, **options: Any) -> Queue:
        """The queue, to be worked on by hand."""
        kind = self.kind(**options)
        if kind.queue is None:
            return JobsTable(TABLES, kind)
        return RowsQueue(TABLES, kind, inspect(connection, TABLES, kind.name, kind.queue))

    def kind(self, **options: Any) -> Kind:
        """The kind as an app would register it."""
        policy = make_policy("standard", PolicyOptions(**options))  # type: ignore[typeddict-item]
        return handled_kind(
            KIND,
            policy,
            _nothing,
            batch=False,
            apply=None,
            payload=object,
            payload_limit=None,
            version=1,
            queue=self.queue,
        )

    def register(self, app: App, handler: Callable[..., Any], **options: Any) -> None:
        """Register the handler with the app."""
        app.kind(KIND, queue=self.queue, **options)(handler)

    # --- look -------------------------------------------------------------------------------------------------------

    @property
    def _table(self) -> sql.Identifier:
        return sql.Identifier(*self.table.split("."))

    def column(self, name: str) -> sql.Identifier:
        return sql.Identifier(self.columns[name])

    def row(self, admin: Admin, number: int) -> dict[str, Any]:
        """The whole row; two equal dicts mean equal row bytes."""
        query = sql.SQL("select * from {} where {}::text = %s").format(self._table, self.column("key"))
        with admin.cursor(row_factory=dict_row) as cursor:
            found = cursor.execute(query, [self.key(number)]).fetchone()
        assert found is not None, f"{self.name}: no row {number}"
        return found

    def of(self, admin: Admin, number: int, name: str) -> Any:
        """One column of a row by our name; the state in our words."""
        value = self.row(admin, number)[self.columns[name]]
        if name == "state":
            return {their: our for our, their in self.states.items()}[str(value)]
        return value

    def count(self, admin: Admin, state: State) -> int:
        query = sql.SQL("select count(*) from {} where {}::text = %s").format(self._table, self.column("state"))
        found = admin.execute(query, [self.states[state]]).fetchone()
        assert found is not None
        return int(found[0])

    # --- meddle -----------------------------------------------------------------------------------------------------

    def set(self, admin: Admin, number: int, **values: Any) -> None:
        """Change columns of a row by plain SQL, named in our words."""
        changes = sql.SQL(", ").join(sql.SQL("{} = %s").format(self.column(name)) for name in values)
        theirs = [self.states[cast("State", value)] if name == "state" else value for name, value in values.items()]
        change = sql.SQL("update {} set {} where {}::text = %s").format(self._table, changes, self.column("key"))
        admin.execute(change, [*theirs, self.key(number)])

    def delete(self, admin: Admin, number: int) -> None:
        query = sql.SQL("delete from {} where {}::text = %s").format(self._table, self.column("key"))
        admin.execute(query, [self.key(number)])

    def age(self, admin: Admin, seconds: float) -> None:
        """Let time pass: shift the instants into the past."""
        admin.execute(
            sql.SQL("update {} set {ready} = {ready} - %(by)s, {lease} = {lease} - %(by)s").format(
                self._table, ready=self.column("ready_at"), lease=self.column("lease_expires_at")
            ),
            {"by": timedelta(seconds=seconds)},
        )

    def end(self, admin: Admin, number: int) -> None:
        """The app ends a row that is being worked on, and leaves the rest of it as it is."""
        self.set(admin, number, state="failed")


class Jobs(Adapter):
    """The jobs table."""

    name = "jobs"
    table = "pgworker.jobs"
    queue = None
    columns: ClassVar = {
        name: name
        for name in ("key", "revision", "state", "token", "lease_expires_at", "ready_at", "attempts", "evictions")
    } | {
        "code": "last_code",
        "cancel_requested_at": "cancel_requested_at",
        "finished_at": "finished_at",
        "urgency": "class",
    }

    def create(self, admin: Admin) -> None:
        """It is there."""

    def key(self, number: int) -> str:
        return f"k{number}"

    def revision(self, number: int) -> str:
        return f"r{number}"

    def payload(self, body: str) -> object:
        return body

    def put(self, admin: Admin, number: int, revision: int = 1, body: str = "text") -> None:
        jobs = [NewJob(body, self.key(number), self.revision(revision))]
        drive_sync(put_jobs(TABLES, self.kind(), jobs, if_pending="replace"), lambda each: send_sync(admin, each))

    def end(self, admin: Admin, number: int) -> None:
        # (a check of the table forbids a token without pending work)
        admin.execute(
            "update pgworker.jobs set state = 'failed', token = null, lease_expires_at = null where key = %s",
            [self.key(number)],
        )


class Messages(Adapter):
    """An app's messages, each edit counted: integers, and a column for everything."""

    name = "messages"
    table = "crawl.messages"
    columns: ClassVar = {
        "key": "message_id",
        "revision": "generation",
        "state": "embed_state",
        "token": "embed_token",
        "lease_expires_at": "embed_lease",
        "ready_at": "embed_at",
        "attempts": "embed_attempts",
        "urgency": "embed_class",
        "priority": "embed_rank",
        "evictions": "embed_evictions",
        "cancel_requested_at": "embed_stop",
        "runner": "embed_worker",
        "code": "embed_error",
        "finished_at": "embed_done_at",
        "result": "embedding",
    }
    states: ClassVar[Mapping[State, str]] = {"pending": "0", "succeeded": "1", "failed": "2", "cancelled": "3"}
    queue = TableQueue(
        table,
        **columns,
        states={"pending": 0, "succeeded": 1, "failed": 2, "cancelled": 3},
        where="not private and body not like '%\"secret\"%' -- nobody else's business",
        payload="body",
    )

    def create(self, admin: Admin) -> None:
        admin.execute("""
create schema if not exists crawl;
grant usage on schema crawl to public;
create table crawl.messages (
    message_id bigint primary key, body text not null, private bool not null default false,
    generation bigint not null default 1, embedding jsonb check (embedding <> '13'),
    embed_state smallint not null default 0, embed_token uuid, embed_lease timestamptz,
    embed_at timestamptz not null default clock_timestamp(), embed_attempts int not null default 0,
    embed_class smallint not null default 0, embed_rank int not null default 0, embed_evictions int not null default 0,
    embed_stop timestamptz, embed_worker text, embed_error text, embed_done_at timestamptz);
create index messages_to_embed on crawl.messages (embed_class, embed_rank, embed_at, message_id)
    where embed_state = 0 and not private and body not like '%"secret"%';
grant select, update on crawl.messages to public""")

    def key(self, number: int) -> str:
        return str(number)

    def revision(self, number: int) -> str:
        return str(number)

    def payload(self, body: str) -> object:
        return body

    def put(self, admin: Admin, number: int, revision: int = 1, body: str = "text") -> None:
        admin.execute(
            "insert into crawl.messages (message_id, generation, body) values (%s, %s, %s)"
            " on conflict (message_id) do update set generation = excluded.generation, body = excluded.body,"
            " embed_state = 0, embed_attempts = 0, embed_evictions = 0, embed_at = clock_timestamp(),"
            " embed_lease = null, embed_token = null, embed_stop = null, embed_worker = null,"
            " embed_error = null, embed_done_at = null",
            [number, revision, body],
        )


class Threads(Adapter):
    """An app's threads by the hash of what is in them: foreign names and types, and nothing but what is needed."""

    name = "threads"
    table = "crawl.Thread Vectors"
    columns: ClassVar = {
        "key": "Thread-Id",
        "revision": "contentHash",
        "state": "progress",
        "token": "lock",
        "lease_expires_at": "locked until",
        "ready_at": "not before",
        "attempts": "tries",
    }
    states: ClassVar[Mapping[State, str]] = {
        "pending": "it's dirty",
        "succeeded": "clean",
        "failed": "broken",
        "cancelled": "gone",
    }
    queue = TableQueue(table, **columns, states=states, payload=("title", "tags"))

    def create(self, admin: Admin) -> None:
        admin.execute("""
create schema if not exists crawl;
grant usage on schema crawl to public;
create type crawl.progress as enum ('it''s dirty', 'clean', 'broken', 'gone');
create domain crawl.thread_id as varchar(80) not null check (value <> '');
create table crawl."Thread Vectors" (
    "Thread-Id" crawl.thread_id, title text not null, tags text[] not null default '{}',
    "contentHash" bytea, vector jsonb check (vector <> '13'), progress crawl.progress not null default 'it''s dirty',
    lock uuid, "locked until" timestamptz, "not before" timestamptz default clock_timestamp(), tries smallint);
create unique index thread_ids on crawl."Thread Vectors" ("Thread-Id");
create index threads_to_do on crawl."Thread Vectors" ("not before", "Thread-Id") where progress = 'it''s dirty';
grant select, update on crawl."Thread Vectors" to public""")

    def key(self, number: int) -> str:
        return f"thread {{{number}}} 100%"

    def revision(self, number: int) -> str:
        return "\\x" + hashlib.sha256(str(number).encode()).hexdigest()

    def payload(self, body: str) -> object:
        return {"title": body, "tags": ["a", "b"]}

    def put(self, admin: Admin, number: int, revision: int = 1, body: str = "text") -> None:
        admin.execute(
            'insert into crawl."Thread Vectors" as t ("Thread-Id", "contentHash", title, tags) values (%s, %s, %s, %s)'
            ' on conflict ("Thread-Id") do update set "contentHash" = excluded."contentHash", title = excluded.title,'
            " progress = 'it''s dirty', tries = null, lock = null, \"locked until\" = null,"
            ' "not before" = clock_timestamp()',
            [self.key(number), self.revision(revision), body, ["a", "b"]],
        )


ADAPTERS: tuple[Adapter, ...] = (Jobs(), Messages(), Threads())
