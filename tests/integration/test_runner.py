"""A runner at work: bounds, batches, windows, failures, and what it shows of itself."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import AlreadyRunning, App, Job, Park, Pause, Permanent, Retry, Stop
from pgworker.claimer import Claimer, Taken
from pgworker.events import JobLost, JobSettled, RunnerTrouble
from pgworker.queue import JobsTable
from tests.handles import Gate, Hand, Recorder, age, hand, jobs, result, row, running

Admin: TypeAlias = psycopg.Connection[Any]


async def test_a_job_runs_and_its_result_is_stored(app: App, admin: Admin) -> None:
    @app.kind("work")
    async def work(job: Job[int]) -> dict[str, int]:
        return {"twice": 2 * job.payload}

    seen = Recorder(app)
    await app.enqueue("work", 21, key="k", revision="r1")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    after, stored = row(admin, "k"), result(admin, "k")
    assert (after["state"], after["attempts"], after["token"], after["has_result"]) == ("succeeded", 0, None, True)
    assert stored is not None
    assert (stored["value"], stored["revision"]) == ({"twice": 42}, "r1")


@pytest.mark.contract("A1")
async def test_a_worker_lives_in_the_apps_own_task_group(app: App) -> None:
    @app.kind("work")
    async def work(job: Job[int]) -> None: ...

    seen = Recorder(app)
    async with anyio.create_task_group() as group:
        group.start_soon(app.run)
        for count in range(1, 6):
            await app.enqueue("work", count)
            await seen.count(JobSettled, count)
        group.cancel_scope.cancel()


@pytest.mark.contract("A2")
async def test_a_stuck_kind_holds_up_no_other(app: App) -> None:
    gate = Gate()

    @app.kind("stuck")
    async def stuck(job: Job[int]) -> None:
        await gate.pass_through()

    @app.kind("work")
    async def work(job: Job[int]) -> None: ...

    seen = Recorder(app)
    await app.enqueue_many("stuck", jobs(30))
    await app.enqueue_many("work", jobs(50))
    async with running(app.worker()) as worker:
        await gate.until(10)
        await seen.wait(lambda: worker.status()["work"].succeeded == 50)
        assert worker.status()["stuck"].succeeded == 0


@pytest.mark.contract("A4")
async def test_no_transaction_is_open_while_a_handler_runs(app: App, admin: Admin) -> None:
    gate = Gate()

    @app.kind("work")
    async def work(job: Job[int]) -> None:
        await gate.pass_through()

    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await gate.until(1)
        admin.execute("select from pgworker.jobs for update nowait")
        open_now = admin.execute(
            "select count(*) from pg_stat_activity where application_name like 'pgworker%' and pid <> pg_backend_pid()"
            " and datname = current_database() and state like 'idle in transaction%'"
        ).fetchone()
        assert open_now == (0,)


@pytest.mark.contract("A5")
@pytest.mark.ruling("2.12")
async def test_a_thread_that_ignores_cancelling_keeps_its_slot_and_is_waited_for(app: App, admin: Admin) -> None:
    entered, leave = threading.Semaphore(0), threading.Event()
    inside: list[str] = []
    peak: list[int] = []

    @app.kind("work", concurrency=2, timeout=0.05, max_attempts=1)
    def work(job: Job[int]) -> None:
        inside.append(job.key)
        peak.append(len(inside))
        entered.release()
        leave.wait(20)
        inside.remove(job.key)

    seen = Recorder(app)
    await app.enqueue_many("work", jobs(4))
    async with anyio.create_task_group() as group:
        worker = app.worker()
        group.start_soon(worker.run)
        for _ in range(2):
            assert await anyio.to_thread.run_sync(entered.acquire, True, 10)
        await anyio.sleep(0.3)  # well past the deadline, and past a next round of claims
        assert worker.status()["work"].in_flight == 2
        assert not seen.events
        worker.release()
        await anyio.sleep(0.1)
        assert worker.status()["work"].lifecycle == "running"
        leave.set()
    assert worker.status()["work"].lifecycle == "stopped"
    assert max(peak) == 2


@pytest.mark.contract("A9")
async def test_a_row_without_a_hint_is_found_by_the_poll(app: App, admin: Admin) -> None:
    started: list[float] = []

    @app.kind("work")
    async def work(job: Job[int]) -> None:
        started.append(time.monotonic())

    seen = Recorder(app)
    async with running(app.worker()):
        await app.enqueue("work", 0)
        await seen.wait(lambda: len(started) == 1)
        inserted = time.monotonic()
        admin.execute("insert into pgworker.jobs (kind, key, payload) values ('work', 'raw', '1')")
        await seen.wait(lambda: len(started) == 2)
    assert started[1] - inserted < 1.25 + 1


@pytest.mark.race(7)
async def test_a_hint_that_comes_during_an_empty_claim_is_kept_for_the_wait(
    app: App, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Claimer.round
    armed = False

    async def too_late(self: Claimer, limit: int) -> Taken:
        nonlocal armed
        taken: Taken = await original(self, limit)
        if armed:
            armed = False
            assert taken.claims == []
            admin.execute("insert into pgworker.jobs (kind, key, payload) values ('work', 'raw', '1')")
            worker._runners[0].wake.set()
        return taken

    monkeypatch.setattr(Claimer, "round", too_late)

    @app.kind("work", poll=60)
    async def work(job: Job[int]) -> None: ...

    seen = Recorder(app)
    worker = app.worker()
    async with running(worker):
        await _until_listening(admin)
        await anyio.sleep(0.3)  # past the poke that comes with it
        armed = True
        worker._runners[0].wake.set()
        await seen.count(JobSettled, 1, within=5)


@pytest.mark.contract("A14")
async def test_each_event_has_its_own_row_and_result(app: App, admin: Admin) -> None:
    @app.kind("work")
    async def work(job: Job[int]) -> int:
        return job.payload

    seen = Recorder(app)
    for value in (1, 1, 2):
        await app.enqueue("work", value)
    async with running(app.worker()):
        await seen.count(JobSettled, 3)
    assert admin.execute("select value from pgworker.results order by value").fetchall() == [(1,), (1,), (2,)]
    assert admin.execute("select count(distinct key) from pgworker.jobs where state = 'succeeded'").fetchone() == (3,)


@pytest.mark.contract("A31", "A32", "A45", "X16")
async def test_content_runs_two_batches_of_up_to_64(app: App, admin: Admin) -> None:
    gate = Gate()

    @app.kind("work", preset="content", batch=64)
    async def work(batch: list[Job[int]]) -> list[int]:
        await gate.pass_through(len(batch))
        return [job.payload for job in batch]

    await app.enqueue_many("work", jobs(640))
    seen = Recorder(app)
    async with running(app.worker()) as worker:
        await gate.until(2)
        await anyio.sleep(0.3)  # time enough for a third batch
        assert admin.execute("select count(*) from pgworker.jobs where token is not null").fetchone() == (128,)
        gate.open()
        await seen.wait(lambda: worker.status()["work"].succeeded == 640, within=20)
    assert gate.peak == 2
    assert max(gate.calls) == 64
    assert sum(gate.calls) == 640


@pytest.mark.contract("A33")
async def test_what_comes_within_the_window_goes_into_one_call(app: App, admin: Admin) -> None:
    calls: list[int] = []

    @app.kind("work", batch=64, window=0.4)
    async def work(batch: list[Job[int]]) -> list[None]:
        calls.append(len(batch))
        return [None] * len(batch)

    seen = Recorder(app)
    async with running(app.worker()):
        await app.enqueue("work", 0)
        await seen.count(JobSettled, 1)
        for _ in range(3):
            await app.enqueue("work", 1)
            await anyio.sleep(0.1)
        await seen.count(JobSettled, 4)
    assert calls == [1, 3]


@pytest.mark.contract("A34")
async def test_an_idle_runner_looks_once_a_poll(app: App, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.kind("work", poll=0.2)
    async def work(job: Job[int]) -> None: ...

    looks: list[JobsTable] = []
    survey = JobsTable.survey

    def counted(queue: JobsTable) -> Any:
        looks.append(queue)
        return survey(queue)

    async with running(app.worker()):
        await _until_listening(admin)
        monkeypatch.setattr(JobsTable, "survey", counted)
        with anyio.move_on_after(2.1):
            await anyio.sleep_forever()
    assert 5 <= len(looks) <= 12


async def _until_listening(admin: Admin) -> None:
    """Until the worker's LISTEN has been poked about for the last time: from then on only polls look."""
    listening = (
        "select count(*) from pg_stat_activity where application_name = 'pgworker listen'"
        " and datname = current_database() and state = 'idle' and query <> ''"
    )
    with anyio.fail_after(10):
        while admin.execute(listening).fetchone() == (0,):  # noqa: ASYNC110 - another session's state has no event
            await anyio.sleep(0.02)


