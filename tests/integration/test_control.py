"""Who supersedes or cancels a running job is heard at once by the process that runs it, not at its next renewal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import anyio
import anyio.to_thread
import psycopg
import pytest

from pgworker import App, Job, Lease, NewJob
from pgworker.claimer import Claimer, Taken
from pgworker.events import JobLost, JobSettled
from pgworker.job import Claim
from pgworker.leases import Held, LeaseKeeper
from pgworker.policy import STORE_TIMEOUT
from pgworker.queue import JobsRenewals
from pgworker.statements import Renewal, Statement
from tests.databases import TABLES
from tests.handles import Hand, Recorder, result, row, running
from tests.integration.test_facts import facts

SLOW = Lease.renew(timedelta(seconds=600), timedelta(seconds=200))
"""A lease whose next renewal is not to be waited for."""
COVERING = "content"
"""The preset whose leases are never renewed: 770 s for batches of 64 in two minutes."""


@pytest.fixture(autouse=True)
def rare_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test hears of, it hears from a hint, unless it says otherwise."""
    monkeypatch.setattr("pgworker.leases._LOOK_EVERY_SECONDS", 600.0)


class Handlers:
    """Handlers that stay inside, and tell what becomes of them."""

    def __init__(self) -> None:
        self.inside: list[Job[int]] = []
        self.told: list[tuple[str, str | None]] = []
        """Who was told to stop inside the handler, and why."""
        self._leave = anyio.Event()
        self._changed = anyio.Event()

    async def stay(self, job: Job[int]) -> int:
        """Inside until let go; the second revision of a thing passes through."""
        if job.payload == 2:
            return 2
        self.inside.append(job)
        self._tell()
        try:
            await self._leave.wait()
        except anyio.get_cancelled_exc_class():
            self.told.append((job.key, job.signal.cause))
            raise
        finally:
            self.inside.remove(job)
            self._tell()
        return job.payload

    def let_go(self) -> None:
        self._leave.set()

    async def until(self, inside: int) -> None:
        with anyio.fail_after(20):
            while len(self.inside) != inside:
                await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


async def eventually(condition: Callable[[], bool]) -> None:
    """Until something holds that no event tells of."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 - said above
            await anyio.sleep(0.01)


async def until_listening(admin: psycopg.Connection[tuple[object, ...]]) -> None:
    """Until the worker's listener has poked everybody, as it does at its start, and asked itself whether it hears."""
    ask = (
        "select from pg_stat_activity where application_name = 'pgworker listen' and state = 'idle'"
        " and datname = current_database() and query like '%pg_notify%'"
    )
    await eventually(lambda: admin.execute(ask).fetchone() is not None)


def hint(admin: psycopg.Connection[tuple[object, ...]], payload: str) -> None:
    admin.execute("select pg_notify(%s, %s)", [TABLES.channel, payload])


class Looks:
    """Watches this process look at its leases: when, and at how many at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: list[float] = []
        self.sizes: list[int] = []
        original = LeaseKeeper._ask

        def watched(keeper: LeaseKeeper, asked: Mapping[Held, float | None]) -> None:
            looked = sum(seconds is None for seconds in asked.values())
            if looked:
                self.at.append(time.monotonic())
                self.sizes.append(looked)
            original(keeper, asked)

        monkeypatch.setattr(LeaseKeeper, "_ask", watched)


class Deaf:
    """Lease keepers that heed no hint before they may: those of a listener's start come when they like."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hears = False
        self.ignored: set[str] = set()
        original = LeaseKeeper.verify

        def verify(keeper: LeaseKeeper, kind: str) -> None:
            if self.hears:
                original(keeper, kind)
            else:
                self.ignored.add(kind)

        monkeypatch.setattr(LeaseKeeper, "verify", verify)


