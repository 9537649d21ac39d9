"""The tests' own house: what a test may rely on when it asks for a database."""

from __future__ import annotations

import contextlib
import os
import uuid
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import errors

from tests.plugins.hygiene import let_stay

if TYPE_CHECKING:
    from pgworker import App
    from pgworker.tablemap import TableMap
    from tests.databases import Connection, MakeDsn, WorkerDatabase

HOSTILE = os.environ.get("PGWORKER_TEST_HOSTILE") == "1"
hostile_only = pytest.mark.skipif(not HOSTILE, reason="PGWORKER_TEST_HOSTILE=1 is not set")


def put(connection: Connection, tables: TableMap, kind: str, key: str) -> None:
    connection.execute(f"insert into {tables.qualified('jobs')} (kind, key) values (%s, %s)".encode(), [kind, key])


def count(connection: Connection, tables: TableMap) -> int:
    (rows,) = connection.execute(f"select count(*) from {tables.qualified('jobs')}".encode()).fetchone() or (-1,)
    return int(rows)


@pytest.mark.ruling("1.32")
@pytest.mark.parametrize("which", ["first", "second"])
def test_rows_do_not_reach_the_next_test(admin: Connection, tables: TableMap, which: str) -> None:
    assert count(admin, tables) == 0
    put(admin, tables, "mail", which)
    assert count(admin, tables) == 1


@pytest.mark.ruling("1.32")
def test_the_database_bears_the_name_of_this_process(dsn: str, admin: Connection, run_name: str) -> None:
    assert admin.info.dbname == run_name
    with psycopg.connect(dsn) as connection:
        assert connection.info.dbname == run_name


@pytest.mark.parametrize("which", ["first", "second"])
def test_objects_do_not_reach_the_next_test(admin: Connection, which: str) -> None:
    admin.execute(f"create table documents (name text default '{which}')".encode())
    admin.execute("create function audit() returns trigger language plpgsql as 'begin return new; end'")
    admin.execute("create trigger audited before insert on pgworker.results for each row execute function audit()")


ADDED = """
create table public.added (n serial primary key, m int references public.added);
create view public.seen as select * from public.added;
create type public.mood as enum ('good', 'bad');
create domain public.mark as int check (value > 0);
create schema elsewhere create table more (n int);
create function public.audit() returns trigger language plpgsql as 'begin return new; end';
create trigger audited before insert on pgworker.results for each row execute function public.audit();
alter table pgworker.results add constraint refuse check (value <> '13');
create index by_priority on pgworker.jobs (priority)
"""
ALTERED = (
    "alter table pgworker.results alter column value set default '1'",
    "grant select on pgworker.results to public",
    "create or replace view pgworker.job_states as select *, 1 as more from pgworker.job_states",
)


def database_of(dsn: str) -> object:
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = connection.execute("select oid from pg_catalog.pg_database where datname = current_database()")
        return found.fetchone()


def test_what_a_test_has_added_is_dropped(worker_database: WorkerDatabase, dsn: str) -> None:
    before = database_of(worker_database.admin_dsn)
    for _ in range(2):
        with psycopg.connect(worker_database.admin_dsn, autocommit=True) as connection:
            connection.execute(ADDED)
        worker_database.reset()
    assert database_of(worker_database.admin_dsn) == before


@pytest.mark.parametrize("change", ALTERED)
def test_what_a_test_has_altered_has_the_database_made_anew(
    worker_database: WorkerDatabase, dsn: str, change: str
) -> None:
    before = database_of(dsn)
    with psycopg.connect(worker_database.admin_dsn, autocommit=True) as connection:
        connection.execute(change.encode())
    worker_database.reset()
    assert database_of(worker_database.admin_dsn) != before


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_lock_left_behind_does_not_stop_the_next_test(
    admin: Connection, dsn: str, tables: TableMap, request: pytest.FixtureRequest, which: str
) -> None:
    put(admin, tables, "mail", which)
    left = psycopg.connect(dsn)
    let_stay(left)
    left.execute(f"select from {tables.qualified('jobs')} for update".encode())
    request.session.config.add_cleanup(left.close)


def test_scratch_databases_are_apart(make_dsn: MakeDsn, tables: TableMap, dsn: str) -> None:
    empty, migrated = make_dsn(), make_dsn(migrated=True)
    assert len({empty, migrated, dsn}) == 3
    with psycopg.connect(migrated) as connection:
        assert count(connection, tables) == 0
    with psycopg.connect(empty) as connection, pytest.raises(errors.UndefinedTable):
        count(connection, tables)


