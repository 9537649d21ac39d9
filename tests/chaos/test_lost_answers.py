"""The server commits, and nobody is told: a proxy swallows the answer and cuts the connection."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgworker import App, Job, Lease, NewJob
from pgworker.client import Done, make_order, put_orders
from pgworker.db import send
from pgworker.events import JobLost, JobSettled, RunnerTrouble
from tests.chaos.audit import Admin, findings, install, read
from tests.chaos.proxy import Point, Proxy, proxied
from tests.chaos.stage import recognize
from tests.databases import TABLES
from tests.handles import Recorder, result, row, running

CLAIM = "lease_epoch = j.lease_epoch + 1"
FINISH = "has_result = ((select valued"
SETTLE = "ready_at = case when decided"
INSERT = "on conflict (kind, key) do update"


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with proxied(dsn) as proxy:
        yield proxy


@pytest.fixture
def far_app(proxy: Proxy) -> App:
    """An app whose way to the database leads through the proxy."""
    return App(proxy.dsn)


SHORT = Lease.renew(timedelta(seconds=1))


@pytest.mark.contract("A56")
@pytest.mark.race(3)
async def test_a_claim_whose_answer_is_lost_comes_back_at_its_expiry(far_app: App, proxy: Proxy, admin: Admin) -> None:
    install(admin)
    runs: list[tuple[str, int, int]] = []

    @far_app.kind("work", poll=0.1, lease=Lease.renew(timedelta(seconds=0.6)), concurrency=3)
    async def work(job: Job[int]) -> int:
        runs.append((job.key, job.attempts, job.evictions))
        return job.payload

    seen = Recorder(far_app)
    for number in range(3):
        await far_app.enqueue("work", number, key=f"k{number}", revision="r")
    proxy.swallow(CLAIM)
    worker = far_app.worker()
    async with running(worker):
        await seen.wait(lambda: len(seen.of(JobSettled)) == 3)
        assert worker.status()["work"].failed == 0
    await far_app.close()
    assert proxy.fired == 1
    assert [(each.code, each.error) for each in seen.of(RunnerTrouble)] == [("queue_claim_failed", "OperationalError")]
    assert sorted(runs) == [("k0", 0, 1), ("k1", 0, 1), ("k2", 0, 1)]
    log = read(admin)
    assert not findings(log)
    takeovers = [change for change in log if change.is_takeover]
    assert len(takeovers) == 3
    for change in takeovers:
        assert change.old_expiry is not None
        assert change.old_expiry <= change.at


@pytest.mark.race(4)
@pytest.mark.parametrize("applying", [0, 1], ids=["plain", "with apply"])
async def test_a_completion_whose_answer_is_lost_has_happened_once(
    far_app: App, proxy: Proxy, admin: Admin, applying: int
) -> None:
    install(admin)
    admin.execute("create table public.stored (key text); grant all on public.stored to public")
    runs: list[str] = []

    async def store(connection: psycopg.AsyncConnection[Any], job: Job[int], value: int) -> None:
        await connection.execute("insert into public.stored values (%s)", [job.key])
        if job.key == "k":
            proxy.swallow("COMMIT")

    @far_app.kind("work", poll=0.1, lease=SHORT, concurrency=1, max_attempts=1, apply=store if applying else None)
    async def work(job: Job[int]) -> int:
        runs.append(job.key)
        return job.payload

    seen = Recorder(far_app)
    await far_app.enqueue("work", 7, key="k", revision="r")
    await far_app.enqueue("work", 8, key="l", revision="r")
    if not applying:
        proxy.swallow(FINISH)
    worker = far_app.worker()
    async with running(worker):
        await seen.wait(lambda: bool(seen.of(JobLost)) and bool(seen.of(JobSettled)))
        status = worker.status()["work"]
    await far_app.close()
    assert proxy.fired == 1
    assert runs == ["k", "l"]
    assert (status.failed, status.retried, status.superseded, status.last_error) == (0, 0, 1, None)
    assert [each.code for each in seen.of(RunnerTrouble)] == ["queue_complete_failed"]
    for key, value in (("k", 7), ("l", 8)):
        stored = result(admin, key)
        assert stored is not None
        assert stored["value"] == value
        assert (row(admin, key)["state"], row(admin, key)["attempts"]) == ("succeeded", 0)
    log = read(admin)
    assert not findings(log)
    assert sum(change.is_success for change in log) == 2
    assert admin.execute("select key from public.stored order by key").fetchall() == [("k",), ("l",)] * applying


@pytest.mark.race(4)
async def test_a_retry_whose_answer_is_lost_counts_once(far_app: App, proxy: Proxy, admin: Admin) -> None:
    install(admin)
    runs: list[int] = []

    @far_app.kind("work", poll=0.1, lease=SHORT, max_attempts=3)
    async def work(job: Job[int]) -> int:
        runs.append(job.attempts)
        raise ValueError

    seen = Recorder(far_app)
    await far_app.enqueue("work", 7, key="k", revision="r")
    proxy.swallow(SETTLE)
    async with running(far_app.worker()):
        await seen.wait(lambda: bool(seen.of(JobLost)))
    await far_app.close()
    assert proxy.fired == 1
    assert runs == [0]
    assert (row(admin, "k")["state"], row(admin, "k")["attempts"]) == ("pending", 1)
    assert not findings(read(admin))


async def test_an_enqueue_whose_answer_is_lost_may_be_repeated(far_app: App, proxy: Proxy, admin: Admin) -> None:
    far_app.declare("work", payload=int)
    proxy.swallow(INSERT)
    with pytest.raises(psycopg.OperationalError):
        await far_app.enqueue("work", 7, key="k", revision="r")
    assert (await far_app.enqueue("work", 7, key="k", revision="r")).status == "unchanged"
    await far_app.close()
    assert proxy.fired == 1
    assert row(admin, "k")["generation"] == 1


@pytest.mark.parametrize("point", Point)
async def test_sixteen_jobs_whose_acknowledgement_is_lost_are_sixteen_when_they_are_sent_again(
    far_app: App, proxy: Proxy, admin: Admin, point: Point
) -> None:
    """One statement, one commit: the caller, who cannot know, repeats it with the keys that it has given."""
    far_app.declare("work", payload=int)
    jobs = [NewJob(number, f"k{number:02}", "r") for number in range(16)]
    proxy.set_trap(recognize("insert_jobs"), point)
    async with far_app:
        with pytest.raises(psycopg.OperationalError):
            await far_app.enqueue_many("work", jobs)
        again = await far_app.enqueue_many("work", jobs)
    assert proxy.fired == 1
    assert {each.status for each in again} == {"unchanged" if point is Point.COMMITTED else "created"}
    rows = admin.execute("select key, generation, state from pgworker.jobs order by key").fetchall()
    assert rows == [(f"k{number:02}", 1, "pending") for number in range(16)]


@pytest.mark.parametrize("point", Point)
async def test_sixteen_events_whose_acknowledgement_is_lost_are_sixteen_when_they_are_sent_once_more(
    far_app: App, proxy: Proxy, admin: Admin, point: Point
) -> None:
    """An event's key is made once for each call: whoever asks for the same again, as it is to be done, adds nothing."""
    far_app.declare("work", payload=int)
    order = make_order(far_app.kinds["work"], [NewJob(number) for number in range(16)], if_pending="replace")
    first_time, again = (next(put_orders(TABLES, [order], Done(), again=each)) for each in (False, True))
    proxy.set_trap(recognize("insert_events"), point)
    async with await psycopg.AsyncConnection.connect(proxy.dsn, autocommit=True) as first:
        with pytest.raises(psycopg.OperationalError):
            await send(first, first_time)
    async with await psycopg.AsyncConnection.connect(proxy.dsn, autocommit=True) as second:
        puts = await send(second, again)
    assert proxy.fired == 1
    assert len(puts) == 16
    payloads = admin.execute("select payload::int from pgworker.jobs order by 1").fetchall()
    assert payloads == [(number,) for number in range(16)]
