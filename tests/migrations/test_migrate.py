from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.rows import dict_row

from pgworker.errors import SchemaError, SchemaMissing, SchemaTooNew
from pgworker.schema import apply, check, grants, migrate, migrations, parse, pending, render
from pgworker.schema.script import lock_key
from pgworker.tablemap import TableMap
from tests.databases import TABLES, connect
from tests.migrations import catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgworker.schema import Migration
    from tests.databases import Connection, MakeDsn

SHIPPED: Final = migrations()
NEXT: Final = len(SHIPPED) + 1
HASTE: Final = timedelta(milliseconds=20)
PAUSE: Final = apply._pause


def another(body: str, *, number: int = NEXT, breaking: str = "no", transaction: str = "yes") -> Migration:
    name = "another"
    header = f"-- {number:04d} {name}\n-- Upgrade: Of a test.\n-- Breaking: {breaking}\n-- Transaction: {transaction}\n"
    return parse(f"{number:04d}_{name}.sql", header + body)


@pytest.fixture
def carry(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let this release carry further migrations, and no pause between the tries keep the test waiting."""

    def carry(*more: Migration, pause: Callable[[int], None] = lambda _: None) -> None:
        monkeypatch.setattr(apply, "migrations", lambda: (*SHIPPED, *more))
        monkeypatch.setattr(apply, "_pause", pause)

    return carry


@pytest.fixture
def empty(make_dsn: MakeDsn) -> Iterator[Connection]:
    """An owner's connection to a database without our schema."""
    with connect(make_dsn()) as connection:
        yield connection


@pytest.fixture
def migrated(make_dsn: MakeDsn) -> Iterator[Connection]:
    with connect(make_dsn(migrated=True)) as connection:
        yield connection


@contextmanager
def beside(connection: Connection, name: str = "beside") -> Iterator[Connection]:
    """A second session on the same database, not in autocommit: rolled back at the end."""
    dsn = connection.info.dsn
    with psycopg.connect(dsn, password=connection.info.password, application_name=name) as other:
        yield other
        if not other.closed:
            other.rollback()


@contextmanager
def role(connection: Connection, *rights: str) -> Iterator[str]:
    """A role for one test, gone from the server at its end."""
    name = f"pgworker_tests_role_{secrets.token_hex(6)}"
    connection.execute(sql.SQL("create role {}").format(sql.Identifier(name)))
    try:
        for right in rights:
            connection.execute(right.format(role=f'"{name}"').encode())
        yield name
    finally:
        connection.execute("reset session authorization")
        connection.execute(sql.SQL("drop owned by {0}; drop role {0}").format(sql.Identifier(name)))


def become(connection: Connection, name: str) -> None:
    connection.execute(sql.SQL("set session authorization {}").format(sql.Identifier(name)))


def recorded(connection: Connection, tables: TableMap = TABLES) -> list[tuple[object, ...]]:
    rows = f"select number, name, breaking, checksum, release from {tables.qualified('migrations')} order by number"
    return connection.execute(rows.encode()).fetchall()


def columns(connection: Connection) -> set[str]:
    rows = connection.execute(
        "select attname from pg_attribute where attrelid = 'pgworker.jobs'::regclass and attnum > 0"
    )
    return {name for (name,) in rows}


def test_a_second_migrate_finds_nothing_to_do(empty: Connection) -> None:
    assert pending(empty, TABLES) == SHIPPED
    assert migrate(empty, TABLES) == SHIPPED
    check(empty, TABLES)
    rows = recorded(empty)
    assert [row[:4] for row in rows] == [(each.number, each.name, each.breaking, each.checksum) for each in SHIPPED]
    assert all(row[4] for row in rows)
    assert migrate(empty, TABLES) == pending(empty, TABLES) == ()
    assert recorded(empty) == rows


def test_each_migration_is_applied_once_by_many_at_once(empty: Connection, carry: Callable[..., None]) -> None:
    carry(another("alter table {schema}.jobs add column extra int;"))
    together = threading.Barrier(4)

    def start() -> tuple[Migration, ...]:
        with beside(empty) as other:
            together.wait()
            return migrate(other, TABLES)

    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(start) for _ in range(4)]
        applied = [each.number for run in runs for each in run.result()]
    assert sorted(applied) == [*range(1, NEXT + 1)]
    check(empty, TABLES)


