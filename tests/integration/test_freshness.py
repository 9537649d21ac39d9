"""Fresh work beside a backlog, and a provider that is down: what is new is started soon, nothing is lost."""

from __future__ import annotations

import statistics
import time
from typing import Any

import anyio
import anyio.abc
import psycopg
import pytest

from pgworker import App, Job, NewJob, Pause
from pgworker.events import JobSettled
from tests.handles import Recorder, result, row, running

Admin = psycopg.Connection[Any]

# --- beside a backlog -----------------------------------------------------------------------------------------------


async def catch_up(app: App, jobs: int) -> None:
    await app.enqueue_many("work", [NewJob(None, f"old{number}", urgency="catch_up") for number in range(jobs)])


@pytest.mark.contract("A68")
async def test_a_fresh_job_waits_for_no_more_of_the_backlog_than_a_round(app: App) -> None:
    started: list[str] = []
    passed_by: list[int] = []

    @app.kind("work", concurrency=2)
    async def work(job: Job[object]) -> None:
        started.append(job.key)
        await anyio.sleep(0.005)

    seen = Recorder(app)
    await catch_up(app, 400)
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 5)
        for number in range(20):
            await app.enqueue("work", key=f"new{number}")
            worker._runners[0].wake.set()  # as the hint does, which may be late on a busy machine
            committed_after = len(started)
            await seen.wait(lambda key=f"new{number}": key in started)  # type: ignore[misc]
            passed_by.append(started.index(f"new{number}") - committed_after)
        assert len(started) < 420, "the backlog was at an end too soon to prove anything"
    # both calls that end, and the turn of catch-up work for each
    assert max(passed_by) <= 4


def percentile(values: list[float], share: int) -> float:
    return statistics.quantiles(values, n=100)[share - 1]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.contract("A68")
async def test_ten_fresh_jobs_a_second_beside_ten_thousand_that_catch_up(app: App, admin: Admin) -> None:
    entered: dict[str, float] = {}

    @app.kind("work", concurrency=20)
    async def work(job: Job[object]) -> None:
        entered[job.key] = time.monotonic()
        await anyio.sleep(0.2)

    sent: dict[str, float] = {}

    async def caught_up(seconds: float) -> float:
        """How many a second are started in this time."""
        before, began = len(entered) - len(entered.keys() & sent.keys()), time.monotonic()
        await anyio.sleep(seconds)
        after, ended = len(entered) - len(entered.keys() & sent.keys()), time.monotonic()
        return (after - before) / (ended - began)

    async def send_fresh() -> None:
        began = time.monotonic()
        for number in range(650):
            await anyio.sleep(max(0.0, began + number / 10 - time.monotonic()))
            sent[f"new{number}"] = time.monotonic()  # before the insert is sent, so that the commit is later
            await app.enqueue("work", key=f"new{number}")

    await catch_up(app, 10_000)
    async with running(app.worker()):
        await anyio.sleep(2)
        alone = await caught_up(18)
        async with anyio.create_task_group() as group:
            group.start_soon(send_fresh)
            beside = await caught_up(64)
        with anyio.fail_after(10):
            while not entered.keys() >= sent.keys():  # noqa: ASYNC110 - nothing tells of the last one
                await anyio.sleep(0.01)
    waits = [entered[key] - at for key, at in sent.items()]
    p95 = percentile(waits, 95)
    print(f"fresh p50 {statistics.median(waits):.3f} s, p95 {p95:.3f} s; catch-up {alone:.1f}/s, then {beside:.1f}/s")  # noqa: T201
    assert len(waits) >= 600
    assert p95 < 1.0
    assert beside >= 0.8 * alone
    left = admin.execute("select count(*) from pgworker.jobs where state = 'pending' and class = 1").fetchone()
    assert left is not None
    assert left[0] > 0, "the backlog was at an end too soon to prove anything"


# --- a provider that is down ----------------------------------------------------------------------------------------


class ProviderDownError(Exception):
    """What the provider's client raises."""


class Provider:
    """Somebody else's service."""

    def __init__(self) -> None:
        self.up = True
        self.calls = 0

    async def call(self) -> str:
        self.calls += 1
        await anyio.sleep(0.01)
        if not self.up:
            raise ProviderDownError
        return "answer"


