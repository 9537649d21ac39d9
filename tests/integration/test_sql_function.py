"""`pgworker.enqueue(...)`: the front door for SQL, triggers and other languages."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeAlias

import psycopg
import pytest
from psycopg.types.json import Jsonb

from pgworker import App, Job
from pgworker.events import JobSettled
from pgworker.schema import grants
from pgworker.tablemap import TableMap
from tests.handles import Hand, Recorder, result, row, running
from tests.integration.test_hints import Ears

Admin: TypeAlias = psycopg.Connection[Any]


@pytest.fixture
def caller(dsn: str) -> Iterator[Admin]:
    """The application's own connection: no autocommit, none of our settings."""
    with psycopg.connect(dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        yield connection


@pytest.fixture
def ears(dsn: str, tables: TableMap) -> Iterator[Ears]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Ears(connection, tables.channel)


def enqueue(caller: Admin, arguments: str = "'work'", *values: object) -> tuple[str, str]:
    found = caller.execute(
        f"select job_key, status from pgworker.enqueue({arguments})".encode(), values or None
    ).fetchone()
    assert found is not None
    return found[0], found[1]


async def test_what_sql_enqueues_a_handler_gets(app: App, caller: Admin, admin: Admin) -> None:
    @app.kind("work")
    async def work(job: Job[dict[str, int]]) -> int:
        return job.payload["n"]

    seen = Recorder(app)
    assert enqueue(caller, "'work', '{\"n\": 7}', key => 'k', revision => 'r1'") == ("k", "created")
    caller.commit()
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.of(JobSettled)))
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["value"], stored["revision"]) == (7, "r1")


def test_the_defaults(caller: Admin, admin: Admin, hand: Hand) -> None:
    key, status = enqueue(caller)
    caller.commit()
    assert status == "created"
    now = row(admin, key)
    assert (now["payload"], now["class"], now["priority"], now["revision"], now["version"]) == (None, 0, 0, "", 1)
    assert now["max_attempts"] is None
    (claim,) = hand.claim()
    assert claim.payload == "null"  # JSON's null, as from the app


def test_nulls_are_as_if_left_out(caller: Admin, admin: Admin) -> None:
    key, status = enqueue(
        caller, "'work', null, key => null, revision => null, delay => null, priority => null, wake => null"
    )
    caller.commit()
    assert status == "created"
    assert (row(admin, key)["priority"], row(admin, key)["payload"]) == (0, None)


def test_it_is_part_of_the_callers_transaction(caller: Admin, admin: Admin) -> None:
    enqueue(caller, "'work', key => 'undone'")
    caller.rollback()
    enqueue(caller, "'work', key => 'kept'")
    caller.execute("savepoint here")
    enqueue(caller, "'work', key => 'undone, too'")
    caller.execute("rollback to savepoint here")
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)
    caller.commit()
    assert admin.execute("select key from pgworker.jobs").fetchall() == [("kept",)]


def test_options_reach_the_row(caller: Admin, admin: Admin) -> None:
    enqueue(caller, "'work', key => 'k', delay => '2 hours', priority => -5, urgency => 'catch_up'")
    caller.commit()
    now = row(admin, "k")
    assert (now["priority"], now["class"]) == (-5, 1)
    assert (
        timedelta(hours=2) - timedelta(seconds=1) < now["ready_at"] - now["created_at"] <= timedelta(hours=2, seconds=1)
    )


BAD = [
    ("null", "kind must match"),
    ("''", "kind must match"),
    ("repeat('k', 64)", "kind must match"),
    ("'with space'", "kind must match"),
    ("E'work\\n'", "kind must match"),
    ("'wörk'", "kind must match"),
    ("'work', key => ''", "key must have 1 to 512 bytes"),
    ("'work', key => repeat('é', 257)", "key must have 1 to 512 bytes"),
    ("'work', key => 'k', revision => ''", "revision must have 1 to 128 bytes"),
    ("'work', key => 'k', revision => repeat('r', 129)", "revision must have 1 to 128 bytes"),
    ("'work', revision => 'r'", "a revision needs a key"),
    ("'work', urgency => 'soon'", "urgency must be fresh or catch_up"),
    ("'work', urgency => null", "urgency must be fresh or catch_up"),
    ("'work', if_pending => 'drop'", "if_pending must be replace or keep"),
    ("'work', if_pending => null", "if_pending must be replace or keep"),
    ("'work', priority => 32768", "priority must be"),
    ("'work', priority => -32769", "priority must be"),
    ("'work', delay => '-1 second'", "delay must not be negative"),
    ("'work', delay => '400000 years'", ""),
]


