"""What each term of the claim that is fair between tenants asks for: quick tests, one of which fails without it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import uuid4

import psycopg
import pytest

from pgworker.fairness import Shares, claim_fair
from pgworker.job import NewJob
from pgworker.kind import declare_kind
from pgworker.policy import make_policy
from pgworker.queue import JobsTable
from pgworker.statements import BEGINNING, Cursor, Lane
from tests.handles import Hand, age, copy_of, everything, row
from tests.handles import hand as make_hand
from tests.integration.test_statement_terms import PAUSES

Admin: TypeAlias = psycopg.Connection[Any]


def take(
    hand: Hand,
    limit: int = 10,
    *,
    served: str = "",
    after: Cursor = BEGINNING,
    looks: int = 100,
    max_evictions: int | None = 5,
    ttl_seconds: float = 60.0,
    facts: int = 0,
) -> Shares:
    """One fair claim of the lane (fresh, 0)."""
    return hand.send(
        claim_fair(
            hand.tables,
            Lane(hand.kind, 0, 0),
            limit=limit,
            token=uuid4(),
            runner="by hand",
            ttl_seconds=ttl_seconds,
            max_evictions=max_evictions,
            version=1,
            served=served,
            after=after,
            looks=looks,
            facts=facts,
        )
    )


def keys(shares: Shares) -> str:
    return " ".join(claim.key for claim in shares.claims)


def enqueue(hand: Hand, keys: str) -> None:
    """Jobs by their keys, which begin with their tenant's letter, in this order."""
    hand.enqueue_many([NewJob(key=key, tenant=key[0]) for key in keys.split()])


# --- the ring -------------------------------------------------------------------------------------------------------


def test_each_tenant_in_turn_whatever_waits_of_the_others(hand: Hand) -> None:
    enqueue(hand, "a1 a2 a3 a4 b1 b2 c1 c2")
    served, found = "", list[str]()
    for _ in range(4):
        shares = take(hand, 2, served=served)
        assert shares.served is not None
        served = shares.served
        found.append(f"{keys(shares)}, {served}")
    assert found == ["a1 b1, b", "c1 a2, a", "b2 c2, c", "a3 a4, a"]


@pytest.mark.parametrize(
    ("served", "order"), [("", "a b c"), ("a", "b c a"), ("b", "c a b"), ("bb", "c a b"), ("c", "a b c")]
)
def test_the_ring_begins_behind_the_last_one_and_ends_with_it(hand: Hand, served: str, order: str) -> None:
    enqueue(hand, "a b c")
    shares = take(hand, served=served)
    assert (keys(shares), shares.served) == (order, order[-1])


def test_what_is_of_nobody_is_one_tenant_among_the_others(hand: Hand, admin: Admin) -> None:
    enqueue(hand, "x1 x2 a1 a2 b1 b2")
    admin.execute("update pgworker.jobs set tenant = '' where tenant = 'x'")
    assert keys(take(hand, 3)) == "a1 b1 x1"
    assert keys(take(hand, 3, served="b")) == "x2 a2 b2"


def test_what_has_no_tenant_at_all_is_left_to_others(hand: Hand) -> None:
    hand.enqueue("k")
    assert take(hand) == ([], None)
    assert [claim.key for claim in hand.claim()] == ["k"]


@pytest.mark.contract("A17")
def test_fewer_tenants_than_jobs_to_take_get_equal_shares(hand: Hand) -> None:
    enqueue(hand, "a1 a2 a3 a4 a5 c1 b1 b2 b3 b4")
    assert keys(take(hand, 9)) == "a1 b1 c1 a2 b2 a3 b3"


def test_a_tenant_that_is_alone_gets_everything(hand: Hand) -> None:
    enqueue(hand, "a1 a2 a3 a4")
    assert keys(take(hand, 3)) == "a1 a2 a3"


@pytest.mark.contract("A17")
def test_what_does_not_come_out_even_goes_to_those_who_are_first(hand: Hand) -> None:
    enqueue(hand, "a1 a2 b1 b2 c1 c2 c3")
    assert keys(take(hand, 4, served="b")) == "c1 a1 b1 c2"


def test_a_job_that_somebody_holds_is_passed_over(hand: Hand, dsn: str) -> None:
    enqueue(hand, "a1 a2 a3 a4 a5 b1")
    other = make_hand(dsn)
    with other.connection.transaction():
        other.connection.execute("select 1 from pgworker.jobs where key in ('a1', 'a3') for update")
        assert keys(take(hand, 4)) == "a2 b1 a4"
    other.connection.close()


# --- how far it looks -----------------------------------------------------------------------------------------------


