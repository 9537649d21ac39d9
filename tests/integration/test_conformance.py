"""One suite for every table that a queue may live in, at work: ours, and two of apps with columns of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import psycopg
import pytest

from pgworker import App, Backoff, ConfigError, Job, Lease, Permanent, Retry
from pgworker.events import JobLost, JobSettled
from pgworker.outcome import HANDLER_RESULT_COUNT
from tests.adapters import KIND, Adapter
from tests.chaos.processes import Start, start, until
from tests.handles import Recorder, running

Admin: TypeAlias = psycopg.Connection[Any]
Conn: TypeAlias = psycopg.AsyncConnection[Any]

__all__ = ["start"]
QUICKLY = Backoff(base=timedelta(seconds=0.05), jitter="none")


async def work_off(app: App, seen: Recorder, count: int = 1) -> None:
    """Run a worker until so many ends have been written."""
    async with running(app.worker()):
        await seen.count(JobSettled, count)


# --- outcomes -------------------------------------------------------------------------------------------------------


async def test_a_row_is_worked_on_and_succeeds(app: App, adapter: Adapter, admin: Admin) -> None:
    got: list[Job[Any]] = []

    async def work(job: Job[Any]) -> None:
        got.append(job)

    adapter.register(app, work)
    adapter.put(admin, 5, 3, 'wörter "und" mehr')
    await work_off(app, Recorder(app))
    (job,) = got
    assert (job.kind, job.key, job.revision) == (KIND, adapter.key(5), adapter.revision(3))
    assert job.payload == adapter.payload('wörter "und" mehr')
    assert job.idempotency_key == f"{KIND}:{adapter.key(5)}:{adapter.revision(3)}"
    assert adapter.of(admin, 5, "state") == "succeeded"
    assert adapter.of(admin, 5, "token") is None
    assert adapter.of(admin, 5, "lease_expires_at") is None


@pytest.mark.contract("A3")
async def test_no_column_is_renamed_and_no_row_copied(app: App, adapter: Adapter, admin: Admin) -> None:
    async def work(job: Job[Any]) -> None: ...

    def catalog() -> list[Any]:
        return admin.execute(
            "select table_schema, table_name, column_name, ordinal_position, data_type, column_default, is_nullable"
            " from information_schema.columns where table_schema not in ('pg_catalog', 'information_schema')"
            " order by 1, 2, 4"
        ).fetchall()

    adapter.register(app, work)
    for number in range(3):
        adapter.put(admin, number)
    before = catalog()
    await work_off(app, Recorder(app), 3)
    assert catalog() == before
    copies = admin.execute("select (select count(*) from pgworker.jobs), (select count(*) from pgworker.results)")
    assert copies.fetchone() == ((3, 0) if adapter.queue is None else (0, 0))


async def test_a_judged_failure_is_tried_again_until_the_limit(app: App, adapter: Adapter, admin: Admin) -> None:
    attempts: list[int] = []

    async def work(job: Job[Any]) -> None:
        attempts.append(job.attempts)
        raise ValueError

    adapter.register(app, work, max_attempts=3, backoff=QUICKLY)
    adapter.put(admin, 1)
    await work_off(app, Recorder(app), 3)
    assert attempts == [0, 1, 2]
    assert (adapter.of(admin, 1, "state"), adapter.of(admin, 1, "attempts")) == ("failed", 3)


async def test_a_retry_waits_for_its_backoff(app: App, adapter: Adapter, admin: Admin) -> None:
    async def work(job: Job[Any]) -> Retry | None:
        return Retry(after=60, code="not_yet")

    adapter.register(app, work)
    adapter.put(admin, 1)
    before = adapter.of(admin, 1, "ready_at")
    await work_off(app, Recorder(app))
    assert (adapter.of(admin, 1, "state"), adapter.of(admin, 1, "attempts")) == ("pending", 1)
    assert adapter.of(admin, 1, "ready_at") - before >= timedelta(seconds=60)


async def test_a_permanent_failure_ends_at_once(app: App, adapter: Adapter, admin: Admin) -> None:
    async def work(job: Job[Any]) -> Permanent | None:
        return Permanent("unreadable")

    adapter.register(app, work)
    adapter.put(admin, 1)
    await work_off(app, Recorder(app))
    assert (adapter.of(admin, 1, "state"), adapter.of(admin, 1, "attempts")) == ("failed", 1)
    if "code" in adapter.columns:
        assert adapter.of(admin, 1, "code") == "unreadable"


@pytest.mark.contract("A32")
async def test_a_batch_has_at_most_64_rows(app: App, adapter: Adapter, admin: Admin) -> None:
    sizes: list[int] = []

    async def work(jobs: list[Job[Any]]) -> list[None]:
        sizes.append(len(jobs))
        return [None] * len(jobs)

    adapter.register(app, work, batch=64, window=0)
    for number in range(130):
        adapter.put(admin, number)
    await work_off(app, Recorder(app), 130)
    assert max(sizes) == 64
    assert sum(sizes) == 130
    assert adapter.count(admin, "succeeded") == 130


@pytest.mark.contract("A65")
async def test_a_wrong_number_of_results_fails_the_whole_batch(app: App, adapter: Adapter, admin: Admin) -> None:
    async def work(jobs: list[Job[Any]]) -> list[int]:
        return [1]

    adapter.register(app, work, batch=8, window=0)
    for number in range(3):
        adapter.put(admin, number)
    seen = Recorder(app)
    await work_off(app, seen, 3)
    assert {event.code for event in seen.of(JobSettled)} == {HANDLER_RESULT_COUNT}
    assert adapter.count(admin, "failed") == 3


# --- superseded, deleted, taken over --------------------------------------------------------------------------------


class Stage:
    """The first call waits on it, so that the test may meddle meanwhile."""

    def __init__(self) -> None:
        self.entered, self.leave = anyio.Event(), anyio.Event()
        self.revisions: list[str | None] = []

    async def call(self, job: Job[Any]) -> None:
        self.revisions.append(job.revision)
        if len(self.revisions) == 1:
            self.entered.set()
            await self.leave.wait()


@pytest.mark.contract("A24")
async def test_a_new_revision_drops_what_comes_of_the_old(app: App, adapter: Adapter, admin: Admin) -> None:
    stage = Stage()
    adapter.register(app, stage.call, poll=0.1)
    adapter.put(admin, 1, 1)
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await stage.entered.wait()
        adapter.put(admin, 1, 2)
        stage.leave.set()
        await seen.count(JobLost, 1)
        await seen.count(JobSettled, 1)
        status = worker.status()[KIND]
    assert stage.revisions == [adapter.revision(1), adapter.revision(2)]
    assert (status.superseded, status.succeeded, status.last_error) == (1, 1, None)
    assert (adapter.of(admin, 1, "state"), adapter.of(admin, 1, "attempts") or 0) == ("succeeded", 0)


async def test_a_row_that_is_deleted_and_made_anew_runs_anew(app: App, adapter: Adapter, admin: Admin) -> None:
    stage = Stage()
    adapter.register(app, stage.call, poll=0.1)
    adapter.put(admin, 1, 1)
    seen = Recorder(app)
    async with running(app.worker()):
        await stage.entered.wait()
        adapter.delete(admin, 1)
        adapter.put(admin, 1, 1)
        stage.leave.set()
        await seen.count(JobLost, 1)
        await seen.count(JobSettled, 1)
    assert stage.revisions == [adapter.revision(1)] * 2
    assert adapter.of(admin, 1, "state") == "succeeded"


@pytest.mark.parametrize("lease", [Lease.renew(timedelta(seconds=60)), Lease.cover(timedelta(seconds=800))])
async def test_a_running_handler_is_told_at_once_that_its_row_has_changed(
    app: App, adapter: Adapter, admin: Admin, lease: Lease
) -> None:
    """No renewal is due for long: the app says that it has changed something."""
    entered, told = threading.Event(), threading.Event()

    def work(job: Job[Any]) -> None:
        if job.revision == adapter.revision(1):
            entered.set()
            if job.signal.wait(20) and job.lost:
                told.set()

    adapter.register(app, work, lease=lease, timeout=30, poll=60)
    adapter.put(admin, 1, 1)
    seen = Recorder(app)
    async with running(app.worker()):
        assert await anyio.to_thread.run_sync(entered.wait, 10)
        if adapter.queue is None:
            await app.enqueue(KIND, "text", key=adapter.key(1), revision=adapter.revision(2))
        else:
            adapter.put(admin, 1, 2)
            await app.notify(KIND)
        assert await anyio.to_thread.run_sync(told.wait, 10)
        await seen.count(JobSettled, 1)
    assert adapter.of(admin, 1, "state") == "succeeded"


@pytest.mark.contract("A59")
async def test_a_stop_gives_rows_back_uncounted(app: App, adapter: Adapter, admin: Admin) -> None:
    inside = 0
    full = anyio.Event()

    async def work(jobs: list[Job[Any]]) -> list[None]:
        nonlocal inside
        inside += len(jobs)
        if inside == 4:
            full.set()
        await anyio.sleep_forever()
        return []

    adapter.register(app, work, batch=2, window=0)
    for number in range(4):
        adapter.put(admin, number)
    async with running(app.worker()):
        with anyio.fail_after(10):
            await full.wait()
    for number in range(4):
        assert adapter.of(admin, number, "token") is None
        assert (adapter.of(admin, number, "state"), adapter.of(admin, number, "attempts") or 0) == ("pending", 0)


async def test_a_renewed_lease_outlasts_its_time(app: App, adapter: Adapter, admin: Admin) -> None:
    calls: list[str] = []

    async def work(job: Job[Any]) -> None:
        calls.append(job.key)
        await anyio.sleep(1.2)

    adapter.register(app, work, lease=Lease.renew(timedelta(seconds=0.6)), poll=0.1)
    adapter.put(admin, 1)
    seen = Recorder(app)
    await work_off(app, seen)
    assert calls == [adapter.key(1)]
    assert not seen.of(JobLost)


CRASHES = """
{imports}

