"""Who may write to a job: whoever holds the lease's token, while it lasts, and nobody by name or by memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Job, Lease
from pgworker.events import JobLost, JobSettled
from pgworker.outcome import Settlement
from tests.chaos.audit import install, read
from tests.handles import Gate, Hand, Recorder, result, row, running
from tests.integration.test_control import eventually
from tests.integration.test_facts import facts
from tests.integration.test_fences import WRITES

Admin: TypeAlias = psycopg.Connection[Any]

PARK = Settlement("pending", "later", delay_seconds=60.0)
UNWATCHED = Lease.renew(timedelta(seconds=600), timedelta(seconds=200))
"""A lease whose loss its holder does not notice while a test runs."""


def lapse(admin: Admin) -> None:
    """Every lease has run out."""
    admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp() where token is not null")


@pytest.mark.contract("B47")
async def test_a_process_that_bears_the_name_of_the_lost_one_is_another_owner(app: App, admin: Admin) -> None:
    inside = {1: anyio.Event(), 2: anyio.Event()}
    leave = {1: anyio.Event(), 2: anyio.Event()}

    @app.kind("work", lease=UNWATCHED, concurrency=1, facts="all")
    async def work(job: Job[None]) -> int:
        inside[job.lease_epoch].set()
        await leave[job.lease_epoch].wait()
        return job.lease_epoch

    seen = Recorder(app)
    await app.enqueue("work", key="k", revision="r")
    before, after = app.worker(), app.worker()
    after.name = before.name
    with anyio.fail_after(20):
        async with running(before):
            await inside[1].wait()
            lapse(admin)
            async with running(after):
                await inside[2].wait()
                held = row(admin, "k")
                leave[1].set()
                await seen.count(JobLost, 1)
                assert (row(admin, "k"), result(admin, "k")) == (held, None)
                leave[2].set()
                await seen.count(JobSettled, 1)
    assert [(lost.key, lost.reason) for lost in seen.of(JobLost)] == [("k", "lost")]
    stored = result(admin, "k")
    assert stored is not None
    assert stored["value"] == 2
    told = [(fact.what, fact.runner) for fact in facts(admin) if fact.what in ("claimed", "succeeded")]
    assert told == [("claimed", before.name), ("claimed", before.name), ("succeeded", before.name)]


@pytest.mark.contract("B49")
async def test_each_renewal_makes_the_lease_a_whole_one_from_then_on(app: App, admin: Admin) -> None:
    install(admin)
    gate = Gate()

    @app.kind("work", lease=Lease.renew(timedelta(seconds=20), timedelta(seconds=0.1)))
    async def work(job: Job[None]) -> None:
        await gate.pass_through()

    seen = Recorder(app)
    await app.enqueue("work", key="k")
    async with running(app.worker()):
        await gate.until(1)
        await eventually(lambda: sum(change.is_renewal for change in read(admin)) >= 3)
        gate.open()
        await seen.count(JobSettled, 1)
    log = read(admin)
    assert sum(change.is_claim for change in log) == 1
    for change in log:
        if change.is_claim or change.is_renewal:
            assert change.expiry is not None
            assert timedelta(seconds=19) < change.expiry - change.at <= timedelta(seconds=20)
            assert change.old_expiry is None or change.expiry > change.old_expiry


@pytest.mark.contract("B55")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("parked_by", ["itself", "who took over"])
def test_no_earlier_holder_revives_or_ends_a_parked_job(hand: Hand, admin: Admin, write: str, parked_by: str) -> None:
    hand.enqueue("k", "r")
    (stale,) = hand.claim()
    holder = stale
    if parked_by == "who took over":
        lapse(admin)
        (holder,) = hand.claim()
    assert hand.settle(holder, PARK).verdict == "done"
    parked = row(admin, "k")
    assert WRITES[write](hand, stale) == "lost"
    assert (row(admin, "k"), result(admin, "k")) == (parked, None)
    assert hand.claim() == []
