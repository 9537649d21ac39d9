"""Waiting for results: what comes back in which case, and how few connections and statements it takes."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from pgworker import (
    App,
    Cancel,
    ConfigError,
    Job,
    JobCancelled,
    JobFailed,
    NewJob,
    PayloadError,
    Permanent,
    PgworkerError,
    ResultGone,
    Superseded,
    UnknownJob,
    UnknownKind,
)
from pgworker import retention as retention_module
from pgworker import waiter as waiter_module
from pgworker import waits as waits_module
from pgworker.db import Database, drive_sync
from pgworker.kind import declare_kind
from pgworker.operations import Shelf, expire_results, read_results
from pgworker.outcome import Settlement
from pgworker.policy import make_policy
from pgworker.retention import Retention
from pgworker.statements import Statement
from tests.databases import TABLES
from tests.handles import FAIL, RETRY, Hand, Recorder, row, running
from tests.handles import hand as make_hand

Admin: TypeAlias = psycopg.Connection[TupleRow]

THREAD = "pgworker-results"
NEVER = 3600.0


@pytest.fixture(autouse=True)
def quick_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody tells of is found ten times a second."""
    monkeypatch.setattr(waits_module, "POLL_SECONDS", 0.1)


@pytest.fixture
def no_poll(quick_poll: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a wait learns, it learns at its first look or by a notification."""
    monkeypatch.setattr(waits_module, "POLL_SECONDS", NEVER)


@pytest.fixture
def waiting(app: App) -> App:
    """An app that knows the kind `work`, which is handled elsewhere: by hand."""
    app.declare("work")
    return app


class Reads:
    """Every statement that the waiter's thread has sent: which keys it asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Sequence[str]] = []
        self._more = threading.Condition()
        send = Database.run

        async def run(database: Database, statement: Statement[Any], *, within: float = float("inf")) -> Any:
            answer = await send(database, statement, within=within)
            if statement.name == "read_results":
                with self._more:
                    self.asked.append(cast("Sequence[str]", statement.parameters["keys"]))
                    self._more.notify_all()
            return answer

        monkeypatch.setattr(Database, "run", run)

    @property
    def sizes(self) -> list[int]:
        return [len(keys) for keys in self.asked]

    async def until(self, holds: Callable[[], bool]) -> None:
        """Until the statements so far are as wished."""

        def wait() -> None:
            with self._more:
                assert self._more.wait_for(holds, 10), self.asked

        await anyio.to_thread.run_sync(wait)

    async def looked_at(self, key: str, *, times: int = 1) -> None:
        """Until so many statements have asked for a job, and were answered."""
        await self.until(lambda: sum(key in keys for keys in self.asked) >= times)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def tell_done(admin: Admin, channel: str, kind: str = "work") -> None:
    admin.execute("select pg_notify(%s, %s)", (channel, f"d:{kind}"))


def sessions(admin: Admin) -> list[str]:
    """The connections of the waiter to this test's database."""
    found = admin.execute(
        "select application_name from pg_stat_activity where datname = current_database()"
        " and application_name in ('pgworker results', 'pgworker listen') order by 1"
    ).fetchall()
    return [str(name) for (name,) in found]


def wait_until_gone(admin: Admin) -> None:
    """Until the server has noticed that the waiter's connections were closed."""
    for _ in range(500):
        if not sessions(admin):
            return
        admin.execute("select pg_sleep(0.02)")
    raise AssertionError(sessions(admin))


class Background:
    """Waits in tasks of their own: what became of each, by its name."""

    def __init__(self, app: App, group: anyio.abc.TaskGroup) -> None:
        self.ends: dict[object, object] = {}
        self._app = app
        self._group = group
        self._changed = anyio.Event()

    def wait_for(self, key: str, *, name: object = None, revision: str | None = None) -> anyio.CancelScope:
        scope = anyio.CancelScope()
        self._group.start_soon(self._wait, key, revision, name if name is not None else key, scope)
        return scope

    async def _wait(self, key: str, revision: str | None, name: object, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                self.ends[name] = await self._app.result("work", key, revision=revision)
            except PgworkerError as error:
                self.ends[name] = error
        self._changed.set()
        self._changed = anyio.Event()

    async def looked(self) -> None:
        """Until each of these waits has been looked at: whoever comes after them is looked at no earlier."""
        await anyio.lowlevel.checkpoint()
        with pytest.raises(UnknownJob):
            await self._app.result("work", "nobody's")

    async def ended(self, count: int = 1, *, within: float = 10) -> None:
        with anyio.fail_after(within):
            while len(self.ends) < count:
                await self._changed.wait()


# --- what comes back ------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    text: str
    number: int


@pytest.mark.ruling("2.14")
async def test_a_value_comes_back_as_the_type_that_the_handler_declares(app: App) -> None:
    @app.kind("ask")
    async def ask(job: Job[str]) -> Answer:
        return Answer(job.payload, 42)

    @app.kind("ask_many", batch=10)
    def ask_many(jobs: list[Job[str]]) -> list[Answer | None]:
        return [Answer(job.payload, 1) if job.payload else None for job in jobs]

    async with running(app.worker()):
        put = await app.enqueue("ask", "what", key="a", revision="1")
        assert await app.result("ask", "a", timeout=20) == Answer("what", 42)
        assert await app.result("ask", put.key, revision=put.revision, timeout=timedelta(seconds=20)) == Answer(
            "what", 42
        )
        many = await app.enqueue_many("ask_many", [NewJob("x"), NewJob("")])  # events: waited for by the key they got
        assert [await app.result("ask_many", each.key, timeout=20) for each in many] == [Answer("x", 1), None]


@pytest.mark.ruling("2.14")
async def test_a_value_of_a_kind_that_is_handled_elsewhere_comes_back_as_plain_json(waiting: App, hand: Hand) -> None:
    hand.enqueue("a")
    hand.finish(hand.claim()[0], '{"big": 1180591620717411303424, "list": [1.5, null, "ü"]}')
    assert await waiting.result("work", "a") == {"big": 2**70, "list": [1.5, None, "ü"]}


@pytest.mark.ruling("2.14")
async def test_a_wait_in_a_thread(waiting: App, hand: Hand, reads: Reads) -> None:
    hand.enqueue("a", "1")
    values: list[object] = []
    waiter = threading.Thread(target=lambda: values.append(waiting.sync.result("work", "a", timeout=20)))
    waiter.start()
    await reads.looked_at("a")
    hand.finish(hand.claim()[0], "7")
    await anyio.to_thread.run_sync(waiter.join)
    assert values == [7]
    hand.enqueue("b")
    with pytest.raises(TimeoutError, match=r"job 'b' of kind 'work' did not end within 0\.05 s"):
        waiting.sync.result("work", "b", timeout=0.05)


@pytest.mark.ruling("1.10", "2.14", "4.5")
async def test_a_success_without_a_value_gives_none_and_never_the_value_of_the_revision_before(
    waiting: App, hand: Hand
) -> None:
    hand.enqueue("a", "r1")
    hand.finish(hand.claim()[0], '"old"')
    assert await waiting.result("work", "a") == "old"
    hand.enqueue("a", "r2")
    hand.finish(hand.claim()[0])
    assert await waiting.result("work", "a") is None
    assert await waiting.result("work", "a", revision="r2") is None


@pytest.mark.ruling("1.10", "2.14", "4.5")
@pytest.mark.parametrize("revision", [None, "r2"])
async def test_a_wait_for_the_second_revision_never_gets_the_value_of_the_first(
    waiting: App, hand: Hand, reads: Reads, revision: str | None
) -> None:
    hand.enqueue("a", "r1")
    hand.finish(hand.claim()[0], '"old"')
    hand.enqueue("a", "r2")
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        background.wait_for("a", revision=revision)
        await background.looked()
        await reads.looked_at("a", times=4)  # nor at the polls
        assert background.ends == {}
        hand.settle(hand.claim()[0], FAIL)
        await background.ended()
    error = background.ends["a"]
    assert isinstance(error, JobFailed)
    assert (error.kind, error.key, error.code, error.error_class) == ("work", "a", "handler_failed", None)


@pytest.mark.ruling("1.10", "2.14", "4.5")
async def test_without_revisions_the_generation_tells_old_from_new(waiting: App, hand: Hand) -> None:
    hand.enqueue("a")
    hand.finish(hand.claim()[0], "1")
    hand.enqueue("a")
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        background.wait_for("a")
        await background.looked()
        assert background.ends == {}
        hand.finish(hand.claim()[0], "2")
        await background.ended()
    assert background.ends == {"a": 2}


@pytest.mark.ruling("1.10", "4.5")
async def test_a_row_left_in_results_is_nobodys_value(waiting: App, hand: Hand, admin: Admin) -> None:
    """As a raced delete may leave it: same key, same revision even, but the job says that it has none."""
    hand.enqueue("a", "r")
    hand.finish(hand.claim()[0])
    admin.execute(
        "insert into pgworker.results (kind, key, revision, value, finished_at)"
        " values ('work', 'a', 'r', '\"stale\"', clock_timestamp())"
    )
    assert await waiting.result("work", "a") is None
    hand.enqueue("b", "r")
    hand.finish(hand.claim()[0], "1")
    admin.execute("update pgworker.results set revision = 'other' where key = 'b'")
    with pytest.raises(ResultGone, match="job 'b' of kind 'work' has succeeded, but its value is no longer kept"):
        await waiting.result("work", "b")


@pytest.mark.ruling("2.14")
async def test_a_job_that_nobody_enqueued_is_told_at_once(waiting: App, hand: Hand, no_poll: None) -> None:
    hand.enqueue("a")
    with anyio.fail_after(10), pytest.raises(UnknownJob, match="'b' of kind 'work' does not exist") as caught:
        await waiting.result("work", "b")
    assert isinstance(caught.value, LookupError)
    with pytest.raises(UnknownJob):
        waiting.sync.result("work", "b", timeout=20)
    with pytest.raises(UnknownKind):
        await waiting.result("wrok", "a")
    with pytest.raises(UnknownKind):
        waiting.sync.result("wrok", "a")


@pytest.mark.ruling("2.14")
@pytest.mark.parametrize(("before", "after"), [("r1", "r2"), ("r1", None), (None, "r2"), (None, None)])
async def test_other_work_under_the_key_ends_the_wait(
    waiting: App, hand: Hand, before: str | None, after: str | None
) -> None:
    hand.enqueue("a", before)
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        background.wait_for("a")
        background.wait_for("a", name="given", revision=before)
        await background.looked()
        hand.enqueue("a", after)
        hand.finish(hand.claim()[0], '"the new one"')
        await background.ended(2)
    for error in background.ends.values():
        assert isinstance(error, Superseded)
        assert (error.kind, error.key, error.revision) == ("work", "a", after)


@pytest.mark.ruling("2.14")
async def test_a_revision_that_is_not_there_is_superseded(waiting: App, hand: Hand) -> None:
    hand.enqueue("a", "r2")
    with pytest.raises(Superseded, match="job 'a' of kind 'work' is other work now: revision 'r2'"):
        await waiting.result("work", "a", revision="r1")
    hand.finish(hand.claim()[0], "1")
    with pytest.raises(Superseded):
        await waiting.result("work", "a", revision="r1")
    assert await waiting.result("work", "a", revision="r2") == 1


@pytest.mark.ruling("2.14")
async def test_a_retry_is_no_end(waiting: App, hand: Hand, admin: Admin, reads: Reads) -> None:
    hand.enqueue("a", "r")
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        background.wait_for("a")
        await background.looked()
        hand.settle(hand.claim()[0], RETRY)
        await reads.looked_at("a", times=4)
        assert background.ends == {}
        admin.execute("update pgworker.jobs set ready_at = clock_timestamp()")
        hand.finish(hand.claim()[0], "5")
        await background.ended()
    assert background.ends == {"a": 5}


@pytest.mark.ruling("2.14")
async def test_a_deleted_job_is_unknown_and_the_same_revision_made_anew_is_the_same_work(
    waiting: App, hand: Hand, admin: Admin
) -> None:
    hand.enqueue("deleted", "r")
    hand.enqueue("anew", "r")
    hand.enqueue("event")
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        for key in ("deleted", "anew", "event"):
            background.wait_for(key)
        await background.looked()
        with admin.transaction():
            admin.execute("delete from pgworker.jobs")
            admin.execute("insert into pgworker.jobs (kind, key, revision) values ('work', 'anew', 'r')")
            admin.execute("insert into pgworker.jobs (kind, key) values ('work', 'event')")
        hand.finish(hand.claim()[0], '"anew"')
        await background.ended(3)
    assert background.ends["anew"] == "anew"
    assert isinstance(background.ends["deleted"], UnknownJob)
    assert isinstance(background.ends["event"], Superseded)  # generation 1 again, but another row
    hand.enqueue("gone", "r")
    hand.finish(hand.claim(2)[-1], "1")
    admin.execute("delete from pgworker.jobs where key = 'gone'")  # its row in results is still there
    with pytest.raises(UnknownJob):
        await waiting.result("work", "gone")


@pytest.mark.ruling("2.14")
@pytest.mark.field("L28")
async def test_how_a_job_ended_comes_as_a_typed_error(app: App) -> None:
    @app.kind("end", max_attempts=1)
    async def end(job: Job[str]) -> str | float | Cancel | Permanent:
        match job.payload:
            case "cancel":
                return Cancel("changed_mind")
            case "permanent":
                return Permanent("not_sold")
            case "large":
                return "x" * 1024 * 1024
            case "nan":
                return float("nan")
            case _:
                raise ValueError("canary")

    recorder = Recorder(app)
    async with running(app.worker()):
        keys = ["cancel", "permanent", "large", "nan", "raise"]
        await app.enqueue_many("end", [NewJob(key, key=key) for key in keys])
        ends: dict[str, Any] = {}
        for key in keys:
            with pytest.raises((JobFailed, JobCancelled)) as caught:
                await app.result("end", key, timeout=20)
            ends[key] = caught.value
    assert (type(ends["cancel"]), ends["cancel"].code) == (JobCancelled, "changed_mind")
    assert {key: (each.code, each.error_class) for key, each in ends.items() if isinstance(each, JobFailed)} == {
        "permanent": ("not_sold", None),
        "large": ("result_rejected", "str"),  # over a MiB of JSON
        "nan": ("result_rejected", "float"),
        "raise": ("handler_failed", "ValueError"),
    }
    assert "canary" not in "".join(map(str, ends.values()))
    assert str(ends["raise"]) == "job 'raise' of kind 'end' has failed: handler_failed (ValueError)"
    again = pickle.loads(pickle.dumps(ends["raise"]))  # noqa: S301 - our own
    assert (str(again), again.code) == (str(ends["raise"]), "handler_failed")
    assert recorder.events


async def test_what_is_no_key_revision_or_timeout_is_refused(waiting: App) -> None:
    with pytest.raises(PayloadError, match="key"):
        await waiting.result("work", "a\0b")
    with pytest.raises(PayloadError, match="revision"):
        waiting.sync.result("work", "a", revision="")
    for wrong in ("5", float("nan")):
        with pytest.raises(ConfigError, match="timeout must be a timedelta or seconds"):
            await waiting.result("work", "a", timeout=wrong)  # type: ignore[arg-type]
    assert threads() == []  # refused before a thread was started for it


# --- one thread, one LISTEN, one statement --------------------------------------------------------------------------


@pytest.mark.ruling("1.21", "2.14")
async def test_200_waits_share_a_thread_two_connections_and_a_few_statements(
    waiting: App, hand: Hand, admin: Admin, reads: Reads, no_poll: None
) -> None:
    hand.enqueue_many([NewJob(key=f"k{number}") for number in range(200)])
    claims = hand.claim(200)
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        for number in range(200):
            background.wait_for(f"k{number}")
        await reads.until(lambda: sum(reads.sizes) >= 200)
        await anyio.to_thread.run_sync(listening, admin)
        assert len(threads()) == 1
        assert sessions(admin) == ["pgworker listen", "pgworker results"]
        # All of them were there before the thread was, and LISTEN's beginning had all looked at once more.
        assert len(reads.sizes) <= 4
        before = len(reads.sizes)
        for claim in claims:
            hand.finish(claim, f'"{claim.key}"')
        tell_done(admin, TABLES.channel)
        await background.ended(200)
    assert background.ends == {f"k{number}": f"k{number}" for number in range(200)}
    first, *second = reads.sizes[before:]
    # LISTEN's beginning may still have been at it, which asks once more for those that have not been told yet
    assert first == 200
    assert len(second) <= 1


def listening(admin: Admin, sessions: int = 1) -> None:
    """Until so many connections listen: each has then answered a probe of its own, and waits."""
    for _ in range(500):
        found = admin.execute(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and application_name = 'pgworker listen' and state = 'idle' and query like '%%pg_notify%%'"
        ).fetchone()
        if found == (sessions,):
            return
        admin.execute("select pg_sleep(0.02)")
    raise AssertionError("nobody listens")


@pytest.mark.ruling("2.14", "2.18")
async def test_a_notification_of_the_kind_is_heard_long_before_the_poll(
    waiting: App, hand: Hand, admin: Admin, no_poll: None
) -> None:
    hand.enqueue("a")
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        background.wait_for("a")
        await background.looked()
        await anyio.to_thread.run_sync(listening, admin)
        hand.finish(hand.claim()[0], "1")
        tell_done(admin, TABLES.channel)
        await background.ended()
    assert background.ends == {"a": 1}


@pytest.mark.ruling("2.14", "2.18")
async def test_a_kind_with_notify_tells_at_once(app: App, admin: Admin, no_poll: None) -> None:
    begun, leave = anyio.Event(), anyio.Event()

    @app.kind("work", results="notify")
    async def work(job: Job[None]) -> int:
        begun.set()
        await leave.wait()
        return 1

    async with running(app.worker()), anyio.create_task_group() as group:
        await app.enqueue("work", key="a")
        background = Background(app, group)
        background.wait_for("a")
        await background.looked()
        await begun.wait()
        await anyio.to_thread.run_sync(listening, admin, 2)
        leave.set()
        await background.ended()
    assert background.ends == {"a": 1}


@pytest.mark.ruling("2.14")
async def test_without_listen_the_poll_finds_it(dsn: str, hand: Hand) -> None:
    deaf = App(dsn, listen_dsn=make_conninfo(dsn, port=1, host="127.0.0.1"))  # nothing is there
    deaf.declare("work")
    hand.enqueue("a")
    async with deaf, anyio.create_task_group() as group:
        background = Background(deaf, group)
        background.wait_for("a")
        await background.looked()
        hand.finish(hand.claim()[0], "1")
        await background.ended()
    assert background.ends == {"a": 1}


@pytest.mark.ruling("2.14")
async def test_equal_waits_are_read_once_and_each_poll_is_one_statement(waiting: App, hand: Hand, reads: Reads) -> None:
    other = Hand(hand.connection, kind="other")
    waiting.declare("other")
    hand.enqueue("a")
    other.enqueue("a")
    others: list[object] = []

    async def wait_for_other() -> None:
        others.append(await waiting.result("other", "a"))

    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        for number in range(50):
            background.wait_for("a", name=number)
        group.start_soon(wait_for_other)
        await reads.until(lambda: len(reads.asked) >= 4)
        assert set(reads.sizes[1:]) <= {1, 2}
        assert reads.sizes[-1] == 2  # one statement for two kinds
        hand.finish(hand.claim()[0], "1")
        other.finish(other.claim()[0], "2")
        await background.ended(50)
    assert set(background.ends.values()) == {1}
    assert others == [2]


async def test_those_who_come_one_after_the_other_are_read_together(
    waiting: App, hand: Hand, reads: Reads, no_poll: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiter_module, "_GATHER_SECONDS", 1.0)
    hand.enqueue_many([NewJob(key=f"k{number}") for number in range(20)])
    for claim in hand.claim(20):
        hand.finish(claim, "1")
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        background.wait_for("k0")
        await background.ended()
        for number in range(1, 20):
            background.wait_for(f"k{number}")
            await anyio.sleep(0.005)
        await background.ended(20)
    assert sum(reads.sizes) == 20
    assert len(reads.asked) <= 3


async def test_a_statement_reads_a_bounded_number_of_jobs(
    waiting: App, hand: Hand, reads: Reads, no_poll: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits_module, "MOST_AT_ONCE", 3)
    hand.enqueue_many([NewJob(key=f"k{number}") for number in range(8)])
    for claim in hand.claim(8):
        hand.finish(claim, "1")
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        for number in range(8):
            background.wait_for(f"k{number}")
        await background.ended(8)
    assert sum(reads.sizes) == 8
    assert max(reads.sizes) == 3


@pytest.mark.ruling("2.14")
async def test_a_cancelled_wait_is_taken_off_and_disturbs_no_other(waiting: App, hand: Hand, reads: Reads) -> None:
    hand.enqueue("a")
    hand.enqueue("b")
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        cancelled = [background.wait_for("a", name=number) for number in range(10)]
        background.wait_for("b")
        await background.looked()
        for scope in cancelled:
            scope.cancel()
        with pytest.raises(TimeoutError):
            await anyio.to_thread.run_sync(lambda: waiting.sync.result("work", "a", timeout=0.01))
        await reads.until(lambda: reads.asked[-1] == ["b"])
        assert background.ends == {}
        for claim in hand.claim(2):
            hand.finish(claim, "1")
        await background.ended()
    assert background.ends == {"b": 1}


@pytest.mark.ruling("2.14")
async def test_a_timeout_is_told_to_its_caller_alone(waiting: App, hand: Hand) -> None:
    hand.enqueue("a")
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        background.wait_for("a")
        await background.looked()
        with pytest.raises(TimeoutError, match=r"job 'a' of kind 'work' did not end within 0\.05 s"):
            await waiting.result("work", "a", timeout=0.05)
        with pytest.raises(TimeoutError):
            await waiting.result("work", "a", timeout=timedelta(0))
        with pytest.raises(TimeoutError):
            waiting.sync.result("work", "a", timeout=-1)
        hand.finish(hand.claim()[0], "1")
        await background.ended()
    assert background.ends == {"a": 1}


@pytest.mark.ruling("2.14")
async def test_a_loop_that_stands_still_disturbs_no_other(waiting: App, hand: Hand, reads: Reads) -> None:
    """Its wait is over, and it cannot hear of it: the others are told nevertheless."""
    hand.enqueue("a")
    stand_still, stands = threading.Event(), threading.Event()
    slow: list[object] = []

    async def wait_and_block() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            stands.set()
            stand_still.wait(20)

    async def wait() -> None:
        slow.append(await waiting.result("work", "a"))

    blocked = threading.Thread(target=lambda: asyncio.run(wait_and_block()))
    blocked.start()
    assert await anyio.to_thread.run_sync(stands.wait, 10)
    await reads.looked_at("a")
    hand.finish(hand.claim()[0], "1")
    assert await waiting.result("work", "a", timeout=20) == 1
    assert len(threads()) == 1
    assert slow == []
    stand_still.set()
    await anyio.to_thread.run_sync(blocked.join)
    assert slow == [1]


@pytest.mark.ruling("2.14")
async def test_a_loop_that_has_ended_disturbs_no_other(waiting: App, hand: Hand) -> None:
    hand.enqueue("a")

    async def give_up() -> None:
        with anyio.move_on_after(0.05):
            await waiting.result("work", "a")

    await anyio.to_thread.run_sync(lambda: asyncio.run(give_up()))
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        background.wait_for("a")
        await background.looked()
        hand.finish(hand.claim()[0], "1")
        await background.ended()
    assert background.ends == {"a": 1}


# --- outages, ends, forks -------------------------------------------------------------------------------------------


@contextmanager
def outage(server_dsn: str, admin: Admin) -> Iterator[None]:
    """Nobody may connect to this test's database, and the waiter's sessions are thrown out."""
    name = admin.info.dbname
    with psycopg.connect(server_dsn, autocommit=True) as server:
        server.execute(f'alter database "{name}" with allow_connections false'.encode())
        try:
            admin.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = current_database()"
                " and application_name in ('pgworker results', 'pgworker listen')"
            )
            yield
        finally:
            server.execute(f'alter database "{name}" with allow_connections true'.encode())


@pytest.mark.ruling("2.14")
async def test_an_outage_is_outwaited(waiting: App, hand: Hand, admin: Admin, server_dsn: str) -> None:
    hand.enqueue("a")
    claim = hand.claim()[0]
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        background.wait_for("a")
        await background.looked()
        with outage(server_dsn, admin):
            with pytest.raises(TimeoutError):
                await waiting.result("work", "a", timeout=0.3)
            hand.finish(claim, "1")  # this session was there before
        await background.ended(within=30)
    assert background.ends == {"a": 1}


@pytest.mark.ruling("2.14")
async def test_an_error_that_no_waiting_will_mend_is_told(waiting: App, admin: Admin, hand: Hand) -> None:
    hand.enqueue("a")
    admin.execute("alter table pgworker.results rename to mislaid")
    with anyio.fail_after(20), pytest.raises(PgworkerError, match="results cannot be read: UndefinedTable") as caught:
        await waiting.result("work", "a")
    assert isinstance(caught.value.__cause__, psycopg.Error)
    admin.execute("alter table pgworker.mislaid rename to results")
    hand.finish(hand.claim()[0], "1")
    assert await waiting.result("work", "a", timeout=20) == 1


@pytest.mark.ruling("1.21", "2.24")
async def test_closing_the_app_ends_the_thread_and_tells_those_who_wait(waiting: App, hand: Hand, admin: Admin) -> None:
    assert threads() == []  # nothing before the first wait
    hand.enqueue("a")
    async with anyio.create_task_group() as group:
        background = Background(waiting, group)
        background.wait_for("a")
        await background.looked()
        (thread,) = threads()
        await waiting.close()
        await background.ended()
        await anyio.to_thread.run_sync(thread.join, 10)
    assert not thread.is_alive()
    assert str(background.ends["a"]) == "the app was closed, and the wait for a result with it"
    wait_until_gone(admin)
    hand.finish(hand.claim()[0], "1")
    assert await waiting.result("work", "a") == 1  # used again, it starts anew


@pytest.mark.ruling("1.21", "2.24")
async def test_the_thread_ends_when_nobody_has_waited_for_a_while(
    waiting: App, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits_module, "IDLE_SECONDS", 0.05)
    hand.enqueue("a")
    hand.finish(hand.claim()[0], "1")
    for _ in range(5):  # some of them meet it as it ends
        assert await waiting.result("work", "a", timeout=20) == 1
    for thread in threads():
        await anyio.to_thread.run_sync(thread.join, 10)
    assert threads() == []
    assert await waiting.result("work", "a", timeout=20) == 1


def run_script(script: str, *arguments: str) -> None:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.ruling("1.21", "2.24")
def test_a_fork_gets_a_thread_of_its_own_and_leaves_the_parents_alone(dsn: str, hand: Hand) -> None:
    hand.enqueue("done")
    hand.finish(hand.claim()[0], "1")
    hand.enqueue("open")
    script = """
        import os, sys, threading
        from pgworker import App, JobCancelled, waits
        waits.POLL_SECONDS = 0.1
        app = App(sys.argv[1])
        app.declare("work")
        ends = []
        def wait():
            try:
                ends.append(app.sync.result("work", "open", timeout=20))
            except JobCancelled:
                ends.append("cancelled")
        waiter = threading.Thread(target=wait)
        waiter.start()
        assert app.sync.result("work", "done", timeout=20) == 1
        child = os.fork()
        if child == 0:
            assert app.sync.result("work", "done", timeout=20) == 1
            app.sync.close()
            left = [each.name for each in threading.enumerate() if each.is_alive()]
            os._exit(int("pgworker-results" in left))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert app.sync.result("work", "done", timeout=20) == 1
        assert ends == []
        assert app.sync.cancel("work", key="open") == 1
        waiter.join()
        assert ends == ["cancelled"], ends
        app.sync.close()
    """
    run_script(script, dsn)


@pytest.mark.ruling("1.21", "2.24")
def test_a_program_that_forgets_to_close_ends_quietly(dsn: str, hand: Hand, admin: Admin) -> None:
    hand.enqueue("done")
    hand.finish(hand.claim()[0], "1")
    script = """
        import asyncio, sys
        from pgworker import App
        app = App(sys.argv[1])
        app.declare("work")
        assert app.sync.result("work", "done") == 1
        async def main():
            assert await app.result("work", "done") == 1
        asyncio.run(main())
    """
    run_script(script, dsn)
    wait_until_gone(admin)


@pytest.mark.contract("A22")
@pytest.mark.ruling("1.10")
async def test_a_result_that_the_table_refuses_is_an_error_to_those_who_wait(app: App, admin: Admin) -> None:
    admin.execute("alter table pgworker.results add check (value <> '\"poison\"')")

    @app.kind("work", max_attempts=1)
    async def work(job: Job[str]) -> str:
        return job.payload

    async with running(app.worker()):
        await app.enqueue("work", "poison", key="a")
        with pytest.raises(JobFailed) as caught:
            await app.result("work", "a", timeout=20)
    assert caught.value.code == "result_rejected"
    assert row(admin, "a")["state"] == "failed"


@pytest.mark.ruling("1.10", "4.5")
def test_only_a_success_of_now_brings_its_value_along(hand: Hand) -> None:
    """Not the value of the work before, which may be large, and is nobody's any more."""
    read = read_results(TABLES, [("work", "a"), ("work", "b"), ("other", "a")])
    hand.enqueue("a", "r1")
    hand.finish(hand.claim()[0], "1")
    (first,) = hand.send(read)
    assert (first.state, first.has_result, first.value) == ("succeeded", True, "1")
    hand.enqueue("a", "r1b")
    hand.connection.execute("update pgworker.results set revision = 'r1b'")  # and not by its revision alone
    (waits,) = hand.send(read)
    assert (waits.state, waits.has_result, waits.value) == ("pending", False, None)
    hand.settle(hand.claim()[0], FAIL)
    (failed,) = hand.send(read)
    assert (failed.state, failed.has_result, failed.value) == ("failed", False, None)
    assert (failed.code, failed.generation, failed.id) == ("handler_failed", 2, first.id)


# --- time to live ---------------------------------------------------------------------------------------------------


def let_time_pass(admin: Admin, seconds: float, *keys: str) -> None:
    """Shift what is known of these keys into the past."""
    for table in ("jobs", "results"):
        admin.execute(
            f"update pgworker.{table} set finished_at = finished_at - %s where key = any(%s)".encode(),
            (timedelta(seconds=seconds), list(keys)),
        )


def results_of(admin: Admin) -> set[str]:
    found = admin.execute("select kind, key from pgworker.results").fetchall()
    return {key if kind == "work" else f"{kind} {key}" for kind, key in found}


@pytest.mark.ruling("2.14")
async def test_a_result_past_its_time_to_live_is_not_handed_out(app: App, hand: Hand, admin: Admin) -> None:
    app.declare("work", result_ttl=60)
    hand.enqueue_many([NewJob(key="young"), NewJob(key="old"), NewJob(key="none")])
    for claim in hand.claim(3):
        hand.finish(claim, None if claim.key == "none" else "1")
    let_time_pass(admin, 50, "young")
    let_time_pass(admin, 70, "old", "none")
    assert await app.result("work", "young") == 1
    assert await app.result("work", "none") is None
    with pytest.raises(ResultGone):
        await app.result("work", "old")


def keeping_a_minute() -> Retention:
    """Results of kind work go after that; jobs stay."""
    policy = make_policy("standard", {"result_ttl": timedelta(minutes=1), "keep": -1, "keep_failed": -1})
    kind = declare_kind("work", policy, payload=object, payload_limit=None, version=1)
    return Retention(TABLES, [kind], facts=False)


@pytest.mark.ruling("2.14")
async def test_results_past_their_time_to_live_are_deleted_and_missed(
    waiting: App, hand: Hand, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "_PAGE", 2)  # so that it takes several
    other = Hand(hand.connection, kind="other")
    other.enqueue("old")
    other.finish(other.claim()[0], "1")
    old = ["old", "failed", "cancelled", "superseded", "anew", "old2", "old3"]
    hand.enqueue_many([NewJob(key=key, revision="r1") for key in (*old, "young")])
    for claim in hand.claim(8):
        hand.finish(claim, '"first"')
    hand.enqueue_many([NewJob(key=key, revision="r2") for key in ("failed", "cancelled", "superseded", "anew")])
    for claim in hand.claim(8):
        match claim.key:
            case "failed":
                hand.settle(claim, FAIL)
            case "cancelled":
                hand.settle(claim, Settlement("cancelled", "unwanted"))
            case "anew":
                hand.finish(claim, '"second"')
    let_time_pass(admin, 70, *old)
    admin.execute("update pgworker.results set finished_at = clock_timestamp() where key = 'anew'")
    with hand.connection.transaction(force_rollback=True):
        looked = hand.send(expire_results(TABLES, Shelf("work", "failed", 60), limit=10))
    assert (looked.read, looked.deleted) == (1, 1)  # one of four states at a time
    retention = keeping_a_minute()
    assert drive_sync(retention.prune(), hand.send) == (0, 0, 5, 0)
    assert results_of(admin) == {"young", "superseded", "anew", "other old"}
    with pytest.raises(ResultGone):
        await waiting.result("work", "old")
    assert await waiting.result("work", "anew") == "second"
    assert await waiting.result("work", "young") == "first"
    let_time_pass(admin, 70, "young")  # later than where the first pass came to
    admin.execute(
        "update pgworker.jobs set finished_at = clock_timestamp() - interval '65 seconds' where key = 'young'"
    )
    assert drive_sync(retention.prune(), hand.send) == (0, 0, 1, 0)
    assert results_of(admin) == {"superseded", "anew", "other old"}


@pytest.mark.ruling("2.14")
def test_deleting_old_results_waits_for_nobody_and_comes_back(dsn: str, hand: Hand, admin: Admin) -> None:
    hand.enqueue("a", "r1")
    hand.finish(hand.claim()[0], '"first"')
    let_time_pass(admin, 70, "a")
    retention = keeping_a_minute()
    other = make_hand(dsn)
    with hand.connection.transaction():
        hand.connection.execute("select from pgworker.results where key = 'a' for update")  # as a finish does
        assert drive_sync(retention.prune(), other.send) == (0, 0, 0, 0)  # a wait would never end
    assert drive_sync(retention.prune(), other.send) == (0, 0, 0, 0)  # its page has passed
    retention.begin_anew()
    assert drive_sync(retention.prune(), other.send) == (0, 0, 1, 0)
    other.connection.close()


@pytest.mark.ruling("2.14")
async def test_a_worker_deletes_what_is_past_its_time(
    app: App, hand: Hand, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "PRUNE_EVERY", timedelta(seconds=0.02))

    @app.kind("work", result_ttl=timedelta(minutes=1))
    async def work(job: Job[str]) -> str:
        return job.payload

    async with running(app.worker()):
        await app.enqueue("work", "x", key="a")
        assert await app.result("work", "a", timeout=20) == "x"
        let_time_pass(admin, 70, "a")
        with anyio.fail_after(20):
            while results_of(admin):  # noqa: ASYNC110 - it is the database that tells
                await anyio.sleep(0.02)


@pytest.mark.ruling("2.14")
def test_a_time_to_live_is_positive(app: App) -> None:
    with pytest.raises(ConfigError, match=r"result_ttl: seconds or a timedelta .*; got -1"):
        app.declare("work", result_ttl=-1)
