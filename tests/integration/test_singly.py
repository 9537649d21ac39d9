"""`singly=True`: a batch call that fails as a whole is made again for each of its jobs alone."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import psycopg
import pytest

from pgworker import App, ConfigError, Job, Lease, NewJob, Retry
from pgworker.events import JobLost, JobSettled
from pgworker.job import Signal
from pgworker.policy import covering_ttl, make_policy
from tests.handles import Hand, Recorder, jobs, row, running

Admin: TypeAlias = psycopg.Connection[Any]
POISON = 3


def ends(admin: Admin) -> list[tuple[Any, ...]]:
    """What became of the jobs, but for those that simply succeeded."""
    return admin.execute(
        "select payload, state, attempts, last_code from pgworker.jobs where state <> 'succeeded' or attempts > 0"
        " order by payload"
    ).fetchall()


async def explode(batch: list[Job[int]]) -> list[int]:
    raise ValueError


async def crash(batch: list[Job[int]]) -> list[int]:
    raise SystemExit


async def miscount(batch: list[Job[int]]) -> list[int]:
    return [1] * (len(batch) + 1)


async def hang(batch: list[Job[int]]) -> list[int]:
    await anyio.sleep_forever()
    return []


@pytest.mark.contract("A65", "A66", "X15")
@pytest.mark.parametrize(
    ("fault", "options", "end"),
    [
        (explode, {}, (POISON, "pending", 1, "handler_failed")),
        (explode, {"max_attempts": 1}, (POISON, "failed", 1, "handler_failed")),
        (crash, {"preset": "content"}, (POISON, "failed", 1, "handler_panic")),
        (miscount, {}, (POISON, "failed", 1, "handler_result_count")),
        (hang, {"timeout": 0.2}, (POISON, "pending", 1, "handler_timeout")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_one_poisonous_job_fails_alone(
    app: App, admin: Admin, fault: Any, options: dict[str, Any], end: tuple[Any, ...]
) -> None:
    calls: list[list[int]] = []

    @app.kind("work", batch=8, singly=True, concurrency=1, **options)
    async def work(batch: list[Job[int]]) -> list[int]:
        calls.append([job.payload for job in batch])
        if POISON in calls[-1]:
            return await fault(batch)  # type: ignore[no-any-return]
        return calls[-1]

    await app.enqueue_many("work", jobs(8))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 8)
    assert calls == [list(range(8)), *([number] for number in range(8))]
    assert ends(admin) == [end]
    assert admin.execute("select count(*) from pgworker.results").fetchone() == (7,)


@pytest.mark.contract("A65")
async def test_what_a_call_has_made_of_its_jobs_is_forgotten_by_the_next(app: App, admin: Admin) -> None:
    calls: list[list[list[int]]] = []

    @app.kind("work", batch=8, singly=True, concurrency=1)
    async def work(batch: list[Job[list[int]]]) -> None:
        calls.append([[*job.payload] for job in batch])
        for job in batch:
            job.payload.append(POISON)
            job.signal = Signal()
        if len(batch) > 1:
            raise ValueError

    await app.enqueue_many("work", [NewJob([number]) for number in range(3)])
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 3)
    assert calls == [[[0], [1], [2]], [[0]], [[1]], [[2]]]
    assert ends(admin) == []


async def test_without_it_the_batch_fails_together(app: App, admin: Admin) -> None:
    calls: list[int] = []

    @app.kind("work", batch=4, max_attempts=1)
    async def work(batch: list[Job[int]]) -> list[int]:
        calls.append(len(batch))
        return await explode(batch)

    await app.enqueue_many("work", jobs(4))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 4)
    assert ends(admin) == [(number, "failed", 1, "handler_failed") for number in range(4)]
    assert calls == [4]


async def test_in_a_thread_each_job_has_a_deadline_and_a_signal_of_its_own(app: App, admin: Admin) -> None:
    cancelled: list[tuple[int, bool]] = []

    @app.kind("work", batch=3, singly=True, concurrency=1, timeout=0.2)
    def work(batch: list[Job[int]]) -> list[int]:
        if len(batch) > 1:
            batch[0].signal.wait(10)  # past the deadline of the call with all of them
        else:
            cancelled.append((batch[0].payload, batch[0].cancelled))
            if batch[0].payload == 1:
                batch[0].signal.wait(10)
        return [job.payload for job in batch]

    await app.enqueue_many("work", jobs(3))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 3)
    assert cancelled == [(0, False), (1, False), (2, False)]
    assert ends(admin) == [(1, "pending", 1, "handler_timeout")]


@pytest.mark.ruling("2.10")
async def test_a_job_that_was_lost_meanwhile_is_not_called_again(app: App, admin: Admin) -> None:
    alone: list[int] = []

    @app.kind("work", batch=3, singly=True, lease=Lease.renew(timedelta(seconds=0.9), timedelta(seconds=0.1)))
    async def work(batch: list[Job[int]]) -> list[int]:
        if len(batch) == 1:
            alone.append(batch[0].payload)
            return [0]
        admin.execute("delete from pgworker.jobs where payload = '1'")
        while not batch[1].lost:  # noqa: ASYNC110 - the handler looks, as handlers do
            await anyio.sleep(0.01)
        raise ValueError

    await app.enqueue_many("work", jobs(3))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 2 and len(seen.of(JobLost)) == 1)
    assert alone == [0, 2]


@pytest.mark.contract("A61")
async def test_a_release_on_the_way_gives_all_of_them_back(app: App, admin: Admin) -> None:
    calls: list[int] = []

    @app.kind("work", batch=5, singly=True)
    async def work(batch: list[Job[int]]) -> list[int]:
        calls.append(len(batch))
        if len(batch) > 1:
            raise ValueError
        if len(calls) == 4:
            worker.release()
        return [0]

    await app.enqueue_many("work", jobs(5))
    worker = app.worker()
    await worker.run()
    assert calls == [5, 1, 1, 1]
    found = admin.execute("select distinct state, token, attempts, last_code from pgworker.jobs").fetchall()
    assert found == [("pending", None, 0, None)]
    assert worker.status()["work"].released == 5


def left_alone(admin: Admin) -> int:
    """How many jobs wait as if nobody had ever claimed them."""
    found = admin.execute(
        "select count(*) from pgworker.jobs"
        " where state = 'pending' and token is null and attempts = 0 and evictions = 0 and last_code is null"
    ).fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.contract("A61")
@pytest.mark.parametrize("colour", ["async", "def"])
@pytest.mark.parametrize("moment", ["in the call with all", "in the second of the others"])
async def test_a_handler_that_fails_because_of_a_release_is_not_called_again(
    app: App, admin: Admin, colour: str, moment: str
) -> None:
    calls: list[int] = []
    last = 1 if moment == "in the call with all" else 3

    async def work(batch: list[Job[int]]) -> list[int]:
        calls.append(len(batch))
        if len(calls) == last:
            try:
                await anyio.sleep(10)
            finally:
                raise ValueError
        return await explode(batch) if len(batch) > 1 else [0]

    def work_in_thread(batch: list[Job[int]]) -> list[int]:
        calls.append(len(batch))
        if len(calls) == last:
            batch[0].signal.wait(10)
            raise ValueError
        return [0] * (len(batch) % 4)  # which is none for the call with all

    handler: Any = work if colour == "async" else work_in_thread
    app.kind("work", batch=4, singly=True)(handler)
    await app.enqueue_many("work", jobs(4))
    async with running(app.worker()) as worker:
        with anyio.fail_after(5):
            while len(calls) < last:  # noqa: ASYNC110 - the thread has no event of the loop's
                await anyio.sleep(0.01)
    assert calls == [4, 1, 1][:last]
    assert left_alone(admin) == 4
    assert worker.status()["work"].released == 4


@pytest.mark.contract("A61")
async def test_a_release_after_a_missed_deadline_is_not_forgotten_with_it(app: App, admin: Admin) -> None:
    calls: list[int] = []
    late = threading.Event()

    @app.kind("work", batch=4, singly=True, timeout=0.1)
    def work(batch: list[Job[int]]) -> list[int]:
        calls.append(len(batch))
        batch[0].signal.wait(10)
        late.set()
        released.wait(10)
        return [0] * len(batch)

    released = threading.Event()
    await app.enqueue_many("work", jobs(4))
    async with running(app.worker()) as worker:
        await anyio.to_thread.run_sync(late.wait, 10)
        worker.release()
        released.set()
    assert calls == [4]
    assert left_alone(admin) == 4


@pytest.mark.ruling("2.10")
async def test_a_job_that_was_cancelled_meanwhile_is_not_called_again(app: App, admin: Admin) -> None:
    alone: list[int] = []

    @app.kind("work", batch=3, singly=True)
    async def work(batch: list[Job[int]]) -> list[int]:
        if len(batch) == 1:
            alone.append(batch[0].payload)
            return [0]
        await app.cancel("work", key="k0001")
        while not batch[1].cancelled:  # noqa: ASYNC110 - the handler looks, as handlers do
            await anyio.sleep(0.01)
        raise ValueError

    await app.enqueue_many("work", jobs(3))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 3)
    assert alone == [0, 2]
    assert [row(admin, f"k000{number}")["state"] for number in range(3)] == ["succeeded", "cancelled", "succeeded"]


async def test_the_leases_are_held_until_the_last_of_them_has_run(app: App, admin: Admin, hand: Hand) -> None:
    @app.kind("work", batch=4, singly=True, lease=Lease.renew(timedelta(seconds=0.6), timedelta(seconds=0.1)))
    async def work(batch: list[Job[int]]) -> list[int]:
        if len(batch) > 1:
            raise ValueError
        await anyio.sleep(0.3)
        return [0]

    await app.enqueue_many("work", jobs(4))
    seen = Recorder(app)
    started = time.monotonic()
    async with running(app.worker()):
        await seen.count(JobSettled, 4)
    assert time.monotonic() - started > 1.2  # twice the lease
    assert ends(admin) == []
    assert admin.execute("select max(lease_epoch), max(evictions) from pgworker.jobs").fetchone() == (1, 0)


@pytest.mark.parametrize("answer", ["one for all", "one for each"])
async def test_what_the_handler_itself_decides_is_not_decided_again(app: App, admin: Admin, answer: str) -> None:
    calls: list[int] = []

    @app.kind("work", batch=3, singly=True)
    async def work(batch: list[Job[int]]) -> object:
        calls.append(len(batch))
        return Retry(60) if answer == "one for all" else [Retry(60)] * len(batch)

    await app.enqueue_many("work", jobs(3))
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 3)
    assert calls == [3]


async def test_a_job_that_is_alone_in_its_batch_is_called_once(app: App, admin: Admin) -> None:
    calls: list[int] = []

    @app.kind("work", batch=3, singly=True)
    async def work(batch: list[Job[int]]) -> list[int]:
        calls.append(len(batch))
        raise ValueError

    await app.enqueue("work", 1, key="k")
    seen = Recorder(app)
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
    assert calls == [1]
    assert row(admin, "k")["attempts"] == 1


@pytest.mark.contract("A42")
def test_a_covering_lease_covers_the_calls_that_may_follow() -> None:
    policy = make_policy("content", {"singly": True, "batch": 10})
    assert policy.lease.ttl == timedelta(seconds=120 * 11 + (2 * 10 + 2) * 5)
    assert covering_ttl(timedelta(minutes=2), 10, singly=True) == policy.lease.ttl


def test_it_is_for_batches() -> None:
    async def work(job: Job[int]) -> None: ...

    with pytest.raises(ConfigError, match="give batch= with it"):
        App("postgresql://nowhere").kind("work", singly=True)(work)
