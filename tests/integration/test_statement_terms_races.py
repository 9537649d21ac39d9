"""What a statement asks again of a row once it is locked: it has changed since the statement looked at it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import psycopg
import pytest

from pgworker.statements import BEGINNING, Insert, Lane, Statement, insert_jobs, reap_expired
from tests.handles import Hand, row
from tests.handles import hand as make_hand

Admin: TypeAlias = psycopg.Connection[Any]
T = TypeVar("T")
LOCK = 4711


@pytest.fixture
def other(dsn: str) -> Iterator[Hand]:
    other = make_hand(dsn)
    yield other
    other.connection.close()


def halted(statement: Statement[T], cte: str, alias: str) -> Statement[T]:
    """The statement, made to wait for a lock after it has looked at the rows of a CTE and before it locks them."""
    old = f"from {cte} {alias} cross join lateral".encode()
    new = (
        f"from (select {cte}.* from {cte}, (select pg_advisory_xact_lock({LOCK}) is null as never from {cte} offset 0)"
        f" as halt where not halt.never offset 0) {alias} cross join lateral"
    ).encode()
    assert old in statement.sql
    return replace(statement, sql=statement.sql.replace(old, new))


def meanwhile(hand: Hand, other: Hand, admin: Admin, statement: Statement[T], change: str) -> T:
    """What the halted statement answers when this change is committed while it waits."""
    with ThreadPoolExecutor(1) as pool, other.connection.transaction():
        other.connection.execute(f"select pg_advisory_xact_lock({LOCK})".encode())
        answer = pool.submit(hand.send, statement)
        while not admin.execute("select 1 from pg_locks where locktype = 'advisory' and not granted").fetchone():
            assert not answer.done(), answer.result()
            admin.execute("select pg_sleep(0.005)")
        admin.execute(change.encode())
    return answer.result()


def test_the_reaper_leaves_a_lease_that_was_renewed_since_it_looked(hand: Hand, other: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    (claim,) = hand.claim(ttl_seconds=0.001)
    admin.execute("select pg_sleep(0.002)")
    lane = Lane("work", 0, 0)
    statement = reap_expired(hand.tables, lane, limit=10, ttl_seconds=60, max_evictions=5, after=BEGINNING)
    renewal = "update pgworker.jobs set lease_expires_at = clock_timestamp() + interval '1 minute'"
    reaped = meanwhile(hand, other, admin, halted(statement, "page", "p"), renewal)
    assert (reaped.read, reaped.ended_or_freed) == (1, 0)
    assert row(admin, "k")["token"] == claim.token


def test_the_reaper_shortens_no_lease_that_was_renewed_since_it_looked(hand: Hand, other: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    hand.claim()
    admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp() + interval '1 hour'")
    lane = Lane("work", 0, 0)
    statement = reap_expired(hand.tables, lane, limit=10, ttl_seconds=60, max_evictions=5, after=BEGINNING)
    renewal = "update pgworker.jobs set lease_expires_at = clock_timestamp() + interval '50 seconds'"
    meanwhile(hand, other, admin, halted(statement, "page", "p"), renewal)
    left = "select lease_expires_at - clock_timestamp() < interval '50 seconds' from pgworker.jobs"
    assert admin.execute(left.encode()).fetchone() == (True,)


@pytest.mark.parametrize(
    ("change", "lifted"),
    [
        ("payload = '2'", True),
        ("revision = 'r2'", False),
        ("state = 'failed', finished_at = clock_timestamp()", False),
        ("token = gen_random_uuid(), lease_expires_at = clock_timestamp() + interval '1 minute'", False),
    ],
)
def test_an_insert_lifts_nothing_that_has_changed_since_it_looked(
    hand: Hand, other: Hand, admin: Admin, change: str, *, lifted: bool
) -> None:
    hand.enqueue("k", "r", urgency="catch_up")
    job = Insert("k", "r", 0, 0, 0.0, None, None, "1")
    statement = insert_jobs(hand.tables, "work", [job], version=1, keep=False)
    put = meanwhile(hand, other, admin, halted(statement, "looked", "l"), f"update pgworker.jobs set {change}")
    assert put["k"].status == "unchanged"
    assert (row(admin, "k")["class"] == 0) is lifted


def behind(hand: Hand, other: Hand, admin: Admin, statement: Statement[T], first: str) -> T:
    """What a statement answers that waits for a row which the other session has just written, and then commits."""
    with ThreadPoolExecutor(1) as pool, other.connection.transaction():
        other.connection.execute(first.encode())
        answer = pool.submit(hand.send, statement)
        waits = "select 1 from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
        while not admin.execute(waits.encode(), [hand.connection.info.backend_pid]).fetchone():
            assert not answer.done(), answer.result()
            admin.execute("select pg_sleep(0.005)")
    return answer.result()


INSERTED = "insert into pgworker.jobs (kind, key, revision, payload) values ('work', 'k', '{}', '1')"


@pytest.mark.parametrize(("keep", "revision"), [(False, "r"), (True, "r2"), (True, "r")])
def test_an_insert_that_comes_second_leaves_the_row_and_is_to_be_sent_again(
    hand: Hand, other: Hand, admin: Admin, *, keep: bool, revision: str
) -> None:
    job = Insert("k", revision, 0, 0, 0.0, None, None, "2")
    statement = insert_jobs(hand.tables, "work", [job], version=1, keep=keep)
    assert behind(hand, other, admin, statement, INSERTED.format("r")) == {}
    after = row(admin, "k")
    assert (after["revision"], after["payload"], after["generation"]) == ("r", 1, 1)
    again = hand.send(statement)["k"].status
    assert again == ("unchanged" if revision == "r" else "kept")


def test_a_claim_that_came_since_the_insert_looked_is_superseded(hand: Hand, other: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r")
    claimed = (
        "update pgworker.jobs set token = gen_random_uuid(), lease_epoch = 1,"
        " lease_expires_at = clock_timestamp() + interval '1 minute'"
    )
    job = Insert("k", "r2", 0, 0, 0.0, None, None, "2")
    statement = insert_jobs(hand.tables, "work", [job], version=1, keep=False)
    assert behind(hand, other, admin, statement, claimed)["k"].status == "superseded"
    assert row(admin, "k")["token"] is None