@pytest.mark.ruling("2.22", "4.8")
@pytest.mark.parametrize(("arguments", "says"), BAD, ids=[arguments[:50] for arguments, _ in BAD])
def test_bad_arguments_give_a_clear_error_without_the_data(
    caller: Admin, admin: Admin, arguments: str, says: str
) -> None:
    with pytest.raises(psycopg.DataError) as refused:
        enqueue(caller, f"{arguments}, payload => '\"SECRET\"'")
    if says:
        assert str(refused.value).startswith(f"pgworker: {says}")
        assert refused.value.sqlstate == "22023"
    assert "SECRET" not in "\n".join([str(refused.value), str(refused.value.diag.context)])
    caller.rollback()
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)


@pytest.mark.ruling("2.22")
def test_the_longest_names_are_stored(caller: Admin, admin: Admin) -> None:
    enqueue(caller, "%s, key => %s, revision => %s", "k" * 63, "é" * 256, "é" * 64)
    caller.commit()
    assert row(admin, "é" * 256, kind="k" * 63)["revision"] == "é" * 64


@pytest.mark.contract("A7")
@pytest.mark.ruling("2.18")
def test_wake_notifies_after_the_commit_and_only_when_asked(caller: Admin, ears: Ears) -> None:
    enqueue(caller, "'work', wake => true")
    assert ears.payloads_so_far() == []
    caller.commit()
    assert ears.payloads_so_far() == ["r:work"]
    enqueue(caller, "'work', wake => true")
    caller.rollback()
    enqueue(caller, "'work'")
    caller.commit()
    enqueue(caller, "'work', wake => true, delay => '1 hour'")  # nothing to be woken for yet
    caller.commit()
    assert ears.payloads_so_far() == []
    enqueue(caller, "'work', key => 'k', revision => 'r', wake => true")
    enqueue(caller, "'work', wake => true")
    caller.commit()
    assert ears.payloads_so_far() == ["r:work"]  # one a transaction
    enqueue(caller, "'work', key => 'k', revision => 'r', wake => true")  # changes nothing
    caller.commit()
    assert ears.payloads_so_far() == []


@pytest.mark.ruling("2.5")
def test_event_keys_are_distinct_and_ordered_by_time(caller: Admin) -> None:
    found = caller.execute(
        "select (pgworker.enqueue('work', to_jsonb(n))).job_key from generate_series(1, 500) n"
    ).fetchall()
    keys = [uuid.UUID(key) for (key,) in found]
    assert [str(key) for key in keys] == [key for (key,) in found]
    assert len(set(keys)) == 500
    assert {(key.version, key.variant) for key in keys} == {(7, uuid.RFC_4122)}
    milliseconds = [key.int >> 80 for key in keys]
    assert milliseconds == sorted(milliseconds)
    now = caller.execute("select extract(epoch from clock_timestamp()) * 1000").fetchall()[0][0]
    assert now - 60_000 < milliseconds[0] <= milliseconds[-1] <= now + 1


@pytest.mark.ruling("0.4", "2.9")
def test_calls_keep_their_order_also_within_one_transaction(caller: Admin, hand: Hand) -> None:
    caller.execute("select pgworker.enqueue('work', to_jsonb(n)) from generate_series(1, 50) n")
    caller.commit()
    assert [claim.payload for claim in hand.claim(100)] == [str(n) for n in range(1, 51)]