def work_kind(app: App, handlers: Handlers, lease: str, *, concurrency: int = 2) -> None:
    """The kind `work`, whose handlers stay inside; with leases of one sort or the other."""
    if lease == "covering":

        @app.kind("work", preset=COVERING, facts="exceptional", concurrency=concurrency, poll=30.0)
        async def covered(job: Job[int]) -> int:
            return await handlers.stay(job)

    else:

        @app.kind("work", lease=SLOW, concurrency=concurrency, poll=30.0)
        async def renewed(job: Job[int]) -> int:
            return await handlers.stay(job)


LEASES = pytest.mark.parametrize("lease", ["covering", "renewed"])


# --- superseded ------------------------------------------------------------------------------------------------------


@LEASES
@pytest.mark.contract("A12", "A24")
@pytest.mark.ruling("1.19", "2.3")
async def test_a_superseded_handler_is_told_at_once(app: App, admin: psycopg.Connection, lease: str) -> None:
    handlers = Handlers()
    work_kind(app, handlers, lease)
    seen = Recorder(app)
    await app.enqueue("work", 1, key="k", revision="r1")
    async with running(app.worker()):
        await handlers.until(inside=1)
        await until_listening(admin)
        assert (await app.enqueue("work", 2, key="k", revision="r2")).status == "superseded"
        await handlers.until(inside=0)
        await seen.count(JobSettled, 1)
    assert handlers.told == [("k", "lost")]
    assert [(lost.key, lost.reason) for lost in seen.of(JobLost)] == [("k", "lost")]
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["value"], row(admin, "k")["lease_epoch"]) == (2, 2)


@LEASES
@pytest.mark.contract("A24")
@pytest.mark.ruling("1.19", "2.3")
async def test_it_is_told_also_beside_the_new_revisions_run_in_the_same_process(
    app: App, hand: Hand, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, lease: str
) -> None:
    deaf, handlers = Deaf(monkeypatch), Handlers()
    work_kind(app, handlers, lease)
    seen = Recorder(app)
    await app.enqueue("work", 1, key="k", revision="r1")
    async with running(app.worker()):
        await handlers.until(inside=1)
        await until_listening(admin)
        hand.enqueue("k", "r2", 3)
        hint(admin, "r:work")
        await handlers.until(inside=2)
        deaf.hears = True
        hint(admin, "c:work")
        await handlers.until(inside=1)
        assert [job.revision for job in handlers.inside] == ["r2"]
        handlers.let_go()
        await seen.count(JobSettled, 1)
    assert handlers.told == [("k", "lost")]
    stored = result(admin, "k")
    assert stored is not None
    assert stored["value"] == 3


@LEASES
@pytest.mark.ruling("1.19", "1.4")
async def test_it_is_told_when_the_callers_transaction_commits_and_not_before(
    app: App, dsn: str, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, lease: str
) -> None:
    looks = Looks(monkeypatch)
    handlers = Handlers()
    work_kind(app, handlers, lease)
    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(1, "kept", "r1"), NewJob(1, "gone", "r1")])
    async with running(app.worker()), await psycopg.AsyncConnection.connect(dsn) as caller:
        await handlers.until(inside=2)
        await until_listening(admin)
        await app.enqueue("work", 2, key="kept", revision="r2", conn=caller)
        await caller.rollback()
        await app.enqueue("work", 2, key="gone", revision="r2", conn=caller)
        looks.at.clear()
        hint(admin, "c:work")  # about something else
        await eventually(lambda: bool(looks.at))
        assert {job.key for job in handlers.inside} == {"kept", "gone"}
        await caller.commit()
        await handlers.until(inside=1)
        assert handlers.told == [("gone", "lost")]
        handlers.let_go()
        await seen.count(JobSettled, 2)
    assert handlers.told == [("gone", "lost")]
    assert {key: row(admin, key)["revision"] for key in ("kept", "gone")} == {"kept": "r1", "gone": "r2"}


