"""P7: how soon an idle worker begins a job, against how soon a notification reaches another process."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

import anyio
import anyio.to_thread

from pgworker.app import App
from pgworker.bench.app import STAMP
from pgworker.bench.floors import CHANNEL
from pgworker.bench.processes import Child, floor_loops, workers
from pgworker.bench.results import Result, Run, at_most, noted
from pgworker.bench.session import Session
from pgworker.bench.stats import percentile
from pgworker.db import SyncConnection

_EVERY_SECONDS: Final = 0.05  # twenty jobs a second
_WARM_UP: Final = 5
_INSERT: Final = "insert into {raw_inserts} (payload) values (to_jsonb(%s::float8)) returning pg_notify(%s, %s)"


def p7(session: Session) -> Result:
    """Twenty jobs a second, and between two of them an INSERT with a NOTIFY, each timed from before it is sent."""
    session.say(f"pickup latency, {session.sizes.pickups} jobs")
    with (
        workers(session, session.arena, "stamps") as (worker,),
        floor_loops(session.arena, "listen") as (listener,),
        session.arena.connect() as connection,
    ):
        ours, bare = anyio.run(_alternate, session, worker, listener, connection)
    session.arena.empty()
    runs: list[Run] = [{"subject_ms": one, "floor_ms": other} for one, other in zip(ours, bare, strict=True)]
    middle, late = ([percentile(each, share) for each in (ours, bare)] for share in (0.5, 0.99))
    checks = (
        at_most("p50, as a multiple of the floor's", middle[0] / middle[1], 1.5, floor=1.0),
        at_most("p99, as a multiple of the floor's", late[0] / late[1], 2.0, floor=1.0),
        noted("p50", middle[0], unit="ms", floor=middle[1]),
        noted("p99", late[0], unit="ms", floor=late[1]),
    )
    return Result("P7", "Pickup latency of an idle worker", session.variant("pickups"), checks, tuple(runs))


async def _alternate(
    session: Session, worker: Child, listener: Child, connection: SyncConnection
) -> tuple[list[float], list[float]]:
    """The milliseconds of each job and of each notification."""
    ours, bare = list[float](), list[float]()
    async with session.arena.app() as app:
        for number in range(_WARM_UP + session.sizes.pickups):
            session.left()
            began = time.monotonic()
            one = await _job(app, worker)
            await _pause(began)
            began = time.monotonic()
            other = await anyio.to_thread.run_sync(partial(_notification, session, listener, connection))
            await _pause(began)
            if number >= _WARM_UP:
                ours.append(one)
                bare.append(other)
    return ours, bare


async def _job(app: App, worker: Child) -> float:
    await app.enqueue(STAMP, time.monotonic())
    return float(await anyio.to_thread.run_sync(worker.read))


def _notification(session: Session, listener: Child, connection: SyncConnection) -> float:
    now = time.monotonic()
    connection.execute(session.arena.sql(_INSERT), [now, CHANNEL, str(now)])
    return float(listener.read())


async def _pause(began: float) -> None:
    await anyio.sleep(max(0.0, began + _EVERY_SECONDS / 2 - time.monotonic()))
