"""The journal: what each statement tells of a job, at each level, in the transaction of the change."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import psycopg
import pytest
from psycopg import errors

from pgworker import NewJob
from pgworker.client import put_jobs
from pgworker.job import Claim, State
from pgworker.operations import cancel_jobs, forget_job, reopen_jobs
from pgworker.outcome import Settlement, Success
from pgworker.statements import BEGINNING, FACTS, Lane, finish_jobs, reap_expired, settle_jobs
from tests.chaos.audit import Change, install, read
from tests.databases import TABLES
from tests.handles import Hand, untyped

Admin: TypeAlias = psycopg.Connection[Any]

FAIL = Settlement("failed", "broken", counts=True)
RETRY = Settlement("pending", "broken", counts=True, delay_seconds=0.0)
PARK = Settlement("pending", "later", delay_seconds=0.0)
RELEASE = Settlement("pending", None)
CANCEL = Settlement("cancelled", "unwanted")


class Fact(NamedTuple):
    what: str
    code: str | None
    runner: str | None
    generation: int
    attempts: int


def facts(admin: Admin, key: str = "k") -> list[Fact]:
    found = admin.execute(
        "select what, code, runner, generation, attempts from pgworker.facts where key = %s order by id", [key]
    ).fetchall()
    return [Fact(*each) for each in found]


def told(admin: Admin, key: str = "k") -> list[str]:
    return [fact.what for fact in facts(admin, key)]


class Journalist:
    """Sends statements at one level."""

    def __init__(self, hand: Hand, level: int) -> None:
        self.hand = hand
        self.level = level

    def enqueue(self, revision: str, *, wait: bool = False) -> str:
        job = NewJob(None, "k", revision)
        kind = untyped(self.hand.kind)
        flow = put_jobs(self.hand.tables, kind, [job], if_pending="replace")
        statement = next(flow)
        parameters = {**statement.parameters, "facts": self.level, "wait": wait}
        object.__setattr__(statement, "parameters", parameters)
        return str(self.hand.send(statement)["k"].status)

    def claim(self, ttl_seconds: float = 60.0) -> Claim:
        [claim] = self.hand.claim(ttl_seconds=ttl_seconds, facts=self.level)
        return claim

    def finish(self, claim: Claim) -> str:
        statement = finish_jobs(self.hand.tables, self.hand.kind, [(claim, Success(None))], facts=self.level)
        return self.hand.send(statement)[claim.id].verdict

    def settle(self, claim: Claim, settlement: Settlement) -> str:
        statement = settle_jobs(self.hand.tables, self.hand.kind, [(claim, settlement)], facts=self.level)
        return self.hand.send(statement)[claim.id].verdict

    def reap(self, max_evictions: int = 5) -> None:
        self.hand.send(
            reap_expired(
                self.hand.tables, Lane(self.hand.kind, 0, 0), limit=10, ttl_seconds=0.05, max_evictions=max_evictions,
                after=BEGINNING, facts=self.level,
            )
        )  # fmt: skip


@pytest.fixture
def everything(hand: Hand) -> Journalist:
    return Journalist(hand, FACTS["all"])


def test_a_job_that_goes_well_tells_three_facts(everything: Journalist, admin: Admin) -> None:
    everything.enqueue("r1")
    claim = everything.claim()
    assert everything.finish(claim) == "done"
    assert facts(admin) == [
        Fact("enqueued", None, None, 1, 0),
        Fact("claimed", None, "by hand", 1, 0),
        Fact("succeeded", None, "by hand", 1, 0),
    ]


@pytest.mark.parametrize(
    ("settlement", "fact"),
    [
        (FAIL, Fact("failed", "broken", "by hand", 1, 1)),
        (RETRY, Fact("retried", "broken", "by hand", 1, 1)),
        (PARK, Fact("parked", "later", "by hand", 1, 0)),
        (RELEASE, Fact("released", None, "by hand", 1, 0)),
        (CANCEL, Fact("cancelled", "unwanted", "by hand", 1, 0)),
    ],
    ids=lambda each: each.what if isinstance(each, Fact) else "",
)
def test_each_other_end_tells_its_own(everything: Journalist, admin: Admin, settlement: Settlement, fact: Fact) -> None:
    everything.enqueue("r1")
    assert everything.settle(everything.claim(), settlement) == "done"
    assert facts(admin)[-1] == fact


def test_new_work_tells_whom_it_found(everything: Journalist, admin: Admin) -> None:
    everything.enqueue("r1")
    everything.enqueue("r2")
    everything.claim()
    everything.enqueue("r3")
    everything.finish(everything.claim())
    everything.enqueue("r4")
    everything.enqueue("r4")
    assert told(admin) == ["enqueued", "replaced", "claimed", "superseded", "claimed", "succeeded", "requeued"]


def test_a_lost_worker_is_told_by_whoever_finds_it(everything: Journalist, admin: Admin) -> None:
    everything.enqueue("r1")
    everything.claim(ttl_seconds=0.05)
    admin.execute("select pg_sleep(0.1)")
    everything.claim(ttl_seconds=0.05)
    admin.execute("select pg_sleep(0.1)")
    everything.reap()
    everything.claim(ttl_seconds=0.05)
    admin.execute("select pg_sleep(0.1)")
    everything.reap(max_evictions=3)
    assert told(admin) == ["enqueued", "claimed", "evicted", "claimed", "evicted", "claimed", "evicted", "failed"]
    assert facts(admin)[-1].code == "evicted_too_often"


def test_an_eviction_names_who_held_the_lease(everything: Journalist, admin: Admin, hand: Hand) -> None:
    everything.enqueue("r1")
    everything.claim(ttl_seconds=0.05)
    admin.execute("update pgworker.jobs set runner = 'killed'")
    admin.execute("select pg_sleep(0.1)")
    everything.claim(ttl_seconds=0.05)
    assert [(fact.what, fact.runner) for fact in facts(admin)[-2:]] == [("evicted", "killed"), ("claimed", "by hand")]


def test_what_is_not_written_is_not_told(everything: Journalist, admin: Admin) -> None:
    everything.enqueue("r1")
    claim = everything.claim()
    everything.enqueue("r2")
    before = facts(admin)
    assert everything.finish(claim) == "lost"
    assert everything.settle(claim, FAIL) == "lost"
    assert facts(admin) == before


def test_a_fact_and_its_change_commit_together(everything: Journalist, admin: Admin) -> None:
    everything.enqueue("r1")
    claim = everything.claim()
    before = facts(admin)
    with everything.hand.connection.transaction(force_rollback=True):
        everything.finish(claim)
    assert facts(admin) == before


def nothing(journalist: Journalist) -> None: ...


def waits(journalist: Journalist) -> None:
    journalist.enqueue("r1")


def runs(journalist: Journalist) -> Claim:
    waits(journalist)
    return journalist.claim()


def has_expired(journalist: Journalist) -> None:
    runs(journalist)
    journalist.hand.connection.execute("update pgworker.jobs set lease_expires_at = clock_timestamp()")


def has_succeeded(journalist: Journalist) -> int:
    claim = runs(journalist)
    journalist.finish(claim)
    return claim.id


def has_failed(journalist: Journalist) -> int:
    claim = runs(journalist)
    journalist.settle(claim, FAIL)
    return claim.id


def settles(settlement: Settlement) -> Callable[[Journalist, Any], object]:
    return lambda journalist, claim: journalist.settle(claim, settlement)


def reopens(state: State, what: str) -> Callable[[Journalist, Any], object]:
    return lambda journalist, id_: journalist.hand.send(
        reopen_jobs(TABLES, "work", [id_], states=[state], what=what, code=None, facts=journalist.level)
    )


def forgets(journalist: Journalist, _: object) -> object:
    return journalist.hand.send(forget_job(TABLES, "work", "k", facts=journalist.level))


def cancels(journalist: Journalist, claim: Claim) -> object:
    return journalist.hand.send(cancel_jobs(TABLES, "work", [claim.id], facts=journalist.level))


STEPS: dict[str, tuple[Callable[[Journalist], Any], Callable[[Journalist, Any], object]]] = {
    # the fact: what the job is like before, and the step that tells the fact
    "enqueued": (nothing, lambda journalist, _: journalist.enqueue("r1")),
    "replaced": (waits, lambda journalist, _: journalist.enqueue("r2")),
    "superseded": (runs, lambda journalist, _: journalist.enqueue("r2")),
    "requeued": (has_succeeded, lambda journalist, _: journalist.enqueue("r2")),
    "claimed": (waits, lambda journalist, _: journalist.claim()),
    "succeeded": (runs, lambda journalist, claim: journalist.finish(claim)),
    "retried": (runs, settles(RETRY)),
    "parked": (runs, settles(PARK)),
    "released": (runs, settles(RELEASE)),
    "failed": (runs, settles(FAIL)),
    "cancelled": (runs, settles(CANCEL)),
    "evicted": (has_expired, lambda journalist, _: journalist.reap()),
    "cancel_requested": (runs, cancels),
    "retry_requested": (has_failed, reopens("failed", "retry_requested")),
    "rebuild_requested": (has_succeeded, reopens("succeeded", "rebuild_requested")),
    "forgotten": (has_failed, forgets),
}


def everything_stored(admin: Admin) -> list[Any]:
    return [
        admin.execute(f"select * from pgworker.{table} order by 1").fetchall() for table in ("jobs", "results", "facts")
    ]


@pytest.mark.contract("B40")
@pytest.mark.parametrize("end", ["raises", "is killed"])
@pytest.mark.parametrize("what", STEPS)
def test_a_change_whose_fact_cannot_be_written_is_not_made(
    everything: Journalist, admin: Admin, what: str, end: str
) -> None:
    before, step = STEPS[what]
    given = before(everything)
    stored = everything_stored(admin)
    deed = "raise exception 'no'" if end == "raises" else "perform pg_terminate_backend(pg_backend_pid())"
    admin.execute(
        f"create function public.fail() returns trigger language plpgsql as $$ begin {deed}; return new; end $$;"
        "create trigger fail before insert on pgworker.facts for each row"
        f" when (new.what = '{what}') execute function public.fail()".encode()
    )
    with pytest.raises(errors.RaiseException if end == "raises" else psycopg.OperationalError):
        step(everything, given)
    assert everything_stored(admin) == stored


AFTER = {
    **dict.fromkeys(("enqueued", "superseded", "requeued", "retried", "parked", "released", "evicted"), "waits"),
    **dict.fromkeys(("retry_requested", "rebuild_requested"), "waits"),
    "claimed": "runs",
    **{state: state for state in ("succeeded", "failed", "cancelled")},
    "forgotten": "is gone",
}
"""What the journal's readers know a job to be after each fact; those that are not here leave it as it was."""

