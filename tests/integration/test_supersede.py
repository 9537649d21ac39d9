"""Runs and the new revisions that supersede them: beside each other, or one after the other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Job, Lease
from pgworker.events import JobLost, JobSettled
from tests.handles import Recorder, result, row, running

Admin: TypeAlias = psycopg.Connection[Any]


@pytest.mark.ruling("2.3")
async def test_a_new_revision_may_run_beside_the_old_and_only_it_may_write(app: App, admin: Admin) -> None:
    entered = {1: anyio.Event(), 2: anyio.Event()}

    @app.kind("work")
    async def work(job: Job[int]) -> int:
        entered[job.payload].set()
        if job.payload == 1:
            with anyio.CancelScope(shield=True):  # it goes on, whatever it is told
                await entered[2].wait()
        return job.payload

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k", revision="r1")
    async with running(app.worker()):
        await entered[1].wait()
        await app.enqueue("work", 2, key="k", revision="r2")
        await seen.wait(lambda: len(seen.of(JobSettled)) == 1 and len(seen.of(JobLost)) == 1)
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["value"], stored["revision"]) == (2, "r2")


@pytest.mark.ruling("2.3")
async def test_a_kind_may_have_the_new_revision_wait_for_the_end_of_the_olds_lease(app: App, admin: Admin) -> None:
    started: dict[int, Any] = {}
    entered = anyio.Event()

    @app.kind("work", supersede="wait", lease=Lease.renew(timedelta(seconds=1.5), timedelta(seconds=0.5)), poll=0.1)
    async def work(job: Job[int]) -> int:
        started[job.payload] = admin.execute("select clock_timestamp()").fetchone()
        entered.set()
        if job.payload == 1:
            await anyio.sleep_forever()
        return job.payload

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k", revision="r1")
    async with running(app.worker()):
        await entered.wait()
        lease_ends = row(admin, "k")["lease_expires_at"]
        assert (await app.enqueue("work", 2, key="k", revision="r2")).status == "superseded"
        after = row(admin, "k")
        assert (after["token"], after["payload"]) == (None, 2)
        assert after["ready_at"] >= lease_ends
        await seen.count(JobSettled, 1)
    assert started[2][0] >= after["ready_at"]
    assert len(seen.of(JobLost)) == 1