@pytest.mark.contract("A38")
async def test_each_kind_has_its_own_bound(app: App, admin: Admin) -> None:
    gates = {"one": Gate(), "three": Gate()}

    @app.kind("one", concurrency=1)
    async def one(job: Job[int]) -> None:
        await gates["one"].pass_through()

    @app.kind("three", concurrency=3)
    async def three(job: Job[int]) -> None:
        await gates["three"].pass_through()

    await app.enqueue_many("one", jobs(10))
    await app.enqueue_many("three", jobs(10))
    seen = Recorder(app)
    async with running(app.worker()):
        await gates["one"].until(1)
        await gates["three"].until(3)
        await anyio.sleep(0.2)  # time enough for one too many
        for gate in gates.values():
            gate.open()
        await seen.count(JobSettled, 20)
    assert (gates["one"].peak, gates["three"].peak) == (1, 3)


@pytest.mark.contract("A39")
async def test_a_handler_past_its_deadline_is_cancelled_and_retried(app: App, admin: Admin) -> None:
    cancelled: list[str] = []

    @app.kind("work", timeout=0.1, max_attempts=3)
    async def work(job: Job[int]) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(job.key)

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    after = row(admin, "k")
    assert cancelled == ["k"]
    assert (after["state"], after["attempts"], after["last_code"]) == ("pending", 1, "handler_timeout")