SHOWN = {"ready": "waits", "scheduled": "waits", "running": "runs", "cancelling": "runs", "expired": "runs"}


def is_move(change: Change) -> bool:
    old = (change.old_state, change.old_token, change.old_generation, change.old_cancel_requested)
    return old != (change.state, change.token, change.generation, change.cancel_requested)


@pytest.mark.parametrize("what", [*STEPS, "evicted by a claim"])
def test_each_move_tells_one_fact_and_the_facts_tell_the_state(everything: Journalist, admin: Admin, what: str) -> None:
    """Of a kind that keeps all facts. The SQL function, which knows no kind, tells no more than `superseded`."""
    install(admin)
    before, step = STEPS.get(what, (has_expired, lambda journalist, _: journalist.claim(0.05)))
    step(everything, before(everything))
    moves = [change.txid for change in read(admin) if is_move(change)]
    by_transaction = admin.execute("select xid::text from pgworker.facts order by id").fetchall()
    if what == "evicted by a claim":
        moves.append(moves[-1])  # two at once: from its old owner to a new one
    assert [xid for (xid,) in by_transaction] == moves
    state = "is gone"
    for fact in told(admin):
        state = AFTER.get(fact, state)
    (shown,) = admin.execute("select state from pgworker.job_states").fetchone() or ("is gone",)
    assert SHOWN.get(shown, shown) == state


