"""`apply=`: the app's own writes land with the completion, or not at all, and never in the app's way."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import psycopg
import pytest

from pgworker import App, ConfigError, Job, Lease, NewJob, Permanent
from pgworker.events import JobLost, JobSettled, RunnerTrouble
from tests.handles import Hand, Recorder, result, row, running

Admin: TypeAlias = psycopg.Connection[Any]
Conn: TypeAlias = psycopg.AsyncConnection[Any]
SyncConn: TypeAlias = psycopg.Connection[Any]

STORE = "update public.documents set search = to_tsvector('pg_catalog.simple', %s), indexed = %s where key = %s"


@pytest.fixture(autouse=True)
def documents(admin: Admin) -> None:
    """The app's own table: a document, and what was made of it by the job of its key."""
    admin.execute(
        "create table public.documents (key text primary key, body text not null, search tsvector,"
        " indexed text check (indexed not like '%refused%'))"
    )


def put(admin: Admin, *keys: str, body: str = "body") -> None:
    for key in keys:
        admin.execute("insert into public.documents (key, body) values (%s, %s)", (key, body))


def document(admin: Admin, key: str) -> tuple[str | None, str | None]:
    """What apply has written for a key."""
    found = admin.execute("select search::text, indexed from public.documents where key = %s", (key,)).fetchone()
    assert found is not None
    return found[0], found[1]


@dataclass
class Steps:
    """Lets a test act while apply is under way: `before` its write or `after` it, once each."""

    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    calls: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def take(self, name: str) -> None:
        step: Callable[[], object] = getattr(self, name)
        setattr(self, name, lambda: None)
        step()


@pytest.fixture
def poll() -> float:
    """Seconds until the worker finds by itself what came without a hint."""
    return 0.1


@pytest.fixture(params=["async", "sync"])
async def steps(request: pytest.FixtureRequest, app: App, poll: float) -> AsyncIterator[Steps]:
    """The kind `work`, whose apply stores the payload in the document: with an async handler, or one in a thread."""
    steps = Steps()

    async def store(conn: Conn, job: Job[str], value: str) -> None:
        steps.calls.append(job.key)
        await anyio.to_thread.run_sync(steps.take, "before")
        await conn.execute(STORE, (value, value, job.key))
        await anyio.to_thread.run_sync(steps.take, "after")

    def store_sync(conn: SyncConn, job: Job[str], value: str) -> None:
        steps.calls.append(job.key)
        steps.threads.add(threading.get_ident())
        steps.take("before")
        conn.execute(STORE, (value, value, job.key))
        steps.take("after")

    async def work(job: Job[str]) -> str:
        return job.payload

    def work_sync(job: Job[str]) -> str:
        return job.payload

    if request.param == "async":
        app.kind("work", apply=store, poll=poll)(work)
    else:
        app.kind("work", apply=store_sync, poll=poll)(work_sync)
    yield steps
    assert threading.get_ident() not in steps.threads


# --- together or not at all -----------------------------------------------------------------------------------------


@pytest.mark.ruling("2.11")
async def test_the_apps_write_is_seen_together_with_the_completion(app: App, admin: Admin, steps: Steps) -> None:
    seen_during: list[Any] = []
    steps.after = lambda: seen_during.append((document(admin, "k"), row(admin, "k")["state"]))
    put(admin, "k")
    seen = Recorder(app)
    await app.enqueue("work", "hello world", key="k", revision="r1")
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.of(JobSettled)))
    assert seen_during == [((None, None), "pending")]
    assert document(admin, "k") == ("'hello':1 'world':2", "hello world")
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["value"], stored["revision"], row(admin, "k")["state"]) == ("hello world", "r1", "succeeded")
    assert steps.calls == ["k"]


@pytest.mark.ruling("1.3", "2.11", "4.2")
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_run_that_is_superseded_during_apply_takes_its_writes_back(
    app: App, admin: Admin, steps: Steps, hand: Hand, when: str
) -> None:
    setattr(steps, when, lambda: hand.enqueue("k", "r2", "new"))
    put(admin, "k")
    seen = Recorder(app)
    await app.enqueue("work", "old", key="k", revision="r1")
    trail(admin)
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 1)
        await seen.count(JobLost, 1)  # the two may run beside each other, so that the old one is noticed later
        status = worker.status()["work"]
    assert admin.execute("select indexed from public.trail order by n").fetchall() == [("new",)]  # "old" was never seen
    assert document(admin, "k") == ("'new':1", "new")
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["value"], stored["revision"]) == ("new", "r2")
    assert (status.superseded, status.succeeded, status.last_error) == (1, 1, None)


