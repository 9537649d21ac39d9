"""`eligible=`: a completion asks again whether its result is still wanted, in its own transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import psycopg
import pytest

from pgworker import App, ConfigError, Job
from pgworker.events import JobLost, JobSettled, RunnerTrouble
from tests.chaos.processes import until
from tests.handles import Hand, Recorder, result, row, running

Admin: TypeAlias = psycopg.Connection[Any]
Conn: TypeAlias = psycopg.AsyncConnection[Any]
SyncConn: TypeAlias = psycopg.Connection[Any]

LOOK = "select public and hash = %s from public.documents where key = %s for share"


@pytest.fixture(autouse=True)
def documents(admin: Admin) -> None:
    """The source of the jobs: what they are made from, and who may see it."""
    admin.execute(
        "create table public.documents (key text primary key, hash text not null, public boolean not null default true,"
        " indexed text)"
    )
    for key in ("k", "k0", "k1", "k2"):
        admin.execute("insert into public.documents (key, hash) values (%s, 'r1')", (key,))


@dataclass
class Steps:
    """What the test does while the handler runs, and while eligible is asked; and what was asked."""

    in_handler: Callable[[], object] = lambda: None
    in_eligible: Callable[[], object] = lambda: None
    answer: Callable[[object], object] = bool
    calls: list[str] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)

    def eligible(self, found: object) -> bool:
        self.calls.append("eligible")
        self.threads.add(threading.get_ident())
        step, self.in_eligible = self.in_eligible, lambda: None
        step()
        return self.answer(found)  # type: ignore[return-value]


@pytest.fixture(params=["async", "sync with apply"])
def steps(request: pytest.FixtureRequest, app: App) -> Steps:
    """The kind `work`, whose result is wanted while its document is public and has the job's revision."""
    steps = Steps()

    async def eligible(conn: Conn, job: Job[str]) -> bool:
        found = await (await conn.execute(LOOK, (job.revision or "r1", job.key))).fetchone()
        return await anyio.to_thread.run_sync(steps.eligible, found and found[0])

    def eligible_sync(conn: SyncConn, job: Job[str]) -> bool:
        found = conn.execute(LOOK, (job.revision or "r1", job.key)).fetchone()
        return steps.eligible(found and found[0])

    async def store(conn: Conn, job: Job[str], value: str) -> None:
        steps.calls.append("apply")
        await conn.execute("update public.documents set indexed = %s where key = %s", (value, job.key))

    def store_sync(conn: SyncConn, job: Job[str], value: str) -> None:
        steps.calls.append("apply")
        conn.execute("update public.documents set indexed = %s where key = %s", (value, job.key))

    async def work(job: Job[str]) -> str:
        await anyio.to_thread.run_sync(steps.in_handler)
        return job.payload

    def work_sync(job: Job[str]) -> str:
        steps.in_handler()
        return job.payload

    colour, _, applied = request.param.partition(" ")
    if colour == "async":
        app.kind("work", eligible=eligible, apply=store if applied else None, poll=0.1)(work)
    else:
        app.kind("work", eligible=eligible_sync, apply=store_sync if applied else None, poll=0.1)(work_sync)
    return steps


async def run_one(app: App) -> Recorder:
    seen = Recorder(app)
    await app.enqueue("work", "value", key="k", revision="r1")
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 1)
        assert worker.status()["work"].last_error is None
    return seen


@pytest.mark.contract("A21")
@pytest.mark.ruling("2.11")
async def test_what_is_still_wanted_succeeds(app: App, admin: Admin, steps: Steps, request: Any) -> None:
    await run_one(app)
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["value"], row(admin, "k")["state"]) == ("value", "succeeded")
    applied = "apply" in request.node.callspec.id
    assert steps.calls == ["eligible", "apply"][: 2 if applied else 1]
    indexed = admin.execute("select indexed from public.documents where key = 'k'").fetchone()
    assert indexed == ("value" if applied else None,)
    assert threading.get_ident() not in steps.threads


@pytest.mark.contract("A21")
@pytest.mark.ruling("2.11")
@pytest.mark.parametrize(
    "change",
    [
        "delete from public.documents where key = 'k'",
        "update public.documents set public = false where key = 'k'",
        "update public.documents set hash = 'edited, but not enqueued' where key = 'k'",
    ],
    ids=["deleted", "made private", "edited"],
)
async def test_a_source_that_changed_between_claim_and_completion_drops_the_result(
    app: App, admin: Admin, steps: Steps, change: str
) -> None:
    steps.in_handler = lambda: admin.execute(change)
    seen = await run_one(app)
    after = row(admin, "k")
    assert (after["state"], after["last_code"], after["attempts"]) == ("cancelled", "not_eligible", 0)
    assert (after["token"], after["has_result"], result(admin, "k")) == (None, False, None)
    (settled,) = seen.of(JobSettled)
    assert (settled.state, settled.code, settled.counted) == ("cancelled", "not_eligible", False)
    assert seen.of(RunnerTrouble) == []
    assert steps.calls == ["eligible"]
    told = admin.execute("select what, code from pgworker.facts").fetchall()
    assert told == [("cancelled", "not_eligible")]


