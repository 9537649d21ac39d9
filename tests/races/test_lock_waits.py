"""Somebody holds a job's row lock: the runtime's statements never wait for it, and never believe an old clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker import NewJob
from pgworker.outcome import Success
from pgworker.statements import finish_jobs, renew_leases, settle_jobs
from tests.handles import RETRY, Hand, result, row

Admin: TypeAlias = psycopg.Connection[Any]


@contextmanager
def locked(dsn: str, key: str) -> Iterator[psycopg.Connection[Any]]:
    """Another transaction holds the row's lock while the block runs, and changes nothing."""
    with psycopg.connect(dsn) as other:
        other.execute("select from pgworker.jobs where key = %s for update", (key,))
        yield other
        other.rollback()


@pytest.mark.race(1)
@pytest.mark.ruling("1.1", "1.2")
@pytest.mark.parametrize("write", ["finish", "settle", "renew"])
def test_a_locked_row_is_busy_and_the_others_go_on(hand: Hand, dsn: str, admin: Admin, write: str) -> None:
    hand.enqueue_many([NewJob(key=f"k{index}", revision="r") for index in range(50)])
    claims = hand.claim(50)
    held = claims[7]

    def send() -> dict[str, set[int]]:
        verdicts: dict[str, set[int]] = {}
        if write == "finish":
            answers: dict[int, Any] = hand.send(
                finish_jobs(hand.tables, hand.kind, [(c, Success("1")) for c in claims])
            )
        elif write == "settle":
            answers = hand.send(settle_jobs(hand.tables, hand.kind, [(c, RETRY) for c in claims]))
        else:
            answers = hand.send(renew_leases(hand.tables, [(c, 60.0) for c in claims]))
        for id_, answer in answers.items():
            verdicts.setdefault(answer.verdict, set()).add(id_)
        return verdicts

    others = {claim.id for claim in claims} - {held.id}
    with locked(dsn, held.key):
        assert send() == {"done": others, "busy": {held.id}}
    if write == "renew":
        assert send() == {"done": others | {held.id}}
    else:
        assert send() == {"lost": others, "done": {held.id}}
        after = row(admin, held.key)
        assert (after["state"], after["attempts"]) == (("succeeded", 0) if write == "finish" else ("pending", 1))


WRITES = {
    "finish": lambda hand, claim: hand.finish(claim, "1"),
    "settle": lambda hand, claim: hand.settle(claim, RETRY),
    "renew": lambda hand, claim: hand.renew(claim),
}


@pytest.mark.race(1)
@pytest.mark.parametrize("write", WRITES)
def test_a_lock_held_past_the_expiry_leaves_the_write_refused(hand: Hand, dsn: str, admin: Admin, write: str) -> None:
    hand.enqueue("k", "r")
    (claim,) = hand.claim(ttl_seconds=0.3)
    with locked(dsn, "k"):
        assert WRITES[write](hand, claim).verdict == "busy"
        admin.execute("select pg_sleep_until(lease_expires_at) from pgworker.jobs")
        assert WRITES[write](hand, claim).verdict == "busy"
    before = row(admin, "k")
    assert WRITES[write](hand, claim).verdict == "expired"
    assert row(admin, "k") == before
    assert result(admin, "k") is None


@pytest.mark.race(1)
@pytest.mark.parametrize("write", WRITES)
def test_a_lock_let_go_before_the_expiry_costs_only_a_second_try(hand: Hand, dsn: str, write: str) -> None:
    hand.enqueue("k", "r")
    (claim,) = hand.claim()
    with locked(dsn, "k"):
        assert WRITES[write](hand, claim).verdict == "busy"
    assert WRITES[write](hand, claim).verdict == "done"


@pytest.mark.race(1)
@pytest.mark.ruling("0.2")
def test_each_row_of_a_batch_is_judged_by_its_own_expiry(hand: Hand, admin: Admin) -> None:
    hand.enqueue("a", "r")
    hand.enqueue("b", "r")
    (a,) = hand.claim(ttl_seconds=30)
    (b,) = hand.claim(ttl_seconds=0.0)
    answers = hand.send(finish_jobs(hand.tables, hand.kind, [(a, Success("1")), (b, Success("1"))]))
    assert (answers[a.id].verdict, answers[b.id].verdict) == ("done", "expired")
    assert result(admin, "b") is None


@pytest.mark.race(12)
@pytest.mark.contract("C3")
@pytest.mark.ruling("4.1")
def test_eight_claimers_share_out_all_rows_but_the_locked_one(dsn: str, hand: Hand) -> None:
    from tests.handles import hand as another_hand  # noqa: PLC0415

    hand.enqueue_many([NewJob(key=f"k{index:03}", revision="r") for index in range(500)])
    claimed: list[list[int]] = [[] for _ in range(8)]

    def claim_all(index: int) -> None:
        mine = another_hand(dsn)
        try:
            while claims := mine.claim(64):
                claimed[index] += [claim.id for claim in claims]
        finally:
            mine.connection.close()

    with locked(dsn, "k250"):
        threads = [threading.Thread(target=claim_all, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ids = [id_ for part in claimed for id_ in part]
        assert len(ids) == len(set(ids)) == 499
    assert [claim.key for claim in hand.claim(10)] == ["k250"]
