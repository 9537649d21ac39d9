"""What waits, for how long, by kind and urgency: `app.lag`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Job, Lag, NewJob
from pgworker.events import JobSettled
from tests.handles import RELEASE, Hand, Recorder, age, running

Admin: TypeAlias = psycopg.Connection[Any]


@pytest.mark.contract("A67")
async def test_nothing_waits_at_first(app: App) -> None:
    assert (await app.lag(), app.sync.lag(), await app.lag("work")) == ([], [], [])


@pytest.mark.contract("A67")
async def test_lag_counts_by_kind_and_urgency_what_is_pending_and_what_is_ready(
    app: App, hand: Hand, admin: Admin
) -> None:
    hand.enqueue_many([NewJob(1, f"f{number}", "r", priority=number) for number in range(4)])
    hand.enqueue_many([NewJob(1, f"c{number}", "r", urgency="catch_up") for number in range(3)])
    hand.enqueue("later", delay=timedelta(hours=1))
    hand.claim(priority=0)  # runs, then has expired
    hand.claim(priority=1, ttl_seconds=3600)  # runs
    (claim,) = hand.claim(priority=2)
    hand.finish(claim)
    age(admin, 120)
    app.declare("a")
    await app.enqueue("a", 1)
    other, *found = await app.lag()
    assert (other.kind, other.urgency, other.pending, other.ready) == ("a", "fresh", 1, 1)
    for same in (await app.lag("work"), app.sync.lag("work")):
        assert [(each.urgency, each.pending, each.ready) for each in same] == [("fresh", 4, 2), ("catch_up", 3, 3)]
    assert [(each.kind, each.urgency, each.pending, each.ready) for each in found] == [
        ("work", "fresh", 4, 2),
        ("work", "catch_up", 3, 3),
    ]
    for each in found:
        assert each.oldest_seconds is not None
        assert 120 <= each.oldest_seconds < 180
        assert each.pending_exact
        assert each.ready_exact
    assert [(each.kind, each.pending) for each in await app.lag("a")] == [("a", 1)]
    assert await app.lag("nothing like it") == []


@pytest.mark.contract("A67")
async def test_the_age_is_that_of_the_oldest_job_that_is_due_and_free_in_any_lane(
    app: App, hand: Hand, admin: Admin
) -> None:
    hand.enqueue_many([NewJob(1, f"k{number}", priority=number) for number in range(3)])
    admin.execute("update pgworker.jobs set ready_at = ready_at - priority * interval '100 s'")

    async def oldest() -> float | None:
        return (await app.lag("work"))[0].oldest_seconds

    assert 200 <= (await oldest() or 0) < 260
    (claim,) = hand.claim(priority=2)
    assert 100 <= (await oldest() or 0) < 160
    hand.settle(claim, RELEASE)
    assert 200 <= (await oldest() or 0) < 260
    admin.execute("update pgworker.jobs set ready_at = clock_timestamp() + interval '1 h'")
    assert await oldest() is None
    admin.execute("update pgworker.jobs set ready_at = '-infinity' where key = 'k0'")
    assert (await oldest() or 0) > 1e10


@pytest.mark.contract("A67")
async def test_a_job_whose_worker_was_lost_counts_as_waiting_from_its_ready_time_on(
    app: App, hand: Hand, admin: Admin
) -> None:
    hand.enqueue("k")
    hand.claim(ttl_seconds=60)
    (found,) = await app.lag("work")
    assert (found.pending, found.ready, found.oldest_seconds) == (1, 0, None)
    age(admin, 120)
    (found,) = await app.lag("work")
    assert (found.pending, found.ready) == (1, 1)
    assert found.oldest_seconds is not None
    assert 120 <= found.oldest_seconds < 180


@pytest.mark.contract("A67")
@pytest.mark.parametrize(("jobs", "exact"), [(10_000, True), (10_001, False)])
async def test_counts_are_exact_up_to_ten_thousand_and_the_age_beyond(
    app: App,
    admin: Admin,
    jobs: int,
    exact: bool,  # noqa: FBT001 - a parameter of the table of cases
) -> None:
    admin.execute(
        "insert into pgworker.jobs (kind, key, ready_at, priority, payload) select 'work', 'k' || n,"
        " clock_timestamp() - n * interval '1 s', n %% 3, '1' from generate_series(1, %s) n",
        (jobs,),
    )
    (found,) = await app.lag()
    assert found.oldest_seconds is not None
    assert jobs <= found.oldest_seconds < jobs + 60
    seconds = found.oldest_seconds
    assert found == Lag("work", "fresh", 10_000, 10_000, seconds, pending_exact=exact, ready_exact=exact)
    admin.execute("update pgworker.jobs set ready_at = clock_timestamp() + interval '1 h' where key in ('k1', 'k2')")
    (found,) = await app.lag()
    assert (found.pending_exact, found.ready_exact, found.ready) == (exact, True, jobs - 2)


@pytest.mark.contract("A68")
async def test_while_a_provider_is_down_the_lag_shows_and_nothing_is_dropped(app: App, admin: Admin) -> None:
    up = anyio.Event()

    @app.kind("fetch", poll=0.02)
    async def fetch(job: Job[int]) -> None:
        await up.wait()

    seen = Recorder(app)
    await app.enqueue_many("fetch", [NewJob(number) for number in range(30)])
    async with running(app.worker(["fetch"])):
        with anyio.fail_after(10):
            while (await app.lag("fetch"))[0].ready != 20:  # noqa: ASYNC110 - ten run, and nothing tells of that
                await anyio.sleep(0.02)
        admin.execute("update pgworker.jobs set ready_at = ready_at - interval '300 s'")
        (found,) = await app.lag("fetch")
        assert (found.pending, found.ready) == (30, 20)
        assert 300 <= (found.oldest_seconds or 0) < 360
        up.set()
        await seen.count(JobSettled, 30)
    assert await app.lag() == []
