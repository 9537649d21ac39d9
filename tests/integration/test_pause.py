"""A paused kind is claimed by nobody, wherever it was paused; all else goes on."""

from __future__ import annotations

import inspect
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, ConfigError, Job, KindPause
from pgworker.events import JobSettled
from tests.handles import Hand, Recorder, running

Admin: TypeAlias = psycopg.Connection[Any]


@pytest.fixture(autouse=True)
def work(app: App) -> None:
    app.declare("work")


async def paused(app: App) -> KindPause:
    (found,) = await app.pauses()
    return found


@pytest.mark.ruling("2.25")
@pytest.mark.parametrize("door", ["async", "sync"])
async def test_a_paused_kind_is_not_claimed_until_it_is_resumed(app: App, hand: Hand, door: str) -> None:
    async def call(verb: str, *words: str) -> Any:
        done = getattr(app if door == "async" else app.sync, verb)(*words)
        return await done if inspect.isawaitable(done) else done

    hand.enqueue("before")
    assert (await call("pauses"), await call("resume", "work")) == ([], False)
    await call("pause", "work")
    (found,) = await call("pauses")
    assert (found.kind, found.until, found.code) == ("work", None, "paused")
    assert abs(datetime.now(UTC) - found.since) < timedelta(minutes=1)
    assert hand.enqueue("during").created
    assert hand.claim(5) == []
    assert await call("resume", "work") is True
    assert [claim.key for claim in hand.claim(5)] == ["before", "during"]
    assert (await call("pauses"), await call("resume", "work")) == ([], False)
    await call("pause", "work")
    assert len(await call("pauses")) == 1, "it can be paused again"


@pytest.mark.ruling("2.25")
async def test_a_pause_ends_by_itself_when_its_time_is_up(app: App, hand: Hand, admin: Admin) -> None:
    hand.enqueue("k")
    await app.pause("work", for_=60, code="quota")
    found = await paused(app)
    assert found.until is not None
    assert (found.until - found.since, found.code) == (timedelta(seconds=60), "quota")
    assert hand.claim() == []
    admin.execute("update pgworker.kinds set paused_until = clock_timestamp()")
    assert (await app.pauses(), await app.resume("work")) == ([], False)
    assert hand.claim()
    since = found.since
    await app.pause("work")
    assert (await paused(app)).since > since, "another pause than the one that is over"


@pytest.mark.ruling("2.25")
async def test_the_longest_pause_stays_with_its_code(app: App) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    await app.pause("work", until=until, code="longer")
    since = (await paused(app)).since
    await app.pause("work", for_=timedelta(minutes=5), code="shorter")
    assert await paused(app) == KindPause("work", since, until, "longer")
    await app.pause("work", until=until + timedelta(hours=1), code="longest")
    assert await paused(app) == KindPause("work", since, until + timedelta(hours=1), "longest")
    await app.pause("work", code="endless")
    await app.pause("work", until=until + timedelta(hours=2), code="ends")
    assert await paused(app) == KindPause("work", since, None, "endless")
    await app.resume("work")
    await app.pause("work", until=datetime.now(UTC) - timedelta(hours=1))
    assert await app.pauses() == []


@pytest.mark.ruling("2.25")
async def test_what_runs_goes_on_and_a_resume_wakes_the_workers(app: App) -> None:
    """Without the wake-up they would look again when a minute is over."""
    started, release = anyio.Event(), anyio.Event()

    @app.kind("slow", poll=60)
    async def slow(job: Job[int]) -> None:
        started.set()
        await release.wait()

    seen = Recorder(app)
    async with running(app.worker(["slow"])):
        await app.enqueue("slow", 1)
        await started.wait()
        await app.pause("slow")
        release.set()
        await seen.count(JobSettled, 1)
        assert seen.of(JobSettled)[0].state == "succeeded"
        await app.enqueue("slow", 2)
        await app.resume("slow")
        await seen.count(JobSettled, 2)


@pytest.mark.ruling("2.25")
async def test_a_pause_outlives_the_workers(app: App, admin: Admin) -> None:
    ran: list[int] = []

    @app.kind("slow", poll=0.02)
    async def slow(job: Job[int]) -> None:
        ran.append(job.payload)

    @app.kind("other")
    async def other(job: Job[int]) -> None: ...

    seen = Recorder(app)
    await app.pause("slow")
    for number in range(2):
        await app.enqueue("slow", number)
        async with running(app.worker()):
            await app.enqueue("other", number)
            await seen.count(JobSettled, number + 1)
    assert ran == []
    await app.resume("slow")
    async with running(app.worker()):
        await seen.count(JobSettled, 4)
    assert sorted(ran) == [0, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"until": datetime.now(UTC), "for_": 1}, "not both"),
        ({"until": datetime.now()}, "time zone"),  # noqa: DTZ005 - that is the mistake
        ({"for_": -1}, "for_ must be"),
        ({"for_": float("nan")}, "for_ must be"),
        ({"code": "two words"}, "one printable ASCII word"),
    ],
)
async def test_a_pause_that_cannot_be_is_refused_unsent(app: App, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await app.pause("work", **options)
    with pytest.raises(ConfigError, match=said):
        app.sync.pause("work", **options)
    assert not app._doors


async def test_a_pause_past_what_a_driver_reads_is_shown_as_one_without_an_end(app: App) -> None:
    await app.pause("work", until=datetime.max.replace(tzinfo=timezone(-timedelta(hours=12))))
    assert [(pause.kind, pause.until) for pause in await app.pauses()] == [("work", None)]
    await app.resume("work")
    assert await app.pauses() == []
