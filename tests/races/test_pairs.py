"""A completion against whatever else can happen to its row, in both orders: open first, or finished first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker.db import send_sync
from pgworker.job import Claim
from pgworker.outcome import Success
from pgworker.statements import finish_jobs
from tests.handles import Hand, hand, result, row

Admin: TypeAlias = psycopg.Connection[Any]
Other: TypeAlias = Callable[[Hand], object]


def new_revision(other: Hand) -> object:
    return other.enqueue("k", "r2", "new")


def delete_and_recreate(other: Hand) -> object:
    other.connection.execute("delete from pgworker.jobs where key = 'k'")
    return other.enqueue("k", "r1", "new")


def operator_cancel(other: Hand) -> object:
    return other.connection.execute(
        "update pgworker.jobs set state = 'cancelled', token = null, lease_expires_at = null,"
        " finished_at = clock_timestamp() where key = 'k' and state = 'pending'"
    )


OTHERS: dict[str, Other] = {
    "new_revision": new_revision,
    "delete_and_recreate": delete_and_recreate,
    "operator_cancel": operator_cancel,
}


@pytest.fixture
def claim(hand: Hand) -> Claim:
    hand.enqueue("k", "r1", "old")
    return hand.claim()[0]


@pytest.fixture
def other(dsn: str) -> Iterator[Hand]:
    handed = hand(dsn)
    yield handed
    handed.connection.close()


@pytest.mark.race(2)
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_is_open_then_commits(hand: Hand, other: Hand, admin: Admin, claim: Claim, name: str) -> None:
    with other.connection.transaction():
        OTHERS[name](other)
        assert hand.finish(claim, '"stale"').verdict == "busy"  # it may yet roll back
    after = row(admin, "k")
    assert hand.finish(claim, '"stale"').verdict == "lost"
    assert row(admin, "k") == after
    assert result(admin, "k") is None


@pytest.mark.race(2)
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_is_open_then_rolls_back(hand: Hand, other: Hand, admin: Admin, claim: Claim, name: str) -> None:
    with other.connection.transaction(force_rollback=True):
        OTHERS[name](other)
        assert hand.finish(claim, '"good"').verdict == "busy"
    assert hand.finish(claim, '"good"').verdict == "done"
    stored = result(admin, "k")
    assert stored is not None
    assert stored["value"] == "good"


@pytest.mark.race(2)
@pytest.mark.parametrize("name", OTHERS)
def test_the_completion_is_open_and_the_other_waits_for_it(
    hand: Hand, other: Hand, admin: Admin, claim: Claim, name: str
) -> None:
    with completion_open(hand, claim):
        waiter = threading.Thread(target=OTHERS[name], args=(other,))
        waiter.start()
        wait_until_blocked(admin, other)
    waiter.join(10)
    after, stored = row(admin, "k"), result(admin, "k")
    assert stored is not None
    assert (stored["value"], stored["revision"]) == ("good", "r1")
    expected = {"new_revision": "pending", "delete_and_recreate": "pending", "operator_cancel": "succeeded"}
    assert after["state"] == expected[name]
    assert after["token"] is None


@pytest.mark.race(2)
@pytest.mark.parametrize("reclaimed_first", [True, False])
def test_a_reclaim_and_the_old_owners_completion(
    hand: Hand,
    other: Hand,
    admin: Admin,
    reclaimed_first: bool,  # noqa: FBT001 - one of two orders
) -> None:
    hand.enqueue("k", "r1")
    (claim,) = hand.claim(ttl_seconds=0.3)  # aged rows would be older than the test's server: no eviction
    admin.execute("select pg_sleep_until(lease_expires_at) from pgworker.jobs")
    if reclaimed_first:
        (heir,) = other.claim(ttl_seconds=0.3)
        assert hand.finish(claim, '"stale"').verdict == "lost"
    else:
        assert hand.finish(claim, '"stale"').verdict == "expired"
        (heir,) = other.claim(ttl_seconds=0.3)
    assert (heir.id, heir.evictions, heir.attempts, heir.lease_epoch) == (claim.id, 1, 0, 2)
    assert other.renew(heir).verdict == "done"
    assert other.finish(heir, '"good"').verdict == "done"
    stored = result(admin, "k")
    assert stored is not None
    assert stored["value"] == "good"


@pytest.mark.race(2)
def test_the_same_revision_does_not_wait_for_an_open_completion(hand: Hand, other: Hand, claim: Claim) -> None:
    with completion_open(hand, claim):
        assert other.enqueue("k", "r1").status == "unchanged"


@contextmanager
def completion_open(hand: Hand, claim: Claim) -> Iterator[None]:
    """The completion has been sent and not been committed while the block runs."""
    with hand.connection.transaction():
        answers = send_sync(hand.connection, finish_jobs(hand.tables, hand.kind, [(claim, Success('"good"'))]))
        assert answers[claim.id].verdict == "done"
        yield


def wait_until_blocked(admin: Admin, other: Hand) -> None:
    """Until the other session waits for a lock (seen from outside: a session that waits has no event for us)."""
    pid = other.connection.info.backend_pid
    asked = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
    for _ in range(1000):
        if admin.execute(asked, (pid,)).fetchone() == (True,):
            return
        admin.execute("select pg_sleep(0.005)")
    pytest.fail("the other session does not wait")
