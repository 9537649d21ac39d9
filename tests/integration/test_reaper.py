"""Expired leases: who counts them, who ends the job, and that no row is ever out of everybody's sight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeAlias
from uuid import uuid4

import psycopg
import pytest

from pgworker import App, Job, Lease, NewJob
from pgworker.db import Database
from pgworker.events import JobSettled
from pgworker.job import Claim, Urgency
from pgworker.maintenance import Reaper
from pgworker.outcome import Settlement
from pgworker.policy import STORE_TIMEOUT, make_policy
from pgworker.queue import JobsTable
from pgworker.statements import BEGINNING, Cursor, Lane, Reaped, Statement
from pgworker.surveys import Surveys
from tests.handles import FAIL, RELEASE, RETRY, Hand, Recorder, age, result, row, running, untyped
from tests.handles import hand as other_hand

Admin: TypeAlias = psycopg.Connection[Any]

TTL = 0.5
LIMIT = 3


@pytest.fixture(autouse=True)
def _server_older_than_a_lease(admin: Admin) -> None:
    """A lease from before the server's start is no eviction: wait until there can be none."""
    admin.execute(
        "select pg_sleep(1 - extract(epoch from clock_timestamp() - pg_postmaster_start_time()))"
        " where clock_timestamp() < pg_postmaster_start_time() + interval '1 second'"
    )


@pytest.fixture
def expired(hand: Hand, admin: Admin) -> Callable[..., None]:
    """Make a job whose lease has run out, with these columns."""

    def make(key: str, *, evictions: int = 0, cancel: bool = False, **columns: object) -> None:
        hand.enqueue(key, "r")
        columns |= {"evictions": evictions, "cancel_requested_at": datetime.now(UTC) if cancel else None}
        columns |= {"runner": "another", "token": uuid4()}
        names = ", ".join(f"{name} = %({name})s" for name in columns)
        admin.execute(
            f"update pgworker.jobs set {names}, lease_expires_at = clock_timestamp() where key = %(key)s".encode(),
            {**columns, "key": key},
        )

    return make


def lapse(admin: Admin) -> None:
    """Every lease has run out."""
    admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp() where token is not null")


ENDED = ("state", "evictions", "last_code", "token", "lease_expires_at", "runner", "cancel_requested_at")


@pytest.mark.contract("D27", "X10", "X29")
@pytest.mark.ruling("1.8")
@pytest.mark.parametrize(
    ("evictions", "cancel", "state", "code"),
    [
        (0, False, "pending", None),
        (LIMIT - 2, False, "pending", None),
        (LIMIT - 1, False, "failed", "evicted_too_often"),
        (LIMIT + 5, False, "failed", "evicted_too_often"),
        (0, True, "cancelled", None),
        (LIMIT - 1, True, "cancelled", None),
    ],
)
def test_an_expired_lease_is_freed_ended_or_cancelled(
    hand: Hand,
    admin: Admin,
    expired: Callable[..., None],
    *,
    evictions: int,
    cancel: bool,
    state: str,
    code: str | None,
) -> None:
    expired("k", evictions=evictions, cancel=cancel, attempts=2)
    before = row(admin, "k")
    page = hand.reap(ttl_seconds=TTL, max_evictions=LIMIT)
    assert (page.read, page.ended_or_freed, page.freed) == (1, 1, int(state == "pending"))
    after = row(admin, "k")
    assert [after[name] for name in ENDED] == [state, evictions + 1, code, None, None, None, None]
    assert (after["finished_at"] is None) is (state == "pending")
    assert (after["attempts"], after["ready_at"], after["lease_epoch"]) == (
        2,
        before["ready_at"],
        before["lease_epoch"],
    )
    assert len(hand.claim()) == int(state == "pending")
    assert hand.reap(ttl_seconds=TTL, max_evictions=LIMIT).ended_or_freed == 0
    assert result(admin, "k") is None


@pytest.mark.contract("X29")
@pytest.mark.ruling("1.8")
@pytest.mark.parametrize(
    ("evictions", "cancel", "taken"),
    [(0, False, True), (LIMIT - 2, False, True), (LIMIT - 1, False, False), (0, True, False)],
)
def test_a_claim_takes_over_what_is_not_the_reapers(
    hand: Hand, admin: Admin, expired: Callable[..., None], *, evictions: int, cancel: bool, taken: bool
) -> None:
    expired("k", evictions=evictions, cancel=cancel)
    before = row(admin, "k")
    claims = hand.claim(max_evictions=LIMIT, ttl_seconds=TTL)
    assert len(claims) == int(taken)
    if taken:
        assert row(admin, "k")["evictions"] == claims[0].evictions == evictions + 1
        assert claims[0].lease_epoch == before["lease_epoch"] + 1
    else:
        assert row(admin, "k") == before


