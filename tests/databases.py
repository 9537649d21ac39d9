"""The tests' databases: one for each process of a run, restored before each test, and scratch ones for single tests."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from pgworker.schema import migrate
from pgworker.tablemap import TableMap
from tests import hostile
from tests.plugins.hygiene import let_stay

if TYPE_CHECKING:
    from collections.abc import Generator

Connection: TypeAlias = psycopg.Connection[TupleRow]

TABLES: Final = TableMap()
_ADMIN_NAME: Final = "tests"  # not `pgworker...`: those are the sessions of the code under test
_KEPT: Final = {f"{TABLES.schema}.migrations"}

# Everything but rows that a test may leave behind. Cheap enough to ask before each test (about 2 ms).
_FINGERPRINT: Final = """
select (select md5(string_agg(concat_ws(' ', c.oid, c.relname, c.relnatts, c.reloptions, c.relowner, c.relacl,
                                        c.relrowsecurity, c.relpersistence, c.relreplident), ',' order by c.oid))
        from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname !~ '^(pg_|information_schema)'),
       (select md5(string_agg(concat_ws(' ', a.attrelid, a.attname, a.attnum, a.attnotnull, a.atthasdef, a.atttypid,
                                        a.atttypmod, a.attacl), ',' order by a.attrelid, a.attnum))
        from pg_attribute a join pg_class c on c.oid = a.attrelid join pg_namespace n on n.oid = c.relnamespace
        where n.nspname !~ '^(pg_|information_schema)'),
       (select md5(string_agg(concat_ws(' ', d.oid, pg_get_expr(d.adbin, d.adrelid)), ',' order by d.oid))
        from pg_attrdef d),
       (select md5(string_agg(concat_ws(' ', r.oid, pg_get_ruledef(r.oid)), ',' order by r.oid))
        from pg_rewrite r join pg_class c on c.oid = r.ev_class join pg_namespace n on n.oid = c.relnamespace
        where n.nspname !~ '^(pg_|information_schema)'),
       (select md5(string_agg(concat_ws(' ', t.oid, t.tgenabled), ',' order by t.oid)) from pg_trigger t),
       (select md5(string_agg(concat_ws(' ', p.oid, p.proacl, md5(p.prosrc)), ',' order by p.oid))
        from pg_proc p join pg_namespace n on n.oid = p.pronamespace where n.nspname !~ '^(pg_|information_schema)'),
       (select md5(string_agg(concat_ws(' ', c.oid, c.convalidated), ',' order by c.oid)) from pg_constraint c),
       (select md5(string_agg(concat_ws(' ', n.oid, n.nspname, n.nspowner, n.nspacl), ',' order by n.oid))
        from pg_namespace n where n.nspname !~ '^pg_(toast_)?temp_'),
       (select md5(string_agg(concat_ws(' ', t.oid, t.typname, t.typacl), ',' order by t.oid))
        from pg_type t join pg_namespace n on n.oid = t.typnamespace where n.nspname !~ '^(pg_|information_schema)'),
       (select md5(string_agg(concat_ws(' ', s.setrole, s.setconfig), ',' order by s.setrole))
        from pg_db_role_setting s join pg_database d on d.oid = s.setdatabase where d.datname = current_database())"""

# Statements that drop what a test has added: all that is newer than the newest of ours. Whether that was all that it
# has done, only the fingerprint tells.
_UNDO: Final = """
with o as (
    select n.oid as namespace from pg_namespace n
    where n.oid <= %(newest)s and n.nspname !~ '^(pg_|information_schema)')
select format('drop schema %%I cascade', n.nspname)
from pg_namespace n where n.oid > %(newest)s and n.nspname !~ '^pg_'
union all
select format('alter table %%s drop constraint if exists %%I cascade', c.conrelid::regclass, c.conname)
from pg_constraint c
where c.oid > %(newest)s and c.conrelid between 1 and %(newest)s and c.conislocal and c.contype <> 't'
union all
select format('drop trigger if exists %%I on %%s', t.tgname, t.tgrelid::regclass) from pg_trigger t
where t.oid > %(newest)s and t.tgrelid <= %(newest)s and not t.tgisinternal and t.tgparentid = 0
union all
select format('drop %%s if exists %%s cascade', k.name, c.oid::regclass)
from pg_class c join o on o.namespace = c.relnamespace
join (values ('r', 'table'), ('p', 'table'), ('v', 'view'), ('m', 'materialized view'), ('S', 'sequence'),
             ('i', 'index'), ('I', 'index'), ('c', 'type')) k (kind, name) on k.kind = c.relkind::text
where c.oid > %(newest)s and not c.relispartition and not exists (select from pg_constraint where conindid = c.oid)
union all
select format('drop routine if exists %%s cascade', p.oid::regprocedure)
from pg_proc p join o on o.namespace = p.pronamespace where p.oid > %(newest)s
union all
select format('drop type if exists %%s cascade', t.oid::regtype)
from pg_type t join o on o.namespace = t.typnamespace
where t.oid > %(newest)s and t.typtype in ('d', 'e', 'r') and t.typcategory <> 'A'"""

_NEWEST: Final = """
select greatest((select max(oid::bigint) from pg_class), (select max(oid::bigint) from pg_namespace),
                (select max(oid::bigint) from pg_constraint), (select max(oid::bigint) from pg_trigger),
                (select max(oid::bigint) from pg_proc), (select max(oid::bigint) from pg_type))"""

# What a process of the test before, or a pool on its way out, has left: the next test may count sessions.
_END_OURS: Final = """
select pg_terminate_backend(pid) from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and application_name like 'pgworker%'"""

_IDLE: Final = """
select pid, application_name, left(query, 200) from pg_stat_activity
where datname = any(%s) and application_name like 'pgworker%%' and state like 'idle in transaction%%'"""


class MakeDsn(Protocol):
    """Make a database for this test alone and return an owner's DSN; it is dropped when the test ends."""

    def __call__(self, *, migrated: bool = False) -> str:
        """Make it empty, or with our schema in it."""
        ...


