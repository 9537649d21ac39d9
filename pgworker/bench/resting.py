"""P10, P12: what a worker costs while it does nothing, and while it holds all that it may."""

from __future__ import annotations

import time
from typing import Final

from pgworker.app import App
from pgworker.bench.app import HOLD, MANY, PAYLOAD
from pgworker.bench.meter import Meter
from pgworker.bench.proc import Memory, memory
from pgworker.bench.processes import Child, workers
from pgworker.bench.results import Result, Run, at_most, noted
from pgworker.bench.session import Session
from pgworker.bench.stats import median
from pgworker.errors import PgworkerError
from pgworker.job import NewJob

_MIB: Final = 1024 * 1024
_LOOK_EVERY: Final = 0.1
_WINDOWS: Final = 5
_HELD: Final = "select count(*) from {jobs} where kind = %s and token is not null"


def p10(session: Session) -> Result:
    """Statements a second of one process, window after window: in some of them autovacuum is at work as well."""
    runs: list[Run] = []
    for name, kinds in (("drains", 1), ("many", MANY)):
        session.say(f"idle worker ({name})")
        with workers(session, session.arena, name) as (worker,):
            time.sleep(min(session.sizes.idle_seconds / 2, session.left()))  # its start is over by then
            runs += [_rest(session, worker, kinds) for _ in range(_WINDOWS)]
        session.arena.empty()

    def usual(name: str, kinds: int) -> float | None:
        seen = [value for run in runs if run["kinds"] == kinds and (value := run[name]) is not None]
        return median(seen) if seen else None

    checks = (
        at_most(f"statements, {MANY} kinds", usual("statements_per_second", MANY), 1.2, unit="1/s"),
        at_most("statements, one kind", usual("statements_per_second", 1), 1.2, unit="1/s"),
        at_most(f"CPU, {MANY} kinds", usual("cpu_percent", MANY), 1.0, unit="% of a core"),
        noted("CPU, one kind", usual("cpu_percent", 1), unit="% of a core"),
    )
    note = "statements are counted by the database, for all who are at work in it"
    return Result("P10", "Idle worker", session.variant("idle_seconds"), checks, tuple(runs), note)


def _rest(session: Session, worker: Child, kinds: int) -> Run:
    meter = Meter(session.arena, [worker.pid])
    meter.start()
    time.sleep(min(session.sizes.idle_seconds, session.left()))
    worker.check()
    meter.stop()
    sample = meter.sample(1, running=True)
    cpu = sample.worker_cpu_us
    return {
        "kinds": kinds,
        "statements_per_second": (sample.transactions or 0.0) / sample.seconds,
        "cpu_percent": None if cpu is None else cpu / sample.seconds / 1e4,
    }


def p12(session: Session) -> Result:
    """Resident memory with ten thousand jobs in flight; the floor is the same worker before it has any."""
    count = session.sizes.in_flight
    session.say(f"{count} jobs in flight")
    with workers(session, session.arena, "holds") as (worker,):
        before = _memory(worker.pid)
        app = App(session.arena.dsn, schema=session.arena.tables.schema)
        app.declare(HOLD, payload=str)
        with app.sync as producer:
            producer.enqueue_many(HOLD, [NewJob(PAYLOAD) for _ in range(count)])
        session.until_true(lambda: session.arena.number(_HELD, HOLD) >= count, every=_LOOK_EVERY)
        worker.check()
        after = _memory(worker.pid)
        worker.process.kill()  # giving them all back is not what is measured
    session.arena.empty()
    checks = (
        at_most("resident memory", after.now / _MIB, 200, unit="MiB", floor=before.now / _MIB),
        noted("at its peak", after.peak / _MIB, unit="MiB", floor=before.peak / _MIB),
        noted("a job", (after.now - before.now) / count / 1024, unit="KiB"),
    )
    note = f"{count:,} jobs; the floor is the process without them"
    return Result("P12", "Memory with jobs in flight", session.variant("in_flight"), checks, _run(before, after), note)


def _memory(pid: int) -> Memory:
    found = memory(pid)
    if found is None:
        raise PgworkerError("the memory of a process cannot be read here: there is no /proc")
    return found


def _run(before: Memory, after: Memory) -> tuple[Run, ...]:
    return ({"before_bytes": before.now, "after_bytes": after.now, "peak_bytes": after.peak},)