@pytest.mark.ruling("2.29")
def test_without_a_limit_nothing_is_evicted_for_good(hand: Hand, admin: Admin, expired: Callable[..., None]) -> None:
    expired("k", evictions=1_000_000)
    hand.reap(ttl_seconds=TTL, max_evictions=None)
    assert row(admin, "k")["state"] == "pending"
    assert len(hand.claim(max_evictions=None)) == 1


@pytest.mark.contract("D28")
def test_live_leases_future_and_ended_jobs_are_left_alone(hand: Hand, admin: Admin) -> None:
    for key, ttl in (("live", 60.0), ("ended", 60.0), ("retried", 60.0)):
        hand.enqueue(key, "r")
        (claim,) = hand.claim(ttl_seconds=ttl)
        if key == "ended":
            hand.finish(claim)
        elif key == "retried":
            hand.settle(claim, RETRY)
    hand.enqueue("new", "r")
    keys = ("live", "ended", "retried", "new")
    before = [row(admin, key) for key in keys]
    assert hand.reap().ended_or_freed == 0
    assert [row(admin, key) for key in keys] == before


@pytest.mark.contract("A23")
def test_the_old_holder_writes_nothing_after_the_reaper(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r")
    (claim,) = hand.claim(ttl_seconds=TTL)
    lapse(admin)
    hand.reap(ttl_seconds=TTL)
    before = row(admin, "k")
    assert [hand.finish(claim).verdict, hand.settle(claim, FAIL).verdict, hand.renew(claim).verdict] == ["lost"] * 3
    assert row(admin, "k") == before


@pytest.mark.ruling("1.1")
def test_a_locked_row_is_left_for_the_next_pass(
    hand: Hand, admin: Admin, dsn: str, expired: Callable[..., None]
) -> None:
    expired("held")
    expired("free")
    with psycopg.connect(dsn) as other:
        other.execute("select from pgworker.jobs where key = 'held' for update")
        assert hand.reap(ttl_seconds=TTL).freed == 1
        other.rollback()
    assert row(admin, "held")["token"] is not None
    assert hand.reap(ttl_seconds=TTL).freed == 1
    assert row(admin, "held")["token"] is None


def test_two_reapers_at_once_share_the_rows(hand: Hand, admin: Admin, dsn: str) -> None:
    hand.enqueue_many([NewJob(key=f"k{index}") for index in range(600)])
    hand.claim(600, ttl_seconds=TTL)
    lapse(admin)
    start = threading.Barrier(4)
    done: list[int] = []

    def work() -> None:
        mine = other_hand(dsn)
        start.wait(10)
        done.append(mine.reap(ttl_seconds=TTL).ended_or_freed)
        mine.connection.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(done) == 600
    assert admin.execute("select distinct evictions, token from pgworker.jobs").fetchall() == [(1, None)]


@pytest.mark.ruling("1.7")
async def test_a_pass_goes_in_bounded_pages_over_all_lanes(
    hand: Hand, admin: Admin, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.maintenance._PAGE", 10)
    pages: list[tuple[Lane, Reaped]] = []

    class Watched(JobsTable):
        def reap(self, lane: Lane, *, limit: int, after: Cursor = BEGINNING) -> Statement[Reaped]:
            statement = super().reap(lane, limit=limit, after=after)

            def read(rows: Any) -> Reaped:
                pages.append((lane, statement.read(rows)))
                return pages[-1][1]

            return Statement(statement.name, statement.sql, statement.parameters, read)

    lanes = [Lane("work", urgency, priority) for urgency in (0, 1) for priority in (-1, 0, 1)]
    for lane in lanes:
        urgency: Urgency = "catch_up" if lane.urgency else "fresh"
        hand.enqueue_many([NewJob(urgency=urgency, priority=lane.priority) for _ in range(25)])
        last = hand.claim(25, ttl_seconds=TTL, urgency=lane.urgency, priority=lane.priority)[-7:]
        admin.execute(
            "update pgworker.jobs set lease_expires_at = clock_timestamp() where id = any(%s)", [[c.id for c in last]]
        )
    database = Database(dsn, "worker", deadline=STORE_TIMEOUT, connections=1)
    await database.open()
    policy = make_policy("standard", {"lease": Lease.renew(timedelta(seconds=TTL))})
    queue = Watched(hand.tables, replace(untyped("work"), policy=policy))
    freed = await Reaper(Surveys(database), database).reap(queue)
    await database.close()
    assert freed == 6 * 7  # the last of each lane, behind two pages of live leases
    assert admin.execute("select count(*) from pgworker.jobs where token is null and evictions = 1").fetchone() == (42,)
    assert [page.read for lane, page in pages if lane == lanes[3]] == [10, 10, 5]
    assert [lane for lane, _ in pages] == [lane for lane in lanes for _ in range(3)]


@pytest.mark.contract("D28", "X29")
@pytest.mark.ruling("1.8")
async def test_a_worker_reaps_from_time_to_time_and_wakes_its_runner(
    app: App, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.maintenance.REAP_EVERY", timedelta(seconds=0.2))

    @app.kind("work", poll=30.0, max_evictions=LIMIT, lease=Lease.renew(timedelta(seconds=TTL)))
    async def work(job: Job[int]) -> None: ...

    seen = Recorder(app)
    async with running(app.worker()):
        await app.enqueue("work", 0)
        await seen.wait(lambda: len(seen.of(JobSettled)) == 1)
        # "free" is at its limit too, which no claim takes; but its lease ended by a restart of the server: no eviction.
        admin.execute(
            "insert into pgworker.jobs (kind, key, payload, evictions, cancel_requested_at, token, lease_expires_at)"
            " select 'work', key, '1', evictions, cancel, gen_random_uuid(), expires from"
            " (values ('cancel', 0, clock_timestamp(), clock_timestamp()), ('limit', 2, null, clock_timestamp()),"
            " ('free', 2, null, pg_postmaster_start_time())) as v(key, evictions, cancel, expires)"
        )
        await seen.wait(lambda: any(event.key == "free" for event in seen.of(JobSettled)))  # long before its poll
    found = admin.execute(
        "select key, state, last_code from pgworker.jobs where key in ('limit', 'cancel') order by key"
    )
    assert found.fetchall() == [("cancel", "cancelled", None), ("limit", "failed", "evicted_too_often")]


# --- no row is out of sight -----------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """What claims and reapers look at, of a pending row: two rows of one shape are the same to them."""

    lease: str
    cancel: bool
    evictions: int
    due: bool
    revision: str
    current: bool


FEW = 2
PARK = Settlement("pending", "parked", delay_seconds=3600.0)
SHAPE = """
select case when token is null then 'none' when lease_expires_at > clock_timestamp() then 'live'
            when lease_expires_at > clock_timestamp() - interval '1 minute' then 'expired' else 'expired long ago' end,
       cancel_requested_at is not null, least(evictions, %(limit)s), ready_at <= clock_timestamp(), revision,
       generation = 1 or token is null
from pgworker.jobs where state = 'pending'"""

# As it is decided: at once without a lease, else a request.
CANCEL = """
update pgworker.jobs set state = case when token is null then 'cancelled' else state end,
    finished_at = case when token is null then clock_timestamp() end,
    cancel_requested_at = case when token is not null then clock_timestamp() end
where state = 'pending'"""


@dataclass
class Walker:
    """One row, moved by every operation that there is, over one connection."""

    hand: Hand

    @property
    def connection(self) -> Admin:
        return self.hand.connection

    def operations(self) -> Iterator[tuple[str, Callable[[], object]]]:
        for revision, if_pending, hours in (
            (None, "replace", 0),
            ("r1", "replace", 0),
            ("r2", "replace", 0),
            ("r2", "replace", 1),
            (None, "keep", 0),
            ("r2", "keep", 0),
        ):
            delay = timedelta(hours=hours)
            enqueue = partial(self.hand.enqueue, "k", revision, if_pending=if_pending, delay=delay)
            yield f"enqueue {revision} {if_pending} {delay}", enqueue
        yield "claim", self._claim
        yield "finish", lambda: self._held(self.hand.finish)
        for name, settlement in (("release", RELEASE), ("retry", RETRY), ("fail", FAIL), ("park", PARK)):
            yield name, partial(self._settle, settlement)
        yield "renew", lambda: self._held(self.hand.renew)
        yield "reap", lambda: self.hand.reap(max_evictions=FEW, ttl_seconds=0)
        yield "an hour passes", lambda: age(self.connection, 3601)
        yield "the lease runs out", lambda: lapse(self.connection)
        yield "cancel", lambda: self.connection.execute(CANCEL)

    def _claim(self) -> None:
        if self.hand.claim(max_evictions=FEW, ttl_seconds=TTL):
            self.connection.execute(
                "update pgworker.jobs set lease_expires_at = clock_timestamp() + interval '1 minute'"
            )

    def _settle(self, settlement: Settlement) -> None:
        self._held(lambda claim: self.hand.settle(claim, settlement))

    def _held(self, write: Callable[[Claim], object]) -> None:
        """A write of whoever holds the row, since its first generation; there may be nobody."""
        now = row(self.connection, "k")
        if now["token"]:
            fence = {name: now[name] for name in ("kind", "id", "key", "revision", "token")}
            rest = {name: now[name] for name in ("attempts", "max_attempts", "evictions", "lease_epoch", "priority")}
            other = {"urgency": 0, "ready_at": now["ready_at"], "waited_seconds": 0.0, "payload": None}
            write(Claim(**fence, **rest, **other, generation=1))

    def shape(self) -> Shape | None:
        found = self.connection.execute(SHAPE, {"limit": FEW}).fetchone()
        return None if found is None else Shape(*found)

    def save(self) -> str:
        """The whole row, as text."""
        found = self.connection.execute("select to_jsonb(j)::text from pgworker.jobs j").fetchone()
        assert found is not None
        return str(found[0])

    def restore(self, saved: str) -> None:
        self.connection.execute("delete from pgworker.jobs")
        self.connection.execute(
            "insert into pgworker.jobs select (jsonb_populate_record(null::pgworker.jobs, %s::jsonb)).*", [saved]
        )

    def tries(self, saved: str) -> Iterator[tuple[str, Shape, str]]:
        """What becomes of this row by each operation, as long as it is pending."""
        self.restore(saved)
        for name, operation in self.operations():
            self.connection.execute("begin")
            operation()
            shape = self.shape()
            if shape is not None:
                yield name, shape, self.save()
            self.connection.execute("rollback")

    def sees(self, saved: str) -> bool:
        """Whether, once its times have come, a claim takes this row, or the reaper frees or ends it."""
        self.restore(saved)
        age(self.connection, 86_400)
        return bool(self.hand.claim(max_evictions=FEW) or self.hand.reap(max_evictions=FEW).ended_or_freed)


@pytest.mark.ruling("0.5")
def test_no_reachable_row_is_out_of_everybodys_sight(hand: Hand) -> None:
    """Every operation is tried from each shape of a pending row; once its times have come, somebody sees each."""
    walker = Walker(hand)
    hand.enqueue("k", "r1")
    start = walker.shape()
    assert start is not None
    reached: dict[Shape, tuple[str, str]] = {start: ("enqueue r1", walker.save())}
    todo = [start]
    while todo:
        path, saved = reached[todo.pop()]
        for name, shape, changed in walker.tries(saved):
            if shape not in reached:
                reached[shape] = (f"{path}; {name}", changed)
                todo.append(shape)
    assert [f"{shape}: {path}" for shape, (path, saved) in reached.items() if not walker.sees(saved)] == []
    # The walk has been everywhere: each lease with and without a request and evictions; and a request needs a lease.
    seen = {(shape.lease, shape.cancel, shape.evictions) for shape in reached}
    leases = ("live", "expired", "expired long ago")
    assert seen >= {(lease, cancel, n) for lease in leases for cancel in (False, True) for n in range(FEW)}
    assert {cancel for lease, cancel, _ in seen if lease == "none"} == {False}
    assert {shape.due for shape in reached} == {False, True}


@pytest.mark.ruling("2.30")
def test_a_lease_from_before_the_clock_was_set_back_lasts_no_longer_than_it_was_asked_for(
    hand: Hand, admin: Admin
) -> None:
    for key in ("far", "near"):
        hand.enqueue(key, "r")
    claims = {claim.key: claim for claim in hand.claim(2, ttl_seconds=60)}
    admin.execute("update pgworker.jobs set lease_expires_at = lease_expires_at + interval '2 hours' where key = 'far'")
    near = row(admin, "near")
    reaped = hand.reap(ttl_seconds=15)  # of another release's worker: the row says for how long the lease was
    assert (reaped.ended_or_freed, reaped.freed) == (0, 0)
    assert row(admin, "near") == near
    left = admin.execute(
        "select lease_expires_at - clock_timestamp() between interval '50 s' and interval '60 s', evictions"
        " from pgworker.jobs where key = 'far'"
    ).fetchone()
    assert left == (True, 0)
    assert hand.renew(claims["far"]).verdict == "done"
    assert hand.finish(claims["far"]).verdict == "done"