def trail(admin: Admin) -> None:
    """From now on each committed write of apply is noted."""
    admin.execute(
        "create table public.trail (n serial, indexed text);"
        "create function public.note() returns trigger language plpgsql security definer as"
        " 'begin insert into public.trail (indexed) values (new.indexed); return null; end';"
        "create trigger noted after update on public.documents for each row"
        " when (old.indexed is distinct from new.indexed) execute function public.note()"
    )


@pytest.mark.ruling("2.2", "2.11")
async def test_a_payload_that_comes_during_apply_is_new_work_and_the_writes_are_taken_back(
    app: App, admin: Admin, steps: Steps, hand: Hand
) -> None:
    steps.after = lambda: hand.enqueue("k", None, "new")
    put(admin, "k")
    trail(admin)
    seen = Recorder(app)
    await app.enqueue("work", "old", key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
        await seen.count(JobLost, 1)
    assert admin.execute("select indexed from public.trail order by n").fetchall() == [("new",)]
    after = row(admin, "k")
    assert (after["state"], after["attempts"], after["evictions"], after["token"]) == ("succeeded", 0, 0, None)
    assert len(seen.of(JobLost)) == 1
    assert steps.calls == ["k", "k"]


@pytest.mark.ruling("2.11")
async def test_a_deleted_job_takes_the_writes_back(app: App, admin: Admin, steps: Steps) -> None:
    steps.after = lambda: admin.execute("delete from pgworker.jobs")
    put(admin, "k")
    seen = Recorder(app)
    await app.enqueue("work", "old", key="k")
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.of(JobLost)))
    assert document(admin, "k") == (None, None)
    assert admin.execute("select count(*) from pgworker.results").fetchone() == (0,)


@pytest.mark.ruling("1.3")
@pytest.mark.parametrize("poll", [60], ids=["no poll"])  # or it might be found again, and ended as evicted
async def test_a_lease_that_ends_during_apply_takes_the_writes_back(app: App, admin: Admin, steps: Steps) -> None:
    def expire() -> None:
        admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp(), evictions = 4")

    steps.after = expire
    put(admin, "k")
    trail(admin)
    seen = Recorder(app)
    await app.enqueue("work", "value", key="k")
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.of(JobLost)))
    assert seen.of(JobLost)[0].reason == "expired"
    assert admin.execute("select count(*) from public.trail").fetchone() == (0,)
    assert row(admin, "k")["state"] == "pending"


@pytest.mark.ruling("1.2", "1.3")
async def test_a_job_row_that_somebody_holds_lets_apply_be_repeated(
    app: App, admin: Admin, dsn: str, steps: Steps
) -> None:
    put(admin, "k")
    seen = Recorder(app)
    await app.enqueue("work", "value", key="k")
    with psycopg.connect(dsn) as other:
        steps.before = lambda: other.execute("select from pgworker.jobs where key = 'k' for update")
        async with running(app.worker()) as worker:
            with anyio.fail_after(10):
                while len(steps.calls) < 3:  # noqa: ASYNC110 - apply is called in a thread
                    await anyio.sleep(0.01)
            assert document(admin, "k") == (None, None)
            other.rollback()
            await seen.wait(lambda: bool(seen.of(JobSettled)))
            assert worker.status()["work"].last_error is None
    assert document(admin, "k") == ("'value':1", "value")
    assert row(admin, "k")["attempts"] == 0


async def test_apply_is_for_successes_only(app: App, admin: Admin) -> None:
    applied: list[str] = []

    async def store(conn: Conn, job: Job[int], value: object) -> None:
        applied.append(job.key)

    @app.kind("work", batch=4, window=0, apply=store, max_attempts=1)
    async def work(jobs: list[Job[int]]) -> list[object]:
        return ["value", Permanent("no"), None, math_nan()]

    await app.enqueue_many("work", [NewJob(index, f"k{index}") for index in range(4)])
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 4)
    assert applied == ["k0", "k2"]
    found = admin.execute("select last_code from pgworker.jobs order by key").fetchall()
    assert found == [(None,), ("no",), (None,), ("result_rejected",)]


def math_nan() -> float:
    return float("nan")


