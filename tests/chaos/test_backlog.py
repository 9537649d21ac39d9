"""A backlog that never ends: what became ready behind the place where claims are at is started on time all the same."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta

import anyio
import psycopg
import pytest

from pgworker import App, Backoff, Job, Lease, NewJob, Retry
from tests.chaos.audit import Admin, findings, install, read, told
from tests.handles import Hand, running

LEASE_SECONDS = 1.2


class Backlog:
    """A worker that cannot keep pace with those who enqueue; notes when each of the jobs that matter was started."""

    def __init__(self, app: App, *, ready: int, together: int) -> None:
        self.started: dict[str, list[float]] = {}
        self.done = 0
        self._app = app
        self._ready = ready
        self._together = together
        self._numbers = itertools.count()
        self._changed = anyio.Event()
        app.kind(
            "work",
            concurrency=10,
            lease=Lease.renew(timedelta(seconds=LEASE_SECONDS)),
            backoff=Backoff(base=timedelta(seconds=1), jitter="none"),
            facts="none",
        )(self._work)

    async def _work(self, job: Job[str]) -> str | Retry:
        if job.payload != "backlog":
            self.started.setdefault(job.payload, []).append(time.monotonic())
            self._changed.set()
            self._changed = anyio.Event()
            if job.payload == "retried" and not job.attempts:
                return Retry()
        else:
            self.done += 1
            await anyio.sleep(0.005)
        return job.payload

    async def fill(self) -> None:
        """Keep so many ready, and more each time: faster than they are worked off."""
        while True:
            waiting = next(self._numbers) * self._together - self.done
            jobs = [NewJob("backlog") for _ in range(self._together)]
            if waiting < self._ready:
                await self._app.enqueue_many("work", jobs)
            else:
                done = self.done
                await anyio.sleep(0.05)
                await self._app.enqueue_many("work", jobs[: 2 * (self.done - done)])

    async def until_started(self, name: str, *, times: int = 1, within: float) -> None:
        with anyio.fail_after(within):
            while len(self.started.get(name, ())) < times:
                await self._changed.wait()


async def wait_behind_a_backlog(app: App, hand: Hand, admin: Admin, *, ready: int, patience: float) -> None:
    """In a backlog of so many: a worker lost, a retry, a transaction that was open for long.

    The retried one has a better priority: in its own lane it goes to the end of the line, as it should.
    """
    install(admin)
    backlog = Backlog(app, ready=ready, together=1000)
    await app.enqueue("work", "orphaned", key="orphaned")
    late: psycopg.Connection[tuple[object, ...]] = psycopg.connect(hand.connection.info.dsn, password=_password(hand))
    with late:
        app.sync.enqueue("work", "late", key="late", conn=late)  # not committed yet
        async with anyio.create_task_group() as group:
            group.start_soon(backlog.fill)
            while _ready(admin) < ready:  # noqa: ASYNC110 - nothing tells of it
                await anyio.sleep(0.05)
            assert len(hand.claim(1, ttl_seconds=LEASE_SECONDS)) == 1  # by a worker that dies at once
            lost_at = time.monotonic()
            async with running(app.worker()):
                with anyio.fail_after(20):
                    while backlog.done < 200:  # noqa: ASYNC110 - as before: the claims are somewhere in the backlog
                        await anyio.sleep(0.01)
                assert not backlog.started.keys() & {"late"}
                late.commit()
                committed_at = time.monotonic()
                await app.enqueue("work", "retried", key="retried", priority=-1)
                await backlog.until_started("late", within=patience)
                await backlog.until_started("retried", times=2, within=patience + 1)
                await backlog.until_started("orphaned", within=patience + LEASE_SECONDS)
                left = _ready(admin)
                first, second = backlog.started["retried"]
                waits = {
                    "late": backlog.started["late"][0] - committed_at,
                    "retried": second - first - 1,
                    "orphaned": backlog.started["orphaned"][0] - lost_at - LEASE_SECONDS,
                }
                print({name: round(seconds, 3) for name, seconds in waits.items()}, backlog.done, left)  # noqa: T201
            group.cancel_scope.cancel()
    assert left > ready / 2, "the backlog was at an end"
    assert all(seconds < patience for seconds in waits.values()), waits
    found = findings(read(admin))
    assert not found, told(found)
    rows = admin.execute(
        "select key, state, attempts from pgworker.jobs where key in ('late', 'retried', 'orphaned') order by key"
    ).fetchall()
    assert rows == [("late", "succeeded", 0), ("orphaned", "succeeded", 0), ("retried", "succeeded", 1)]


def _ready(admin: Admin) -> int:
    found = admin.execute("select count(*) from pgworker.jobs where state = 'pending' and token is null").fetchone()
    assert found is not None
    return int(found[0])


def _password(hand: Hand) -> str:
    return hand.connection.info.password


@pytest.mark.contract("A26")
@pytest.mark.ruling("4.3", "1.6")
async def test_what_is_behind_the_claims_starts_on_time_under_a_backlog(app: App, hand: Hand, admin: Admin) -> None:
    await wait_behind_a_backlog(app, hand, admin, ready=3_000, patience=10)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.ruling("4.3")
async def test_what_is_behind_the_claims_starts_within_two_seconds_under_50000(
    app: App, hand: Hand, admin: Admin
) -> None:
    await wait_behind_a_backlog(app, hand, admin, ready=50_000, patience=2)
