"""A cancel is for the work that it was asked for: what is enqueued after it runs, whatever becomes of the old run."""

from __future__ import annotations

from datetime import timedelta

import anyio
import pytest

from pgworker import App, Job, Lease
from pgworker.events import JobSettled
from tests.chaos.audit import Admin, by_job, findings, install, read
from tests.chaos.processes import Start, until
from tests.handles import Hand, Recorder, result, row, running

REVISIONS = pytest.mark.parametrize("revisions", [("r1", "r2"), (None, None)], ids=["revisions", "latest wins"])


def facts_of(admin: Admin, key: str) -> list[tuple[int, str]]:
    """What is written of a job, with the generation that it is about."""
    found = admin.execute("select generation, what from pgworker.facts where key = %s order by id", [key]).fetchall()
    return [(generation, what) for generation, what in found]


def check(admin: Admin) -> None:
    """The new work has succeeded, once, and no word of a cancel is about it."""
    after, stored = row(admin, "k"), result(admin, "k")
    assert (after["state"], after["generation"], after["attempts"], after["cancel_requested_at"]) == (
        "succeeded", 2, 0, None,
    )  # fmt: skip
    assert stored is not None
    assert stored["value"] == "new"
    log = read(admin)
    assert not findings(log)
    for changes in by_job(log).values():
        assert [change.generation for change in changes if change.is_success] == [2]
        assert not any(change.state == "cancelled" for change in changes if change.generation == 2)
    facts = facts_of(admin, "k")
    assert (1, "cancel_requested") in facts
    assert (2, "succeeded") in facts
    assert not [fact for fact in facts if fact[0] == 2 and fact[1].startswith("cancel")]


@pytest.mark.ruling("4.4")
@pytest.mark.parametrize("when", ["before the run notices", "while the run ends"])
@REVISIONS
async def test_work_that_comes_before_the_holder_of_a_cancelled_job_is_done_with_it(
    app: App, admin: Admin, when: str, revisions: tuple[str | None, str | None]
) -> None:
    install(admin)
    began, told, enqueued = anyio.Event(), anyio.Event(), anyio.Event()
    unnoticed = when == "before the run notices"
    seconds = 60 if unnoticed else 0.9  # the renewal, which tells of the cancel, comes after a third of it

    @app.kind("work", poll=0.1, lease=Lease.renew(timedelta(seconds=seconds)), facts="all", concurrency=1)
    async def work(job: Job[str]) -> str:
        if job.payload == "old":
            began.set()
            try:
                await (enqueued.wait() if unnoticed else anyio.sleep_forever())
            except anyio.get_cancelled_exc_class():
                told.set()
                with anyio.CancelScope(shield=True):
                    await enqueued.wait()
                raise
        return job.payload

    seen = Recorder(app)
    await app.enqueue("work", "old", key="k", revision=revisions[0])
    async with running(app.worker()):
        with anyio.fail_after(10):
            await began.wait()
            assert await app.cancel("work", key="k") == 1
            if not unnoticed:
                await told.wait()
        await app.enqueue("work", "new", key="k", revision=revisions[1])
        enqueued.set()
        await seen.wait(lambda: "succeeded" in {each.state for each in seen.of(JobSettled)})
        await seen.wait(lambda: row(admin, "k")["state"] == "succeeded")
    check(admin)


HOLDER = """
@app.kind("work", poll=0.1, facts="all", lease=Lease.renew(timedelta(seconds=0.6), timedelta(seconds=0.15)))
async def work(job: Job[str]) -> str:
    if job.payload != "new":
        say("began")
        await asyncio.sleep(3600)
    return job.payload
"""


@pytest.mark.ruling("4.4")
@pytest.mark.parametrize("reaped", [0, 1], ids=["leased still", "lease run out"])
@REVISIONS
def test_work_that_comes_after_the_holder_of_a_cancelled_job_was_killed(
    start: Start, dsn: str, *, hand: Hand, admin: Admin, reaped: int, revisions: tuple[str | None, str | None]
) -> None:
    install(admin)
    hand.enqueue("k", revisions[0], "old")
    holder = start(HOLDER)
    holder.out.expect("began")
    operator = App(dsn)
    operator.declare("work", facts="all")
    with operator.sync:
        assert operator.sync.cancel("work", key="k") == 1
        holder.kill()
        if reaped:
            until(lambda: admin.execute(_RUN_OUT).fetchone() is not None)
        operator.sync.enqueue("work", "new", key="k", revision=revisions[1])
    hand.reap()
    start(HOLDER)
    until(lambda: row(admin, "k")["state"] != "pending")
    check(admin)


_RUN_OUT = "select 1 from pgworker.jobs where lease_expires_at < clock_timestamp()"