TRAP = """
create schema trap;
create table trap.jobs (id int);
create sequence trap.job_ids;
create function trap.fall() returns text language plpgsql as $$ begin raise exception 'trapped'; end $$;
create function trap.octet_length(text) returns int language sql as 'select trap.fall()::int';
create function trap.clock_timestamp() returns timestamptz language sql as 'select trap.fall()::timestamptz';
create function trap.gen_random_uuid() returns uuid language sql as 'select trap.fall()::uuid';
create function trap.lpad(text, int, text) returns text language sql as 'select trap.fall()';
create function trap.pg_notify(text, text) returns text language sql as 'select trap.fall()';
create function trap.same(text, text) returns bool language sql as 'select trap.fall()::bool';
create operator trap.= (leftarg = text, rightarg = text, function = trap.same);
create operator trap.<> (leftarg = text, rightarg = text, function = trap.same);
grant usage on schema trap to public;
grant all on trap.jobs to public"""


@pytest.mark.ruling("4.10")
def test_the_callers_search_path_leads_nowhere(caller: Admin, admin: Admin) -> None:
    admin.execute(TRAP)
    caller.execute("create temporary table jobs (id int)")
    caller.execute("set search_path = trap, pg_temp, pg_catalog")
    for status in ("created", "unchanged"):
        assert enqueue(caller, "'work', '1', key => 'k', revision => 'r', wake => true") == ("k", status)
    assert enqueue(caller, "'work', '1', key => 'k', revision => 'r2'") == ("k", "replaced")
    assert enqueue(caller)[1] == "created"
    caller.commit()
    assert row(admin, "k")["revision"] == "r2"


@pytest.mark.ruling("4.10")
def test_a_role_with_the_grants_and_nothing_else_may_call_it(admin: Admin, dsn: str, tables: TableMap) -> None:
    role = f"pgworker_test_{uuid.uuid4().hex[:12]}"
    admin.execute(f"create role {role}".encode())
    try:
        admin.execute(f"set role {role}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            enqueue(admin)
        admin.execute("reset role")
        admin.execute(grants(tables, role).encode())
        admin.execute(f"set role {role}".encode())
        for status in ("created", "unchanged"):
            assert enqueue(admin, "'work', '1', key => 'k', revision => 'r', wake => true") == ("k", status)
        assert enqueue(admin, "'work', '1', key => 'k', revision => 'r2'") == ("k", "replaced")
        assert enqueue(admin)[1] == "created"
        with pytest.raises(psycopg.errors.InsufficientPrivilege):  # it runs with the caller's rights, no one else's
            admin.execute("drop table pgworker.jobs")
    finally:
        admin.execute("reset role")
        admin.execute(f"drop owned by {role}; drop role {role}".encode())


def test_a_trigger_may_call_it(admin: Admin, caller: Admin) -> None:
    admin.execute(
        """
        create table public.documents (key text primary key, body text);
        create function public.changed() returns trigger language plpgsql as $$
        begin
            perform pgworker.enqueue('work', to_jsonb(new.body), key => new.key, revision => md5(new.body));
            return null;
        end $$;
        create trigger changed after insert or update on public.documents
        for each row execute function public.changed()
        """
    )
    caller.execute("insert into public.documents values ('a', 'one'), ('b', 'two')")
    caller.execute("update public.documents set body = 'three' where key = 'a'")
    caller.execute("update public.documents set body = body where key = 'b'")
    caller.commit()
    found = admin.execute("select key, payload, generation from pgworker.jobs order by key").fetchall()
    assert found == [("a", "three", 2), ("b", "two", 1)]


@pytest.mark.field("L28")
def test_large_numbers_and_odd_texts_travel(caller: Admin, hand: Hand) -> None:
    value = {"big": 2**70, "text": "\\u0000 % {} $1 '\" é"}
    enqueue(caller, "'work', %s", Jsonb(value))
    caller.commit()
    (claim,) = hand.claim()
    assert claim.payload is not None
    assert str(2**70) in claim.payload


@pytest.mark.ruling("2.2")
def test_a_lease_that_ends_in_the_middle_leaves_a_whole_row(caller: Admin, hand: Hand, admin: Admin) -> None:
    """Token and expiry go together, also when the lease runs out while the function looks at its clock."""
    hand.enqueue("k")
    for _ in range(150):
        hand.claim(ttl_seconds=0.0005)
        assert enqueue(caller, "'work', key => 'k'")[1] in {"replaced", "superseded"}
        caller.commit()
        now = row(admin, "k")
        assert (now["token"] is None) == (now["lease_expires_at"] is None) == (now["runner"] is None)
