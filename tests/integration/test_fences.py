"""Every write of a run proves that it still owns the row: one broken part of the fence, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from uuid import uuid4

import psycopg
import pytest

from pgworker.job import Claim
from pgworker.outcome import Success
from pgworker.statements import Renewal, finish_jobs, survey_lanes
from tests.handles import FAIL, RELEASE, RETRY, Hand, age, result, row

Admin: TypeAlias = psycopg.Connection[Any]

WRITES: dict[str, Callable[[Hand, Claim], str]] = {
    "complete": lambda hand, claim: hand.finish(claim, "1").verdict,
    "retry": lambda hand, claim: hand.settle(claim, RETRY).verdict,
    "fail": lambda hand, claim: hand.settle(claim, FAIL).verdict,
    "release": lambda hand, claim: hand.settle(claim, RELEASE).verdict,
    "renew": lambda hand, claim: hand.renew(claim).verdict,
}


def other_id(admin: Admin, claim: Claim) -> Claim:
    return claim._replace(id=claim.id + 1)


def other_key(admin: Admin, claim: Claim) -> Claim:
    return claim._replace(key="another")


def other_revision(admin: Admin, claim: Claim) -> Claim:
    return claim._replace(revision="r2")


def other_token(admin: Admin, claim: Claim) -> Claim:
    return claim._replace(token=uuid4())


def no_longer_pending(admin: Admin, claim: Claim) -> Claim:
    admin.execute("update pgworker.jobs set state = 'failed', token = null, lease_expires_at = null")
    return claim


def expired(admin: Admin, claim: Claim) -> Claim:
    age(admin, 61)
    return claim


@pytest.mark.contract("A20", "B48")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("broken", [other_id, other_key, other_revision, other_token, no_longer_pending, expired])
def test_a_write_with_one_broken_fence_part_changes_nothing(
    hand: Hand, admin: Admin, write: str, broken: Callable[[Admin, Claim], Claim]
) -> None:
    hand.enqueue("k", "r1")
    (claim,) = hand.claim()
    claim = broken(admin, claim)
    before = row(admin, "k")
    assert WRITES[write](hand, claim) == ("expired" if broken is expired else "lost")
    assert row(admin, "k") == before
    assert result(admin, "k") is None


@pytest.mark.contract("A20")
@pytest.mark.parametrize("write", WRITES)
def test_a_write_with_its_whole_fence_is_done(hand: Hand, write: str) -> None:
    hand.enqueue("k", "r1")
    (claim,) = hand.claim()
    assert WRITES[write](hand, claim) == "done"


@pytest.mark.contract("A23")
@pytest.mark.parametrize("write", WRITES)
def test_a_token_from_before_delete_and_recreate_is_refused(hand: Hand, admin: Admin, write: str) -> None:
    hand.enqueue("k", "r1")
    (old,) = hand.claim()
    admin.execute("delete from pgworker.jobs")
    hand.enqueue("k", "r1")
    before = row(admin, "k")
    assert WRITES[write](hand, old) == "lost"
    assert row(admin, "k") == before
    hand.claim()
    before = row(admin, "k")
    assert WRITES[write](hand, old) == "lost"
    assert row(admin, "k") == before


@pytest.mark.contract("A25")
def test_a_second_completion_with_the_same_token_is_refused(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r1")
    (claim,) = hand.claim()
    assert hand.finish(claim, '"first"').verdict == "done"
    before = (row(admin, "k"), result(admin, "k"))
    assert hand.finish(claim, '"second"').verdict == "lost"
    assert (row(admin, "k"), result(admin, "k")) == before


@pytest.mark.contract("A27")
@pytest.mark.parametrize("write", WRITES)
def test_an_expired_owner_is_refused_although_nobody_reclaimed(hand: Hand, admin: Admin, write: str) -> None:
    hand.enqueue("k", "r1")
    (claim,) = hand.claim(ttl_seconds=30)
    age(admin, 30.001)
    before = row(admin, "k")
    assert WRITES[write](hand, claim) == "expired"
    assert row(admin, "k") == before


@pytest.mark.contract("A22")
def test_a_result_that_cannot_be_stored_takes_the_success_back(hand: Hand, admin: Admin) -> None:
    admin.execute("alter table pgworker.results add constraint refuse check (value <> '13')")
    hand.enqueue("k", "r1")
    (claim,) = hand.claim()
    before = row(admin, "k")
    with pytest.raises(psycopg.errors.CheckViolation):
        hand.finish(claim, "13")
    assert row(admin, "k") == before
    assert result(admin, "k") is None
    assert hand.finish(claim, "12").verdict == "done"
    hand.enqueue("k", "r2")
    (claim,) = hand.claim()
    assert hand.finish(claim, "11").verdict == "done"
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["revision"], stored["value"], row(admin, "k")["state"]) == ("r2", 11, "succeeded")


def test_one_row_given_twice_is_finished_once(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r1")
    (claim,) = hand.claim()
    answers = hand.send(finish_jobs(hand.tables, hand.kind, [(claim, Success("1")), (claim, Success("2"))]))
    assert answers[claim.id].verdict == "done"
    assert row(admin, "k")["state"] == "succeeded"


@pytest.mark.ruling("0.5")
@pytest.mark.parametrize("settlement", [RETRY, RELEASE])
def test_a_return_to_pending_honours_a_requested_cancel(hand: Hand, admin: Admin, settlement: Any) -> None:
    hand.enqueue("k", "r1")
    (claim,) = hand.claim()
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    answer = hand.settle(claim, settlement)
    assert (answer.verdict, answer.state) == ("done", "cancelled")
    after = row(admin, "k")
    assert (after["state"], after["cancel_requested_at"], after["token"]) == ("cancelled", None, None)
    assert after["finished_at"] is not None


@pytest.mark.ruling("1.10")
def test_a_success_without_a_value_leaves_no_older_result(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r1")
    (claim,) = hand.claim()
    hand.finish(claim, '"of r1"')
    hand.enqueue("k", "r2")
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["revision"], stored["value"]) == ("r1", "of r1")
    (claim,) = hand.claim()
    hand.finish(claim, None)
    assert result(admin, "k") is None
    assert row(admin, "k")["has_result"] is False


@pytest.mark.ruling("1.19")
def test_a_look_at_a_lease_tells_without_touching_it(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r1")
    [claim] = hand.claim()
    before = row(admin, "k")
    with hand.connection.transaction(), admin.transaction():
        admin.execute("select from pgworker.jobs for update")  # a lock does not hold a look up
        assert hand.renew(claim, None) == Renewal("done", cancel_requested=False)
    assert row(admin, "k") == before
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    assert hand.renew(claim, None) == Renewal("done", cancel_requested=True)
    hand.enqueue("k", "r2")
    assert hand.renew(claim, None) == Renewal("lost", cancel_requested=False)


@pytest.mark.ruling("2.25")
@pytest.mark.race(13)
@pytest.mark.parametrize(
    ("paused", "claims"),
    [
        ("clock_timestamp(), null", 0),
        ("clock_timestamp(), clock_timestamp() + interval '1 hour'", 0),
        ("clock_timestamp(), clock_timestamp() - interval '1 hour'", 1),
        ("null, null", 1),
    ],
)
def test_a_paused_kind_gives_no_claim_even_after_a_survey(hand: Hand, admin: Admin, paused: str, claims: int) -> None:
    hand.enqueue("k", "r1")
    assert [due.paused for due in hand.send(survey_lanes(hand.tables, ["work"]))] == [False]
    admin.execute(
        f"insert into pgworker.kinds (kind, paused_at, paused_until) values ('work', {paused}),"
        " ('other', clock_timestamp(), null)"
    )
    before = row(admin, "k")
    assert [due.paused for due in hand.send(survey_lanes(hand.tables, ["work"]))] == [claims == 0]
    assert len(hand.claim()) == claims
    assert (row(admin, "k") == before) == (claims == 0)
