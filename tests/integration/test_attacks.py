"""What an app or its surroundings may do to a worker, and must not end, wedge or mislead it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import anyio
import anyio.to_thread
import psycopg
import pytest

from pgworker import App, Backoff, ConfigError, Job, NewJob, Park, Pause, Retry
from pgworker.errors import PgworkerError
from pgworker.events import JobLost, JobSettled
from pgworker.executors.guest import Contained
from pgworker.outcome import Returned
from pgworker.registry import DOOR_CONNECTIONS
from tests.handles import Recorder, result, row, running

if TYPE_CHECKING:
    from tests.databases import WorkerDatabase

Admin: TypeAlias = psycopg.Connection[Any]
Conn: TypeAlias = psycopg.AsyncConnection[Any]
SyncConn: TypeAlias = psycopg.Connection[Any]

AT_ONCE = Backoff(base=timedelta(milliseconds=1), cap=timedelta(milliseconds=1), jitter="none")


def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def outcomes(admin: Admin) -> set[tuple[str, str | None]]:
    return set(admin.execute("select state, last_code from pgworker.jobs where kind = 'work'").fetchall())


async def run_and_prove_life(app: App, seen: Recorder, *, settled: int) -> None:
    """The jobs of `work` come to their ends, the runner then takes a job more, and the worker stops when it is told."""

    def ended() -> int:
        return sum(event.kind == "work" and event.state != "pending" for event in seen.of(JobSettled))

    async with running(app.worker()) as worker:
        await seen.wait(lambda: ended() == settled)
        assert worker.status()["work"].lifecycle != "stopped"
        await app.enqueue("work", None, key="alive")
        await seen.wait(lambda: ended() == settled + 1)
        assert worker.status()["work"].in_flight == 0


# --- handlers that strike at their own task -------------------------------------------------------------------------


async def cancels_itself_and_waits() -> None:
    cancel_own_task()
    await anyio.sleep(10)


async def cancels_itself_and_returns() -> None:
    cancel_own_task()


async def cancels_itself_twice_and_raises() -> None:
    cancel_own_task()
    cancel_own_task()
    raise LookupError


@pytest.mark.ruling("2.13")
@pytest.mark.parametrize(
    ("strike", "code"),
    [
        (cancels_itself_and_waits, "handler_failed"),
        (cancels_itself_and_returns, None),
        (cancels_itself_twice_and_raises, "handler_failed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_handler_that_cancels_its_own_task_does_not_end_the_runner(
    app: App, admin: Admin, strike: Callable[[], Awaitable[None]], code: str | None
) -> None:
    beside = anyio.Event()

    @app.kind("work", max_attempts=1)
    async def work(job: Job[object]) -> None:
        if job.key == "bad":
            await strike()
            beside.set()
        elif job.key == "beside":
            await beside.wait() if code is None else await anyio.sleep(0.1)

    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(None, "beside"), NewJob(None, "bad")])
    await run_and_prove_life(app, seen, settled=2)
    assert (row(admin, "bad")["last_code"], row(admin, "beside")["state"]) == (code, "succeeded")


async def test_a_cancellation_by_our_own_scope_still_goes_through() -> None:
    with anyio.move_on_after(0.01) as scope:
        async with Contained():
            await anyio.sleep(10)
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    "wait", [-5, float("nan"), "5", True, timedelta(seconds=-1), timedelta.max, timedelta.min], ids=repr
)
async def test_a_wait_that_cannot_be_kept_is_the_jobs_failure_and_wedges_nothing(
    app: App, admin: Admin, wait: Any
) -> None:
    makers: list[Callable[[], object]] = [
        lambda: Retry(wait),
        lambda: Park("later", wait),
        lambda: Pause(wait),
    ]

    @app.kind("work", max_attempts=1)
    async def work(job: Job[int | None]) -> Any:
        return None if job.payload is None else makers[job.payload]()

    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(index) for index in range(len(makers))])
    await run_and_prove_life(app, seen, settled=3)
    assert outcomes(admin) == {("failed", "handler_failed"), ("succeeded", None)}


def test_a_backoff_that_leaves_the_range_of_instants_is_refused() -> None:
    with pytest.raises(ConfigError, match="3650 days"):
        Backoff(cap=timedelta.max)


@dataclass
class Exits:
    how: str

    def __post_init__(self) -> None:
        raise {"exit": SystemExit, "memory": MemoryError, "cancelled": asyncio.CancelledError}[self.how]


@pytest.mark.parametrize(
    ("how", "code"), [("exit", "handler_panic"), ("memory", "handler_failed"), ("cancelled", "handler_failed")]
)
async def test_a_payload_type_that_exits_fails_its_own_job_only(app: App, admin: Admin, how: str, code: str) -> None:
    @app.kind("work", max_attempts=1)
    async def work(job: Job[Exits | None]) -> None: ...

    seen = Recorder(app)
    admin.execute("insert into pgworker.jobs (kind, key, payload) values ('work', 'bad', %s)", [f'{{"how": "{how}"}}'])
    await run_and_prove_life(app, seen, settled=1)
    assert row(admin, "bad")["last_code"] == code


@pytest.mark.parametrize("answer", [None, "text", {"value": 1}])
async def test_a_middleware_that_answers_nonsense_fails_the_job_only(dsn: str, admin: Admin, answer: object) -> None:
    async def nonsense(kind: str, jobs: Any, call_next: Any) -> Any:
        results = await call_next(jobs)
        return results if jobs[0].key == "alive" else [answer] * len(jobs)

    async with App(dsn, middleware=[nonsense]) as app:

        @app.kind("work", max_attempts=1)
        async def work(job: Job[object]) -> None: ...

        seen = Recorder(app)
        await app.enqueue("work", 1, key="bad")
        await run_and_prove_life(app, seen, settled=1)
    assert row(admin, "bad")["last_code"] == "result_rejected"


# --- the app's own writes -------------------------------------------------------------------------------------------


async def exits(conn: Conn) -> None:
    raise SystemExit


async def raises_cancelled(conn: Conn) -> None:
    raise asyncio.CancelledError


async def cancels_itself(conn: Conn) -> None:
    cancel_own_task()
    await anyio.sleep(1)


async def closes(conn: Conn) -> None:
    await conn.close()


async def commits(conn: Conn) -> None:
    await conn.execute("commit")


async def meets_a_dead_server(conn: Conn) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        await psycopg.AsyncConnection.connect(f"host=127.0.0.1 port={unheard.getsockname()[1]}")


@pytest.mark.ruling("2.11")
@pytest.mark.parametrize(
    ("strike", "code"),
    [
        (exits, "handler_panic"),
        (raises_cancelled, "handler_failed"),
        (cancels_itself, "handler_failed"),
        (closes, "handler_failed"),
        (commits, "handler_failed"),
        (meets_a_dead_server, "handler_failed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_what_apply_does_is_the_jobs_failure_and_wedges_no_slot(
    app: App, admin: Admin, strike: Callable[[Conn], Awaitable[None]], code: str
) -> None:
    async def store(conn: Conn, job: Job[object], value: object) -> None:
        if job.key == "bad":
            await strike(conn)

    @app.kind("work", apply=store, max_attempts=2, concurrency=1, backoff=AT_ONCE)
    async def work(job: Job[object]) -> int:
        return 1

    seen = Recorder(app)
    await app.enqueue("work", 1, key="bad")
    await run_and_prove_life(app, seen, settled=1)
    after = row(admin, "bad")
    assert (after["state"], after["attempts"], after["last_code"]) == ("failed", 2, code)


@pytest.mark.parametrize(("strike", "code"), [("exit", "handler_panic"), ("close", "handler_failed")])
async def test_what_apply_does_in_a_thread_is_the_jobs_failure_too(
    app: App, admin: Admin, strike: str, code: str
) -> None:
    def store(conn: SyncConn, job: Job[object], value: object) -> None:
        if job.key == "bad" and strike == "exit":
            raise SystemExit
        if job.key == "bad":
            conn.close()

    @app.kind("work", apply=store, max_attempts=1, concurrency=1)
    def work(job: Job[object]) -> int:
        return 1

    seen = Recorder(app)
    await app.enqueue("work", 1, key="bad")
    await run_and_prove_life(app, seen, settled=1)
    assert row(admin, "bad")["last_code"] == code


@pytest.mark.parametrize("revision", [None, "r2"])
async def test_a_job_whose_apply_replaces_itself_fails_and_never_succeeds_without_its_writes(
    app: App, admin: Admin, revision: str | None
) -> None:
    """The completion takes the app's writes back, and the enqueue was one of them: so the row looks untouched."""
    admin.execute("create table public.stored (key text); grant all on public.stored to public")

    async def store(conn: Conn, job: Job[object], value: object) -> None:
        await conn.execute("insert into public.stored values (%s)", [job.key])
        if job.key == "bad":
            await app.enqueue("work", 2, key="bad", revision=revision, conn=conn)

    @app.kind("work", apply=store, max_attempts=2, backoff=AT_ONCE)
    async def work(job: Job[object]) -> int:
        return 1

    seen = Recorder(app)
    await app.enqueue("work", 1, key="bad", revision=revision and "r1")
    await run_and_prove_life(app, seen, settled=1)
    after = row(admin, "bad")
    assert (after["state"], after["attempts"], after["evictions"]) == ("failed", 2, 0)
    assert (after["last_code"], after["last_error"]) == ("queue_complete_failed", "SupersededByItself")
    assert admin.execute("select key from public.stored").fetchall() == [("alive",)]