@pytest.mark.ruling("1.19", "2.10")
async def test_a_superseded_item_of_a_batch_is_marked_and_the_call_goes_on(app: App, admin: psycopg.Connection) -> None:
    handlers = Handlers()
    batches: list[list[Job[int]]] = []

    @app.kind("work", preset=COVERING, batch=64, poll=30.0)
    async def work(jobs: list[Job[int]]) -> list[int]:
        batches.append(jobs)
        if len(batches) == 1:
            await handlers.stay(jobs[0])
        return [job.payload for job in jobs]

    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(1, f"k{number}", "r1") for number in range(3)])
    async with running(app.worker()):
        await handlers.until(inside=1)
        await until_listening(admin)
        await app.enqueue("work", 3, key="k1", revision="r2")
        await anyio.to_thread.run_sync(batches[0][1].signal.wait, 20)
        assert [job.lost for job in batches[0]] == [False, True, False]
        assert len(handlers.inside) == 1
        handlers.let_go()
        await seen.count(JobSettled, 3)
    assert handlers.told == []
    assert [lost.key for lost in seen.of(JobLost)] == ["k1"]


@pytest.mark.ruling("1.19", "2.12")
async def test_a_thread_handler_sees_it_between_its_steps(app: App, admin: psycopg.Connection) -> None:
    inside = anyio.Event()
    told: list[tuple[bool, bool]] = []

    @app.kind("work", lease=SLOW, poll=30.0)
    def work(job: Job[int]) -> int:
        if job.payload == 1:
            anyio.from_thread.run_sync(inside.set)
            job.signal.wait(20)
            told.append((job.cancelled, job.lost))
        return job.payload

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k", revision="r1")
    async with running(app.worker()):
        await inside.wait()
        await until_listening(admin)
        await app.enqueue("work", 2, key="k", revision="r2")
        await seen.count(JobSettled, 1)
        await seen.count(JobLost, 1)
    assert told == [(True, True)]


# --- cancelled -------------------------------------------------------------------------------------------------------


@LEASES
@pytest.mark.contract("X30", "B64")
@pytest.mark.ruling("1.19")
async def test_a_running_job_that_an_operator_cancels_is_told_at_once(
    app: App, admin: psycopg.Connection, lease: str
) -> None:
    handlers = Handlers()
    work_kind(app, handlers, lease)
    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(1, "k", "r1"), NewJob(1, "other", "r1")])
    async with running(app.worker()):
        await handlers.until(inside=2)
        await until_listening(admin)
        admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp() where key = 'k'")
        hint(admin, "c:work")
        await seen.count(JobSettled, 1)
        assert handlers.told == [("k", "cancel")]
        assert [job.key for job in handlers.inside] == ["other"]
    assert row(admin, "k")["state"] == "cancelled"
    assert [(fact.what, fact.attempts) for fact in facts(admin)] == [("cancelled", 0)]
    assert facts(admin, "other") == []


@LEASES
@pytest.mark.ruling("1.19", "2.16")
@pytest.mark.parametrize("verb", ["cancel", "forget"])
async def test_the_verbs_tell_a_running_job_at_once(app: App, admin: psycopg.Connection, lease: str, verb: str) -> None:
    handlers = Handlers()
    work_kind(app, handlers, lease)
    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(1, "k", "r1"), NewJob(1, "other", "r1")])
    async with running(app.worker()):
        await handlers.until(inside=2)
        await until_listening(admin)
        if verb == "cancel":
            assert await app.cancel("work", key="k") == 1
        else:
            assert await app.forget("work", "k")
        await handlers.until(inside=1)
        assert handlers.told == [("k", "cancel" if verb == "cancel" else "lost")]
        await seen.count(JobSettled if verb == "cancel" else JobLost, 1)
    left = admin.execute("select key, state from pgworker.jobs order by key").fetchall()
    assert left == [("k", "cancelled")] * (verb == "cancel") + [("other", "pending")]


# --- without hints ---------------------------------------------------------------------------------------------------