@pytest.mark.contract("A40")
@pytest.mark.ruling("2.12")
async def test_a_value_after_the_deadline_is_a_failure(app: App, admin: Admin) -> None:
    @app.kind("work", timeout=0.05, max_attempts=3)
    def work(job: Job[int]) -> str:
        job.signal.wait(10)  # told at the deadline; the answer comes after it
        return "late"

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    after = row(admin, "k")
    assert (after["attempts"], after["last_code"], result(admin, "k")) == (1, "handler_timeout", None)


@pytest.mark.contract("A50")
@pytest.mark.ruling("1.20")
async def test_three_judged_failures_fail_the_job(app: App, admin: Admin) -> None:
    calls: list[int] = []

    @app.kind("work", preset="content", batch=1)
    async def work(batch: list[Job[int]]) -> list[None]:
        calls.append(batch[0].attempts)
        msg = "SECRET"
        raise ValueError(msg)

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()) as worker:
        for count in range(1, 4):
            await seen.count(JobSettled, count)
            age(admin, 100)  # past the backoff
            worker._runners[0].wake.set()
    after = row(admin, "k")
    assert calls == [0, 1, 2]
    assert (after["state"], after["attempts"], after["last_code"]) == ("failed", 3, "handler_failed")
    assert after["last_error"] == "ValueError"  # its class, and nothing of its text


@pytest.mark.contract("A54")
async def test_a_permanent_failure_fails_the_job_at_once(app: App, admin: Admin) -> None:
    calls: list[str] = []

    @app.kind("work")
    async def work(job: Job[int]) -> Permanent:
        calls.append(job.key)
        return Permanent("no_such_user")

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    after = row(admin, "k")
    assert (len(calls), after["state"], after["last_code"]) == (1, "failed", "no_such_user")