def test_the_script_makes_the_same_schema_and_runs_twice(make_dsn: MakeDsn, migrated: Connection) -> None:
    script = render(TABLES, SHIPPED).encode()
    with connect(make_dsn()) as statement_by_statement, connect(make_dsn()) as as_one_transaction:
        statement_by_statement.execute(script)
        with as_one_transaction.transaction():  # psql -1
            as_one_transaction.execute(script)
        for made in (statement_by_statement, as_one_transaction):
            assert catalog.lines(made) == catalog.lines(migrated)
            assert recorded(made) == recorded(migrated)
            made.execute(script)
            assert recorded(made) == recorded(migrated)
            assert migrate(made, TABLES) == ()


def test_the_script_stops_where_something_is_missing(empty: Connection) -> None:
    with pytest.raises(errors.RaiseException, match=f"before {NEXT:04d} another"):
        empty.execute(render(TABLES, [another("create table {schema}.never ();")]).encode())
    assert empty.execute("select to_regnamespace('pgworker')").fetchone() == (None,)


def test_the_script_does_not_pass_over_a_migration_whose_text_has_changed(migrated: Connection) -> None:
    migrated.execute("update pgworker.migrations set checksum = 'other' where number = 1")
    with pytest.raises(errors.DuplicateTable):
        migrated.execute(render(TABLES, SHIPPED).encode())


@pytest.mark.parametrize("caller", [check, pending, migrate])
def test_a_breaking_migration_of_a_newer_release_is_refused(
    caller: Callable[[Connection, TableMap], object], migrated: Connection, carry: Callable[..., None]
) -> None:
    migrated.execute("insert into pgworker.migrations values (9998, 'addition', false, 'x', '8.0')")
    caller(migrated, TABLES)
    migrated.execute("insert into pgworker.migrations values (9999, 'upheaval', true, 'x', '9.1')")
    carry(another("create table {schema}.never ();"))
    with pytest.raises(SchemaTooNew, match=r"9999 upheaval.*upgrade this pgworker to 9\.1 or later"):
        caller(migrated, TABLES)
    assert migrated.execute("select to_regclass('pgworker.never')").fetchone() == (None,)


def test_a_breaking_migration_is_no_obstacle_to_the_release_that_knows_it(
    migrated: Connection, carry: Callable[..., None]
) -> None:
    upheaval = another("create table {schema}.later ();", breaking="yes")
    carry(upheaval)
    assert migrate(migrated, TABLES) == (upheaval,)
    check(migrated, TABLES)
    carry(another("", number=NEXT, breaking="yes"))
    with pytest.raises(SchemaError, match=f"migration {NEXT:04d} another is not the text"):
        migrate(migrated, TABLES)


def test_another_history_under_the_same_number_is_refused_when_it_is_breaking(
    migrated: Connection, carry: Callable[..., None]
) -> None:
    carry(another(""))
    migrated.execute("insert into pgworker.migrations values (%s, 'theirs', true, 'x', '9.1')", [NEXT])
    with pytest.raises(SchemaTooNew, match="theirs"):
        check(migrated, TABLES)


def test_a_changed_file_is_an_error_for_migrate_and_not_for_workers(migrated: Connection) -> None:
    migrated.execute("update pgworker.migrations set checksum = 'other', release = '0.0.1' where number = 1")
    for caller in (pending, migrate):
        with pytest.raises(SchemaError, match=r"migration 0001 jobs is not the text that pgworker 0\.0\.1 applied"):
            caller(migrated, TABLES)
    check(migrated, TABLES)


@pytest.mark.ruling("2.26")
def test_a_missing_schema_names_the_remedy(empty: Connection, carry: Callable[..., None]) -> None:
    for statement in (b"select 1", b"create schema pgworker"):
        empty.execute(statement)
        with pytest.raises(SchemaMissing, match=rf"{empty.info.dbname}.*'pgworker': run `pgworker migrate`") as caught:
            check(empty, TABLES)
        assert "\n" not in str(caught.value)
    migrate(empty, TABLES)
    carry(another(""))
    with pytest.raises(SchemaMissing, match=f"lacks {NEXT:04d} another.*run `pgworker migrate`"):
        check(empty, TABLES)