def test_apply_is_of_its_handlers_colour(app: App) -> None:
    async def store(conn: Conn, job: Job[int], value: object) -> None: ...

    def store_sync(conn: SyncConn, job: Job[int], value: object) -> None: ...

    async def work(job: Job[int]) -> None: ...

    def work_sync(job: Job[int]) -> None: ...

    with pytest.raises(ConfigError, match="both be `async def` or both be `def`"):
        app.kind("one", apply=store_sync)(work)
    with pytest.raises(ConfigError, match="both be `async def` or both be `def`"):
        app.kind("two", apply=store)(work_sync)


# --- what cannot be written -----------------------------------------------------------------------------------------


@pytest.mark.contract("A57")
@pytest.mark.ruling("1.18")
async def test_a_write_that_the_database_refuses_fails_its_own_job_only(
    app: App, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def store(conn: Conn, job: Job[str], value: str) -> None:
        await conn.execute(STORE, (value, value, job.key))

    @app.kind("work", batch=4, window=0, apply=store)
    async def work(jobs: list[Job[str]]) -> list[str]:
        return [job.payload for job in jobs]

    put(admin, "k0", "k1", "k2", "k3")
    texts = ["zero", "this is refused SECRET", "two", "three"]
    await app.enqueue_many("work", [NewJob(text, f"k{index}") for index, text in enumerate(texts)])
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await seen.wait(lambda: len(seen.of(JobSettled)) == 4)
        assert (worker.status()["work"].succeeded, worker.status()["work"].retried) == (3, 1)
    found = admin.execute("select state, attempts, last_code, token from pgworker.jobs order by key").fetchall()
    assert found == [
        ("succeeded", 0, None, None),
        ("pending", 1, "result_rejected", None),
        ("succeeded", 0, None, None),
        ("succeeded", 0, None, None),
    ]
    assert [document(admin, f"k{index}")[1] for index in range(4)] == ["zero", None, "two", "three"]
    assert "SECRET" not in caplog.text


@pytest.mark.contract("A57")
@pytest.mark.ruling("1.18")
@pytest.mark.parametrize("preset", ["standard", "content"])
async def test_a_result_that_the_database_refuses_fails_its_own_job_only(app: App, admin: Admin, preset: str) -> None:
    admin.execute("alter table pgworker.results add constraint refuse check (value <> '13' and value <> '17')")

    @app.kind("work", preset=preset, batch=40, window=0, max_attempts=2)
    async def work(jobs: list[Job[int]]) -> list[int]:
        return [job.payload for job in jobs]

    await app.enqueue_many("work", [NewJob(index, f"k{index:02}") for index in range(40)])
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 40)
    found = admin.execute(
        "select key, attempts, last_code, token from pgworker.jobs where state = 'pending' order by key"
    ).fetchall()
    assert found == [("k13", 1, "result_rejected", None), ("k17", 1, "result_rejected", None)]
    assert admin.execute("select count(*) from pgworker.results").fetchone() == (38,)


@pytest.mark.ruling("1.18")
async def test_an_error_of_the_apps_own_code_is_a_failure_of_the_job(app: App, admin: Admin) -> None:
    async def store(conn: Conn, job: Job[int], value: object) -> None:
        await conn.execute("update public.documents set body = 'changed'")
        raise LookupError("SECRET")

    @app.kind("work", apply=store, max_attempts=1)
    async def work(job: Job[int]) -> int:
        return 1

    put(admin, "k")
    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.of(JobSettled)))
    after = row(admin, "k")
    assert (after["state"], after["last_code"], after["has_result"]) == ("failed", "handler_failed", False)
    assert admin.execute("select body from public.documents").fetchone() == ("body",)


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> float:
    """Statements of the worker have 0.8 s; the server gives up on them, and on idle transactions, after 0.3 s."""
    monkeypatch.setattr("pgworker.worker.STORE_TIMEOUT", timedelta(seconds=0.8))
    return 0.8


async def slow_sleep(conn: Conn, job: Job[int], value: object) -> None:
    await conn.execute("update public.documents set body = 'changed'")
    await anyio.sleep(30)


async def slow_statement(conn: Conn, job: Job[int], value: object) -> None:
    await conn.execute("update public.documents set body = 'changed'")
    await conn.execute("select pg_sleep(30)")


async def slow_lock(conn: Conn, job: Job[int], value: object) -> None:
    await conn.execute("update public.documents set body = 'changed' where key = 'locked'")


def slow_thread(conn: SyncConn, job: Job[int], value: object) -> None:
    conn.execute("update public.documents set body = 'changed'")
    threading.Event().wait(1.0)
    conn.execute("select 1")