@pytest.mark.contract("A65")
@pytest.mark.parametrize("answer", [[1, 2], [1, 2, 3, 4], "abc", None, {"a": 1}])
async def test_a_batch_answer_of_the_wrong_length_fails_the_whole_batch(app: App, admin: Admin, answer: object) -> None:
    @app.kind("work", batch=3)
    async def work(batch: list[Job[int]]) -> object:
        return answer

    seen = Recorder(app)
    await app.enqueue_many("work", jobs(3))
    async with running(app.worker()):
        await seen.count(JobSettled, 3)
    rows = admin.execute("select distinct state, last_code from pgworker.jobs").fetchall()
    assert rows == [("failed", "handler_result_count")]


@pytest.mark.contract("A66")
@pytest.mark.ruling("2.13")
@pytest.mark.parametrize("crash", [SystemExit, type("Odd", (BaseException,), {})])
async def test_a_crash_fails_a_content_batch_for_good_and_the_runner_lives(
    app: App, admin: Admin, crash: type[BaseException]
) -> None:
    @app.kind("work", preset="content", batch=3)
    async def work(batch: list[Job[int]]) -> list[int]:
        if batch[0].payload < 3:
            raise crash
        return [job.payload for job in batch]

    seen = Recorder(app)
    await app.enqueue_many("work", jobs(3))
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 3)
        assert worker.status()["work"].last_error == "handler_panic"
        await app.enqueue("work", 7, key="later")
        await seen.wait(lambda: worker.status()["work"].succeeded == 1)
    rows = admin.execute("select distinct state, last_code from pgworker.jobs where key <> 'later'").fetchall()
    assert rows == [("failed", "handler_panic")]


@pytest.mark.contract("X15")
async def test_each_job_of_a_batch_has_its_own_outcome(app: App, admin: Admin) -> None:
    @app.kind("work", batch=5, max_attempts=3)
    async def work(batch: list[Job[int]]) -> list[object]:
        return ["value", None, Retry(code="again"), Permanent("never"), object()]

    seen = Recorder(app)
    await app.enqueue_many("work", jobs(5))
    async with running(app.worker()):
        await seen.count(JobSettled, 5)
    found = admin.execute("select state, attempts, last_code, has_result from pgworker.jobs order by key").fetchall()
    assert found == [
        ("succeeded", 0, None, True),
        ("succeeded", 0, None, False),
        ("pending", 1, "again", False),
        ("failed", 1, "never", False),
        ("pending", 1, "result_rejected", False),
    ]


@pytest.mark.contract("A51", "A63")
async def test_a_pause_stops_claiming_and_costs_no_attempt(app: App, admin: Admin) -> None:
    calls: list[float] = []

    @app.kind("work", concurrency=1, max_attempts=1)
    async def work(job: Job[int]) -> Pause | None:
        calls.append(time.monotonic())
        return Pause(app_pause, "provider_down") if len(calls) == 1 else None

    app_pause = timedelta(seconds=0.6)
    seen = Recorder(app)
    await app.enqueue_many("work", jobs(3))
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 1)
        status = worker.status()["work"]
        assert (status.lifecycle, status.parked) == ("paused", 1)
        assert status.retry_in_seconds is not None
        assert 0 < status.retry_in_seconds <= 0.6
        await seen.wait(lambda: worker.status()["work"].succeeded == 3)
        assert worker.status()["work"].lifecycle == "running"
    assert calls[1] - calls[0] >= 0.6
    assert admin.execute("select distinct state, attempts from pgworker.jobs").fetchall() == [("succeeded", 0)]


@pytest.mark.contract("A48")
async def test_each_failure_in_a_row_makes_the_row_wait_longer(app: App, admin: Admin) -> None:
    @app.kind("work", preset="content", batch=8, max_attempts=20)
    async def work(batch: list[Job[int]]) -> None:
        worker.drain()
        raise ValueError

    await app.enqueue_many("work", jobs(8))
    admin.execute("update pgworker.jobs set attempts = payload::int")
    (before,) = admin.execute("select clock_timestamp()").fetchone() or (None,)
    seen = Recorder(app)
    worker = app.worker()
    await worker.run()
    waits = admin.execute(
        "select payload::int, extract(epoch from ready_at - %s)::float8,"
        " extract(epoch from ready_at - clock_timestamp())::float8"
        " from pgworker.jobs where attempts = payload::int + 1 order by 1",
        [before],
    ).fetchall()
    assert [failures for failures, *_ in waits] == list(range(8))
    for failures, at_least, at_most in waits:
        base = min(2.0**failures, 60.0)
        assert at_least >= base
        assert at_most <= min(1.2 * base, 60.0)
    told = [(each.retry_in_seconds or 0) / 2 ** (each.attempt - 1) for each in seen.of(JobSettled) if each.attempt < 6]
    assert len(set(told)) > 1, "no jitter"