def test_a_table_migrations_of_somebody_else_is_left_alone(empty: Connection) -> None:
    empty.execute("create schema pgworker; create table pgworker.migrations (id int, migration text)")
    for caller in (check, pending, migrate):
        with pytest.raises(SchemaError, match="choose another schema"):
            caller(empty, TABLES)


def test_odd_schema_names_side_by_side(empty: Connection) -> None:
    migrate(empty, TABLES)
    for name in ("select", "My Jobs", "größe", "a.b", "a;b--", "a$b", "line\nbreak", "x" * 63):
        tables = TableMap(name)
        enqueue = f"select status from {tables.schema_identifier}.enqueue('mail', key => 'k', wake => true)".encode()
        assert migrate(empty, tables) == SHIPPED
        check(empty, tables)
        assert pending(empty, tables) == ()
        assert recorded(empty, tables) == recorded(empty)
        assert empty.execute(enqueue).fetchone() == ("created",)
        empty.execute(f"drop schema {tables.schema_identifier} cascade".encode())
        empty.execute(render(tables, SHIPPED).encode())
        assert empty.execute(enqueue).fetchone() == ("created",)
    assert empty.execute("select count(*) from pgworker.jobs").fetchone() == (0,)


@pytest.mark.field("L32")
def test_migrate_gives_up_after_some_tries_and_says_who_is_in_its_way(
    migrated: Connection, carry: Callable[..., None]
) -> None:
    pauses: list[int] = []
    carry(another("alter table {schema}.results add column extra int; alter table {schema}.jobs add column extra int;"),
          pause=pauses.append)  # fmt: skip
    before = catalog.lines(migrated)
    with beside(migrated, "report") as reader:
        reader.execute("select from pgworker.jobs")
        with pytest.raises(SchemaError, match=r"no lock within 0\.02 s, 3 times over") as caught:
            migrate(migrated, TABLES, lock_timeout=HASTE, tries=3)
        assert f"pid {reader.info.backend_pid} (report, idle in transaction" in str(caught.value)
        assert f"pg_terminate_backend({reader.info.backend_pid})" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert pauses == [1, 2]
    assert catalog.lines(migrated) == before
    assert len(recorded(migrated)) == len(SHIPPED)


@pytest.mark.field("L32")
def test_migrate_tries_again_until_the_reader_has_gone(migrated: Connection, carry: Callable[..., None]) -> None:
    extra = another("alter table {schema}.jobs add column extra int;")
    with beside(migrated) as reader, beside(migrated) as writer:
        reader.execute("select from pgworker.jobs")

        def pause(attempt: int) -> None:
            writer.execute("set local lock_timeout = '1s'")
            writer.execute("select status from pgworker.enqueue('mail')")  # what queued behind the request may pass
            writer.commit()
            if attempt == 2:
                reader.rollback()

        carry(extra, pause=pause)
        assert migrate(migrated, TABLES, lock_timeout=HASTE, tries=5) == (extra,)
    assert migrated.execute("select count(*) from pgworker.jobs").fetchone() == (2,)
    assert "extra" in columns(migrated)


@pytest.mark.field("L32")
def test_a_starting_worker_and_an_idle_migrate_wait_for_no_lock(migrated: Connection) -> None:
    with beside(migrated) as blocker:
        blocker.execute("lock table pgworker.jobs, pgworker.results, pgworker.runners in access exclusive mode")
        blocker.execute("select pg_advisory_xact_lock(%s)", [lock_key(TABLES)])
        blocker.execute("insert into pgworker.migrations values (9999, 'under way', true, 'x', '9.1')")
        migrated.execute("set lock_timeout = '1ms'")
        check(migrated, TABLES)
        assert pending(migrated, TABLES) == migrate(migrated, TABLES) == ()
    migrated.execute("reset lock_timeout")


def test_the_script_waits_for_another_migrator(migrated: Connection) -> None:
    with beside(migrated) as other:
        other.execute("select pg_advisory_xact_lock(%s)", [lock_key(TABLES)])
        migrated.execute("set statement_timeout = '200ms'")
        with pytest.raises(errors.QueryCanceled):
            migrated.execute(render(TABLES, SHIPPED).encode())


def test_a_migration_that_dies_of_a_deadlock_is_tried_again(migrated: Connection, carry: Callable[..., None]) -> None:
    carry(another("do $$ begin raise exception using errcode = 'deadlock_detected'; end $$;"))
    with pytest.raises(SchemaError, match=r"3 times over.*Nobody holds one any more"):
        migrate(migrated, TABLES, tries=3)


