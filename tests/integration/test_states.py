"""The states of a job are four, and none that has ended moves but by new work or an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import psycopg
import pytest
from psycopg import errors

from pgworker.job import MOVES, Claim
from pgworker.outcome import Settlement
from tests.handles import FAIL, RELEASE, RETRY, Hand, result, row

Admin: TypeAlias = psycopg.Connection[Any]

CANCEL = Settlement("cancelled", "unwanted")

ENDS: dict[str, Callable[[Hand, Claim], object]] = {
    "succeeded": lambda hand, claim: hand.finish(claim, "1"),
    "failed": lambda hand, claim: hand.settle(claim, FAIL),
    "cancelled": lambda hand, claim: hand.settle(claim, CANCEL),
}
WRITES: dict[str, Callable[[Hand, Claim], str]] = {
    "succeed": lambda hand, claim: hand.finish(claim, "2").verdict,
    "fail": lambda hand, claim: hand.settle(claim, FAIL).verdict,
    "cancel": lambda hand, claim: hand.settle(claim, CANCEL).verdict,
    "retry": lambda hand, claim: hand.settle(claim, RETRY).verdict,
    "release": lambda hand, claim: hand.settle(claim, RELEASE).verdict,
    "renew": lambda hand, claim: hand.renew(claim).verdict,
}


@pytest.mark.contract("B38")
@pytest.mark.parametrize("state", ["running", "completed", "dead", "retrying", "Pending", "pending ", ""])
def test_the_table_refuses_a_state_that_there_is_not(hand: Hand, admin: Admin, state: str) -> None:
    hand.enqueue("k", "r", 1)
    before = row(admin, "k")
    with pytest.raises(errors.CheckViolation, match="jobs_state"):
        admin.execute("update pgworker.jobs set state = %s", [state])
    with pytest.raises(errors.CheckViolation, match="jobs_state"):
        admin.execute("insert into pgworker.jobs (kind, key, state) values ('work', 'new', %s)", [state])
    with pytest.raises(errors.NotNullViolation):
        admin.execute("update pgworker.jobs set state = null")
    assert row(admin, "k") == before


@pytest.mark.contract("B38")
@pytest.mark.parametrize("state", MOVES)
def test_only_a_pending_job_has_a_lease(hand: Hand, admin: Admin, state: str) -> None:
    """That it runs is a lease on a pending row, and so no state of its own."""
    hand.enqueue("k", "r", 1)
    (claim,) = hand.claim()
    if state == "pending":
        assert admin.execute("select state from pgworker.job_states").fetchone() == ("running",)
    else:
        with pytest.raises(errors.CheckViolation, match="jobs_lease"):
            admin.execute("update pgworker.jobs set state = %s", [state])
    assert (row(admin, "k")["state"], row(admin, "k")["token"]) == ("pending", claim.token)


@pytest.mark.contract("B38")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("end", ENDS)
def test_no_run_moves_a_job_that_has_ended(hand: Hand, admin: Admin, end: str, write: str) -> None:
    hand.enqueue("k", "r", 1)
    (claim,) = hand.claim()
    ENDS[end](hand, claim)
    before = row(admin, "k"), result(admin, "k")
    assert before[0]["state"] == end
    assert WRITES[write](hand, claim) == "lost"
    assert hand.claim() == []
    assert hand.reap().ended_or_freed == 0
    assert (row(admin, "k"), result(admin, "k")) == before
