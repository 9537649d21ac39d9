"""An application sits on a job's row in an open transaction: that costs this one job time, and nobody else anything."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import Any

import anyio
import psycopg
import pytest

from pgworker import App, Job, Lease, NewJob
from pgworker.events import JobLost, JobSettled
from tests.chaos.audit import Admin, findings, install, read
from tests.handles import Recorder, hand, row, running

JOBS = 500


async def hold_one_of_many(app: App, dsn: str, admin: Admin, *, lease: float, hold: float) -> None:
    install(admin)
    inside = 0
    all_inside, leave = anyio.Event(), anyio.Event()

    @app.kind("work", concurrency=JOBS, poll=0.2, lease=Lease.renew(timedelta(seconds=lease)))
    async def work(job: Job[int]) -> int:
        nonlocal inside
        inside += 1
        if inside == JOBS:
            all_inside.set()
        await leave.wait()
        return job.payload

    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(number, f"k{number:03}", "r1") for number in range(JOBS)])
    async with running(app.worker()), await psycopg.AsyncConnection.connect(dsn) as caller:
        with anyio.fail_after(20):
            await all_inside.wait()
        await app.enqueue("work", -1, key="k250", revision="r2", conn=caller)
        async with await psycopg.AsyncConnection.connect(dsn) as brief:
            await app.enqueue("work", -1, key="k100", revision="r2", conn=brief)
            await anyio.sleep(lease * 0.5)  # a renewal of it is answered with busy, which is not lost
            await brief.rollback()
            await anyio.sleep(hold - lease * 0.5)  # more than a lease, and many renewals
            await app.enqueue("work", -1, key="k100", revision="r2", conn=brief)
            leave.set()
            await seen.wait(lambda: len(seen.of(JobSettled)) == JOBS - 2, within=5)  # the callers still hold on
            assert [lost.key for lost in seen.of(JobLost)] == ["k250"]  # it alone, by the local guard
            assert (row(admin, "k250")["state"], row(admin, "k100")["state"]) == ("pending", "pending")
            assert not [change for change in read(admin) if change.is_takeover or change.is_reaping]
            await brief.rollback()
            await seen.wait(lambda: len(seen.of(JobSettled)) == JOBS - 1)
        await caller.rollback()
        await seen.wait(lambda: len(seen.of(JobSettled)) == JOBS, within=lease + 0.2 + 2.8)
    log = read(admin)
    assert not findings(log)
    assert {change.key for change in log if change.is_takeover} == {"k250"}
    assert sum(change.is_success for change in log) == JOBS
    assert (row(admin, "k250")["state"], row(admin, "k250")["attempts"]) == ("succeeded", 0)


@pytest.mark.ruling("4.1", "1.1", "1.2")
async def test_one_row_of_500_held_by_an_open_enqueue(app: App, dsn: str, admin: Admin) -> None:
    await hold_one_of_many(app, dsn, admin, lease=3, hold=4.4)


@pytest.mark.slow
@pytest.mark.ruling("4.1")
async def test_one_row_of_500_held_for_eight_seconds(app: App, dsn: str, admin: Admin) -> None:
    await hold_one_of_many(app, dsn, admin, lease=6, hold=8)


def enqueue_pairs(dsn: str, stop: threading.Event, seed: int, errors: list[str]) -> int:
    """An application's transactions: two jobs each, in key order, with a pause between the two."""
    chance = random.Random(seed)  # noqa: S311 - any keys will do
    done = 0
    mine = hand(dsn)
    with mine.connection as connection:
        while not stop.is_set():
            first, second = sorted(chance.sample(range(60), 2))
            try:
                with connection.transaction():
                    mine.enqueue(f"k{first:02}", str(chance.random()))
                    stop.wait(chance.uniform(0, 0.005))
                    mine.enqueue(f"k{second:02}", str(chance.random()))
            except psycopg.Error as error:
                errors.append(f"{type(error).__name__} {error.sqlstate}")
            else:
                done += 1
    return done


async def enqueue_pairs_under_load(app: App, dsn: str, admin: Admin, seconds: float) -> None:
    install(admin)

    @app.kind("work", concurrency=20, lease=Lease.renew(timedelta(seconds=1)), poll=0.05)
    async def work(job: Job[Any]) -> str:
        await anyio.sleep(0.01)
        return job.key

    seen = Recorder(app)
    stop, errors, done = threading.Event(), list[str](), list[int]()
    callers = [
        threading.Thread(target=lambda seed=seed: done.append(enqueue_pairs(dsn, stop, seed, errors)))
        for seed in range(4)
    ]
    async with running(app.worker()):
        for caller in callers:
            caller.start()
        with anyio.move_on_after(seconds):
            await anyio.sleep_forever()
        stop.set()
        for caller in callers:
            await anyio.to_thread.run_sync(caller.join)
        await seen.wait(lambda: _all_ended(admin))
    assert errors == []
    assert min(done) > 10
    assert len(seen.of(JobSettled)) > 50
    assert not findings(read(admin))


def _all_ended(admin: Admin) -> bool:
    return admin.execute("select from pgworker.jobs where state <> 'succeeded'").fetchone() is None


@pytest.mark.ruling("4.1")
async def test_callers_that_enqueue_pairs_in_key_order_never_deadlock(app: App, dsn: str, admin: Admin) -> None:
    await enqueue_pairs_under_load(app, dsn, admin, 2)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.ruling("4.1")
async def test_callers_that_enqueue_pairs_for_half_a_minute(app: App, dsn: str, admin: Admin) -> None:
    await enqueue_pairs_under_load(app, dsn, admin, 30)