@pytest.mark.parametrize("revision", [None, "r2"])
async def test_new_work_that_comes_during_apply_is_no_failure(app: App, admin: Admin, revision: str | None) -> None:
    async def store(conn: Conn, job: Job[int], value: object) -> None:
        if job.payload == 1:
            await app.enqueue("work", 2, key="k", revision=revision)

    @app.kind("work", apply=store)
    async def work(job: Job[int]) -> int:
        return job.payload

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k", revision=revision and "r1")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    assert [event.reason for event in seen.of(JobLost)] == ["lost"]
    after, stored = row(admin, "k"), result(admin, "k")
    assert stored is not None
    assert (after["state"], after["attempts"], stored["value"]) == ("succeeded", 0, 2)


async def test_an_observer_that_reads_a_cancelled_future_does_not_end_the_runner(app: App) -> None:
    @app.kind("work")
    async def work(job: Job[object]) -> None: ...

    cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    cancelled.cancel()
    app.events.subscribe(lambda _event: cancelled.result())
    seen = Recorder(app)
    await app.enqueue("work", 1)
    await run_and_prove_life(app, seen, settled=1)


# --- threads and loops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "state"), [("drain", "succeeded"), ("release", "pending")])
async def test_a_thread_may_stop_its_worker(app: App, admin: Admin, order: str, state: str) -> None:
    @app.kind("work", max_attempts=1)
    def work(job: Job[object]) -> None:
        getattr(worker, order)()
        ordered.set()
        if order == "release":
            job.signal.wait(5)

    ordered = threading.Event()
    worker = app.worker()
    await app.enqueue("work", 1, key="k")
    with anyio.fail_after(10):
        await worker.run()
    assert ordered.is_set()
    after = row(admin, "k")
    assert (after["state"], after["attempts"], after["token"]) == (state, 0, None)