def connect(dsn: str) -> Connection:
    """An administrator's autocommit session: READ COMMITTED whatever the database's default is."""
    connection = psycopg.connect(dsn, autocommit=True, application_name=_ADMIN_NAME)
    connection.execute("set default_transaction_isolation = 'read committed'")
    return connection


def create(server_dsn: str, name: str) -> str:
    """Create a database and return an administrator's DSN to it."""
    with connect(server_dsn) as connection:
        # template0, as a copy of a database that somebody is connected to is refused
        connection.execute(sql.SQL("create database {} template template0").format(sql.Identifier(name)))
    return make_conninfo(server_dsn, dbname=name)


def drop(server_dsn: str, name: str) -> None:
    """Drop a database with all sessions in it; nothing happens when there is none."""
    with connect(server_dsn) as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


@contextmanager
def scratch(server_dsn: str, name: str, *, migrated: bool) -> Generator[str, None, None]:
    """A database for one test."""
    dsn = create(server_dsn, name)
    try:
        if migrated:
            with connect(dsn) as connection:
                migrate(connection, TABLES)
        yield dsn
    finally:
        drop(server_dsn, name)


def end_idle_transactions(connection: Connection, databases: list[str]) -> list[str]:
    """The sessions of the code under test that sit in an open transaction; they are described and ended.

    A session that is just being closed may still show: what counts is still there after a moment.
    """
    if not connection.execute(_IDLE, [databases]).fetchone():
        return []
    connection.execute("select pg_sleep(0.3)")
    found = connection.execute(_IDLE, [databases]).fetchall()
    for pid, *_ in found:
        connection.execute("select pg_terminate_backend(%s, 2000)", [pid])
    return [f"{application} (pid {pid}) after {query!r}" for pid, application, query in found]


class WorkerDatabase:
    """A database of one test process: made once and restored before each test, made anew where that fails.

    Our schema is in it if `migrated`. The hostile mode needs that.
    """

    def __init__(self, server_dsn: str, name: str, *, hostile_mode: bool = False, migrated: bool = True) -> None:
        self.name = name
        self.admin_dsn = make_conninfo(server_dsn, dbname=name)
        self.dsn = self.admin_dsn
        self._server_dsn = server_dsn
        self._migrated = migrated
        self._role = hostile.Role(f"{name}_role", secrets.token_hex(16)) if hostile_mode else None
        try:
            self._build()
        except BaseException:
            self._drop()
            raise

    def _build(self) -> None:
        drop(self._server_dsn, self.name)
        create(self._server_dsn, self.name)
        if self._role:
            with connect(self.admin_dsn) as connection:
                hostile.poison(connection, self._role)
        with connect(self.admin_dsn) as connection:
            if self._migrated:
                migrate(connection, TABLES)
            if self._role:
                hostile.partition(connection, TABLES)
                hostile.admit(connection, TABLES, self._role)
                self.dsn = make_conninfo(self.admin_dsn, user=self._role.name, password=self._role.password)
        self._keeper = self._open()
        self._fingerprint = self._look()
        ((self._newest,),) = self._keeper.execute(_NEWEST).fetchall()
        # Ids begin at one again: a plan test prepares for the types of those that it sees first.
        self._empty = ";".join(
            f"select setval('{name}', 1, false)" if kind == "S" else f"delete from {name}"
            for name, kind in self._keeper.execute(
                "select oid::regclass::text, relkind::text from pg_class where relnamespace = to_regnamespace(%s)"
                " and relkind in ('r', 'p', 'S') and not relispartition order by oid",
                [TABLES.schema],
            )
            if name not in _KEPT
        ).encode()

    def _open(self) -> Connection:
        connection = connect(self.admin_dsn)
        connection.execute("set search_path = pg_catalog; set lock_timeout = '500ms'")
        let_stay(connection)
        return connection

    def _look(self) -> TupleRow | None:
        return self._keeper.execute(_FINGERPRINT).fetchone()

    def _undo(self) -> bool:
        """Drop what the test before has added; False when it has altered more than that."""
        found = self._keeper.execute(_UNDO, {"newest": self._newest}).fetchall()
        self._keeper.execute(";".join(str(statement) for (statement,) in found).encode())
        return self._look() == self._fingerprint

    def reset(self) -> None:
        """Drop what is new and delete all rows; a database that was altered, locked or gone is made anew (0.3 s)."""
        try:
            self._keeper.execute(_END_OURS)
            if self._look() == self._fingerprint or self._undo():
                self._keeper.execute(self._empty)
                return
        except psycopg.Error:
            pass  # the test before left a lock, ended our session, or what cannot be dropped: build() ends all others
        self._keeper.close()
        self._build()

    def end_idle_transactions(self) -> list[str]:
        """As the function does, for this database; a session of ours that a test has ended is opened again."""
        if self._keeper.closed:
            self._keeper = self._open()
        return end_idle_transactions(self._keeper, [self.name])

    def end_sessions(self) -> None:
        """End all sessions but ours."""
        self._keeper.execute(
            "select pg_terminate_backend(pid, 2000) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )

    def close(self) -> None:
        """Drop the database, and its role with it."""
        self._keeper.close()
        self._drop()

    def _drop(self) -> None:
        drop(self._server_dsn, self.name)
        if self._role:
            with connect(self._server_dsn) as connection:
                connection.execute(sql.SQL("drop role if exists {}").format(sql.Identifier(self._role.name)))