def slow_statement_in_thread(conn: SyncConn, job: Job[int], value: object) -> None:
    conn.execute("select pg_sleep(30)")


def settled(seen: Recorder) -> set[str]:
    return {event.kind for event in seen.of(JobSettled)}


@pytest.mark.contract("A41")
@pytest.mark.ruling("2.11")
@pytest.mark.usefixtures("short_deadline")
@pytest.mark.parametrize(
    "store", [slow_sleep, slow_statement, slow_lock, slow_thread, slow_statement_in_thread], ids=lambda f: f.__name__
)
async def test_an_apply_that_takes_too_long_is_cut_off_and_counted(
    app: App, admin: Admin, dsn: str, store: Callable[..., Any]
) -> None:
    async def work(job: Job[int]) -> int:
        return 1

    def work_sync(job: Job[int]) -> int:
        return 1

    @app.kind("other")
    async def other(job: Job[int]) -> None: ...

    is_sync = store in (slow_thread, slow_statement_in_thread)
    app.kind("work", apply=store, max_attempts=1)(work_sync if is_sync else work)
    put(admin, "k", "locked")
    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    with psycopg.connect(dsn) as locking:
        locking.execute("select from public.documents where key = 'locked' for update")
        if store is not slow_lock:
            locking.rollback()
        async with running(app.worker()):
            await seen.wait(lambda: is_sync or bool(seen.of(RunnerTrouble)))  # once at least it is tried again
            await app.enqueue("other", 1)
            await seen.wait(lambda: "other" in settled(seen))  # the runtime's own statements go on
            await seen.wait(lambda: "work" in settled(seen))
    after = row(admin, "k")
    assert (after["state"], after["attempts"], after["last_code"]) == ("failed", 1, "queue_complete_failed")
    assert after["has_result"] is False
    assert admin.execute("select distinct body from public.documents").fetchall() == [("body",)]


@pytest.mark.usefixtures("short_deadline")
async def test_waiting_for_a_connection_is_no_fault_of_the_job(app: App) -> None:
    async def store(conn: Conn, job: Job[int], value: object) -> None:
        await anyio.sleep(0.2)

    @app.kind("work", apply=store, max_attempts=1, concurrency=60)
    async def work(job: Job[int]) -> int:
        return 1

    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(index) for index in range(60)])
    async with running(app.worker()) as worker:
        await seen.wait(lambda: len(seen.of(JobSettled)) == 60, within=30)
        assert worker.status()["work"].succeeded == 60


# --- whose order of locks it is -------------------------------------------------------------------------------------


@pytest.mark.ruling("1.3", "4.2")
@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
@pytest.mark.parametrize("order", ["document first", "job first"])
async def test_the_app_never_loses_a_deadlock_against_apply(
    app: App, dsn: str, admin: Admin, order: str, rounds: int
) -> None:
    async def store(conn: Conn, job: Job[str], value: str) -> None:
        await conn.execute(STORE, (value, value, job.key))
        await anyio.sleep(random.uniform(0, 0.004))  # noqa: S311 - so that the app meets it at any point

    @app.kind("work", apply=store)
    async def work(job: Job[str]) -> str:
        return job.payload

    def deadlocks() -> int:
        found = admin.execute("select deadlocks from pg_stat_database where datname = current_database()").fetchone()
        assert found is not None
        return int(found[0])

    before = deadlocks()
    keys = [f"k{index}" for index in range(3)]
    put(admin, *keys)
    waited = 0

    async def edit(name: str, share: int) -> None:
        nonlocal waited
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            await conn.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            for number in range(share):
                key, text = random.choice(keys), f"{name}{number}"  # noqa: S311
                async with conn.transaction():
                    for step in ("document", "job") if order == "document first" else ("job", "document"):
                        if step == "document":
                            await conn.execute("update public.documents set body = %s where key = %s", (text, key))
                        else:
                            await app.enqueue("work", text, key=key, revision=text, conn=conn)
                        await anyio.sleep(random.uniform(0, 0.004))  # noqa: S311

    seen = Recorder(app)
    with anyio.fail_after(rounds / 3):
        async with running(app.worker()):
            async with anyio.create_task_group() as group:
                group.start_soon(edit, "a", rounds // 2)
                group.start_soon(edit, "b", rounds // 2)
            await seen.wait(
                lambda: (
                    admin.execute("select count(*) from pgworker.jobs where state <> 'succeeded'").fetchone() == (0,)
                )
            )
    stale = admin.execute(
        "select key from public.documents where indexed is distinct from body and indexed is not null"
    )
    assert stale.fetchall() == []
    assert admin.execute("select max(attempts) from pgworker.jobs").fetchone() == (0,)
    assert deadlocks() == before


# --- what apply finds -----------------------------------------------------------------------------------------------


@pytest.mark.ruling("2.11")
async def test_apply_has_a_plain_session_and_the_finish_lands_after_it(app: App, admin: Admin, tables: Any) -> None:
    settings: dict[str, Any] = {}
    planner = ("enable_seqscan", "enable_sort", "enable_bitmapscan", "enable_partition_pruning", "plan_cache_mode")
    names = (*planner, "transaction_isolation", "transaction_read_only")

    async def store(conn: Conn, job: Job[int], value: object) -> None:
        settings["within"] = [(await (await conn.execute(f"show {name}".encode())).fetchall())[0][0] for name in names]
        plan = await (await conn.execute("explain select * from public.documents order by body")).fetchall()
        settings["plan"] = "\n".join(line for (line,) in plan)
        await conn.execute("set local enable_indexscan = off")
        settings["conn"] = conn

    @app.kind("work", apply=store, concurrency=1)
    async def work(job: Job[int]) -> int:
        return 1

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.of(JobSettled)))
        after = [(await (await settings["conn"].execute(f"show {name}".encode())).fetchall())[0][0] for name in names]
    assert row(admin, "k")["state"] == "succeeded"
    assert settings["within"] == ["on", "on", "on", "on", "auto", "read committed", "off"]
    assert "Seq Scan" in settings["plan"]
    assert "Disabled" not in settings["plan"]
    assert after[:4] == ["off", "off", "off", "off"]