async def go_through_an_outage(app: App, admin: Admin, *, seconds: float, pause: float) -> None:
    provider = Provider()

    @app.kind("work", poll=0.2, concurrency=2)
    async def work(job: Job[int]) -> str | Pause:
        try:
            return await provider.call()
        except ProviderDownError:
            return Pause(pause, "provider_down")

    sent = 0
    stop = anyio.Event()

    async def ingest() -> None:
        nonlocal sent
        while not stop.is_set():
            await app.enqueue("work", sent, key=f"k{sent}", revision="r")
            sent += 1
            with anyio.move_on_after(0.05):
                await stop.wait()

    seen = Recorder(app)
    async with running(app.worker()) as worker, anyio.create_task_group() as group:
        group.start_soon(ingest)
        await seen.count(JobSettled, 5)
        provider.up = False
        await seen.wait(lambda: worker.status()["work"].lifecycle == "paused")
        before = sent
        await anyio.sleep(seconds)
        (waiting,) = await app.lag("work")
        unfinished = sent - worker.status()["work"].succeeded
        during = worker.status()["work"]
        provider.up = True
        await seen.wait(lambda: worker.status()["work"].succeeded > during.succeeded, within=pause + 10)
        stop.set()
        await seen.wait(lambda: worker.status()["work"].succeeded == sent, within=pause + 20)
        after = worker.status()["work"]
    assert sent > before + seconds * 2, "the outage held up who enqueues"
    assert abs(waiting.pending - unfinished) <= 1  # (one may be committed, and not counted yet)
    assert waiting.ready >= unfinished - 4  # (what is being run, and what has just been given back)
    assert waiting.oldest_seconds is not None
    assert waiting.oldest_seconds >= seconds / 4
    assert during.lifecycle != "stopped"
    assert provider.calls < sent + 10 * (seconds / pause + 3), "the provider was not left in peace"
    assert (after.failed, after.retried, after.succeeded) == (0, 0, sent)
    ends = admin.execute("select state, attempts, evictions, count(*) from pgworker.jobs group by 1, 2, 3").fetchall()
    assert ends == [("succeeded", 0, 0, sent)]


@pytest.mark.contract("A68")
async def test_a_provider_that_is_down_for_some_seconds_costs_time_and_nothing_else(app: App, admin: Admin) -> None:
    await go_through_an_outage(app, admin, seconds=2, pause=0.3)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.contract("A68")
async def test_a_provider_that_is_down_for_a_minute_costs_time_and_nothing_else(app: App, admin: Admin) -> None:
    await go_through_an_outage(app, admin, seconds=60, pause=5)


@pytest.mark.contract("A71")
async def test_a_provider_that_hangs_holds_up_neither_an_enqueue_nor_a_stop(app: App, dsn: str, admin: Admin) -> None:
    inside: set[str] = set()
    all_inside = anyio.Event()

    @app.kind("work", preset="content", batch=2, window=0, poll=30.0)
    async def work(jobs: list[Job[int]]) -> list[int]:
        inside.update(job.key for job in jobs)
        if len(inside) == 4:
            all_inside.set()
        await anyio.sleep_forever()
        return []

    worker = app.worker()
    async with anyio.create_task_group() as group:
        await app.enqueue_many("work", [NewJob(number, f"k{number}", "r1") for number in range(4)])
        group.start_soon(worker.run)
        with anyio.fail_after(10):
            await all_inside.wait()
        async with await psycopg.AsyncConnection.connect(dsn) as caller:
            await caller.execute("set lock_timeout = '1ms'")  # to wait for anything that a run holds would be an error
            await app.enqueue("work", 10, key="new", revision="r1", conn=caller)
            await app.enqueue("work", 11, key="k0", revision="r2", conn=caller)  # one that is being run
            await app.enqueue("work", 1, key="k1", revision="r1", conn=caller)  # another, unchanged
        worker.stop()
        with anyio.fail_after(4.5):  # less than a store deadline: nothing is waited out
            while worker.status()["work"].lifecycle != "stopped":  # noqa: ASYNC110 - no event tells of it
                await anyio.sleep(0.005)
    assert inside == {"k0", "k1", "k2", "k3"}
    for key, revision in {"k0": "r2", "k1": "r1", "k2": "r1", "k3": "r1", "new": "r1"}.items():
        after = row(admin, key)
        assert (after["state"], after["revision"], after["token"], after["attempts"], after["evictions"]) == (
            "pending", revision, None, 0, 0,
        ), key  # fmt: skip
        assert result(admin, key) is None
