"""What a type checker makes of the public API. No function here is called: mypy and pyright read them, both strict.

A line that must be an error says so to both, `type: ignore[...]` and `pyright: ignore[...]`, and each of them complains
of an ignore that is not needed: so a wrong call that is accepted fails the check as a right one that is refused does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypedDict, assert_type

import msgspec
import psycopg
import pydantic
from psycopg.rows import DictRow, TupleRow

from pgworker import (
    App,
    Backoff,
    Cancel,
    Enqueued,
    Job,
    KindPause,
    Lag,
    Lease,
    NewJob,
    Park,
    Pause,
    Permanent,
    Retry,
    Stop,
)


@dataclass
class User:
    name: str


class Film(TypedDict):
    title: str


class Point(msgspec.Struct):
    x: int


class Model(pydantic.BaseModel):
    n: int


app = App("postgresql://localhost/app", schema="jobs", listen_dsn=None)


# --- handlers keep their own types ----------------------------------------------------------------------------------


@app.kind("single")
async def single(job: Job[User]) -> None:
    assert_type(job, Job[User])
    assert_type(job.payload, User)
    assert_type(job.payload.name, str)
    assert_type(job.key, str)
    assert_type(job.revision, str | None)
    assert_type(job.attempts, int)
    assert_type(job.ready_at, datetime)
    assert_type(job.idempotency_key, str)
    assert_type(job.lost, bool)
    assert_type(job.cancelled, bool)
    job.nothing  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]  # noqa: B018


@app.kind("batch", batch=64, window=0.25, concurrency=2, preset="content")
async def batch(jobs: list[Job[Film]]) -> list[Point | Retry | None]:
    assert_type(jobs[0].payload, Film)
    return [Point(1), Retry(), None]


@app.kind("thread", timeout=timedelta(minutes=1), lease=Lease.renew(timedelta(seconds=30)), backoff=Backoff())
def thread(job: Job[Point]) -> dict[str, int]:
    return {"x": job.payload.x}


async def directly(user: Job[User], films: list[Job[Film]], point: Job[Point]) -> None:
    """A registered handler is still the function that it was: a test may call it."""
    assert_type(await single(user), None)
    assert_type(await batch(films), list[Point | Retry | None])
    assert_type(thread(point), dict[str, int])
    await single(point)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    thread(point, point)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@app.kind("instructions", stop=Stop("release"), max_attempts=-1, panic="permanent", version=2, payload_limit=10)
async def instructions(job: Job[Model]) -> Retry | Permanent | Park | Pause | Cancel | None:
    match job.attempts:
        case 0:
            return Retry(after=timedelta(seconds=1), code="again")
        case 1:
            return Park("quota", timedelta(hours=1))
        case 2:
            return Pause(timedelta(seconds=5))
        case 3:
            return Cancel()
        case _:
            return Permanent("gone")


async def store(conn: psycopg.AsyncConnection[TupleRow], job: Job[User], value: str) -> None:
    await conn.execute("select %s, %s", (job.key, value))


@app.kind("applied", apply=store, fair=True)
async def applied(job: Job[User]) -> str:
    return job.payload.name


def wrong_registrations() -> None:
    app.kind("no_handler")("text")  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    app.kind("bad_option", panic="sometimes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    app.kind("bad_time", timeout="1 s")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    app.kind("no_such_option", retries=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    app.declare("elsewhere", payload=list[User])


# --- enqueue --------------------------------------------------------------------------------------------------------


async def enqueue(
    conn: psycopg.AsyncConnection,
    dict_conn: psycopg.AsyncConnection[DictRow],
    sync_conn: psycopg.Connection,
    sync_dict_conn: psycopg.Connection[DictRow],
) -> None:
    put = await app.enqueue("single", User("n"), key="k", revision="r", delay=timedelta(1), priority=-1, tenant="t")
    assert_type(put, Enqueued)
    assert_type(put.created, bool)
    assert_type(put.key, str)
    assert_type(put.revision, str | None)
    _ = put.status == "superseded"
    _ = put.status == "suspended"  # type: ignore[comparison-overlap]  # pyright: ignore[reportUnnecessaryComparison]
    many: Sequence[NewJob] = (NewJob(User("n")), NewJob(None, key="k", urgency="catch_up"))
    assert_type(await app.enqueue_many("single", many, if_pending="keep"), list[Enqueued])
    assert_type(app.sync.enqueue("single", User("n"), ready_at=datetime.now(UTC)), Enqueued)
    assert_type(app.sync.enqueue_many("single", many), list[Enqueued])

    # Whatever rows the caller's connection makes, ours are our own.
    await app.enqueue("single", conn=conn)
    await app.enqueue("single", conn=dict_conn)
    await app.enqueue_many("single", many, conn=dict_conn)
    app.sync.enqueue("single", conn=sync_conn)
    app.sync.enqueue("single", conn=sync_dict_conn)
    app.sync.enqueue_many("single", many, conn=sync_dict_conn)

    await app.enqueue("single", conn=sync_conn)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    app.sync.enqueue("single", conn=conn)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await app.enqueue("single", urgency="soon")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await app.enqueue("single", if_pending="drop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await app.enqueue("single", delay="5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await app.enqueue("single", User("n"), "key")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await app.enqueue()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    NewJob(None, "k", "r", urgency="soon")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    put.status = "created"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


# --- operate --------------------------------------------------------------------------------------------------------


async def operate(conn: psycopg.AsyncConnection[DictRow], sync_conn: psycopg.Connection) -> None:
    assert_type(await app.retry("single", code="handler_failed", limit=10, progress=print), int)
    assert_type(await app.rebuild("single", key="k"), int)
    assert_type(await app.cancel("single", all=True), int)
    assert_type(await app.forget("single", "k"), bool)
    assert_type(await app.pause("single", for_=timedelta(1), code="quota"), None)
    assert_type(await app.resume("single"), bool)
    assert_type(await app.pauses(), list[KindPause])
    assert_type((await app.lag("single"))[0].oldest_seconds, float | None)
    assert_type(await app.notify("single", conn=conn), None)
    assert_type(app.sync.retry("single", all=True), int)
    assert_type(app.sync.rebuild("single", all=True), int)
    assert_type(app.sync.cancel("single", key="k"), int)
    assert_type(app.sync.forget("single", "k"), bool)
    assert_type(app.sync.pause("single", until=datetime.now(UTC)), None)
    assert_type(app.sync.resume("single"), bool)
    assert_type(app.sync.lag(), list[Lag])
    app.sync.notify("single", conn=sync_conn)
    await app.rebuild("single", code="c")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await app.retry("single", "k")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# --- work -----------------------------------------------------------------------------------------------------------


async def work() -> None:
    worker = app.worker(["single"])
    await worker.run(startup_timeout=timedelta(seconds=5))
    status = worker.status()["single"]
    assert_type(status.in_flight, int)
    assert_type(status.last_error, str | None)
    async with app as same:
        assert_type(same, App)
        assert_type(await same.run(), None)
    app.worker("single", 2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
