"""P9: does a steady stream stay as fast while an old snapshot keeps every dead row in place?"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, cast

from pgworker.bench.app import NOOP, PAYLOAD
from pgworker.bench.meter import Meter
from pgworker.bench.processes import Child, workers
from pgworker.bench.results import Result, Run, Sample, noted, paired_at_least
from pgworker.bench.session import Session
from pgworker.job import NewJob
from pgworker.syncapp import SyncApp

_TICK: Final = 0.1

# By the rows themselves: what ended in each window, and how long after it was due (claim, call and finish together).
_WINDOWS: Final = """
select floor((extract(epoch from finished_at)::float8 - %s) / %s)::int as number, count(*),
       percentile_cont(0.5) within group (order by extract(epoch from finished_at - ready_at)::float8),
       percentile_cont(0.99) within group (order by extract(epoch from finished_at - ready_at)::float8)
from {jobs} where kind = %s and state = 'succeeded' group by 1 order by 1"""


def p9(session: Session) -> Result:
    """Enqueue at a steady rate under a held snapshot, and compare the last window with the first."""
    sizes = session.sizes
    session.say(f"{sizes.sustained_rate} jobs/s for {sizes.sustained_seconds:g} s under a held snapshot")
    with _held_snapshot(session), workers(session, session.arena, "drains") as (worker,):
        with session.arena.app().sync as producer:
            began, costs = _stream(session, producer, worker)
        windows = _windows(session, began, len(costs))
    session.arena.empty()
    runs = tuple(window | cost.figures("cost") for window, cost in zip(windows, costs, strict=True))
    first, last = runs[0], runs[-1]
    ratio = (last["finished_per_second"] or 0.0) / (first["finished_per_second"] or 1.0)
    checks = (
        paired_at_least("last window's rate, as a share of the first's", [ratio], 0.95),
        noted("rate, last window", last["finished_per_second"], unit="jobs/s", floor=first["finished_per_second"]),
        noted("from due to done, p50, last window", last["p50_ms"], unit="ms", floor=first["p50_ms"]),
        noted("from due to done, p99, last window", last["p99_ms"], unit="ms", floor=first["p99_ms"]),
        noted(
            "Postgres CPU, last window",
            last["cost_postgres_cpu_us"],
            unit="us/job",
            floor=first["cost_postgres_cpu_us"],
        ),
    )
    variant = session.variant("sustained_seconds", "sustained_rate")
    note = (
        f"{sizes.sustained_rate:,} jobs/s are enqueued, so no more can be done, for {sizes.sustained_seconds:g} s;"
        f" the floor is the first {sizes.window_seconds:g} s; the claim's time is within that from due to done"
    )
    return Result("P9", "Steady stream under an old snapshot", variant, checks, runs, note)


@contextmanager
def _held_snapshot(session: Session) -> Generator[None, None, None]:
    """Another session that has looked at something, and does not end."""
    with session.arena.connect("holder") as connection:
        connection.execute("begin isolation level repeatable read read only")
        connection.execute("select 1 from pg_class limit 1")
        yield


def _stream(session: Session, producer: SyncApp, worker: Child) -> tuple[float, list[Sample]]:
    """Enqueue until the time is up; the database's time of the start, and what each window cost."""
    sizes = session.sizes
    batch = max(1, round(sizes.sustained_rate * _TICK))
    windows = max(2, round(sizes.sustained_seconds / sizes.window_seconds))
    ticks = round(sizes.window_seconds / _TICK)
    began, due, costs = session.arena.now(), time.monotonic(), list[Sample]()
    for _ in range(windows):
        meter = Meter(session.arena, [worker.pid])
        meter.start()
        for _ in range(ticks):
            producer.enqueue_many(NOOP, [NewJob(PAYLOAD) for _ in range(batch)])
            due += _TICK
            time.sleep(max(0.0, due - time.monotonic()))
            session.left()
        worker.check()
        meter.stop()
        costs.append(meter.sample(batch * ticks, running=True))
    return began, costs


def _windows(session: Session, began: float, count: int) -> list[Run]:
    seconds = session.sizes.window_seconds
    rows = session.arena.rows(_WINDOWS, began, seconds, NOOP)
    found = {
        cast("int", number): (cast("int", done), cast("float", p50), cast("float", p99))
        for number, done, p50, p99 in rows
    }
    runs: list[Run] = []
    for number in range(count):
        done, p50, p99 = found.get(number, (0, 0.0, 0.0))
        runs.append({"finished_per_second": done / seconds, "p50_ms": p50 * 1000, "p99_ms": p99 * 1000})
    return runs