@pytest.mark.contract("A53", "X38")
async def test_an_asked_delay_may_be_longer_than_the_backoffs_cap(app: App, admin: Admin) -> None:
    @app.kind("work", preset="content")
    async def work(job: Job[int]) -> Retry:
        return Retry(after=90, code="rate_limited")

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    (before,) = admin.execute("select clock_timestamp()").fetchone() or (None,)
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    after = row(admin, "k")
    assert (after["attempts"], after["last_code"]) == (1, "rate_limited")
    assert after["ready_at"] - before >= timedelta(seconds=90)


@pytest.mark.contract("X11")
async def test_a_parked_job_waits_and_costs_no_attempt(app: App, admin: Admin) -> None:
    @app.kind("work", max_attempts=1)
    async def work(job: Job[int]) -> Park:
        return Park("quota", timedelta(hours=1))

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    after = row(admin, "k")
    assert (after["state"], after["attempts"], after["last_code"]) == ("pending", 0, "quota")
    waits = admin.execute("select ready_at - clock_timestamp() > interval '59 minutes' from pgworker.jobs").fetchone()
    assert waits == (True,)


@pytest.mark.contract("A62", "A63")
async def test_status_tells_what_happened(app: App) -> None:
    @app.kind("work", max_attempts=2)
    async def work(job: Job[int]) -> Retry | Permanent | None:
        return {0: None, 1: Retry(code="upstream"), 2: Permanent("gone")}[job.payload]

    seen = Recorder(app)
    worker = app.worker()
    async with running(worker):
        await app.enqueue("work", 2)
        await seen.count(JobSettled, 1)
        failed = worker.status()["work"]
        assert (failed.lifecycle, failed.failed, failed.last_error) == ("retrying", 1, "gone")
        await app.enqueue("work", 0)
        await seen.count(JobSettled, 2)
        done = worker.status()["work"]
        assert (done.lifecycle, done.succeeded, done.last_error) == ("running", 1, None)
        assert done.last_success_at is not None
        await app.enqueue("work", 1)
        await seen.count(JobSettled, 3)
        retrying = worker.status()["work"]
        assert (retrying.lifecycle, retrying.retried, retrying.last_error) == ("retrying", 1, "upstream")
        assert retrying.retry_in_seconds is not None
        await app.enqueue("work", 0)
        await seen.count(JobSettled, 4)
        again = worker.status()["work"]  # a success clears the error, but the retry time has not come
        assert (again.lifecycle, again.last_error) == ("retrying", None)
        assert (again.claimed, again.in_flight) == (4, 0)
    assert worker.status()["work"].lifecycle == "stopped"


@pytest.mark.contract("A24", "A62")
async def test_without_observers_the_counts_are_the_same(app: App, admin: Admin) -> None:
    gate = Gate()

    @app.kind("work", concurrency=10)
    async def work(job: Job[int]) -> int:
        await gate.pass_through()
        return job.payload

    await app.enqueue_many("work", jobs(9))
    await app.enqueue("work", 9, key="k", revision="r1")
    async with running(app.worker()) as worker:
        await gate.until(10)
        await app.enqueue("work", 10, key="k", revision="r2")
        gate.open()
        with anyio.fail_after(10):
            while worker.status()["work"].succeeded + worker.status()["work"].superseded < 11:  # noqa: ASYNC110 - no events
                await anyio.sleep(0.01)
        status = worker.status()["work"]
    assert (status.claimed, status.succeeded, status.superseded, status.in_flight) == (11, 10, 1, 0)
    assert status.last_success_at is not None
    assert row(admin, "k")["revision"] == "r2"


