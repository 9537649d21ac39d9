"""What a worker tells of itself, and that it hears a stop once."""

from __future__ import annotations

from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Job
from tests.handles import Gate, jobs, running

Admin: TypeAlias = psycopg.Connection[Any]


@pytest.mark.contract("B75")
@pytest.mark.parametrize("stop", ["stop", "drain"])
async def test_a_second_stop_changes_nothing_and_name_and_work_in_hand_are_shown(
    app: App, admin: Admin, stop: str
) -> None:
    gate = Gate()

    @app.kind("work", preset="pool")
    async def work(job: Job[int]) -> int:
        await gate.pass_through()
        return job.payload

    await app.enqueue_many("work", jobs(3))
    worker = app.worker()
    with anyio.fail_after(20):
        async with running(worker, stop=stop):
            await gate.until(2)
            owners = admin.execute("select runner from pgworker.jobs where token is not null").fetchall()
            in_hand = [worker.status()["work"].in_flight]
            getattr(worker, stop)()
            getattr(worker, stop)()
            in_hand.append(worker.status()["work"].in_flight)
            gate.open()
    assert owners == [(worker.name,)] * 2
    assert in_hand == [2, 2]
    status = worker.status()["work"]
    assert (status.lifecycle, status.in_flight) == ("stopped", 0)
    assert (status.claimed, status.succeeded, status.released) == (2, 2, 0)
    states = admin.execute("select state, lease_epoch from pgworker.jobs order by key").fetchall()
    assert states == [("succeeded", 1), ("succeeded", 1), ("pending", 0)]
