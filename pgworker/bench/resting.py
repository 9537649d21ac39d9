"""P10, P12: what a worker costs while it does nothing, and while it holds all that it may."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from pgworker.app import App
from pgworker.bench.app import HOLD, MANY, PAYLOAD
from pgworker.bench.meter import Meter
from pgworker.bench.proc import Memory, cpu_seconds, memory
from pgworker.bench.processes import workers
from pgworker.bench.results import Result, Run, at_most, noted
from pgworker.bench.session import Session
from pgworker.errors import PgworkerError
from pgworker.job import NewJob

_MIB: Final = 1024 * 1024
_LOOK_EVERY: Final = 0.1
_HELD: Final = "select count(*) from {jobs} where kind = %s and token is not null"


class _Life(NamedTuple):
    """One worker from its start to its end."""

    rested: float
    transactions: float
    cpu: float | None


def p10(session: Session) -> Result:
    """Statements a second of one process, by a long rest less a short one, so that start and end cancel."""
    runs: list[Run] = []
    for name in ("drains", "many"):
        session.say(f"idle worker ({name})")
        short, long = (_rest(session, name, session.sizes.idle_seconds * times) for times in (0.2, 1.2))
        seconds = long.rested - short.rested
        cpu = None if long.cpu is None or short.cpu is None else long.cpu / long.rested
        runs.append(
            {
                "kinds": 1 if name == "drains" else MANY,
                "statements_per_second": max(0.0, long.transactions - short.transactions) / seconds,
                "cpu_percent": None if cpu is None else cpu * 100,
            }
        )
    one, fifty = runs
    checks = (
        at_most(f"statements/s, {MANY} kinds", fifty["statements_per_second"], 1.2),
        at_most("statements/s, one kind", one["statements_per_second"], 1.2),
        at_most(f"CPU, {MANY} kinds", fifty["cpu_percent"], 1.0, unit="%"),
        noted("CPU, one kind", one["cpu_percent"], unit="%"),
    )
    note = "statements are counted by the database, for all who are at work in it"
    return Result("P10", "Idle worker", session.variant("idle_seconds"), checks, tuple(runs), note)


def _rest(session: Session, app: str, seconds: float) -> _Life:
    meter = Meter(session.arena)
    meter.start()
    with workers(session, session.arena, app) as (worker,):
        began, used = time.monotonic(), cpu_seconds(worker.pid)
        time.sleep(min(seconds, session.left()))
        worker.check()
        now, rested = cpu_seconds(worker.pid), time.monotonic() - began
        meter.stop()
    transactions = meter.sample(1).transactions or 0.0
    session.arena.empty()
    return _Life(rested, transactions, None if used is None or now is None else now - used)


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
    return Result("P12", "Memory with jobs in flight", session.variant("in_flight"), checks, _run(before, after))


def _memory(pid: int) -> Memory:
    found = memory(pid)
    if found is None:
        raise PgworkerError("the memory of a process cannot be read here: there is no /proc")
    return found


def _run(before: Memory, after: Memory) -> tuple[Run, ...]:
    return ({"before_bytes": before.now, "after_bytes": after.now, "peak_bytes": after.peak},)