def test_a_claim_looks_at_so_many_tenants_and_the_next_goes_on_behind_them(hand: Hand) -> None:
    hand.enqueue_many([NewJob(key=key, tenant=key, delay=timedelta(hours=1)) for key in "abce"])
    enqueue(hand, "d")
    assert take(hand, looks=2) == ([], "b")
    assert keys(take(hand, served="b", looks=2)) == "d"
    assert take(hand, served="d", looks=2) == ([], "a")  # over the end


def test_the_place_is_that_of_the_last_one_served_however_far_it_might_look(hand: Hand) -> None:
    enqueue(hand, "a b c")
    assert take(hand, 1, looks=2).served == "a"
    assert take(hand, 1, served="a", looks=1).served == "b"


def test_a_ring_of_which_nobody_can_be_served_has_no_place(hand: Hand) -> None:
    hand.enqueue("a", tenant="a", delay=timedelta(hours=1))
    assert take(hand, looks=2) == ([], None)


OF_ANOTHER_LANE = (
    "kind = 'other'",
    "class = 1",
    "priority = 1",
    "priority = -1",
    "state = 'cancelled', finished_at = ready_at",
)


@pytest.mark.parametrize("served", ["", "z"])
@pytest.mark.parametrize("change", OF_ANOTHER_LANE)
def test_tenants_of_other_lanes_are_not_looked_at(hand: Hand, admin: Admin, change: str, served: str) -> None:
    enqueue(hand, "a1 b1 c1")
    admin.execute(f"update pgworker.jobs set {change} where tenant <> 'b'".encode())
    assert keys(take(hand, served=served, looks=1)) == "b1"


@pytest.mark.parametrize("served", ["", "z"])
@pytest.mark.parametrize("change", OF_ANOTHER_LANE)
def test_a_lane_without_tenants_has_no_ring(hand: Hand, admin: Admin, change: str, served: str) -> None:
    enqueue(hand, "a1")
    admin.execute(f"update pgworker.jobs set {change}".encode())
    assert take(hand, served=served, looks=1) == ([], None)


@pytest.mark.parametrize("change", OF_ANOTHER_LANE)
def test_a_tenant_of_two_lanes_is_served_from_this_one(hand: Hand, admin: Admin, change: str) -> None:
    hand.enqueue("a0", tenant="a", delay=timedelta(hours=1))
    enqueue(hand, "a1")
    admin.execute(f"update pgworker.jobs set {change} where key = 'a1'".encode())
    assert take(hand) == ([], None)


# --- which jobs -----------------------------------------------------------------------------------------------------

LEASED = "token = gen_random_uuid(), runner = 'r', lease_expires_at = clock_timestamp() +"
NOT_TO_BE_CLAIMED = (
    *OF_ANOTHER_LANE,
    "ready_at = clock_timestamp() + interval '1 hour'",
    "version = 2",
    f"{LEASED} interval '1 minute'",
    f"{LEASED} interval '-1 second', evictions = 4",
    f"{LEASED} interval '-1 second', cancel_requested_at = clock_timestamp()",
)


@pytest.mark.parametrize("change", NOT_TO_BE_CLAIMED)
def test_what_cannot_be_claimed_is_not_in_the_way(hand: Hand, admin: Admin, change: str) -> None:
    enqueue(hand, "a1 a2 a3 a4 b1")
    admin.execute(f"update pgworker.jobs set {change} where key in ('a1', 'a3', 'b1')".encode())
    others = {key: each for key, each in everything(admin, but=("", "")).items() if key[1] not in {"a2", "a4"}}
    assert keys(take(hand)) == "a2 a4"
    assert {key: each for key, each in everything(admin, but=("", "")).items() if key[1] not in {"a2", "a4"}} == others


@pytest.mark.parametrize(
    ("evictions", "limit", "taken"), [(0, 2, True), (1, 2, False), (2, 2, False), (0, 1, False), (7, None, True)]
)
def test_an_expired_lease_is_taken_over_below_the_limit_of_evictions(
    hand: Hand, admin: Admin, *, evictions: int, limit: int | None, taken: bool
) -> None:
    enqueue(hand, "a1 a2")
    assert keys(take(hand)) == "a1 a2"
    admin.execute("update pgworker.jobs set evictions = %s", [evictions])
    assert take(hand, max_evictions=limit).claims == []  # a live lease is nobody else's
    admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp()")  # after the server's start
    admin.execute("select pg_sleep(0.002)")
    claims = take(hand, max_evictions=limit, ttl_seconds=0.001).claims
    assert [claim.evictions for claim in claims] == [evictions + 1] * (2 * taken)