def test_fsync_is_off_and_many_may_connect(admin: Connection) -> None:
    if os.environ.get("PGWORKER_TEST_DSN"):
        pytest.skip("a server that is not ours")
    assert admin.execute("show fsync").fetchone() == ("off",)
    assert admin.execute("show max_connections").fetchone() == ("200",)


@hostile_only
@pytest.mark.ruling("4.10")
def test_hostile_sessions_own_nothing_and_default_to_serializable(dsn: str, tables: TableMap) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        assert connection.execute("show transaction_isolation").fetchone() == ("serializable",)
        assert connection.execute(
            "select count(*) from pg_class where relowner = current_user::regrole"
        ).fetchone() == (0,)
        with pytest.raises(errors.InsufficientPrivilege):
            connection.execute("select from jobs")
        with pytest.raises(errors.RaiseException, match="look-alike"):
            connection.execute("select 'a'::text = 'a'::varchar")
        put(connection, tables, "mail", "1")
        assert count(connection, tables) == 1


@hostile_only
@pytest.mark.ruling("4.10")
def test_hostile_partitions_have_equal_ctids(admin: Connection, tables: TableMap) -> None:
    admin.execute(f"truncate {tables.qualified('jobs')}".encode())  # rows of earlier tests may still take up room
    for kind in ("mail", "index", "elsewhere"):
        put(admin, tables, kind, "same")
    found = admin.execute(
        f"select kind, ctid, tableoid::regclass::text from {tables.qualified('jobs')}".encode()
    ).fetchall()
    assert len({ctid for _, ctid, _ in found}) == 1
    assert len({partition for *_, partition in found}) == 3
    assert admin.execute("select count(*) from pgworker.job_states").fetchone() == (3,)


def test_a_session_of_ours_that_stays_in_a_transaction_is_found_and_ended(
    dsn: str, worker_database: WorkerDatabase, admin: Connection
) -> None:
    with (
        psycopg.connect(dsn, application_name="someone else") as other,
        contextlib.closing(psycopg.connect(dsn, application_name="pgworker claimer")) as ours,
    ):
        other.execute("select 1")
        ours.execute("select 2")
        pid = ours.info.backend_pid
        (description,) = worker_database.end_idle_transactions()
        assert description == f"pgworker claimer (pid {pid}) after 'select 2'"
        assert worker_database.end_idle_transactions() == []
        assert admin.execute("select count(*) from pg_stat_activity where pid = %s", [pid]).fetchone() == (0,)


def test_such_a_session_fails_the_test_that_left_it(
    server_dsn: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)  # or it would take our own database
    monkeypatch.setenv("PGWORKER_TEST_SERVER", "dsn")
    monkeypatch.setenv("PGWORKER_TEST_DSN", server_dsn)
    pytester.makeconftest('pytest_plugins = ["tests.plugins.database", "tests.plugins.server"]')
    pytester.makepyfile(
        """
        import psycopg

        LEFT = []

        def leave(dsn):
            LEFT.append(psycopg.connect(dsn, application_name="pgworker"))
            LEFT[-1].execute("select 1")

        def test_leaves_one_in_the_database(dsn):
            leave(dsn)

        def test_leaves_one_in_a_scratch_database(make_dsn):
            leave(make_dsn())

        def test_leaves_none(dsn, make_dsn):
            with psycopg.connect(make_dsn(), application_name="pgworker") as connection:
                connection.execute("select 1")
            for connection in LEFT:
                connection.close()
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(passed=3, errors=2)
    result.stdout.fnmatch_lines(["*sessions of ours left idle in transaction: pgworker (pid *) after 'select 1'"] * 2)


async def test_async_tests_run_without_a_mark(dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        cursor = await connection.execute("select 1")
        assert await cursor.fetchone() == (1,)


async def test_an_app_is_ready_for_async_tests(app: App) -> None:
    app.declare("mail")
    assert (await app.enqueue("mail", {"n": 1})).created


def test_an_app_is_ready_for_sync_tests(app: App, admin: Connection, tables: TableMap) -> None:
    app.declare("mail")
    assert app.sync.enqueue("mail", {"n": 1}).created
    assert count(admin, tables) == 1
