"""One suite for every table that a queue may live in, statement by statement; see test_conformance.py."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import uuid4

import psycopg
import pytest

from pgworker.db import send_sync
from pgworker.job import Claim
from pgworker.outcome import Settlement, Success
from pgworker.queue import Queue
from pgworker.statements import BEGINNING, Due, Lane, Statement
from tests.adapters import KIND, Adapter
from tests.handles import FAIL, RELEASE, RETRY, hand

Admin: TypeAlias = psycopg.Connection[Any]
LANE = Lane(KIND, 0, 0)


class Hands:
    """Works on a queue statement by statement."""

    def __init__(self, dsn: str, adapter: Adapter, **options: Any) -> None:
        self.connection = hand(dsn).connection
        self.queue: Queue = adapter.open(self.connection, **options)

    def claim(self, limit: int = 1, *, lane: Lane = LANE) -> list[Claim]:
        return send_sync(self.connection, self.queue.claim(lane, limit=limit, token=uuid4(), runner="by hand"))

    def finish(self, claim: Claim, value: str | None = None) -> str:
        return send_sync(self.connection, self.queue.finish([(claim, Success(value))]))[claim.id].verdict

    def settle(self, claim: Claim, settlement: Settlement) -> str:
        return send_sync(self.connection, self.queue.settle([(claim, settlement)]))[claim.id].verdict

    def renew(self, claim: Claim, seconds: float | None = 60.0) -> tuple[str, bool]:
        return send_sync(self.connection, self.queue.renewals([(claim, seconds)]))[claim.id]

    def survey(self) -> list[Due]:
        return send_sync(self.connection, self.queue.survey())


@pytest.fixture
def hands(dsn: str, adapter: Adapter) -> Any:
    opened = Hands(dsn, adapter)
    yield opened
    opened.connection.close()


# --- claim ----------------------------------------------------------------------------------------------------------


@pytest.mark.contract("A11")
def test_a_claim_knows_its_row_byte_for_byte(adapter: Adapter, admin: Admin, hands: Hands) -> None:
    adapter.put(admin, 7, 3, 'wörter "und" \\ mehr')
    (claim,) = hands.claim()
    assert (claim.kind, claim.key, claim.revision) == (KIND, adapter.key(7), adapter.revision(3))
    assert (claim.attempts, claim.evictions, claim.urgency, claim.priority) == (0, 0, 0, 0)
    assert claim.token == adapter.of(admin, 7, "token")
    assert claim.ready_at == adapter.of(admin, 7, "ready_at")
    assert claim.payload is not None


@pytest.mark.contract("A16")
def test_eight_claimers_take_each_row_once(dsn: str, adapter: Adapter, admin: Admin) -> None:
    for number in range(200):
        adapter.put(admin, number)
    claims: list[Claim] = []
    ready = threading.Barrier(8)

    def work() -> None:
        hands = Hands(dsn, adapter)
        ready.wait()
        while taken := hands.claim(7):
            claims.extend(taken)
        hands.connection.close()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leftover = Hands(dsn, adapter)  # a row that was locked by another's claim was passed over
    claims += leftover.claim(200)
    leftover.connection.close()
    assert Counter(claim.key for claim in claims) == {adapter.key(number): 1 for number in range(200)}
    assert all(
        claim.token == adapter.of(admin, number, "token")
        for claim in claims[:5]
        for number in range(200)
        if claim.key == adapter.key(number)
    )


@pytest.mark.contract("A17")
def test_a_claim_takes_no_more_than_it_asks_for_and_the_oldest_first(
    adapter: Adapter, admin: Admin, hands: Hands
) -> None:
    for number in range(20, 0, -1):
        adapter.put(admin, number)
    assert [claim.key for claim in hands.claim(7)] == [adapter.key(number) for number in range(20, 13, -1)]
    assert [claim.key for claim in hands.claim(7)] == [adapter.key(number) for number in range(13, 6, -1)]


def test_a_row_is_not_claimed_before_its_time_nor_while_another_works_on_it(
    adapter: Adapter, admin: Admin, hands: Hands
) -> None:
    for number in (1, 2):
        adapter.put(admin, number)
    adapter.age(admin, -60)
    assert hands.claim(5) == []
    ((_, due_in, paused, *_),) = hands.survey()
    assert due_in is not None
    assert 50 < due_in <= 60
    assert not paused
    adapter.age(admin, 60)
    assert len(hands.claim(1)) == 1
    with admin.transaction():
        adapter.set(admin, 2, attempts=0)  # an app's open transaction
        assert hands.claim(5) == []
    (claim,) = hands.claim(5)
    assert claim.key == adapter.key(2)
    assert [due[:3] for due in hands.survey()] == [(LANE, None, False)]


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_what_has_ended_is_not_claimed(adapter: Adapter, admin: Admin, hands: Hands, state: str) -> None:
    adapter.put(admin, 1)
    adapter.set(admin, 1, state=state)
    assert hands.claim() == []
    assert hands.survey() == []
    adapter.put(admin, 2)
    assert [claim.key for claim in hands.claim(5)] == [adapter.key(2)]


def test_a_table_without_work_has_no_lanes(adapter: Adapter, admin: Admin, hands: Hands) -> None:
    assert hands.survey() == []
    adapter.put(admin, 1)
    (claim,) = hands.claim()
    assert hands.finish(claim) == "done"
    assert hands.survey() == []


PAUSES: dict[str, tuple[str, str | None, str | None, bool]] = {
    "for good": (KIND, "now", None, True),
    "for a time": (KIND, "now", "tomorrow", True),
    "for a time that is over": (KIND, "yesterday", "now", False),
    "not at all": (KIND, None, None, False),
    "another kind": ("another", "now", None, False),
}


@pytest.mark.parametrize("pause", PAUSES)
def test_a_paused_kind_gives_nothing(adapter: Adapter, admin: Admin, hands: Hands, pause: str) -> None:
    adapter.put(admin, 1)
    kind, paused_at, paused_until, holds = PAUSES[pause]
    admin.execute(
        "insert into pgworker.kinds (kind, paused_at, paused_until) values (%s, %s::timestamptz, %s::timestamptz)",
        [kind, paused_at, paused_until],
    )
    assert [due.paused for due in hands.survey()] == [holds]
    assert len(hands.claim()) == (0 if holds else 1)


# --- the fence ------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Hands, Claim], str]] = {
    "complete": lambda hands, claim: hands.finish(claim, "1"),
    "retry": lambda hands, claim: hands.settle(claim, RETRY),
    "fail": lambda hands, claim: hands.settle(claim, FAIL),
    "release": lambda hands, claim: hands.settle(claim, RELEASE),
    "renew": lambda hands, claim: hands.renew(claim)[0],
    "look": lambda hands, claim: hands.renew(claim, None)[0],
}
Break: TypeAlias = Callable[[Adapter, Admin, Claim], Claim]


def other_key(adapter: Adapter, admin: Admin, claim: Claim) -> Claim:
    return claim._replace(key=adapter.key(2))


def other_revision(adapter: Adapter, admin: Admin, claim: Claim) -> Claim:
    return claim._replace(revision=adapter.revision(2))


def other_token(adapter: Adapter, admin: Admin, claim: Claim) -> Claim:
    return claim._replace(token=uuid4())


def no_longer_pending(adapter: Adapter, admin: Admin, claim: Claim) -> Claim:
    adapter.end(admin, 1)
    return claim


def expired(adapter: Adapter, admin: Admin, claim: Claim) -> Claim:
    adapter.age(admin, 15.001)  # the kind's lease
    return claim


@pytest.mark.contract("A20", "A27")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("broken", [other_key, other_revision, other_token, no_longer_pending, expired])
def test_a_write_with_one_broken_fence_part_changes_nothing(
    adapter: Adapter, admin: Admin, hands: Hands, write: str, broken: Break
) -> None:
    for number in (1, 2):
        adapter.put(admin, number)
    (claim,) = hands.claim(1)
    claim = broken(adapter, admin, claim)
    before = [adapter.row(admin, number) for number in (1, 2)]
    if broken is expired:  # (whoever only looks learns of an expiry by his own clock)
        assert WRITES[write](hands, claim) == ("done" if write == "look" else "expired")
    else:
        assert WRITES[write](hands, claim) == "lost"
    assert [adapter.row(admin, number) for number in (1, 2)] == before


@pytest.mark.contract("A20")
@pytest.mark.parametrize("write", WRITES)
def test_a_write_with_its_whole_fence_is_done(adapter: Adapter, admin: Admin, hands: Hands, write: str) -> None:
    adapter.put(admin, 1)
    (claim,) = hands.claim()
    assert WRITES[write](hands, claim) == "done"


@pytest.mark.contract("A23")
@pytest.mark.parametrize("write", WRITES)
def test_a_token_from_before_delete_and_recreate_is_refused(
    adapter: Adapter, admin: Admin, hands: Hands, write: str
) -> None:
    adapter.put(admin, 1)
    (old,) = hands.claim()
    adapter.delete(admin, 1)
    assert WRITES[write](hands, old) == "lost"
    adapter.put(admin, 1)
    for _ in range(2):
        before = adapter.row(admin, 1)
        assert WRITES[write](hands, old) == "lost"
        assert adapter.row(admin, 1) == before
        hands.claim()


@pytest.mark.contract("A25")
def test_a_second_completion_is_refused(adapter: Adapter, admin: Admin, hands: Hands) -> None:
    adapter.put(admin, 1)
    (claim,) = hands.claim()
    assert hands.finish(claim, '"first"') == "done"
    before = adapter.row(admin, 1)
    assert hands.finish(claim, '"second"') == "lost"
    assert adapter.row(admin, 1) == before


@pytest.mark.ruling("0.2", "1.1")
@pytest.mark.parametrize("write", [each for each in WRITES if each != "look"])
def test_a_row_that_the_app_holds_is_busy_and_neither_waited_for_nor_lost(
    adapter: Adapter, admin: Admin, hands: Hands, write: str
) -> None:
    for number in (1, 2):
        adapter.put(admin, number)
    held, free = hands.claim(2)
    hands.connection.execute("set statement_timeout = '1s'")
    with admin.transaction():
        adapter.set(admin, 1, attempts=0)
        assert WRITES[write](hands, held) == "busy"
        assert WRITES[write](hands, free) == "done"
    assert WRITES[write](hands, held) == "done"


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("write", ["complete", "retry", "renew"])
def test_a_new_revision_that_is_not_committed_yet_decides_nothing(
    adapter: Adapter,
    admin: Admin,
    hands: Hands,
    write: str,
    commits: bool,  # noqa: FBT001 - of the table of cases
) -> None:
    adapter.put(admin, 1)
    (claim,) = hands.claim()
    with admin.transaction(force_rollback=not commits):
        adapter.put(admin, 1, 2)
        assert WRITES[write](hands, claim) == "busy"
    assert WRITES[write](hands, claim) == ("lost" if commits else "done")


@pytest.mark.ruling("0.2")
@pytest.mark.parametrize("write", ["complete", "retry", "renew"])
def test_a_lease_that_ends_while_the_statement_runs_is_expired(
    adapter: Adapter, admin: Admin, hands: Hands, write: str
) -> None:
    """The clock is read after the locks: here between the two by data dependence, whatever the plan is."""
    adapter.put(admin, 1)
    (claim,) = hands.claim()
    admin.execute(
        "create function public.slow(uuid) returns uuid language plpgsql volatile as"
        " $$ begin perform pg_sleep(0.4); return $1; end $$"
    )
    writes: dict[str, Statement[Any]] = {
        "complete": hands.queue.finish([(claim, Success(None))]),
        "retry": hands.queue.settle([(claim, RETRY)]),
        "renew": hands.queue.renewals([(claim, 60.0)]),
    }
    sql = writes[write]
    column = adapter.columns["token"]
    text = sql.sql.decode()
    locks = text.index("held as materialized")
    quoted = f'j."{column}"' if f'j."{column}" = i.token' in text else f"j.{column}"
    slow = text[:locks] + text[locks:].replace(f"{quoted} = i.token", f"{quoted} = public.slow(i.token)", 1)
    assert slow != text
    (soon,) = admin.execute("select clock_timestamp() + interval '0.2 s'").fetchone() or (None,)
    adapter.set(admin, 1, lease_expires_at=soon)
    rows = hands.connection.execute(slow.encode(), sql.parameters).fetchall()
    assert rows[0][1] == "expired"
    admin.execute("drop function public.slow")
    assert adapter.of(admin, 1, "state") == "pending"


MANY: dict[str, Callable[[Queue, list[Claim]], Statement[Any]]] = {
    "complete": lambda queue, claims: queue.finish([(claim, Success("1")) for claim in claims]),
    "retry": lambda queue, claims: queue.settle([(claim, RETRY) for claim in claims]),
    "renew": lambda queue, claims: queue.renewals([(claim, 60.0) for claim in claims]),
}


@pytest.mark.parametrize("write", MANY)
def test_each_of_many_rows_has_its_own_verdict(adapter: Adapter, admin: Admin, hands: Hands, write: str) -> None:
    for number in range(1, 7):
        adapter.put(admin, number)
    claims = hands.claim(6)
    adapter.delete(admin, 2)
    adapter.put(admin, 4, 2)
    adapter.set(admin, 5, lease_expires_at=datetime.now(UTC) - timedelta(seconds=1))
    with admin.transaction():
        adapter.set(admin, 3, attempts=0)
        # (one of them twice)
        answers = send_sync(hands.connection, MANY[write](hands.queue, [*claims, claims[0]]))
    assert [answers[claim.id].verdict for claim in claims] == ["done", "lost", "busy", "lost", "expired", "done"]
    if write != "renew":
        state = {"complete": "succeeded", "retry": "pending"}[write]
        assert [answers[claim.id].state for claim in claims] == [state, None, None, None, None, state]


# --- what is written ------------------------------------------------------------------------------------------------


def test_the_ends_of_a_run(adapter: Adapter, admin: Admin, hands: Hands) -> None:
    for number in range(1, 6):
        adapter.put(admin, number)
    ends = [RETRY, FAIL, RELEASE, Settlement("cancelled", "unwanted"), Settlement("pending", "parked", delay_seconds=9)]
    before = [adapter.row(admin, number) for number in range(1, 6)]
    for claim, end in zip(hands.claim(5), ends, strict=True):
        assert hands.settle(claim, end) == "done"
    seen = [(adapter.of(admin, number, "state"), adapter.of(admin, number, "attempts") or 0) for number in range(1, 6)]
    assert seen == [("pending", 1), ("failed", 1), ("pending", 0), ("cancelled", 0), ("pending", 0)]
    ready = adapter.columns["ready_at"]
    waits = [adapter.row(admin, n)[ready] - before[n - 1][ready] for n in range(1, 6)]
    assert waits[0].total_seconds() > 59
    assert waits[4].total_seconds() > 8
    assert all(waits[at].total_seconds() == 0 for at in (1, 2, 3))
    for number in range(1, 6):
        assert adapter.of(admin, number, "token") is None
        assert adapter.of(admin, number, "lease_expires_at") is None


def test_a_release_leaves_the_row_as_it_was(adapter: Adapter, admin: Admin, hands: Hands) -> None:
    adapter.put(admin, 1)
    before = adapter.row(admin, 1)
    (claim,) = hands.claim()
    assert hands.settle(claim, RELEASE) == "done"
    after = adapter.row(admin, 1)
    # (attempts of null count as none, and are none afterwards)
    changed = {"lease_epoch", "lease_seconds", adapter.columns["attempts"]}
    assert {k: v for k, v in after.items() if k not in changed} == {k: v for k, v in before.items() if k not in changed}


def test_a_renewal_prolongs_and_a_look_writes_nothing(adapter: Adapter, admin: Admin, hands: Hands) -> None:
    adapter.put(admin, 1)
    (claim,) = hands.claim()
    before = adapter.row(admin, 1)
    assert hands.renew(claim, None) == ("done", False)
    assert adapter.row(admin, 1) == before
    assert hands.renew(claim, 3600.0) == ("done", False)
    lease = adapter.columns["lease_expires_at"]
    assert (adapter.row(admin, 1)[lease] - before[lease]).total_seconds() > 3000
    before[lease] = adapter.row(admin, 1)[lease]
    assert adapter.row(admin, 1) == before


@pytest.mark.contract("A26")
def test_an_expired_lease_is_taken_over_never_before(adapter: Adapter, admin: Admin, hands: Hands) -> None:
    adapter.put(admin, 1)
    (old,) = hands.claim()
    adapter.age(admin, 14)
    assert hands.claim() == []
    assert [due.due_in_seconds for due in hands.survey()] == [None]
    adapter.age(admin, 1)
    assert [(due.due_in_seconds or 0) < 0 for due in hands.survey()] == [True]
    (new,) = hands.claim()
    assert new.token != old.token
    assert (new.key, new.revision, new.attempts) == (old.key, old.revision, 0)
    assert hands.finish(old, "1") == "lost"
    assert hands.finish(new, "1") == "done"


def test_the_check_of_a_completion_tells_ours_from_lost(adapter: Adapter, admin: Admin, hands: Hands) -> None:
    for number in (1, 2, 3):
        adapter.put(admin, number)
    claims = hands.claim(2)

    def check(claim: Claim) -> int | None:
        return send_sync(hands.connection, hands.queue.check(claim))

    (claim, _) = claims
    assert [check(each) for each in claims] == [claim.generation] * 2
    assert check(claim._replace(key=adapter.key(3))) is None
    assert check(claim._replace(revision=adapter.revision(2))) is None
    assert check(claim._replace(token=uuid4())) is None
    adapter.end(admin, 2)
    assert check(claims[1]) is None
    adapter.age(admin, 16)
    assert check(claim) is None


def test_reaping_pages_through_a_lane(adapter: Adapter, admin: Admin, hands: Hands) -> None:
    for number in range(1, 8):
        adapter.put(admin, number)
    hands.claim(5)
    adapter.age(admin, 60)
    after, freed = BEGINNING, 0
    leased: list[int] = []
    for _ in range(4):
        page = send_sync(hands.connection, hands.queue.reap(LANE, limit=3, after=after))
        freed += page.freed
        if page.cursor is None:
            break
        leased.append(page.leased)
        after = page.cursor
    assert leased == ([] if adapter.name == "threads" else [3, 2, 0])
    assert freed == (0 if adapter.name == "threads" else 5)  # (claims take those over; there is nothing else to write)
    assert len(hands.claim(10)) == 7