@pytest.mark.contract("A21")
async def test_a_new_revision_brings_it_back(app: App, admin: Admin, steps: Steps) -> None:
    steps.in_handler = lambda: admin.execute("update public.documents set hash = 'r2'")
    seen = await run_one(app)
    async with running(app.worker()):
        assert (await app.enqueue("work", "newer", key="k", revision="r1")).status == "unchanged"
        assert (await app.enqueue("work", "newer", key="k", revision="r2")).status == "requeued"
        await seen.count(JobSettled, 2)
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["value"], stored["revision"]) == ("newer", "r2")


@pytest.mark.contract("A21")
@pytest.mark.ruling("2.11")
async def test_a_source_that_is_looked_at_with_a_lock_cannot_change_before_the_commit(
    app: App, admin: Admin, dsn: str, steps: Steps
) -> None:
    """The other session wants to hide the document in the middle of the completion: it must wait for its end."""
    states: list[str] = []

    def hide() -> None:
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute("set default_transaction_isolation = 'read committed'")
            other.execute("update public.documents set public = false where key = 'k'")
            states.append(row(admin, "k")["state"])

    hiding = threading.Thread(target=hide)

    def begin_to_hide() -> None:
        hiding.start()
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
        while hiding.is_alive() and admin.execute(waiting, ("update public.documents set public%",)).fetchone() == (0,):
            pass

    steps.in_eligible = begin_to_hide
    await run_one(app)
    await anyio.to_thread.run_sync(hiding.join, 10)
    assert states == ["succeeded"]


@pytest.mark.contract("A20")
@pytest.mark.ruling("1.3", "2.11")
@pytest.mark.parametrize("revision", ["r2", None])
async def test_new_work_that_comes_meanwhile_is_not_cancelled_for_the_old(
    app: App, admin: Admin, hand: Hand, steps: Steps, revision: str | None
) -> None:
    first = "r1" if revision else None

    # the old is not wanted, whatever it is asked; the new is
    steps.answer = lambda found: bool(found) and row(admin, "k")["payload"] == "new" and len(steps.calls) > 1
    steps.in_handler = lambda: admin.execute("update public.documents set hash = 'r2'") if revision else None
    steps.in_eligible = lambda: hand.enqueue("k", revision, "new")
    seen = Recorder(app)
    await app.enqueue("work", "old", key="k", revision=first)
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 1)
        await seen.count(JobLost, 1)  # the two may run beside each other
        status = worker.status()["work"]
    assert (status.superseded, status.succeeded, status.cancelled) == (1, 1, 0)
    assert len(seen.of(JobLost)) == 1
    stored = result(admin, "k")
    assert stored is not None
    assert stored["value"] == "new"


@pytest.mark.ruling("1.2", "1.3")
async def test_a_job_row_that_somebody_holds_lets_it_be_asked_again(
    app: App, admin: Admin, dsn: str, steps: Steps
) -> None:
    steps.in_handler = lambda: admin.execute("update public.documents set public = false")
    seen = Recorder(app)
    await app.enqueue("work", "value", key="k", revision="r1")
    with psycopg.connect(dsn) as other:
        steps.in_eligible = lambda: other.execute("select from pgworker.jobs where key = 'k' for update")
        async with running(app.worker()):
            with anyio.fail_after(10):
                while len(steps.calls) < 3:  # noqa: ASYNC110 - eligible is called in a thread
                    await anyio.sleep(0.01)
            assert row(admin, "k")["state"] == "pending"
            assert seen.of(RunnerTrouble) == [], "it has waited for the row until it was cut off"
            other.rollback()
            await seen.count(JobSettled, 1)
    assert row(admin, "k")["state"] == "cancelled"


