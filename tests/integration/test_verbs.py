"""retry, rebuild, cancel and forget: which jobs each is for, what is left of them, and rows that others hold."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import anyio
import psycopg
import pytest

from pgworker import App, ConfigError, Job, Lease, NewJob, PayloadPruned, PgworkerError, Retry, UnknownKind
from pgworker.db import Flow, drive_sync
from pgworker.events import JobSettled
from pgworker.outcome import Settlement
from pgworker.statements import Statement
from pgworker.verbs import PAGE, Selection
from tests.handles import FAIL, RETRY, Hand, Recorder, age, hand, result, row, running

Admin: TypeAlias = psycopg.Connection[Any]
T = TypeVar("T")


@pytest.fixture(autouse=True)
def work(app: App) -> None:
    app.declare("work")


@pytest.fixture
def other(dsn: str) -> Iterator[Hand]:
    """Another session, in an open transaction from its first statement on."""
    opened = hand(dsn)
    opened.connection.autocommit = False
    yield opened
    opened.connection.rollback()
    opened.connection.close()


def facts(admin: Admin, key: str = "k") -> list[str]:
    return [what for (what,) in admin.execute("select what from pgworker.facts where key = %s order by id", (key,))]


def count(admin: Admin, state: str, kind: str = "work") -> int:
    found = admin.execute("select count(*) from pgworker.jobs where kind = %s and state = %s", (kind, state)).fetchone()
    assert found is not None
    return int(found[0])


def fill(admin: Admin, jobs: int, state: str, *, code: str | None = None, kind: str = "work") -> None:
    """Ended jobs, a second apart: `<kind><state>1` ended first."""
    admin.execute(
        "insert into pgworker.jobs (kind, key, state, payload, last_code, finished_at, attempts)"
        " select %(kind)s, %(kind)s || %(state)s || n, %(state)s, '1', %(code)s,"
        " clock_timestamp() - (%(jobs)s - n + 1) * interval '1 s', 3 from generate_series(1, %(jobs)s) n",
        {"jobs": jobs, "state": state, "code": code, "kind": kind},
    )


# --- by state -------------------------------------------------------------------------------------------------------


def waits(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r", 1)


def is_scheduled(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r", 1, delay=timedelta(hours=1))


def runs(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r", 1)
    hand.claim()


def is_asked_to_stop(hand: Hand, admin: Admin) -> None:
    runs(hand, admin)
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")


def has_expired(hand: Hand, admin: Admin) -> None:
    runs(hand, admin)
    age(admin, 120)


def has_expired_when_asked(hand: Hand, admin: Admin) -> None:
    is_asked_to_stop(hand, admin)
    age(admin, 120)


def is_stranded(hand: Hand, admin: Admin) -> None:
    """As nothing of ours leaves it: neither a claim nor the reaper would ever end it."""
    waits(hand, admin)
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")


def has_succeeded(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r", 1)
    (claim,) = hand.claim()
    hand.finish(claim, '"value"')


def has_failed(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r", 1)
    (claim,) = hand.claim()
    hand.settle(claim, FAIL)


def is_cancelled(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r", 1)
    admin.execute("update pgworker.jobs set state = 'cancelled', finished_at = clock_timestamp()")


TABLE: list[tuple[Callable[[Hand, Admin], None], dict[str, str]]] = [
    # what the row is like: what becomes of it by which verb; nothing for the others
    (waits, {"cancel": "cancelled"}),
    (is_scheduled, {"cancel": "cancelled"}),
    (runs, {"cancel": "asked"}),
    (is_asked_to_stop, {}),
    (has_expired, {"cancel": "cancelled"}),
    (has_expired_when_asked, {"cancel": "cancelled"}),
    (is_stranded, {"cancel": "cancelled"}),
    (has_succeeded, {"rebuild": "ready"}),
    (has_failed, {"retry": "ready", "rebuild": "ready"}),
    (is_cancelled, {"retry": "ready", "rebuild": "ready"}),
]


async def call(app: App, door: str, verb: str, *words: Any, **options: Any) -> Any:
    """A verb by the asynchronous or the synchronous door."""
    done = getattr(app if door == "async" else app.sync, verb)(*words, **options)
    return await done if inspect.isawaitable(done) else done


@pytest.mark.contract("A55", "B38")
@pytest.mark.ruling("2.16")
@pytest.mark.parametrize("door", ["async", "sync"])
@pytest.mark.parametrize("chosen", [{"key": "k"}, {"all": True}], ids=["key", "all"])
@pytest.mark.parametrize("verb", ["retry", "rebuild", "cancel"])
@pytest.mark.parametrize(("state", "moves"), TABLE, ids=[state.__name__ for state, _ in TABLE])
async def test_each_verb_is_for_jobs_of_some_states_and_leaves_the_others_untouched(
    app: App,
    hand: Hand,
    admin: Admin,
    *,
    door: str,
    chosen: dict[str, Any],
    verb: str,
    state: Callable[[Hand, Admin], None],
    moves: dict[str, str],
) -> None:
    state(hand, admin)
    before, told = row(admin, "k"), facts(admin)
    done = await call(app, door, verb, "work", **chosen)
    after = row(admin, "k")
    match moves.get(verb):
        case None:
            assert (done, after, facts(admin)) == (0, before, told)
        case "ready":
            assert (done, after["state"], after["finished_at"]) == (1, "pending", None)
            assert facts(admin) == [*told, f"{verb}_requested"]
            (claim,) = hand.claim()
            assert claim.key == "k"
        case "cancelled":
            assert (done, after["state"], after["token"], after["runner"]) == (1, "cancelled", None, None)
            assert after["finished_at"] is not None
            assert after["cancel_requested_at"] is None
            assert facts(admin) == [*told, "cancelled"]
        case _:
            assert (done, after["state"], after["token"]) == (1, "pending", before["token"])
            assert after["lease_expires_at"] == before["lease_expires_at"]
            assert after["cancel_requested_at"] is not None
            assert facts(admin) == [*told, "cancel_requested"]
    assert await call(app, door, verb, "work", **chosen) == 0


@pytest.mark.contract("A55")
@pytest.mark.ruling("2.15", "2.16")
@pytest.mark.parametrize("verb", ["retry", "rebuild"])
async def test_what_is_reopened_is_as_if_it_had_not_been_tried(app: App, hand: Hand, admin: Admin, verb: str) -> None:
    has_failed(hand, admin)
    admin.execute("update pgworker.jobs set ready_at = ready_at + interval '1 h', evictions = 2, attempts = 7")
    before = row(admin, "k")
    await call(app, "async", verb, "work", key="k")
    after = row(admin, "k")
    cleared = ("last_code", "last_error", "finished_at", "cancel_requested_at", "token")
    assert [after[name] for name in cleared] == [None] * len(cleared)
    assert (after["attempts"], after["evictions"]) == (0, 0)
    same = ("id", "revision", "generation", "payload", "class", "priority", "max_attempts", "version", "created_at")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
    ((due,),) = admin.execute("select ready_at <= clock_timestamp() from pgworker.jobs").fetchall()
    assert due
    assert admin.execute("select attempts from pgworker.facts order by id desc limit 1").fetchone() == (7,)


@pytest.mark.contract("A55")
async def test_a_new_revision_brings_failed_work_back_too(app: App, hand: Hand, admin: Admin) -> None:
    has_failed(hand, admin)
    assert (await app.enqueue("work", 2, key="k", revision="r2")).status == "requeued"
    assert (row(admin, "k")["state"], row(admin, "k")["attempts"]) == ("pending", 0)


@pytest.mark.ruling("2.15", "2.16")
async def test_an_old_result_stays_until_the_rebuilt_job_has_a_new_one(app: App, hand: Hand, admin: Admin) -> None:
    has_succeeded(hand, admin)
    assert await app.rebuild("work", key="k") == 1
    kept = result(admin, "k")
    assert kept is not None
    assert kept["value"] == "value"
    (claim,) = hand.claim()
    assert hand.finish(claim, '"newer"').verdict == "done"
    kept = result(admin, "k")
    assert kept is not None
    assert kept["value"] == "newer"


@pytest.mark.ruling("2.15")
@pytest.mark.parametrize("state", ["succeeded", "cancelled"])
async def test_a_job_without_its_payload_cannot_run_again(app: App, admin: Admin, state: str) -> None:
    fill(admin, 3, state)
    admin.execute("update pgworker.jobs set payload = null where key like '%2'")
    pruned = f"work{state}2"
    before = row(admin, pruned)
    with pytest.raises(PayloadPruned, match=r"1 job of kind 'work' cannot be rebuilt.*pruned: enqueue"):
        await app.rebuild("work", key=pruned)
    with pytest.raises(PayloadPruned, match=r"1 job of kind .* \(2 jobs were rebuilt\)"):
        await app.rebuild("work", all=True)
    assert row(admin, pruned) == before
    assert (count(admin, "pending"), facts(admin, pruned)) == (2, [])


@pytest.mark.ruling("2.17")
async def test_a_handler_that_ends_well_wins_over_a_cancel_and_one_that_would_be_retried_does_not(
    app: App, hand: Hand, admin: Admin
) -> None:
    for key in "ab":
        hand.enqueue(key, "r", 1)
    claims = {claim.key: claim for claim in hand.claim(2)}
    assert await app.cancel("work", all=True) == 2
    assert hand.renew(claims["a"]).cancel_requested
    assert hand.finish(claims["a"]) == ("done", "succeeded")
    assert hand.settle(claims["b"], RETRY) == ("done", "cancelled")


@pytest.mark.ruling("2.17")
@pytest.mark.parametrize("ending", ["value", "retry"])
async def test_what_a_handler_makes_of_a_cancel_that_it_has_heard_of(app: App, admin: Admin, ending: str) -> None:
    """It was told, and came to its end all the same: a value is kept, another try is not made."""
    entered = anyio.Event()

    @app.kind("stubborn", lease=Lease.renew(timedelta(seconds=20), timedelta(seconds=0.2)))
    async def stubborn(job: Job[int]) -> int | Retry:
        with anyio.CancelScope(shield=True), anyio.fail_after(10):
            entered.set()
            while not job.signal.is_set():  # noqa: ASYNC110 - set from a thread
                await anyio.sleep(0.01)
            assert job.signal.cause == "cancel"
        return job.payload if ending == "value" else Retry()

    seen = Recorder(app)
    await app.enqueue("stubborn", 7, key="k", revision="r")
    async with running(app.worker(["stubborn"])):
        await entered.wait()
        assert await app.cancel("stubborn", key="k") == 1
        await seen.count(JobSettled, 1)
    after, kept = row(admin, "k", kind="stubborn"), result(admin, "k", kind="stubborn")
    assert (after["token"], after["cancel_requested_at"]) == (None, None)
    if ending == "value":
        assert kept is not None
        assert (after["state"], kept["value"]) == ("succeeded", 7)
    else:
        assert (after["state"], kept) == ("cancelled", None)


@pytest.mark.ruling("2.15")
def test_what_is_left_of_a_row_that_has_succeeded(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r", {"for": "later"})
    hand.settle(hand.claim()[0], Settlement("pending", "handler_failed", counts=True, delay_seconds=0.0))
    (claim,) = hand.claim()
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    assert hand.finish(claim, "1") == ("done", "succeeded")
    after = row(admin, "k")
    gone = ("token", "lease_expires_at", "runner", "cancel_requested_at", "last_code", "last_error")
    assert {name: after[name] for name in gone} == dict.fromkeys(gone)
    assert (after["attempts"], after["payload"], after["revision"]) == (1, {"for": "later"}, "r")
    assert after["finished_at"] is not None


@pytest.mark.ruling("1.19")
async def test_a_running_handler_is_told_of_a_cancel_and_of_being_forgotten(app: App, admin: Admin) -> None:
    started, ended = anyio.Event(), anyio.Event()

    @app.kind("wait")
    async def wait(job: Job[int]) -> None:
        nonlocal started
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    seen = Recorder(app)
    async with running(app.worker(["wait"])):
        await app.enqueue("wait", 1, key="cancelled")
        await started.wait()
        assert await app.cancel("wait", key="cancelled") == 1
        await seen.count(JobSettled, 1)
        started, ended = anyio.Event(), anyio.Event()
        await app.enqueue("wait", 1, key="forgotten")
        await started.wait()
        assert await app.forget("wait", "forgotten")
        with anyio.fail_after(10):
            await ended.wait()
    assert row(admin, "cancelled", kind="wait")["state"] == "cancelled"
    assert count(admin, "pending", "wait") == 0


# --- which ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "options", "said"),
    [
        ("retry", {}, "exactly one of key=, code= and all=True"),
        ("retry", {"key": "k", "code": "c"}, "exactly one of key=, code= and all=True"),
        ("rebuild", {}, "exactly one of key= and all=True"),
        ("rebuild", {"key": "k", "all": True}, "exactly one of key= and all=True"),
        ("cancel", {"all": False}, "exactly one of key= and all=True"),
        ("cancel", {"all": True, "limit": 0}, "limit is at least 1"),
        ("retry", {"key": ""}, "^no job has such a key: it takes 0 bytes, must take 1 to 512$"),
    ],
)
@pytest.mark.parametrize("door", ["async", "sync"])
async def test_a_verb_is_told_which_jobs_once(
    app: App, door: str, verb: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        await call(app, door, verb, "work", **options)
    with pytest.raises(UnknownKind):
        await call(app, door, verb, "unheard_of", all=True)
    assert not app._doors, "a connection was opened for nothing"


async def test_retry_by_code_takes_the_jobs_that_ended_with_it(app: App, admin: Admin) -> None:
    fill(admin, PAGE, "failed", code="else")
    fill(admin, 3, "cancelled", code="payload_invalid")
    fill(admin, 2, "succeeded", code="payload_invalid")
    fill(admin, 2, "failed", code="payload_invalid", kind="strange")
    assert await app.retry("work", code="payload_invalid") == 3
    assert [count(admin, state) for state in ("pending", "failed", "succeeded")] == [3, PAGE, 2]
    assert count(admin, "failed", "strange") == 2


@pytest.mark.parametrize("door", ["async", "sync"])
async def test_many_jobs_are_done_in_portions_the_oldest_first(app: App, admin: Admin, door: str) -> None:
    fill(admin, 2 * PAGE + 10, "failed")
    fill(admin, 7, "cancelled")
    told: list[int] = []
    assert await call(app, door, "retry", "work", all=True, limit=PAGE + 3, progress=told.append) == PAGE + 3
    assert told == [PAGE, PAGE + 3]
    ((oldest,),) = admin.execute("select min(finished_at) from pgworker.jobs where state = 'failed'").fetchall()
    assert row(admin, f"workfailed{PAGE + 4}")["finished_at"] == oldest
    assert await call(app, door, "retry", "work", all=True) == PAGE + 14
    assert count(admin, "pending") == 2 * PAGE + 17
    del told[:]
    assert await call(app, door, "cancel", "work", all=True, progress=told.append) == 2 * PAGE + 17
    assert told == [PAGE, 2 * PAGE, 2 * PAGE + 17]
    assert count(admin, "cancelled") == 2 * PAGE + 17


async def test_jobs_that_were_asked_to_stop_do_not_hide_those_behind_them(
    app: App, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.verbs.PAGE", 2)
    for key in "abc":
        hand.enqueue(key, "r", 1)
    assert len(hand.claim(limit=3)) == 3
    assert await app.cancel("work", all=True) == 3
    hand.enqueue("d", "r", 1)
    with anyio.fail_after(10):
        assert await app.cancel("work", all=True) == 1


async def test_a_verb_that_is_cancelled_ends_between_two_statements(app: App, admin: Admin) -> None:
    fill(admin, 3 * PAGE, "failed")
    with anyio.CancelScope() as scope:
        await app.retry("work", all=True, progress=lambda _: scope.cancel())
    assert scope.cancelled_caught
    assert (count(admin, "pending"), count(admin, "failed")) == (PAGE, 2 * PAGE)


async def test_a_cancel_reaches_all_lanes(app: App, hand: Hand, admin: Admin) -> None:
    jobs = [
        NewJob(1, f"{urgency}{priority}{delay}", urgency=urgency, priority=priority, delay=delay)
        for urgency in ("fresh", "catch_up")
        for priority in (-5, 0, 5)
        for delay in (0, 3600)
    ]
    hand.enqueue_many(jobs)
    admin.execute("update pgworker.jobs set ready_at = 'infinity' where key = 'fresh03600'")
    assert await app.cancel("work", all=True, limit=5) == 5
    assert await app.cancel("work", all=True) == 7


@pytest.mark.parametrize(("rebuild", "before"), [(False, "failed"), (True, "succeeded")])
async def test_jobs_that_end_again_meanwhile_are_not_taken_twice(
    app: App,
    hand: Hand,
    admin: Admin,
    rebuild: bool,  # noqa: FBT001 - a parameter of the table of cases
    before: str,
) -> None:
    fill(admin, PAGE + 5, before)

    def send(statement: Statement[Any]) -> Any:
        answer = hand.send(statement)
        if statement.name == "reopen_jobs":  # the worker is quick
            admin.execute(
                "update pgworker.jobs set state = 'failed', finished_at = clock_timestamp() where state = 'pending'"
            )
        return answer

    chosen = Selection(everything=True)
    assert drive_sync(app._registry.reopen("work", chosen, None, rebuild=rebuild), send) == PAGE + 5


# --- rows that somebody holds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["retry", "cancel", "forget"])
async def test_a_row_that_stays_held_is_left_alone_and_told(
    app: App, hand: Hand, other: Hand, admin: Admin, verb: str
) -> None:
    state = has_failed if verb == "retry" else waits
    state(hand, admin)
    before = row(admin, "k")
    other.connection.execute("select from pgworker.jobs where key = 'k' for update")
    words = ["work", "k"] if verb == "forget" else ["work"]
    with pytest.raises(PgworkerError, match=r"held by (other|another) transaction.*try again later"):
        await call(app, "async", verb, *words, **({} if verb == "forget" else {"all": True}))
    assert row(admin, "k") == before
    other.connection.rollback()
    assert await call(app, "async", verb, *words, **({} if verb == "forget" else {"key": "k"}))


async def test_a_row_that_is_held_for_a_moment_comes_last_and_counts(app: App, hand: Hand, other: Hand) -> None:
    hand.enqueue_many([NewJob(1, f"k{number}", "r") for number in range(5)])
    other.connection.execute("select from pgworker.jobs where key = 'k2' for update")
    sent: list[str] = []

    def send(statement: Statement[Any]) -> Any:
        sent.append(statement.name)
        if statement.name == "wait_briefly":
            other.connection.rollback()
        return hand.send(statement)

    told: list[int] = []
    assert drive_sync(app._registry.cancel("work", Selection(everything=True), told.append), send) == 5
    assert told == [4, 5]
    assert sent == ["survey_lanes", "list_pending", "cancel_jobs", "wait_briefly", "cancel_jobs"]


async def test_a_held_row_does_not_count_against_the_limit(app: App, admin: Admin, other: Hand) -> None:
    fill(admin, 5, "failed")
    other.connection.execute("select from pgworker.jobs where key = 'workfailed1' for update")
    assert await app.retry("work", all=True, limit=3) == 3
    assert count(admin, "failed") == 2


@pytest.mark.parametrize("verb", ["retry", "rebuild"])
async def test_what_was_enqueued_anew_while_the_verb_waited_is_not_reopened(
    app: App, hand: Hand, other: Hand, admin: Admin, verb: str
) -> None:
    has_failed(hand, admin)
    other.enqueue("k", "r2", 2)

    def send(statement: Statement[Any]) -> Any:
        if statement.name == "wait_briefly":
            other.connection.commit()
        return hand.send(statement)

    flow = app._registry.reopen("work", Selection("k"), None, rebuild=verb == "rebuild")
    assert drive_sync(flow, send) == 0
    assert (row(admin, "k")["revision"], row(admin, "k")["generation"]) == ("r2", 2)


# --- between the look and the lock ----------------------------------------------------------------------------------


async def between(flow: Flow[T], hand: Hand, other: Hand, admin: Admin, act: Callable[[], object]) -> T:
    """Drive a flow whose first write waits, after its snapshot and before its locks, until `act` has been committed.

    It waits for a lock that the other session holds until then.
    """
    other.connection.execute("select pg_advisory_xact_lock(77)")
    written: list[str] = []

    def send(statement: Statement[Any]) -> Any:
        halted = re.sub(
            rb"from (?:\(select \* from (seen where [^)]*)\)|(seen)) s cross join lateral",
            rb"from (select seen.* from (select * from \1\2) seen,"
            rb" (select pg_advisory_xact_lock(77) is null as never from seen offset 0) as halt"
            rb" where not halt.never offset 0) s cross join lateral",
            statement.sql,
        )
        if halted != statement.sql:
            written.append(statement.name)
            if len(written) == 1:
                statement = Statement(statement.name, halted, statement.parameters, statement.read)
        return hand.send(statement)

    def act_and_commit() -> None:
        waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
        while admin.execute(waiting).fetchone() == (0,):
            admin.execute("select pg_sleep(0.01)")
        act()
        other.connection.commit()

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, act_and_commit)
        done = await anyio.to_thread.run_sync(drive_sync, flow, send)
    assert written, "nothing was halted"
    return done


@pytest.mark.parametrize("chosen", [Selection("k"), Selection(code="handler_failed", takes_code=True)])
async def test_what_is_enqueued_between_look_and_lock_is_not_reopened(
    app: App, hand: Hand, other: Hand, admin: Admin, chosen: Selection
) -> None:
    has_failed(hand, admin)
    flow = app._registry.reopen("work", chosen, None, rebuild=False)
    assert await between(flow, hand, other, admin, lambda: other.enqueue("k", "r2", 2, delay=60)) == 0
    after = row(admin, "k")
    assert (after["revision"], after["generation"]) == ("r2", 2)
    assert after["ready_at"] - after["created_at"] > timedelta(seconds=50)


async def test_what_fails_by_another_code_between_look_and_lock_is_not_reopened(
    app: App, hand: Hand, other: Hand, admin: Admin
) -> None:
    has_failed(hand, admin)
    flow = app._registry.reopen("work", Selection(code="handler_failed", takes_code=True), None, rebuild=False)
    fails = "update pgworker.jobs set last_code = 'another'"
    assert await between(flow, hand, other, admin, lambda: other.connection.execute(fails)) == 0
    assert row(admin, "k")["state"] == "failed"


async def test_what_is_pruned_between_look_and_lock_is_not_reopened(
    app: App, hand: Hand, other: Hand, admin: Admin
) -> None:
    has_failed(hand, admin)
    flow = app._registry.reopen("work", Selection("k"), None, rebuild=False)
    prunes = "update pgworker.jobs set payload = null"
    with pytest.raises(ExceptionGroup) as raised:
        await between(flow, hand, other, admin, lambda: other.connection.execute(prunes))
    assert raised.group_contains(PayloadPruned)
    assert row(admin, "k")["state"] == "failed"


async def test_what_ends_between_look_and_lock_is_not_cancelled(
    app: App, hand: Hand, other: Hand, admin: Admin
) -> None:
    runs(hand, admin)
    ends = "update pgworker.jobs set state = 'failed', finished_at = now(), token = null, lease_expires_at = null"
    flow = app._registry.cancel("work", Selection("k"), None)
    assert await between(flow, hand, other, admin, lambda: other.connection.execute(ends)) == 0
    assert row(admin, "k")["state"] == "failed"


async def test_a_request_between_look_and_lock_is_not_made_twice(
    app: App, hand: Hand, other: Hand, admin: Admin
) -> None:
    runs(hand, admin)
    asks = "update pgworker.jobs set cancel_requested_at = '2001-01-01 00:00Z'"
    flow = app._registry.cancel("work", Selection("k"), None)
    assert await between(flow, hand, other, admin, lambda: other.connection.execute(asks)) == 0
    assert row(admin, "k")["cancel_requested_at"].year == 2001


async def test_a_lease_that_ends_between_look_and_lock_ends_the_job(
    app: App, hand: Hand, other: Hand, admin: Admin
) -> None:
    runs(hand, admin)
    expires = "update pgworker.jobs set lease_expires_at = clock_timestamp()"
    flow = app._registry.cancel("work", Selection("k"), None)
    assert await between(flow, hand, other, admin, lambda: other.connection.execute(expires)) == 1
    assert row(admin, "k")["state"] == "cancelled"


# --- forget ---------------------------------------------------------------------------------------------------------


@pytest.mark.ruling("2.15")
@pytest.mark.parametrize("door", ["async", "sync"])
@pytest.mark.parametrize("state", [state for state, _ in TABLE], ids=[state.__name__ for state, _ in TABLE])
async def test_forget_deletes_a_job_in_any_state_with_its_result(
    app: App, hand: Hand, admin: Admin, door: str, state: Callable[[Hand, Admin], None]
) -> None:
    state(hand, admin)
    hand.enqueue("bystander")
    told = facts(admin)
    assert await call(app, door, "forget", "work", "k") is True
    assert (result(admin, "k"), facts(admin)) == (None, [*told, "forgotten"])
    assert admin.execute("select key from pgworker.jobs").fetchall() == [("bystander",)]
    assert await call(app, door, "forget", "work", "k") is False
    assert (await app.enqueue("work", 1, key="k", revision="r")).created, "its revision is forgotten, too"


async def test_a_forgotten_run_can_write_nothing_even_when_its_key_is_back(app: App, hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r", 1)
    (claim,) = hand.claim()
    await app.forget("work", "k")
    hand.enqueue("k", "r", 1)
    assert hand.finish(claim, "1").verdict == "lost"
    assert (row(admin, "k")["state"], result(admin, "k")) == ("pending", None)


async def test_forget_leaves_no_result_of_a_completion_that_was_under_way(
    app: App, hand: Hand, other: Hand, admin: Admin
) -> None:
    hand.enqueue("k", "r", 1)
    (claim,) = hand.claim()
    assert other.finish(claim, '"late"').verdict == "done"

    def send(statement: Statement[Any]) -> Any:
        if statement.name == "wait_briefly":
            other.connection.commit()
        return hand.send(statement)

    assert drive_sync(app._registry.forget("work", "k"), send) is True
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)
    assert result(admin, "k") is None


@pytest.mark.parametrize("claimed", ["before", "between"])
async def test_forget_leaves_no_result_of_a_completion_between_its_look_and_its_lock(
    app: App, hand: Hand, other: Hand, admin: Admin, claimed: str
) -> None:
    hand.enqueue("k", "r", 1)
    claims = hand.claim() if claimed == "before" else []

    def complete() -> None:
        (claim,) = claims or other.claim()
        assert other.finish(claim, '"late"').verdict == "done"

    assert await between(app._registry.forget("work", "k"), hand, other, admin, complete) is True
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)
    assert result(admin, "k") is None


async def test_a_result_whose_job_was_deleted_by_hand_can_be_forgotten(app: App, hand: Hand, admin: Admin) -> None:
    has_succeeded(hand, admin)
    admin.execute("delete from pgworker.jobs")
    assert await app.forget("work", "k") is True
    assert result(admin, "k") is None


# --- facts and hints ------------------------------------------------------------------------------------------------


async def test_a_kind_without_a_journal_has_none_of_the_operator_either(app: App, admin: Admin) -> None:
    app.declare("silent", facts="none")
    await app.enqueue("silent", 1, key="k")
    assert await app.cancel("silent", key="k") == 1
    assert await app.retry("silent", key="k") == 1
    assert await app.forget("silent", "k")
    assert admin.execute("select count(*) from pgworker.facts").fetchone() == (0,)


@pytest.mark.ruling("1.19", "2.18")
@pytest.mark.parametrize(
    ("state", "verb", "told"),
    [
        (has_failed, "retry", ["r:work"]),
        (has_succeeded, "rebuild", ["r:work"]),
        (runs, "cancel", ["c:work"]),
        (waits, "cancel", []),
        (has_failed, "cancel", []),
        (waits, "retry", []),
    ],
)
async def test_workers_are_told_of_what_concerns_them(
    app: App, hand: Hand, admin: Admin, *, state: Callable[[Hand, Admin], None], verb: str, told: list[str]
) -> None:
    state(hand, admin)
    admin.execute("listen pgworker_pgworker")
    await call(app, "async", verb, "work", key="k")
    await app.close()  # sends what hints are left
    hand.connection.execute("select pg_notify('pgworker_pgworker', 'over')")
    heard = iter(each.payload for each in admin.notifies(timeout=10))
    assert list(itertools.takewhile(lambda payload: payload != "over", heard)) == told


@pytest.mark.ruling("1.19")
async def test_superseding_a_run_tells_its_runner(app: App, hand: Hand, admin: Admin) -> None:
    runs(hand, admin)
    admin.execute("listen pgworker_pgworker")
    assert (await app.enqueue("work", 2, key="k", revision="r2")).status == "superseded"
    heard = {each.payload for each in admin.notifies(timeout=10, stop_after=2)}
    assert heard == {"r:work", "c:work"}


@pytest.mark.ruling("1.19")
async def test_superseding_one_run_among_other_jobs_tells_its_runner(app: App, hand: Hand, admin: Admin) -> None:
    runs(hand, admin)
    admin.execute("listen pgworker_pgworker")
    put = await app.enqueue_many("work", [NewJob(1, "a", "r1"), NewJob(2, "k", "r2"), NewJob(3, "z", "r1")])
    assert [each.status for each in put] == ["created", "superseded", "created"]
    heard = {each.payload for each in admin.notifies(timeout=10, stop_after=2)}
    assert heard == {"r:work", "c:work"}


@pytest.mark.ruling("1.19", "2.18")
def test_the_sql_function_tells_the_runner_of_a_run_that_it_supersedes(hand: Hand, admin: Admin) -> None:
    runs(hand, admin)
    admin.execute("listen pgworker_pgworker")
    hand.connection.execute("select pgworker.enqueue('work', key => 'k', revision => 'r2', wake => true)")
    hand.connection.execute(
        "select pgworker.enqueue('work', key => 'k', revision => 'r3', wake => true)"
    )  # runs no more
    hand.connection.execute("select pg_notify('pgworker_pgworker', 'over')")
    heard = [each.payload for each in admin.notifies(timeout=10, stop_after=4)]
    assert heard == ["r:work", "c:work", "r:work", "over"]


@pytest.mark.contract("A8")
async def test_notifications_of_an_app_become_few_hints(app: App, admin: Admin) -> None:
    admin.execute("listen pgworker_pgworker")
    for _ in range(50):
        await app.notify("work")
        app.sync.notify("work")
    await app.close()
    heard = [each.payload for each in admin.notifies(timeout=0.5)]
    assert set(heard) == {"r:work"}
    assert len(heard) <= 10
    with pytest.raises(UnknownKind):
        await app.notify("unheard_of")


@pytest.mark.contract("A8")
@pytest.mark.parametrize("door", ["async", "sync"])
async def test_a_notification_in_a_transaction_waits_for_its_commit(
    app: App, dsn: str, admin: Admin, door: str
) -> None:
    app.declare("rolled_back")
    admin.execute("create table public.theirs (n int); grant all on public.theirs to public; listen pgworker_pgworker")

    async def write_and_notify(kind: str, *, commit: bool) -> None:
        if door == "async":
            async with await psycopg.AsyncConnection.connect(dsn) as conn:
                await conn.execute("insert into public.theirs values (1)")
                await app.notify(kind, conn=conn)
                await (conn.commit() if commit else conn.rollback())
        else:
            with psycopg.connect(dsn) as sync:
                sync.execute("insert into public.theirs values (1)")
                app.sync.notify(kind, conn=sync)
                (sync.commit if commit else sync.rollback)()

    await write_and_notify("rolled_back", commit=False)
    await write_and_notify("work", commit=True)
    assert [each.payload for each in admin.notifies(timeout=10, stop_after=1)] == ["r:work"]