def test_there_is_no_other_fact(admin: Admin) -> None:
    ((constraint,),) = admin.execute("select pg_get_constraintdef(oid) from pg_constraint where conname = 'facts_what'")
    assert set(re.findall(r"'(\w+)'", constraint)) == set(STEPS)


def _well(journalist: Journalist) -> None:
    journalist.enqueue("r1")
    journalist.enqueue("r2")
    journalist.settle(journalist.claim(), RELEASE)
    journalist.finish(journalist.claim())
    journalist.enqueue("r3")


def _badly(journalist: Journalist) -> None:
    journalist.settle(journalist.claim(), RETRY)
    journalist.settle(journalist.claim(), PARK)
    journalist.claim()
    journalist.enqueue("r4")
    journalist.settle(journalist.claim(), FAIL)


@pytest.mark.parametrize(
    ("level", "well", "badly"),
    [
        ("none", [], []),
        ("exceptional", [], ["retried", "parked", "superseded", "failed"]),
        (
            "all",
            ["enqueued", "replaced", "claimed", "released", "claimed", "succeeded", "requeued"],
            ["claimed", "retried", "claimed", "parked", "claimed", "superseded", "claimed", "failed"],
        ),
    ],
)
def test_a_level_keeps_what_it_says(hand: Hand, admin: Admin, level: Any, well: list[str], badly: list[str]) -> None:
    journalist = Journalist(hand, FACTS[level])
    steps: list[tuple[Callable[[Journalist], None], list[str]]] = [(_well, well), (_badly, well + badly)]
    for step, expected in steps:
        step(journalist)
        assert told(admin) == expected