@app.kind("work", lease=SHORT, poll=0.1, queue={queue})
async def work(job: Job[object]) -> None:
    say("begun", job.key, job.revision, job.token)
    await gate()
"""


@pytest.mark.chaos
@pytest.mark.contract("A26", "A28")
@pytest.mark.field("L01")
def test_what_a_killed_worker_had_in_hand_is_taken_over(start: Start, adapter: Adapter, admin: Admin) -> None:
    root = Path(__file__).parents[2]
    imports = f"sys.path.insert(0, {str(root)!r})\nfrom tests.adapters import {type(adapter).__name__}"
    source = CRASHES.format(imports=imports, queue=f"{type(adapter).__name__}.queue")
    adapter.put(admin, 1)
    first = start(source)
    begun = first.out.expect("begun").split()
    first.kill()
    assert adapter.of(admin, 1, "token") is not None
    second = start(source)
    again = second.out.expect("begun").split()
    assert begun[:-1] == again[:-1]
    assert begun[-1] != again[-1]
    second.open_gate()
    second.stop()
    assert second.wait() == 0
    assert adapter.of(admin, 1, "state") == "succeeded"


# --- completions that carry the app's own writes --------------------------------------------------------------------


@pytest.fixture
def vectors(admin: Admin) -> Iterator[Callable[[], list[Any]]]:
    """A table for what comes of the work, and what is in it."""
    admin.execute("create table public.vectors (key text primary key, revision text, value int check (value <> 13))")
    yield lambda: admin.execute("select key, revision, value from public.vectors order by key").fetchall()
    admin.execute("drop table public.vectors")


async def store(conn: Conn, job: Job[Any], value: int) -> None:
    await conn.execute(
        "insert into public.vectors values (%s, %s, %s) on conflict (key) do update set revision = excluded.revision,"
        " value = excluded.value",
        [job.key, job.revision, value],
    )


@pytest.mark.contract("A22")
async def test_the_apps_writes_and_the_success_commit_together_or_not_at_all(
    app: App, adapter: Adapter, admin: Admin, vectors: Callable[[], list[Any]]
) -> None:
    async def work(jobs: list[Job[Any]]) -> list[int]:
        return [13 if job.key == adapter.key(2) else 7 for job in jobs]

    adapter.register(app, work, batch=8, window=0, apply=store, max_attempts=1)
    for number in (1, 2, 3):
        adapter.put(admin, number)
    await work_off(app, Recorder(app), 3)
    assert [adapter.of(admin, number, "state") for number in (1, 2, 3)] == ["succeeded", "failed", "succeeded"]
    assert vectors() == [(adapter.key(number), adapter.revision(1), 7) for number in (1, 3)]


@pytest.mark.contract("A21", "A22")
@pytest.mark.parametrize("change", ["revised", "deleted", "taken over"])
async def test_the_apps_writes_are_taken_back_when_the_row_changes_meanwhile(
    app: App, adapter: Adapter, admin: Admin, vectors: Callable[[], list[Any]], change: str
) -> None:
    stored: list[list[Any]] = []

    def recreate() -> None:
        adapter.delete(admin, 1)
        adapter.put(admin, 1)

    changes: dict[str, Callable[[], object]] = {
        "revised": lambda: adapter.put(admin, 1, 2),
        "deleted": recreate,
        "taken over": lambda: adapter.set(admin, 1, token="00000000-0000-0000-0000-000000000001"),
    }

    async def work(job: Job[Any]) -> int:
        stored.append(vectors())
        return len(stored)

    async def store_late(conn: Conn, job: Job[Any], value: int) -> None:
        await store(conn, job, value)
        if value == 1:
            await anyio.to_thread.run_sync(changes[change])

    adapter.register(app, work, apply=store_late, poll=0.1)
    adapter.put(admin, 1)
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobLost, 1)
        if change == "taken over":
            adapter.set(admin, 1, token=None, lease_expires_at=None)
        await seen.count(JobSettled, 1)
    assert stored == [[], []]  # nothing of the first run was ever to be seen
    assert vectors() == [(adapter.key(1), adapter.revision(2 if change == "revised" else 1), 2)]


async def test_a_row_that_is_not_eligible_any_more_is_cancelled(
    app: App, adapter: Adapter, admin: Admin, vectors: Callable[[], list[Any]]
) -> None:
    async def work(job: Job[Any]) -> int:
        return 1

    async def eligible(conn: Conn, job: Job[Any]) -> bool:
        return job.key != adapter.key(1)

    adapter.register(app, work, apply=store, eligible=eligible)
    for number in (1, 2):
        adapter.put(admin, number)
    await work_off(app, Recorder(app), 2)
    assert [adapter.of(admin, number, "state") for number in (1, 2)] == ["cancelled", "succeeded"]
    assert vectors() == [(adapter.key(2), adapter.revision(1), 1)]


# --- wake, pause, refuse --------------------------------------------------------------------------------------------


@pytest.mark.contract("A9")
async def test_rows_are_found_by_a_hint_and_without_one_by_the_poll(app: App, adapter: Adapter, admin: Admin) -> None:
    async def work(job: Job[Any]) -> None: ...

    adapter.register(app, work, poll=1)
    seen = Recorder(app)
    async with running(app.worker()):
        adapter.put(admin, 1)
        await seen.count(JobSettled, 1)
        adapter.put(admin, 2)
        await app.notify(KIND)
        await seen.count(JobSettled, 2)


@pytest.mark.contract("A7")
async def test_a_hint_of_the_apps_transaction_wakes_an_idle_worker(
    app: App, dsn: str, adapter: Adapter, admin: Admin
) -> None:
    async def work(job: Job[Any]) -> None: ...

    adapter.register(app, work, poll=60)
    seen = Recorder(app)
    worker = app.worker()
    async with running(worker):
        await anyio.to_thread.run_sync(until, lambda: bool(admin.execute("select 1 from pgworker.runners").fetchone()))
        async with await psycopg.AsyncConnection.connect(dsn) as conn:
            adapter.put(admin, 1)
            await app.notify(KIND, conn=conn)
        await seen.count(JobSettled, 1)


async def test_a_pause_holds_for_the_table_until_the_kind_is_resumed(app: App, adapter: Adapter, admin: Admin) -> None:
    async def work(job: Job[Any]) -> None: ...

    adapter.register(app, work, poll=0.1)
    await app.pause(KIND)
    adapter.put(admin, 1)
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await anyio.to_thread.run_sync(until, lambda: [s.lifecycle for s in worker.status().values()] == ["paused"])
        assert adapter.of(admin, 1, "token") is None
        await app.resume(KIND)
        await seen.count(JobSettled, 1)


async def test_what_is_for_the_jobs_table_is_refused_for_another(app: App, adapter: Adapter, admin: Admin) -> None:
    async def work(job: Job[Any]) -> None: ...

    adapter.register(app, work)
    calls: dict[str, Callable[[], Any]] = {
        "enqueue": lambda: app.enqueue(KIND, "x", key="k"),
        "retry": lambda: app.retry(KIND, all=True),
        "rebuild": lambda: app.rebuild(KIND, all=True),
        "cancel": lambda: app.cancel(KIND, all=True),
        "forget": lambda: app.forget(KIND, "k"),
    }
    for call in calls.values():
        if adapter.queue is None:
            await call()
        else:
            with pytest.raises(ConfigError, match="the app writes and reads itself"):
                await call()
    if adapter.queue is not None:
        with pytest.raises(ConfigError, match=r"notify\(\)"):
            await app.result(KIND, "k", timeout=1)
        with pytest.raises(ConfigError, match="app writes"):
            app.sync.enqueue(KIND, "x")
        app.declare("elsewhere", queue=adapter.queue)
        with pytest.raises(ConfigError, match="app writes"):
            await app.enqueue("elsewhere", "x")