@pytest.mark.ruling("1.3", "4.2")
@pytest.mark.parametrize("order", ["document first", "job first"])
async def test_the_app_never_loses_a_deadlock_against_a_result_that_is_not_wanted(
    app: App, admin: Admin, dsn: str, steps: Steps, order: str
) -> None:
    """The app holds one of the two rows, and comes for the other once the completion is as far as it gets."""
    other = psycopg.connect(dsn)
    other.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    backend = other.info.backend_pid
    failures: list[psycopg.Error] = []

    def edit_document() -> None:
        other.execute("update public.documents set hash = 'r2' where key = 'k'")

    def put_job() -> None:
        app.sync.enqueue("work", "newer", key="k", revision="r2", conn=other)

    begin, end = (edit_document, put_job) if order == "document first" else (put_job, edit_document)

    def go_on() -> None:
        try:
            end()
            other.commit()
        except psycopg.Error as error:
            failures.append(error)
            other.rollback()

    going_on = threading.Thread(target=go_on)

    def go_on_once_it_waits_for_us() -> None:
        waiting = "select from pg_stat_activity where %s = any(pg_blocking_pids(pid))"
        until(lambda: admin.execute(waiting, (backend,)).fetchone() is not None)
        going_on.start()

    def go_on_and_wait_for_it() -> None:
        going_on.start()
        until(lambda: admin.execute("select cardinality(pg_blocking_pids(%s))", (backend,)).fetchone() != (0,))

    watching = threading.Thread(target=go_on_once_it_waits_for_us)

    def begin_in_handler() -> None:
        steps.in_handler = lambda: None
        begin()
        if order == "document first":
            watching.start()

    steps.in_handler = begin_in_handler
    if order == "job first":
        steps.in_eligible = go_on_and_wait_for_it
    steps.answer = lambda found: bool(found) and row(admin, "k")["payload"] == "newer"
    seen = Recorder(app)
    await app.enqueue("work", "value", key="k", revision="r1")
    async with running(app.worker()):
        await seen.count(JobSettled, 1, within=20)
        await seen.count(JobLost, 1)
    await anyio.to_thread.run_sync(going_on.join, 10)
    other.close()
    assert failures == []
    assert seen.of(RunnerTrouble) == []
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["value"], stored["revision"], row(admin, "k")["attempts"]) == ("newer", "r2", 0)


@pytest.mark.parametrize("fault", ["raises", "forgets to answer"])
async def test_an_answer_that_is_none_is_the_jobs_failure(app: App, admin: Admin, steps: Steps, fault: str) -> None:
    def answer(found: object) -> object:
        if fault == "raises":
            raise LookupError("SECRET")
        return None

    steps.answer = answer
    seen = Recorder(app)
    await app.enqueue("work", "value", key="k", revision="r1", max_attempts=1)
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    after = row(admin, "k")
    assert (after["state"], after["attempts"], after["last_code"]) == ("failed", 1, "handler_failed")
    assert after["last_error"] == ("LookupError" if fault == "raises" else "NoAnswerError")
    assert "apply" not in steps.calls


@pytest.mark.contract("A21", "A57")
async def test_one_unwanted_result_of_a_batch_spoils_no_other(app: App, admin: Admin) -> None:
    asked: list[str] = []

    async def eligible(conn: Conn, job: Job[int]) -> bool:
        asked.append(job.key)
        return job.key != "k1"

    @app.kind("work", batch=4, window=0, eligible=eligible)
    async def work(batch: list[Job[int]]) -> list[object]:
        return [job.payload for job in batch]

    seen = Recorder(app)
    for number in range(3):
        await app.enqueue("work", number, key=f"k{number}")
    async with running(app.worker()):
        await seen.count(JobSettled, 3)
    found = admin.execute("select key, state, last_code from pgworker.jobs order by key").fetchall()
    assert found == [("k0", "succeeded", None), ("k1", "cancelled", "not_eligible"), ("k2", "succeeded", None)]
    assert asked == ["k0", "k1", "k2"]


async def test_an_eligible_that_ends_its_transaction_fails_before_apply_could_write_outside_of_it(
    app: App, admin: Admin
) -> None:
    applied: list[str] = []

    async def eligible(conn: Conn, job: Job[int]) -> bool:
        await conn.execute("commit")
        return True

    async def store(conn: Conn, job: Job[int], value: object) -> None:
        applied.append(job.key)

    @app.kind("work", eligible=eligible, apply=store, max_attempts=1)
    async def work(job: Job[int]) -> int:
        return 1

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    assert (row(admin, "k")["last_error"], applied) == ("TransactionEndedError", [])


def test_it_is_of_its_handlers_colour_and_takes_two_arguments() -> None:
    app = App("postgresql://nowhere")

    async def work(job: Job[int]) -> None: ...

    async def three(conn: Conn, job: Job[int], value: None) -> bool:
        return True

    def plain(conn: SyncConn, job: Job[int]) -> bool:
        return True

    with pytest.raises(ConfigError, match="eligible takes two arguments"):
        app.kind("one", eligible=three)(work)
    with pytest.raises(ConfigError, match="handler and eligible must both be"):
        app.kind("two", eligible=plain)(work)