@pytest.mark.ruling("2.3")
def test_a_kind_may_wait_for_the_lease_that_it_took_away(everything: Journalist, hand: Hand, admin: Admin) -> None:
    everything.enqueue("r1")
    everything.claim(ttl_seconds=60.0)
    ends = admin.execute("select lease_expires_at from pgworker.jobs").fetchone()
    assert everything.enqueue("r2", wait=True) == "superseded"
    assert admin.execute("select ready_at from pgworker.jobs").fetchone() == ends
    assert hand.claim() == []


@pytest.mark.ruling("2.3")
def test_who_supersedes_waiting_work_waits_as_long(everything: Journalist, hand: Hand, admin: Admin) -> None:
    everything.enqueue("r1")
    everything.claim(ttl_seconds=60.0)
    ends = admin.execute("select lease_expires_at from pgworker.jobs").fetchone()
    everything.enqueue("r2", wait=True)
    everything.enqueue("r3", wait=True)
    assert admin.execute("select ready_at from pgworker.jobs").fetchone() == ends
    hand.connection.execute("select pgworker.enqueue('work', key => 'k', revision => 'r4')")
    assert admin.execute("select ready_at from pgworker.jobs").fetchone() == ends
    admin.execute("update pgworker.jobs set state = 'cancelled', finished_at = clock_timestamp()")
    everything.enqueue("r5")
    assert admin.execute("select ready_at from pgworker.jobs").fetchone() == ends
    assert hand.claim() == []


@pytest.mark.ruling("2.3", "2.30")
def test_a_lease_from_before_the_clock_was_set_back_is_waited_for_as_long_as_it_was_to_last(
    everything: Journalist, admin: Admin
) -> None:
    everything.enqueue("r1")
    everything.claim(ttl_seconds=60.0)
    admin.execute("update pgworker.jobs set lease_expires_at = lease_expires_at + interval '1 day'")
    everything.enqueue("r2", wait=True)
    ((seconds,),) = admin.execute("select extract(epoch from ready_at - clock_timestamp()) from pgworker.jobs")
    assert 50 < seconds <= 60


@pytest.mark.ruling("2.3")
def test_work_that_nobody_runs_does_not_wait(everything: Journalist, hand: Hand) -> None:
    """Neither as it never ran, nor as it was given back."""
    everything.enqueue("r1")
    everything.enqueue("r2", wait=True)
    (claim,) = hand.claim()
    assert claim.revision == "r2"
    hand.settle(claim, RELEASE)
    everything.enqueue("r3", wait=True)
    assert [claim.revision for claim in hand.claim()] == ["r3"]


def test_the_sql_function_tells_that_it_superseded(everything: Journalist, admin: Admin, hand: Hand) -> None:
    everything.enqueue("r1")
    everything.claim()
    hand.connection.execute("select pgworker.enqueue('work', key => 'k', revision => 'r2')")
    assert told(admin) == ["enqueued", "claimed", "superseded"]
