"""What each term of finish, settle and renew asks for: quick tests, one of which fails without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import psycopg
import pytest

from pgworker.job import Claim
from pgworker.outcome import Settlement, Success
from pgworker.statements import finish_jobs, renew_leases, settle_jobs
from tests.handles import FAIL, RELEASE, RETRY, Hand, age, copy_of, everything, result, row

Admin: TypeAlias = psycopg.Connection[Any]
Write: TypeAlias = Callable[[Hand, Sequence[Claim]], dict[int, str]]
AT_ONCE = replace(RETRY, delay_seconds=0.0)
PARK = Settlement("pending", "later", delay_seconds=60.0)
CANCEL = Settlement("cancelled", "unwanted")


def finish(hand: Hand, claims: Sequence[Claim]) -> dict[int, str]:
    statement = finish_jobs(hand.tables, hand.kind, [(claim, Success("1")) for claim in claims])
    return {id_: answer.verdict for id_, answer in hand.send(statement).items()}


def settle(hand: Hand, claims: Sequence[Claim]) -> dict[int, str]:
    statement = settle_jobs(hand.tables, hand.kind, [(claim, RETRY) for claim in claims])
    return {id_: answer.verdict for id_, answer in hand.send(statement).items()}


def renew(hand: Hand, claims: Sequence[Claim]) -> dict[int, str]:
    statement = renew_leases(hand.tables, [(claim, 600.0) for claim in claims])
    return {id_: answer.verdict for id_, answer in hand.send(statement).items()}


def look(hand: Hand, claims: Sequence[Claim]) -> dict[int, str]:
    statement = renew_leases(hand.tables, [(claim, None) for claim in claims])
    return {id_: answer.verdict for id_, answer in hand.send(statement).items()}


every_write = pytest.mark.parametrize("write", [finish, settle, renew])


@every_write
def test_a_write_changes_its_own_row_only(hand: Hand, admin: Admin, write: Write) -> None:
    for key in ("mine", "neighbour"):
        hand.enqueue(key, "r")
    claim, _ = hand.claim(2)
    copy_of(admin, "mine", kind="copy")
    others, before = everything(admin, but=("work", "mine")), row(admin, "mine")
    assert write(hand, [claim]) == {claim.id: "done"}
    assert row(admin, "mine") != before
    assert everything(admin, but=("work", "mine")) == others


def test_a_renewal_of_several_kinds_changes_no_row_that_has_one_s_id_and_another_s_kind(
    hand: Hand, admin: Admin
) -> None:
    """Ids are of one sequence; but rows may have been copied."""
    for key in ("first", "second"):
        hand.enqueue(key, "r")
    claims = [*hand.claim(2)]
    copy_of(admin, "first", kind="copy")
    copy_of(admin, "second", kind="copy")
    mixed = [claims[0], claims[1]._replace(kind="copy")]
    before = everything(admin, but=("", ""))
    assert renew(hand, mixed) == {claim.id: "done" for claim in mixed}
    after = everything(admin, but=("", ""))
    assert {name for name, job in after.items() if job != before[name]} == {("work", "first"), ("copy", "second")}


@pytest.mark.parametrize("write", [finish, settle])
def test_a_row_that_waits_again_is_the_only_one_that_does(hand: Hand, admin: Admin, write: Write) -> None:
    hand.enqueue("mine", payload=1)
    (claim,) = hand.claim()
    hand.enqueue("mine", payload=2)  # without a revision: the run goes on, and its outcome is the old payload's
    copy_of(admin, "mine", kind="copy")
    others = everything(admin, but=("work", "mine"))
    assert write(hand, [claim]) == {claim.id: "done"}
    assert (row(admin, "mine")["state"], row(admin, "mine")["token"]) == ("pending", None)
    assert everything(admin, but=("work", "mine")) == others


@pytest.mark.parametrize("write", [finish, settle, renew, look])
def test_a_row_that_differs_in_its_kind_alone_is_another(hand: Hand, admin: Admin, write: Write) -> None:
    hand.enqueue("mine", "r")
    (claim,) = hand.claim()
    copy_of(admin, "mine", kind="copy")
    admin.execute("delete from pgworker.jobs where kind = 'work'")
    others = everything(admin, but=("work", "mine"))
    assert write(hand, [claim]) == {claim.id: "lost"}
    assert everything(admin, but=("work", "mine")) == others


@every_write
def test_each_row_of_a_batch_has_its_own_verdict(hand: Hand, admin: Admin, dsn: str, write: Write) -> None:
    for key in ("done", "expired", "busy", "lost"):
        hand.enqueue(key, "r")
    done, expired, busy, lost = hand.claim(4)
    admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp() where key = 'expired'")
    hand.enqueue("lost", "r2")
    with psycopg.connect(dsn) as other:
        other.execute("select from pgworker.jobs where key = 'busy' for update")
        verdicts = write(hand, [done, expired, busy, lost])
    assert verdicts == {done.id: "done", expired.id: "expired", busy.id: "busy", lost.id: "lost"}


def test_a_renewal_of_a_busy_job_tells_of_no_cancel(hand: Hand, admin: Admin, dsn: str) -> None:
    """What was seen without the lock may be withdrawn by whoever holds it."""
    hand.enqueue("k", "r")
    (claim,) = hand.claim()
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    with psycopg.connect(dsn) as other:
        other.execute("select from pgworker.jobs for update")
        assert hand.renew(claim) == ("busy", False)
    assert hand.renew(claim) == ("done", True)


def test_a_look_waits_for_nobody_and_writes_nothing(hand: Hand, admin: Admin, dsn: str) -> None:
    for key in ("held", "lost", "wanted no more", "renewed"):
        hand.enqueue(key, "r")
    held, lost, unwanted, renewed = hand.claim(4)
    hand.enqueue("lost", "r2")
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp() where key = 'wanted no more'")
    others = everything(admin, but=("work", "renewed"))
    with psycopg.connect(dsn) as other:
        other.execute("select from pgworker.jobs where key = 'held' for update")
        asked = [(held, None), (lost, None), (unwanted, None), (renewed, 600.0)]
        answers = hand.send(renew_leases(hand.tables, asked))
    assert {id_: tuple(answer) for id_, answer in answers.items()} == {
        held.id: ("done", False),
        lost.id: ("lost", False),
        unwanted.id: ("done", True),
        renewed.id: ("done", False),
    }
    assert everything(admin, but=("work", "renewed")) == others


def test_a_renewal_says_that_a_cancel_is_wanted(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    (claim,) = hand.claim()
    assert hand.renew(claim) == ("done", False)
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    assert hand.renew(claim) == ("done", True)


def test_a_renewal_that_came_to_nothing_asks_for_nothing(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    (claim,) = hand.claim()
    age(admin, 61)
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    assert hand.renew(claim) == ("expired", False)


# --- What a success writes ---------------------------------------------------------------------------------------


def test_a_success_clears_what_the_failures_before_it_left(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    hand.settle(hand.claim()[0], replace(AT_ONCE, error_class="KeyError"))
    before = row(admin, "k")
    assert (before["last_code"], before["last_error"], before["finished_at"]) == ("handler_failed", "KeyError", None)
    hand.finish(hand.claim()[0], "1")
    after = row(admin, "k")
    assert (after["last_code"], after["last_error"], after["has_result"]) == (None, None, True)
    assert after["finished_at"] is not None


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("value", [None, '"stale"'])
def test_a_success_of_an_older_payload_leaves_row_and_result_as_they_are(
    hand: Hand, admin: Admin, *, cancel: bool, value: str | None
) -> None:
    hand.enqueue("k", payload=1)
    hand.finish(hand.claim()[0], '"first"')
    hand.enqueue("k", payload=2)
    (claim,) = hand.claim()
    hand.enqueue("k", payload=3)
    admin.execute("update pgworker.jobs set last_code = 'noted', last_error = 'Noted'")
    if cancel:
        admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    assert hand.finish(claim, value).state == ("cancelled" if cancel else "pending")
    after, stored = row(admin, "k"), result(admin, "k")
    assert (after["state"], after["has_result"]) == ("cancelled" if cancel else "pending", True)
    assert (after["finished_at"] is None) != cancel
    assert (after["last_code"], after["last_error"]) == ("noted", "Noted")
    assert stored is not None
    assert stored["value"] == "first"


def test_a_value_of_an_older_payload_is_no_result(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", payload=1)
    (claim,) = hand.claim()
    hand.enqueue("k", payload=2)
    hand.finish(claim, '"stale"')
    assert row(admin, "k")["has_result"] is False
    assert result(admin, "k") is None


def test_a_success_without_a_value_drops_its_own_result_only(hand: Hand, admin: Admin) -> None:
    for key in ("k", "neighbour"):
        hand.enqueue(key)
        hand.finish(hand.claim()[0], f'"of {key}"')
    hand.kind = "another"
    hand.enqueue("k")
    hand.finish(hand.claim()[0], '"of another"')
    hand.kind = "work"
    hand.enqueue("k")
    hand.finish(hand.claim()[0], None)
    assert result(admin, "k") is None
    assert row(admin, "k")["has_result"] is False
    assert [result(admin, "neighbour") is None, result(admin, "k", kind="another") is None] == [False, False]


def test_a_success_with_a_value_replaces_the_older_one(hand: Hand, admin: Admin) -> None:
    for value in ("1", "2"):
        hand.enqueue("k")
        hand.finish(hand.claim()[0], value)
        assert (result(admin, "k") or {})["value"] == int(value)
        assert row(admin, "k")["has_result"] is True


# --- What any other end writes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settlement", "attempts", "evictions", "waits", "code", "error"),
    [
        (RELEASE, 1, 3, False, "handler_failed", "KeyError"),
        (PARK, 1, 3, True, "later", None),
        (replace(RETRY, code="again"), 2, 0, True, "again", None),
        (replace(FAIL, error_class="OSError"), 2, 0, False, "handler_failed", "OSError"),
        (CANCEL, 1, 3, False, "unwanted", None),
    ],
)
def test_what_a_settlement_makes_of_the_row(
    hand: Hand,
    admin: Admin,
    *,
    settlement: Settlement,
    attempts: int,
    evictions: int,
    waits: bool,
    code: str,
    error: str,
) -> None:
    hand.enqueue("k")
    hand.settle(hand.claim()[0], replace(AT_ONCE, error_class="KeyError"))
    (claim,) = hand.claim()
    admin.execute("update pgworker.jobs set evictions = 3")
    before = row(admin, "k")
    assert hand.settle(claim, settlement).state == settlement.state
    after = row(admin, "k")
    assert (after["state"], after["attempts"], after["evictions"]) == (settlement.state, attempts, evictions)
    assert (after["ready_at"] > before["ready_at"]) is waits
    assert (after["last_code"], after["last_error"]) == (code, error)
    assert (after["finished_at"] is None) == (settlement.state == "pending")
    assert after["token"] is None


@pytest.mark.parametrize("settlement", [RELEASE, PARK, RETRY, FAIL, CANCEL])
def test_an_end_of_an_older_payload_leaves_the_new_one_as_it_came(
    hand: Hand, admin: Admin, settlement: Settlement
) -> None:
    hand.enqueue("k", payload=1)
    (claim,) = hand.claim()
    hand.enqueue("k", payload=2)
    before = row(admin, "k")
    assert hand.settle(claim, settlement).state == "pending"
    after = row(admin, "k")
    kept = ("state", "attempts", "ready_at", "last_code", "last_error", "finished_at")
    assert [after[name] for name in kept] == [before[name] for name in kept]
    assert after["token"] is None


@pytest.mark.parametrize(
    ("settlement", "state"), [(RELEASE, "cancelled"), (RETRY, "cancelled"), (FAIL, "failed"), (CANCEL, "cancelled")]
)
def test_a_wanted_cancel_ends_what_would_wait(hand: Hand, admin: Admin, settlement: Settlement, state: str) -> None:
    hand.enqueue("k")
    (claim,) = hand.claim()
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    assert hand.settle(claim, settlement).state == state
    after = row(admin, "k")
    assert (after["state"], after["cancel_requested_at"]) == (state, None)
    assert after["finished_at"] is not None


# --- What they tell ----------------------------------------------------------------------------------------------

Level: TypeAlias = Literal[0, 1, 2]


def told(admin: Admin) -> list[str]:
    return [what for (what,) in admin.execute("select what from pgworker.facts order by id")]


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize(
    ("settlement", "what", "least"),
    [
        (RELEASE, "released", 2),
        (PARK, "parked", 1),
        (RETRY, "retried", 1),
        (FAIL, "failed", 1),
        (CANCEL, "cancelled", 1),
    ],
)
def test_a_settlement_tells_as_much_as_its_level_says(
    hand: Hand, admin: Admin, *, level: Level, settlement: Settlement, what: str, least: int
) -> None:
    hand.enqueue("k")
    (claim,) = hand.claim()
    hand.send(settle_jobs(hand.tables, hand.kind, [(claim, settlement)], facts=level))
    assert told(admin) == ([what] if level >= least else [])


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("stale", [False, True])
def test_a_success_tells_as_much_as_its_level_says(hand: Hand, admin: Admin, *, level: Level, stale: bool) -> None:
    hand.enqueue("k", payload=1)
    (claim,) = hand.claim()
    if stale:
        hand.enqueue("k", payload=2)
    hand.send(finish_jobs(hand.tables, hand.kind, [(claim, Success("1"))], facts=level))
    assert told(admin) == (["superseded"] if stale else ["succeeded"])[: max(0, level - (not stale))]


@pytest.mark.parametrize("settlement", [RETRY, PARK, RELEASE, FAIL])
def test_whatever_became_of_an_older_payload_it_was_superseded(
    hand: Hand, admin: Admin, settlement: Settlement
) -> None:
    hand.enqueue("k", payload=1)
    (claim,) = hand.claim()
    hand.enqueue("k", payload=2)
    hand.send(settle_jobs(hand.tables, hand.kind, [(claim, settlement)], facts=1))
    assert told(admin) == ["superseded"]


def test_an_expired_lease_writes_nothing_whoever_asks(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    (claim,) = hand.claim()
    age(admin, 60)
    before = row(admin, "k")
    for write in (finish, settle, renew):
        assert write(hand, [claim]) == {claim.id: "expired"}
    assert row(admin, "k") == before