@pytest.mark.contract("X10")
@pytest.mark.field("L19")
@pytest.mark.parametrize("fair", [False, True])
def test_a_kinds_limit_of_evictions_goes_into_its_claims(hand: Hand, admin: Admin, *, fair: bool) -> None:
    """The reaper sees to jobs at their limit, too: it may be too late."""
    enqueue(hand, "a1")
    assert keys(take(hand)) == "a1"
    admin.execute("update pgworker.jobs set evictions = 2, lease_expires_at = clock_timestamp()")
    admin.execute("select pg_sleep(0.002)")
    for limit, taken in ((3, []), (4, ["a1"])):
        policy = make_policy("standard", {"fair": fair, "max_evictions": limit})
        kind = declare_kind(hand.kind, policy, payload=object, payload_limit=None, version=1)
        queue, lane, token = JobsTable(hand.tables, kind), Lane(hand.kind, 0, 0), uuid4()
        if fair:
            claims = hand.send(queue.claim_fair(lane, limit=5, token=token, runner="r")).claims
        else:
            claims = hand.send(queue.claim(lane, limit=5, token=token, runner="r"))
        assert [claim.key for claim in claims] == taken


def test_a_lease_from_before_the_server_was_started_is_no_eviction(hand: Hand, admin: Admin) -> None:
    enqueue(hand, "a1 a2")
    take(hand)
    age(admin, 10 * 365 * 86_400)
    assert [claim.evictions for claim in take(hand).claims] == [0, 0]


def test_a_claim_begins_behind_its_cursor(hand: Hand, admin: Admin) -> None:
    enqueue(hand, "a1 b1 a2 b2")
    place = row(admin, "b1")
    assert keys(take(hand, after=(place["ready_at"], place["id"]))) == "a2 b2"


def test_a_claim_writes_to_its_own_rows_only(hand: Hand, admin: Admin) -> None:
    enqueue(hand, "a1 a2")
    copy_of(admin, "a1", kind="copy")
    others = everything(admin, but=("work", "a1"))
    assert keys(take(hand, 1)) == "a1"
    assert everything(admin, but=("work", "a1")) == others
    claimed = row(admin, "a1")
    assert (claimed["runner"], claimed["lease_epoch"], claimed["lease_seconds"]) == ("by hand", 1, 60)


@pytest.mark.parametrize(("kind", "since", "until", "paused"), PAUSES)
def test_a_pause_holds_for_its_kind_and_until_its_end(
    hand: Hand, admin: Admin, *, kind: str, since: str, until: str, paused: bool
) -> None:
    admin.execute(
        f"insert into pgworker.kinds (kind, paused_at, paused_until) values ('{kind}', {since}, {until})".encode()
    )
    enqueue(hand, "a")
    assert len(take(hand).claims) == int(not paused)


@pytest.mark.parametrize(("facts", "told"), [(0, []), (1, ["evicted"]), (2, ["evicted", "claimed"])])
def test_a_takeover_tells_as_much_as_its_level_says(hand: Hand, admin: Admin, facts: int, told: list[str]) -> None:
    enqueue(hand, "a")
    take(hand, ttl_seconds=0.001)
    admin.execute("select pg_sleep(0.002)")
    take(hand, ttl_seconds=0.001, facts=facts)
    assert [what for (what,) in admin.execute("select what from pgworker.facts order by id")] == told


def test_a_first_claim_is_told_as_such(hand: Hand, admin: Admin) -> None:
    enqueue(hand, "a")
    (claim,) = take(hand, facts=2).claims
    told = admin.execute("select what, runner, job_id from pgworker.facts").fetchall()
    assert told == [("claimed", "by hand", claim.id)]


# --- whose it is ----------------------------------------------------------------------------------------------------


def tenants(admin: Admin) -> Sequence[tuple[str, str | None]]:
    return admin.execute("select key, tenant from pgworker.jobs order by key").fetchall()


def test_a_job_that_is_replaced_has_the_new_tenant(hand: Hand, admin: Admin) -> None:
    for key, tenant in (("k1", "a"), ("k2", "a"), ("k3", None)):
        hand.enqueue(key, "r1", tenant=tenant)
    for key, revision, tenant in (("k1", "r2", "b"), ("k2", "r1", "b"), ("k3", "r2", "b")):
        hand.enqueue(key, revision, tenant=tenant)
    assert tenants(admin) == [("k1", "b"), ("k2", "a"), ("k3", "b")]
    hand.enqueue("k1", "r3")
    assert tenants(admin)[0] == ("k1", None)


def test_a_claim_changes_nothing_that_an_index_holds(hand: Hand) -> None:
    enqueue(hand, "a1 a2 b1")
    with hand.connection.transaction():
        assert len(take(hand).claims) == 3
        hot = "select sum(n_tup_upd), sum(n_tup_hot_upd) from pg_stat_xact_user_tables where relname like 'jobs%%'"
        assert hand.connection.execute(hot.encode(), []).fetchone() == (3, 3)