async def test_threads_of_the_app_hold_up_neither_completions_nor_the_stop(app: App) -> None:
    def store(conn: SyncConn, job: Job[object], value: object) -> None: ...

    @app.kind("work", apply=store)
    def work(job: Job[object]) -> int:
        return 1

    free = threading.Event()
    limiter = anyio.to_thread.current_default_thread_limiter()
    tokens, limiter.total_tokens = limiter.total_tokens, 1
    seen = Recorder(app)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, lambda: free.wait(20))
            await anyio.wait_all_tasks_blocked()
            await app.enqueue("work", 1)
            with anyio.fail_after(10):
                async with running(app.worker()):
                    await seen.count(JobSettled, 1)
                await app.close()
            free.set()
    finally:
        free.set()
        limiter.total_tokens = tokens


async def test_a_worker_that_waits_for_a_lock_at_its_start_can_be_stopped(
    app: App, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.worker.STORE_TIMEOUT", timedelta(seconds=0.8))

    @app.kind("work")
    async def work(job: Job[object]) -> None: ...

    worker = app.worker()
    with anyio.fail_after(10), admin.transaction():
        admin.execute("lock table pgworker.migrations")
        async with anyio.create_task_group() as group:
            group.start_soon(worker.run)
            await anyio.wait_all_tasks_blocked()
            worker.drain()


def connections(admin: Admin, role: str = "enqueue") -> int:
    query = "select count(*) from pg_stat_activity where datname = current_database() and application_name = %s"
    found = admin.execute(query, [f"pgworker {role}"]).fetchone()
    assert found is not None
    return int(found[0])


def terminate(admin: Admin, *, role: str) -> int:
    """How many connections there were."""
    return admin.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where datname = current_database() and application_name = %s",
        [f"pgworker {role}"],
    ).rowcount


def test_a_loop_for_each_enqueue_leaks_no_connection(dsn: str, admin: Admin) -> None:
    app = App(dsn)
    app.declare("work")
    for index in range(5):
        asyncio.run(app.enqueue("work", index))
    app.sync.close()
    for _ in range(100):
        if connections(admin) == 0:
            return
        threading.Event().wait(0.02)
    pytest.fail(f"{connections(admin)} connections are left")