@pytest.mark.ruling("0.3", "2.11")
@pytest.mark.parametrize("form", ["async", "def"])
async def test_the_finish_after_apply_is_planned_as_ever(app: App, admin: Admin, tables: Any, form: str) -> None:
    """Else a plan that was made while the table was small would be kept, and read all of it when it is big."""
    admin.execute(
        "create function public.note() returns trigger language plpgsql as $$ begin"
        " insert into public.noted values (current_setting('enable_seqscan'), current_setting('enable_sort'),"
        " current_setting('enable_bitmapscan'), current_setting('enable_partition_pruning')); return new; end $$"
    )
    admin.execute("create table public.noted (a text, b text, c text, d text)")
    admin.execute("grant insert on public.noted to public")
    admin.execute(
        "create trigger note before update on pgworker.jobs for each row when (new.state = 'succeeded')"
        " execute function public.note()"
    )

    async def store(conn: Conn, job: Job[int], value: object) -> None:
        await conn.execute("select 1")

    def store_in_thread(conn: psycopg.Connection[Any], job: Job[int], value: object) -> None:
        conn.execute("select 1")

    if form == "async":

        @app.kind("work", apply=store)
        async def work(job: Job[int]) -> int:
            return 1
    else:

        @app.kind("work", apply=store_in_thread)
        def work_in_thread(job: Job[int]) -> int:
            return 1

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.of(JobSettled)))
    assert admin.execute("select * from public.noted").fetchall() == [("off", "off", "off", "off")]


async def test_apply_may_enqueue_in_its_transaction(app: App, admin: Admin) -> None:
    app.declare("next")

    async def store(conn: Conn, job: Job[int], value: int) -> None:
        await app.enqueue("next", value, key=f"after {job.key}", conn=conn)
        if job.key == "bad":
            raise LookupError

    @app.kind("work", apply=store, max_attempts=1)
    async def work(job: Job[int]) -> int:
        return job.payload

    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(1, "good"), NewJob(2, "bad")])
    async with running(app.worker(["work"])):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 2)
    assert admin.execute("select key, payload from pgworker.jobs where kind = 'next'").fetchall() == [("after good", 1)]


async def test_a_covering_lease_is_no_obstacle_to_apply(app: App, admin: Admin) -> None:
    async def store(conn: Conn, job: Job[int], value: int) -> None:
        await conn.execute(STORE, ("v", "v", job.key))

    lease = Lease.cover(timedelta(seconds=60))

    @app.kind("work", preset="content", batch=2, window=0, timeout=10, lease=lease, apply=store)
    async def work(jobs: list[Job[int]]) -> list[int]:
        return [1] * len(jobs)

    put(admin, "k")
    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.wait(lambda: bool(seen.of(JobSettled)))
    assert document(admin, "k") == ("'v':1", "v")