def test_another_migrator_at_work_is_waited_for_and_named(empty: Connection) -> None:
    with beside(empty, "other migrator") as other:
        other.execute("select pg_advisory_xact_lock(%s)", [lock_key(TABLES)])
        with pytest.raises(SchemaError, match=rf"pid {other.info.backend_pid} \(other migrator"):
            migrate(empty, TABLES, lock_timeout=HASTE, tries=1)
        assert migrate(empty, TableMap("other")) == SHIPPED, "the lock is of one schema"


@pytest.mark.field("L14")
def test_no_lock_outlives_the_transaction_of_a_session_that_a_pooler_keeps(
    empty: Connection, carry: Callable[..., None]
) -> None:
    with beside(empty) as kept:
        carry(another("select 1 / 0;"))
        with pytest.raises(errors.DivisionByZero):
            migrate(kept, TABLES)
        held = "select count(*) from pg_locks where pid = %s and locktype = 'advisory'"
        assert empty.execute(held, [kept.info.backend_pid]).fetchone() == (0,)
        for setting in ("lock_timeout", "statement_timeout", "search_path"):
            assert kept.execute(f"show {setting}").fetchone() == empty.execute(f"show {setting}").fetchone()
        kept.rollback()
        nothing = another("select 1;")
        carry(nothing)
        assert migrate(empty, TABLES, lock_timeout=HASTE, tries=1) == (nothing,)


@pytest.mark.parametrize("end", ["pg_terminate_backend", "pg_cancel_backend"])
def test_a_migration_ended_half_way_leaves_nothing(end: str, migrated: Connection, carry: Callable[..., None]) -> None:
    before = catalog.lines(migrated)
    half_way = threading.Event()
    stall = "do $$ begin raise warning 'half way'; perform pg_sleep(50); end $$;"
    carry(another("alter table {schema}.jobs add column extra int; " + stall))
    with beside(migrated) as other, ThreadPoolExecutor(1) as pool:
        other.add_notice_handler(lambda _: half_way.set())
        run = pool.submit(migrate, other, TABLES)
        assert half_way.wait(20)
        migrated.execute(sql.SQL("select {}(%s)").format(sql.Identifier(end)), [other.info.backend_pid])
        with pytest.raises((errors.AdminShutdown, errors.QueryCanceled)):
            run.result(20)
        migrated.execute(
            "set lock_timeout = '10s'; lock table pgworker.jobs; reset lock_timeout"
        )  # has its backend gone?
        assert catalog.lines(migrated) == before
        assert len(recorded(migrated)) == len(SHIPPED)
        carry(another("alter table {schema}.jobs add column extra int;"))
        assert [each.number for each in migrate(migrated, TABLES)] == [NEXT]


def test_a_migration_that_fails_leaves_the_ones_before_it(empty: Connection, carry: Callable[..., None]) -> None:
    carry(another("create table {schema}.never ();"), another("select 1 / 0;", number=NEXT + 1))
    with pytest.raises(errors.DivisionByZero):
        migrate(empty, TABLES)
    assert [row[0] for row in recorded(empty)] == [*range(1, NEXT + 1)]


LOOK_ALIKES: Final = """
    create schema evil;
    create function evil.sprung(text, text) returns bool language plpgsql as $$ begin raise 'sprung'; end $$;
    create function evil.clock_timestamp() returns timestamptz language sql as 'select null::timestamptz';
    create operator evil.= (leftarg = text, rightarg = text, function = evil.sprung);
    create operator evil.<> (leftarg = text, rightarg = text, function = evil.sprung);
    create table evil.pg_namespace (nspname name);
    create table evil.pg_class (oid oid, relname name);
    create type evil.text as enum ('x');
    create type evil.timestamptz as enum ('x')"""
UNFIT: Final = {
    "search_path": "evil, pg_catalog",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "standard_conforming_strings": "off",
    "statement_timeout": "20s",
    "lock_timeout": "10s",
}
FIT: Final = {
    "search_path": "pg_catalog, pg_temp",
    "transaction_isolation": "read committed",
    "standard_conforming_strings": "on",
    "statement_timeout": "0",
    "lock_timeout": "20ms",
}