LOOPS = """
import asyncio, psycopg, sys
from pgworker import App

app = App(sys.argv[1])
app.declare("work")
for index in range(4):
    loop = asyncio.new_event_loop()
    loop.run_until_complete(app.enqueue("work", index))
    loop.close()  # and what runs in it is neither cancelled nor waited for
with psycopg.connect(sys.argv[2]) as connection:
    print(connection.execute(
        "select count(*) from pg_stat_activity where datname = current_database() and application_name = %s",
        ["pgworker enqueue"],
    ).fetchone()[0])
"""


def test_loops_that_are_closed_under_their_pools_leak_one_connection_at_most(
    dsn: str, worker_database: WorkerDatabase
) -> None:
    command = [sys.executable, "-c", LOOPS, dsn, worker_database.admin_dsn]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert int(ended.stdout) <= 2  # the last one, and one that the server has not noticed yet


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A DSN that connects to what never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"host=127.0.0.1 port={listening.getsockname()[1]} dbname=none user=none"


def test_a_program_that_gives_up_on_a_silent_server_comes_to_its_end(silent_server: str) -> None:
    """asyncio.run() waits for what it has cancelled; a pool's task that is connecting takes no cancellation."""
    app = App(silent_server)
    app.declare("work")

    async def give_up() -> None:
        asyncio.get_running_loop().call_later(0.3, cast("asyncio.Task[None]", asyncio.current_task()).cancel)
        await app.enqueue("work", 1)

    done = threading.Event()

    def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(give_up())
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert done.wait(12)


# --- the surroundings -----------------------------------------------------------------------------------------------


async def test_the_connection_for_renewals_is_there_before_the_first_lease(app: App, admin: Admin) -> None:
    """A server that runs out of connections later must not cost a worker its leases, time and again."""

    @app.kind("work")
    async def work(job: Job[object]) -> None: ...

    async with running(app.worker()):
        with anyio.fail_after(10):
            while connections(admin, "lease") != 1:  # noqa: ASYNC110 - nothing tells of it
                await anyio.sleep(0.02)


def waiting(admin: Admin) -> int:
    found = admin.execute("select count(*) from pg_locks where relation = 'pgworker.jobs'::regclass and not granted")
    return int(found.fetchall()[0][0])


async def test_an_enqueue_survives_that_its_pooled_connections_were_ended(app: App, admin: Admin) -> None:
    """As a restart of the server leaves them, a firewall, or idle_session_timeout; however many there are.

    Those that could not be put together are put by halves, over more connections, and at last each over one of its own.
    """
    app.declare("work")
    async with anyio.create_task_group() as callers:
        with admin.transaction():
            admin.execute("lock table pgworker.jobs")
            for _ in range(DOOR_CONNECTIONS):
                callers.start_soon(app.enqueue, "work", 1)
            while waiting(admin) < DOOR_CONNECTIONS:  # noqa: ASYNC110 - nothing tells of it
                await anyio.sleep(0.01)
    assert terminate(admin, role="enqueue") + terminate(admin, role="calls") >= DOOR_CONNECTIONS
    await app.enqueue("work", 1)
    await app.pauses()


def test_a_synchronous_enqueue_survives_it_too(app: App, admin: Admin) -> None:
    app.declare("work")
    with app.sync, ThreadPoolExecutor(DOOR_CONNECTIONS) as callers:
        with admin.transaction():
            admin.execute("lock table pgworker.jobs")
            calls = [callers.submit(app.sync.enqueue, "work", 1) for _ in range(DOOR_CONNECTIONS)]
            while waiting(admin) < DOOR_CONNECTIONS:
                time.sleep(0.01)
        assert [call.result().status for call in calls] == ["created"] * DOOR_CONNECTIONS
        assert terminate(admin, role="enqueue") == DOOR_CONNECTIONS
        app.sync.enqueue("work", 1)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PGCLIENTENCODING", "LATIN1"),
        ("PGCLIENTENCODING", "SQL_ASCII"),
        ("PGDATESTYLE", "German"),
        ("PGTZ", "America/New_York"),
        ("PGOPTIONS", "-c idle_session_timeout=50 -c intervalstyle=iso_8601 -c extra_float_digits=-15"),
    ],
)
async def test_the_session_settings_of_others_change_nothing(
    app: App, admin: Admin, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)

    @app.kind("work", max_attempts=1)
    async def work(job: Job[str]) -> str:
        return job.payload

    seen = Recorder(app)
    first = datetime.min.replace(tzinfo=UTC)
    await app.enqueue_many("work", [NewJob("日本", "ключ"), NewJob("first", "first", ready_at=first)])
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 2)
        await app.enqueue("work", "again", key="again")
        await seen.count(JobSettled, 3)
        assert worker.status()["work"].last_error is None
    stored = result(admin, "ключ")
    assert stored is not None
    assert stored["value"] == "日本"
    assert {row(admin, key)["state"] for key in ("ключ", "first", "again")} == {"succeeded"}