@pytest.mark.contract("A24")
async def test_superseded_is_no_error(app: App, admin: Admin) -> None:
    gate = Gate()

    @app.kind("work", concurrency=1)
    async def work(job: Job[int]) -> int:
        if job.payload == 1:
            await gate.pass_through()
        return job.payload

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k", revision="r1")
    async with running(app.worker()) as worker:
        await gate.until(1)
        await app.enqueue("work", 2, key="k", revision="r2")
        gate.open()
        await seen.count(JobSettled, 1)
        status = worker.status()["work"]
    assert (status.superseded, status.succeeded, status.last_error) == (1, 1, None)
    assert len(seen.of(JobLost)) == 1
    assert seen.of(RunnerTrouble) == []  # the success would have cleared last_error
    stored, after = result(admin, "k"), row(admin, "k")
    assert stored is not None
    assert (stored["value"], stored["revision"], after["attempts"]) == (2, "r2", 0)


@pytest.mark.contract("A64")
@pytest.mark.parametrize("stop", ["drain", "release", "cancel"])
async def test_a_worker_runs_once_at_a_time_and_again_afterwards(app: App, stop: str) -> None:
    @app.kind("work")
    async def work(job: Job[int]) -> None: ...

    seen = Recorder(app)
    worker = app.worker()
    for count in (1, 2, 3):
        async with anyio.create_task_group() as group:
            group.start_soon(worker.run)
            await app.enqueue("work", count)
            await seen.count(JobSettled, count)
            with pytest.raises(AlreadyRunning), anyio.fail_after(5):
                await worker.run()
            runner = worker._runners[0]
            with pytest.raises(AlreadyRunning), anyio.fail_after(5):
                await runner.run()
            (group.cancel_scope.cancel if stop == "cancel" else getattr(worker, stop))()


@pytest.mark.contract("A59")
@pytest.mark.field("L07")
@pytest.mark.parametrize("stop", ["release", "cancel"])
async def test_a_stop_gives_a_running_batch_back(app: App, admin: Admin, stop: str) -> None:
    gate = Gate()

    @app.kind("work", preset="content", batch=64)
    async def work(batch: list[Job[int]]) -> list[int]:
        await gate.pass_through()
        return [0] * len(batch)

    await app.enqueue_many("work", jobs(64))
    before = admin.execute("select key, ready_at, attempts from pgworker.jobs order by key").fetchall()
    async with anyio.create_task_group() as group:
        worker = app.worker()
        group.start_soon(worker.run)
        await gate.until(1)
        if stop == "release":
            worker.release()
        else:
            group.cancel_scope.cancel()
    assert admin.execute("select key, ready_at, attempts from pgworker.jobs order by key").fetchall() == before
    held = admin.execute("select count(*) from pgworker.jobs where token is not null or state <> 'pending'").fetchone()
    assert held == (0,)
    assert worker.status()["work"].released == 64