def demand(settings: dict[str, str]) -> Migration:
    """A migration that fails unless it runs under these settings."""
    wrong = " or ".join(f"current_setting('{name}') <> '{value}'" for name, value in settings.items())
    return another(f"do $$ begin if {wrong} then raise 'unfit settings'; end if; end $$;")


@pytest.fixture
def unfit(make_dsn: MakeDsn) -> Iterator[psycopg.Connection]:
    """A connection to a database whose defaults are bad for migrations."""
    dsn = make_dsn()
    with connect(dsn) as connection:
        connection.execute(LOOK_ALIKES)
        for name, value in UNFIT.items():
            text = f"alter database {connection.info.dbname} set {name} = {value if ',' in value else repr(value)}"
            connection.execute(text.encode())
    with psycopg.connect(dsn) as connection:
        yield connection


@pytest.mark.ruling("1.11", "4.10")
def test_nothing_depends_on_what_the_database_prefers(
    unfit: psycopg.Connection, migrated: Connection, carry: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(unfit, TABLES)
    check(unfit, TABLES)
    assert unfit.execute("show search_path").fetchone() == ("evil, pg_catalog",)
    unfit.rollback()
    with beside(unfit) as reader:
        reader.execute("set search_path = pg_catalog; set standard_conforming_strings = on")
        assert catalog.lines(reader) == catalog.lines(migrated)

    carry(fit := demand(FIT))
    assert migrate(unfit, TABLES, lock_timeout=HASTE, tries=1) == (fit,)

    seen: list[object] = []

    def applied(cursor: apply.Cursor, tables: TableMap) -> tuple[object, ...]:
        seen.extend(
            cursor.execute(f"show {name}").fetchone() for name in ("transaction_isolation", "transaction_read_only")
        )
        return original(cursor, tables)

    original = apply._applied
    monkeypatch.setattr(apply, "_applied", applied)
    check(unfit, TABLES)
    assert seen == [("read committed",), ("on",)]


@pytest.mark.ruling("4.10")
def test_the_script_does_not_depend_on_it_either(unfit: psycopg.Connection, migrated: Connection) -> None:
    needs = {name: FIT[name] for name in ("search_path", "standard_conforming_strings")}
    script = render(TABLES, [*SHIPPED, demand({**needs, "lock_timeout": "3s"})])
    unfit.autocommit = True
    unfit.read_only = False
    unfit.execute("set default_transaction_read_only = off")
    unfit.execute(script.encode())
    unfit.execute("set search_path = pg_catalog; set standard_conforming_strings = on")
    assert catalog.lines(unfit) == catalog.lines(migrated)


def test_the_callers_connection_may_be_set_up_in_any_way(empty: Connection) -> None:
    with beside(empty) as other:
        other.row_factory = dict_row  # type: ignore[assignment]
        other.prepare_threshold = 0
        other.cursor_factory = psycopg.ClientCursor
        other.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        other.read_only = True
        assert migrate(other, TABLES) == SHIPPED
        check(other, TABLES)
        assert (other.autocommit, other.info.transaction_status.name) == (False, "IDLE")
    check(empty, TABLES)


@pytest.mark.parametrize("caller", [check, pending, migrate])
def test_a_connection_in_a_transaction_is_refused(
    caller: Callable[[Connection, TableMap], object], migrated: Connection
) -> None:
    with beside(migrated) as other:
        other.execute("select 1")
        with pytest.raises(SchemaError, match="in none"):
            caller(other, TABLES)


def test_an_owner_of_the_schema_needs_no_right_on_the_database(empty: Connection) -> None:
    empty.execute(f"revoke all on database {empty.info.dbname} from public".encode())
    with role(empty, "create schema pgworker authorization {role}") as owner:
        become(empty, owner)
        assert migrate(empty, TABLES) == SHIPPED
        check(empty, TABLES)
        empty.execute("drop table pgworker.migrations, pgworker.jobs, pgworker.results, pgworker.runners cascade;"
                      "drop table pgworker.kinds, pgworker.facts; drop function pgworker.enqueue;"
                      "drop sequence pgworker.job_ids, pgworker.fact_ids")  # fmt: skip
        empty.execute(render(TABLES, SHIPPED).encode())
        check(empty, TABLES)


def test_a_role_without_the_right_to_migrate_is_told_what_to_ask_for(empty: Connection) -> None:
    with role(empty) as stranger:
        become(empty, stranger)
        with pytest.raises(SchemaError, match=r"permission denied.*create schema \"pgworker\" authorization") as caught:
            migrate(empty, TABLES)
        assert "\n" not in str(caught.value)


def test_a_role_without_grants_is_told_how_to_get_them(migrated: Connection) -> None:
    with role(migrated) as stranger:
        for right in (b"select 1", f'grant usage on schema pgworker to "{stranger}"'.encode()):
            migrated.execute("reset session authorization")
            migrated.execute(right)
            become(migrated, stranger)
            with pytest.raises(SchemaMissing, match=r"may not read schema 'pgworker'.*pgworker migrate --role"):
                check(migrated, TABLES)


ALLOWED: Final = (
    "select status from pgworker.enqueue('mail', '{}', 'k', 'r1', wake => true)",
    (
        "insert into pgworker.jobs (kind, key, payload) values ('mail', 'a', '{}') on conflict (kind, key) do update "
        "set payload = excluded.payload returning id"
    ),
    (
        "update pgworker.jobs set token = gen_random_uuid(), lease_expires_at = clock_timestamp() where (kind, id) in "
        "(select kind, id from pgworker.jobs where state = 'pending' order by id for no key update skip locked)"
    ),
    (
        "insert into pgworker.results values (clock_timestamp(), 'mail', 'a', '', '1') on conflict (kind, key) "
        "do update set value = excluded.value"
    ),
    "update pgworker.jobs set state = 'succeeded', token = null, lease_expires_at = null",
    (
        "insert into pgworker.runners values (clock_timestamp(), clock_timestamp(), 'r', 'mail', '1', '{}') "
        "on conflict (runner, kind) do update set seen_at = excluded.seen_at"
    ),
    (
        "insert into pgworker.kinds values (clock_timestamp(), null, 'mail', 'x') "
        "on conflict (kind) do update set paused_at = null"
    ),
    "delete from pgworker.kinds",
    (
        "insert into pgworker.facts (at, job_id, generation, attempts, kind, key, revision, what) "
        "values (clock_timestamp(), 1, 1, 0, 'mail', 'a', '', 'claimed')"
    ),
    "select * from pgworker.facts",
    "select * from pgworker.job_states",
    "select * from pgworker.migrations",
    "select * from pgworker.jobs for update",
    "delete from pgworker.jobs",
    "delete from pgworker.results",
    "delete from pgworker.runners",
)
FORBIDDEN: Final = (
    "update pgworker.facts set what = 'failed'",
    "truncate pgworker.jobs",
    "drop table pgworker.jobs",
    "drop view pgworker.job_states",
    "alter table pgworker.jobs add column x int",
    "create table pgworker.x ()",
    "create index on pgworker.jobs (runner)",
    "create trigger x before update on pgworker.jobs execute function suppress_redundant_updates_trigger()",
    "create or replace function pgworker.enqueue(text) returns int language sql as 'select 1'",
    "insert into pgworker.migrations values (9999, 'x', true, 'x', 'x')",
    "delete from pgworker.migrations",
    "alter sequence pgworker.job_ids restart",
    "select setval('pgworker.job_ids', 1)",
    "drop schema pgworker cascade",
)


def test_the_granted_role_can_work_and_cannot_change_the_schema(migrated: Connection) -> None:
    migrated.execute("revoke execute on all functions in schema pgworker from public")
    with role(migrated) as worker:
        migrated.execute(grants(TABLES, worker).encode())
        migrated.execute(grants(TABLES, worker).encode())
        become(migrated, worker)
        check(migrated, TABLES)
        for statement in ALLOWED:
            migrated.execute(statement.encode())
        for statement in FORBIDDEN:
            with pytest.raises(errors.InsufficientPrivilege):
                migrated.execute(statement.encode())


def test_grants_know_each_thing_in_the_schema(migrated: Connection) -> None:
    with role(migrated) as worker:
        migrated.execute(grants(TABLES, worker).encode())
        unreachable = """
            select relname::text from pg_class where relnamespace = 'pgworker'::regnamespace
              and (relkind in ('r', 'p', 'v') and not has_table_privilege(%(role)s, oid, 'select')
                   or relkind = 'S' and not has_sequence_privilege(%(role)s, oid, 'usage'))
            union all select proname::text from pg_proc where pronamespace = 'pgworker'::regnamespace
              and not exists (select from aclexplode(proacl) where grantee = %(role)s::regrole)"""
        assert migrated.execute(unreachable, {"role": worker}).fetchall() == []


INDEX: Final = another(
    "create unique index concurrently if not exists jobs_extra on {schema}.jobs (last_code);", transaction="no"
)


def index_state(connection: Connection) -> tuple[object, ...] | None:
    return connection.execute(
        "select indisvalid from pg_index where indexrelid = 'pgworker.jobs_extra'::regclass"
    ).fetchone()


@pytest.mark.parametrize("autocommit", [True, False])
def test_a_file_outside_a_transaction(autocommit: bool, migrated: Connection, carry: Callable[..., None]) -> None:  # noqa: FBT001
    carry(INDEX)
    with beside(migrated) as other:
        other.autocommit = autocommit
        assert migrate(other, TABLES) == (INDEX,)
        assert migrate(other, TABLES) == ()
        assert other.autocommit == autocommit
    assert index_state(migrated) == (True,)
    assert len(recorded(migrated)) == NEXT


def test_what_an_interrupted_index_build_left_is_not_taken_for_an_index(
    migrated: Connection, carry: Callable[..., None]
) -> None:
    carry(INDEX)
    migrated.execute("insert into pgworker.jobs (kind, key, last_code) values ('mail', 'a', 'x'), ('mail', 'b', 'x')")
    with pytest.raises(errors.UniqueViolation):
        migrate(migrated, TABLES)
    assert index_state(migrated) == (False,)
    assert len(recorded(migrated)) == len(SHIPPED)
    migrated.execute("delete from pgworker.jobs")
    assert migrate(migrated, TABLES) == (INDEX,)
    assert index_state(migrated) == (True,)


def test_an_index_that_is_not_valid_in_the_end_is_not_recorded(
    migrated: Connection, carry: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """IF NOT EXISTS was content with the unfinished index of a migrator that died meanwhile."""
    carry(INDEX)
    migrated.execute("insert into pgworker.jobs (kind, key, last_code) values ('mail', 'a', 'x'), ('mail', 'b', 'x')")
    with pytest.raises(errors.UniqueViolation):
        migrate(migrated, TABLES)
    monkeypatch.setattr(apply, "_run_alone", lambda *_: None)
    with pytest.raises(SchemaError, match="2 times over"):
        migrate(migrated, TABLES, tries=2)
    assert len(recorded(migrated)) == len(SHIPPED)


def test_another_migrator_may_be_faster_with_a_file_outside_a_transaction(
    migrated: Connection, carry: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(*_: object) -> None:
        monkeypatch.undo()
        carry(INDEX)
        with beside(migrated) as other:
            assert migrate(other, TABLES) == (INDEX,)

    carry(INDEX)
    monkeypatch.setattr(apply, "_run_alone", overtaken)
    assert migrate(migrated, TABLES) == ()
    assert len(recorded(migrated)) == NEXT


def test_an_index_build_of_another_migrator_is_waited_for(migrated: Connection, carry: Callable[..., None]) -> None:
    """The build waits for a writer's transaction; the second migrator sees it and keeps its hands off."""
    builds = "select pid from pg_stat_progress_create_index, pg_sleep(0.01)"
    pauses: list[int] = []
    with ThreadPoolExecutor(1) as pool, beside(migrated) as other, beside(migrated) as writer:
        writer.execute("insert into pgworker.jobs (kind, key) values ('mail', 'a')")
        carry(INDEX)
        building = pool.submit(migrate, other, TABLES)
        while not migrated.execute(builds).fetchone():
            assert not building.done()

        def pause(attempt: int) -> None:
            pauses.append(attempt)
            writer.rollback()
            assert building.result(20) == (INDEX,)

        carry(INDEX, pause=pause)
        assert migrate(migrated, TABLES, tries=3) == ()
    assert pauses == [1]
    assert index_state(migrated) == (True,)


def test_many_migrators_with_a_file_outside_a_transaction(migrated: Connection, carry: Callable[..., None]) -> None:
    carry(INDEX, pause=PAUSE)
    together = threading.Barrier(3)

    def start() -> tuple[Migration, ...]:
        with beside(migrated) as other:
            together.wait()
            return migrate(other, TABLES)

    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(start) for _ in range(3)]
        assert sorted(each.number for run in runs for each in run.result()) == [NEXT]
    assert index_state(migrated) == (True,)