@pytest.mark.ruling("0.5")
async def test_an_infinite_ready_at_holds_up_nobody_and_the_past_is_seen(app: App, admin: Admin) -> None:
    """Operators put a job off with 'infinity'. No pending row may be invisible, whatever else they write."""

    @app.kind("work")
    async def work(job: Job[object]) -> None: ...

    for key in ("infinity", "-infinity", "4000-01-01 BC"):
        admin.execute("insert into pgworker.jobs (kind, key, ready_at) values ('work', %s, %s)", [key, key])
    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 3)
        assert worker.status()["work"].last_error is None
    states = admin.execute("select key, state from pgworker.jobs").fetchall()
    assert dict(states) == {
        "infinity": "pending",
        "-infinity": "succeeded",
        "4000-01-01 BC": "succeeded",
        "k": "succeeded",
    }


@pytest.mark.parametrize("given", ["dsn", "listen_dsn"])
def test_a_dsn_that_cannot_be_read_is_said_without_quoting_it(given: str) -> None:
    unreadable = "postgres:/user:SECRET@host"
    app = App(unreadable) if given == "dsn" else App("host=localhost", listen_dsn=unreadable)
    app.declare("work")
    with pytest.raises(ConfigError, match="DSN cannot be read") as raised:
        app.sync.enqueue("work", 1)
    assert "SECRET" not in str(raised.value)
    assert raised.value.__cause__ is None


async def test_a_connection_that_knows_no_encoding_is_refused_unsent(app: App, admin: Admin, dsn: str) -> None:
    app.declare("work")
    async with await psycopg.AsyncConnection.connect(dsn, client_encoding="SQL_ASCII") as conn:
        with pytest.raises(PgworkerError, match="SQL_ASCII"):
            await app.enqueue("work", 1, key="ключ", conn=conn)
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (0,)


@pytest.mark.parametrize("text", ['"\ud800"', '"x"\0"y"'], ids=["a lone surrogate", "a NUL"])
async def test_a_result_that_cannot_be_sent_fails_its_own_job_only(dsn: str, admin: Admin, text: str) -> None:
    """A middleware's, as a handler's values are encoded by us."""

    async def replace(kind: str, jobs: Any, call: Any) -> Any:
        results = await call(jobs)
        return [Returned(text) if job.key == "b" else result for job, result in zip(jobs, results, strict=True)]

    app = App(dsn, middleware=[replace])

    @app.kind("work", batch=4, window=0)
    async def work(jobs: Sequence[Job[None]]) -> list[str]:
        return [f"of {job.key}" for job in jobs]

    seen = Recorder(app)
    async with app:
        await app.enqueue_many("work", [NewJob(None, key=key) for key in "abcd"])
        async with running(app.worker()):
            await seen.wait(lambda: len(seen.of(JobSettled)) == len("abcd"))
    assert {key: row(admin, key)["last_code"] for key in "abcd"} == {
        "a": None,
        "b": "result_rejected",
        "c": None,
        "d": None,
    }
    assert [(result(admin, key) or {}).get("value") for key in "abcd"] == ["of a", None, "of c", "of d"]


@pytest.mark.parametrize("name", ["a\0b", "\ud800", 5])
async def test_an_exception_whose_class_lies_about_its_name_fails_its_own_job_only(
    app: App, admin: Admin, name: object
) -> None:
    liar = type("Liar", (type,), {"__name__": property(lambda cls: name)})
    odd = liar("Odd", (Exception,), {})
    seen = Recorder(app)

    @app.kind("work", concurrency=2, max_attempts=1)
    async def work(job: Job[object]) -> None:
        if job.payload == "odd":
            raise odd

    await app.enqueue("work", "odd", key="odd")
    await run_and_prove_life(app, seen, settled=1)
    assert (row(admin, "odd")["last_code"], row(admin, "odd")["last_error"]) == ("handler_failed", "Odd")
