"""A renewal is under way while its job comes to an end: the end waits for it, and nothing revives the lease after."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import psycopg
import pytest

from pgworker import App, Job, Lease
from pgworker.db import SyncConnection, send_sync
from pgworker.events import JobLost, JobSettled
from pgworker.outcome import Settlement, Success
from pgworker.statements import Renewal, Statement, finish_jobs, settle_jobs
from tests.handles import FAIL, RELEASE, RETRY, Hand, Recorder, row, running
from tests.handles import hand as another

T = TypeVar("T")
ENDS: dict[str, Success | Settlement] = {"finish": Success("1"), "retry": RETRY, "release": RELEASE, "fail": FAIL}


def end_of(how: str, mine: Hand, claim: Any) -> Statement[Any]:
    end = ENDS[how]
    if isinstance(end, Success):
        return finish_jobs(mine.tables, mine.kind, [(claim, end)])
    return settle_jobs(mine.tables, mine.kind, [(claim, end)])


@pytest.mark.race(5)
@pytest.mark.contract("A20")
@pytest.mark.parametrize("how", ENDS)
def test_the_renewal_comes_first(hand: Hand, dsn: str, admin: psycopg.Connection[Any], how: str) -> None:
    hand.enqueue("k", "r")
    (claim,) = hand.claim()
    other = another(dsn)
    with other.connection as connection, connection.transaction():
        assert other.renew(claim, 600).verdict == "done"  # and not yet committed
        assert hand.send(end_of(how, hand, claim))[claim.id].verdict == "busy"
    assert hand.send(end_of(how, hand, claim))[claim.id].verdict == "done"
    before = row(admin, "k")
    assert (before["token"], before["lease_expires_at"]) == (None, None)
    assert hand.renew(claim, 600) == Renewal("lost", cancel_requested=False)
    assert row(admin, "k") == before


@pytest.mark.race(5)
@pytest.mark.contract("A20")
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("ended", [True, False])
def test_the_end_comes_first(hand: Hand, dsn: str, admin: psycopg.Connection[Any], how: str, *, ended: bool) -> None:
    hand.enqueue("k", "r")
    (claim,) = hand.claim()
    other = another(dsn)
    with other.connection as connection, connection.transaction(force_rollback=not ended):
        assert other.send(end_of(how, other, claim))[claim.id].verdict == "done"
        assert hand.renew(claim, 600).verdict == "busy"
    before = row(admin, "k")
    assert hand.renew(claim, 600).verdict == ("lost" if ended else "done")
    assert (row(admin, "k") == before) == ended


class SlowKeeper:
    """Holds up the keeper's next renewal of one job, before it is sent or with its answer in hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hold_up: str) -> None:
        self.under_way = threading.Event()
        self.go_on = threading.Event()
        self.answered = threading.Event()
        self._hold_up = hold_up
        monkeypatch.setattr("pgworker.leases.send_sync", self._send)

    def _send(self, connection: SyncConnection, statement: Statement[T]) -> T:
        if self._hold_up == "unsent":
            self._wait()
        answer = send_sync(connection, statement)
        if self._hold_up == "answered":
            self._wait()
        return answer

    def _wait(self) -> None:
        if self.go_on.is_set():
            self.answered.set()  # this is the one after it: the keeper has dealt with the one that was held up
        self.under_way.set()
        self.go_on.wait(20)


@pytest.mark.race(5)
@pytest.mark.contract("X6")
@pytest.mark.parametrize("hold_up", ["unsent", "answered"])
async def test_a_keeper_that_is_late_neither_revives_a_lease_nor_calls_its_job_lost(
    app: App, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, hold_up: str
) -> None:
    keeper = SlowKeeper(monkeypatch, hold_up)
    leave = anyio.Event()

    @app.kind("work", concurrency=2, lease=Lease.renew(timedelta(seconds=30), timedelta(seconds=0.1)))
    async def work(job: Job[int]) -> int:
        if job.payload == 1:
            await anyio.to_thread.run_sync(keeper.under_way.wait, 20)
        else:
            await leave.wait()
        return job.payload

    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()):
        await seen.count(JobSettled, 1)
        before = row(admin, "k")
        assert (before["state"], before["token"], before["lease_expires_at"]) == ("succeeded", None, None)
        await app.enqueue("work", 2, key="next")
        keeper.go_on.set()
        await anyio.to_thread.run_sync(keeper.answered.wait, 20)
        assert keeper.answered.is_set()
        leave.set()
        await seen.count(JobSettled, 2)
    assert row(admin, "k") == before
    assert seen.of(JobLost) == []