async def test_hints_that_may_have_been_missed_are_made_up_for(app: App, hand: Hand, admin: psycopg.Connection) -> None:
    handlers = Handlers()
    work_kind(app, handlers, "covering")
    await app.enqueue("work", 1, key="k", revision="r1")
    async with running(app.worker()):
        await handlers.until(inside=1)
        await until_listening(admin)
        hand.enqueue("k", "r2", 2)  # which sends no hint
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'pgworker listen' and datname = current_database()"
        )
        await handlers.until(inside=0)
    assert handlers.told == [("k", "lost")]


@LEASES
@pytest.mark.contract("X30", "B64")
@pytest.mark.ruling("1.19")
@pytest.mark.parametrize("how", ["superseded", "cancelled"])
async def test_without_listen_it_is_told_within_a_renewal_or_by_the_look_at_covering_leases(
    dsn: str, hand: Hand, monkeypatch: pytest.MonkeyPatch, lease: str, how: str
) -> None:
    monkeypatch.setattr("pgworker.leases._LOOK_EVERY_SECONDS", 0.2)
    monkeypatch.setattr(LeaseKeeper, "verify", lambda _, kind: pytest.fail(f"a hint for {kind}"))
    handlers = Handlers()
    async with App(dsn, listen_dsn="host=127.0.0.1 port=1 connect_timeout=1") as app:
        seen = Recorder(app)
        if lease == "covering":
            work_kind(app, handlers, lease)
        else:

            @app.kind("work", lease=Lease.renew(timedelta(seconds=20), timedelta(seconds=0.2)), poll=30.0)
            async def work(job: Job[int]) -> int:
                return await handlers.stay(job)

        await app.enqueue("work", 1, key="k", revision="r1")
        async with running(app.worker()):
            await handlers.until(inside=1)
            if how == "superseded":
                hand.enqueue("k", "r2", 2)
            else:
                runner = row(hand.connection, "k")["runner"]
                assert [await app.cancel("work", key="k"), await app.cancel("work", key="k")] == [1, 0]
            await handlers.until(inside=0)
            cause, event = ("lost", JobLost) if how == "superseded" else ("cancel", JobSettled)
            assert handlers.told == [("k", cause)]
            await seen.count(event, 1)
            if how == "cancelled":
                assert row(hand.connection, "k")["state"] == "cancelled"
                assert [(fact.what, fact.runner, fact.attempts) for fact in facts(hand.connection)] == [
                    ("cancel_requested", runner, 0),
                    ("cancelled", runner, 0),
                ]