@pytest.mark.contract("A59")
@pytest.mark.race(6)
@pytest.mark.timeout(30)
async def test_a_release_ends_in_one_budget_although_the_rows_are_locked(
    app: App, admin: Admin, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.runner.STORE_TIMEOUT", timedelta(seconds=0.5))
    gate = Gate()

    @app.kind("work", preset="content", batch=64)
    async def work(batch: list[Job[int]]) -> list[int]:
        await gate.pass_through()
        return [0] * len(batch)

    await app.enqueue_many("work", jobs(64))
    other = hand(dsn).connection
    async with anyio.create_task_group() as group:
        worker = app.worker()
        group.start_soon(worker.run)
        await gate.until(1)
        other.execute("begin")
        other.execute("select from pgworker.jobs for update")
        worker.release()
        with anyio.fail_after(5):
            while worker.status()["work"].lifecycle != "stopped":  # noqa: ASYNC110 - the end of run() has no event
                await anyio.sleep(0.01)
    other.execute("rollback")
    other.close()
    leased = admin.execute("select count(*) from pgworker.jobs where token is not null and attempts = 0").fetchone()
    assert leased == (64,)  # they come back when their leases expire


@pytest.mark.contract("A60")
@pytest.mark.race(6)
async def test_a_release_between_completions_keeps_the_finished_ones(app: App, admin: Admin) -> None:
    applied: list[str] = []

    async def apply(conn: psycopg.AsyncConnection[Any], job: Job[int], value: int) -> None:
        assert value == job.payload
        applied.append(job.key)
        if len(applied) == 2:
            worker.release()

    @app.kind("work", preset="content", batch=4, apply=apply)
    async def work(batch: list[Job[int]]) -> list[int]:
        return [job.payload for job in batch]

    await app.enqueue_many("work", jobs(4))
    worker = app.worker()
    await worker.run()
    found = admin.execute("select state, token, attempts from pgworker.jobs order by key").fetchall()
    assert found == [("succeeded", None, 0)] * 2 + [("pending", None, 0)] * 2
    assert admin.execute("select count(*) from pgworker.results").fetchone() == (2,)
    assert applied == ["k0000", "k0001"]


@pytest.mark.contract("A61")
@pytest.mark.race(6)
async def test_a_release_after_the_handlers_success_drops_its_results(app: App, admin: Admin) -> None:
    @app.kind("work", preset="content", batch=4)
    async def work(batch: list[Job[int]]) -> list[int]:
        worker.release()
        return [job.payload for job in batch]

    await app.enqueue_many("work", jobs(4))
    worker = app.worker()
    await worker.run()
    found = admin.execute("select distinct state, token, attempts from pgworker.jobs").fetchall()
    assert found == [("pending", None, 0)]
    assert admin.execute("select count(*) from pgworker.results").fetchone() == (0,)


@pytest.mark.field("L05")
async def test_a_drain_lets_running_jobs_end_and_claims_nothing_more(app: App, admin: Admin) -> None:
    gate = Gate()

    @app.kind("work", concurrency=2)
    async def work(job: Job[int]) -> int:
        await gate.pass_through()
        return job.payload

    await app.enqueue_many("work", jobs(5))
    async with anyio.create_task_group() as group:
        worker = app.worker()
        group.start_soon(worker.run)
        await gate.until(2)
        worker.drain()
        await anyio.sleep(0.1)
        gate.open()
    states = admin.execute("select state, count(*) from pgworker.jobs group by state order by state").fetchall()
    assert states == [("pending", 3), ("succeeded", 2)]
    assert admin.execute("select count(*) from pgworker.jobs where token is not null").fetchone() == (0,)


async def test_a_drain_past_its_grace_releases(app: App, admin: Admin) -> None:
    gate = Gate()

    @app.kind("work", stop=Stop("drain", timedelta(seconds=0.1)))
    async def work(job: Job[int]) -> None:
        await gate.pass_through()

    await app.enqueue("work", 1, key="k")
    async with anyio.create_task_group() as group:
        worker = app.worker()
        group.start_soon(worker.run)
        await gate.until(1)
        worker.drain()
    after = row(admin, "k")
    assert (after["state"], after["token"], after["attempts"]) == ("pending", None, 0)


async def test_a_delayed_job_starts_when_it_is_due_and_not_at_the_next_poll(app: App) -> None:
    @app.kind("work", poll=5.0)
    async def work(job: Job[int]) -> None: ...

    seen = Recorder(app)
    async with running(app.worker()):
        await app.enqueue("work", 0)
        await seen.count(JobSettled, 1)
        await app.enqueue("work", 1, delay=timedelta(seconds=0.3))
        await seen.wait(lambda: len(seen.of(JobSettled)) == 2, within=3)


async def test_a_hand_made_payload_that_does_not_fit_fails_its_own_job_only(app: App, admin: Admin, hand: Hand) -> None:
    @app.kind("work", batch=3)
    async def work(batch: list[Job[int]]) -> list[int]:
        return [job.payload for job in batch]

    hand.enqueue("a", "r", 1)
    hand.enqueue("b", "r", "no number: SECRET")
    hand.enqueue("c", "r", 3)
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 3)
    found = admin.execute("select key, state, last_code from pgworker.jobs order by key").fetchall()
    assert found == [("a", "succeeded", None), ("b", "failed", "payload_invalid"), ("c", "succeeded", None)]