@pytest.mark.ruling("1.19")
async def test_looks_neither_lock_nor_write(
    app: App, dsn: str, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.leases._LOOK_EVERY_SECONDS", 0.05)
    looks = Looks(monkeypatch)
    handlers = Handlers()
    work_kind(app, handlers, "covering")
    await app.enqueue("work", 1, key="k", revision="r1")
    seen = Recorder(app)
    async with running(app.worker()), await psycopg.AsyncConnection.connect(dsn) as caller:
        await handlers.until(inside=1)
        before = admin.execute("select xmin::text, * from pgworker.jobs").fetchone()
        await app.enqueue("work", 2, key="k", revision="r2", conn=caller)  # which locks the row
        so_far = len(looks.at)
        with anyio.fail_after(10):
            while len(looks.at) < so_far + 5:
                hint(admin, "c:work")
                await anyio.sleep(0.02)
        assert handlers.told == []  # the row is still ours
        await caller.rollback()
        assert admin.execute("select xmin::text, * from pgworker.jobs").fetchone() == before
        handlers.let_go()
        await seen.count(JobSettled, 1)
    assert seen.of(JobLost) == []


# --- many, and at bad moments ----------------------------------------------------------------------------------------


@LEASES
@pytest.mark.ruling("1.19")
async def test_a_storm_of_two_hundred_is_ten_looks_a_second(
    app: App, dsn: str, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, lease: str
) -> None:
    looks = Looks(monkeypatch)
    handlers = Handlers()
    work_kind(app, handlers, lease, concurrency=200)
    keys = [f"k{number:03}" for number in range(200)]
    await app.enqueue_many("work", [NewJob(1, key, "r1") for key in keys])
    seen = Recorder(app)
    async with running(app.worker()), await psycopg.AsyncConnection.connect(dsn, autocommit=True) as caller:
        await handlers.until(inside=200)
        await until_listening(admin)
        began, looks.at[:] = time.monotonic(), []
        for key in keys:
            await app.enqueue("work", 2, key=key, revision="r2", conn=caller)
        await handlers.until(inside=0)
        looked, took = len(looks.at), time.monotonic() - began
        await seen.count(JobSettled, 200)
    assert sorted(handlers.told) == [(key, "lost") for key in keys]
    assert looked <= took * 10 + 1


@pytest.mark.parametrize("order", ["hint, then hold", "hold, then hint"])
@pytest.mark.ruling("1.19")
async def test_a_job_that_is_superseded_while_its_claim_is_under_way(
    app: App, hand: Hand, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    handlers = Handlers()
    work_kind(app, handlers, "covering")
    claim_once = Claimer.round
    verify = LeaseKeeper.verify
    heard = anyio.Event()

    def watched(keeper: LeaseKeeper, kind: str) -> None:
        verify(keeper, kind)
        heard.set()

    async def superseded_meanwhile(claimer: Claimer, limit: int) -> Taken:
        nonlocal heard
        taken = await claim_once(claimer, limit)
        if [claim.revision for claim in taken.claims] == ["r1"]:
            hand.enqueue("k", "r2", 2)
            if order == "hint, then hold":
                heard = anyio.Event()
                hint(admin, "c:work")
                await heard.wait()
        return taken

    monkeypatch.setattr(Claimer, "round", superseded_meanwhile)
    monkeypatch.setattr(LeaseKeeper, "verify", watched)
    seen = Recorder(app)
    async with running(app.worker()):
        await until_listening(admin)
        hand.enqueue("k", "r1", 1)
        hint(admin, "r:work")
        if order == "hold, then hint":
            await handlers.until(inside=1)
            hint(admin, "c:work")
        await seen.count(JobLost, 1)
    assert [why for _, why in handlers.told] in (["lost"], [])  # [] when it had not entered yet


@pytest.mark.race(6)
@pytest.mark.parametrize("first", ["stop", "supersede"])
@pytest.mark.parametrize("stop", ["release", "drain"])
async def test_a_stop_beside_a_supersede_leaves_the_new_revision_pending_or_done_and_nothing_else(
    app: App, hand: Hand, admin: psycopg.Connection, first: str, stop: str
) -> None:
    handlers = Handlers()
    work_kind(app, handlers, "renewed", concurrency=1)
    seen = Recorder(app)
    await app.enqueue("work", 1, key="k", revision="r1")
    worker = app.worker()
    async with anyio.create_task_group() as group:
        group.start_soon(worker.run)
        await handlers.until(inside=1)
        await until_listening(admin)
        if first == "stop":
            getattr(worker, stop)()
        hand.enqueue("k", "r2", 2)
        hint(admin, "c:work")
        if first == "supersede":
            getattr(worker, stop)()
    assert handlers.inside == []
    after = row(admin, "k")
    assert (after["revision"], after["state"], after["attempts"], after["token"]) == ("r2", "pending", 0, None)
    assert len(seen.of(JobLost)) == 1
    assert seen.of(JobSettled) == []


@pytest.mark.ruling("1.19")
async def test_a_look_that_fails_is_made_again(app: App, hand: Hand, admin: psycopg.Connection) -> None:
    handlers = Handlers()
    work_kind(app, handlers, "covering")
    await app.enqueue("work", 1, key="k", revision="r1")
    async with running(app.worker()):
        await handlers.until(inside=1)
        await until_listening(admin)
        end = (
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where application_name = 'pgworker lease' and datname = current_database()"
        )
        await eventually(lambda: admin.execute(end).fetchall() == [(True,)])  # it may not have connected yet
        hand.enqueue("k", "r2", 2)
        hint(admin, "c:work")
        await handlers.until(inside=0)
    assert handlers.told == [("k", "lost")]


async def test_a_control_hint_for_one_kind_looks_at_its_leases_only(
    app: App, hand: Hand, admin: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.leases._LOOK_EVERY_SECONDS", 60.0)  # no look comes by itself, however slow this is
    deaf, looks, handlers = Deaf(monkeypatch), Looks(monkeypatch), Handlers()
    work_kind(app, handlers, "covering")

    @app.kind("other", preset=COVERING)
    async def other(job: Job[int]) -> int:
        return await handlers.stay(job)

    await app.enqueue("work", 1, key="k", revision="r1")
    await app.enqueue("other", 1)
    async with running(app.worker()):
        await handlers.until(inside=2)
        await until_listening(admin)
        await eventually(
            lambda: deaf.ignored == {"work", "other"}
        )  # not another's, which a test before has left behind
        hand.enqueue("k", "r2", 2)
        deaf.hears = True
        hint(admin, "c:unknown")
        hint(admin, "c:work")
        await handlers.until(inside=1)
    assert looks.sizes == [1]


@pytest.mark.parametrize(("seconds", "warned"), [(0.9, True), (1.0, False)])
async def test_a_lease_that_a_busy_loop_would_lose_is_warned_of(
    app: App, caplog: pytest.LogCaptureFixture, seconds: float, *, warned: bool
) -> None:
    @app.kind("work", lease=Lease.renew(timedelta(seconds=seconds)))
    async def work(job: Job[int]) -> None: ...

    seen = Recorder(app)
    await app.enqueue("work", 1)
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    assert any("evicted_too_often kind=work" in record.getMessage() for record in caplog.records) == warned


@dataclass(frozen=True)
class Theirs:
    """Renewals of a table of the app's own."""

    def __call__(self, leases: Sequence[tuple[Claim, float | None]]) -> Statement[dict[int, Renewal]]:
        ids = [claim.id for claim, _ in leases]
        return Statement(
            "theirs",
            b"select count(*) from public.theirs",
            {},
            lambda _: dict.fromkeys(ids, Renewal("done", cancel_requested=False)),
        )


@pytest.mark.ruling("1.1", "1.40")
async def test_a_table_that_somebody_locks_costs_no_lease_in_another(
    app: App, hand: Hand, dsn: str, admin: psycopg.Connection
) -> None:
    admin.execute("create table public.theirs (); grant all on public.theirs to public")
    hand.enqueue_many([NewJob(1, "a", "r"), NewJob(1, "b", "r")])
    told: list[str] = []
    call_soon = asyncio.get_running_loop().call_soon_threadsafe
    keeper = LeaseKeeper(app.settings, deadline=STORE_TIMEOUT, call_soon=call_soon)
    lease = Lease.renew(timedelta(seconds=3), timedelta(seconds=0.2))
    sent_at = time.monotonic()
    ours, theirs = hand.claim(2, ttl_seconds=3)
    for claim, renewals in ((theirs, Theirs()), (ours, JobsRenewals(TABLES))):
        (held,) = keeper.hold([claim], lease, renewals, sent_at=sent_at)
        held.listen(lambda _, key=claim.key: told.append(key))  # type: ignore[misc]
    async with anyio.create_task_group() as group:
        try:
            with admin.transaction():
                admin.execute("lock table public.theirs")
                group.start_soon(anyio.to_thread.run_sync, keeper.run)
                group.start_soon(anyio.to_thread.run_sync, keeper.guard)
                await eventually(lambda: told == ["b"])  # by the guard: nobody could ask about it
                alive = "select lease_expires_at > clock_timestamp() from pgworker.jobs where key = 'a'"
                assert hand.connection.execute(alive).fetchone() == (True,)
        finally:
            keeper.close()
    assert told == ["b"]
