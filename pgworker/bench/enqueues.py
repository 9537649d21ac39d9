"""P4, P5, P6: how fast jobs get into the table, many in one call, one by one, and in producers' own transactions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Final

import anyio
import psycopg

from pgworker.app import App
from pgworker.bench.app import NOOP, PAYLOAD
from pgworker.bench.meter import Meter
from pgworker.bench.results import Result, Run, Sample, at_least, at_most, middle, noted, paired_at_least
from pgworker.bench.session import Session
from pgworker.bench.stats import median, percentile
from pgworker.client import put_jobs
from pgworker.config import conninfo
from pgworker.db import AnyAsyncConnection, drive, send
from pgworker.job import NewJob

PRODUCERS: Final = 16

_COPY: Final = "copy {raw_inserts} (payload) from stdin"
_INSERT: Final = "insert into {raw_inserts} (payload) values (%s::jsonb)"
_JSON: Final = f'"{PAYLOAD}"'

_Each = Callable[[int], Awaitable[object]]


# --- P4 -------------------------------------------------------------------------------------------------------------


def p4(session: Session) -> Result:
    """Many jobs in one call, with an outcome for each; the floor is COPY into a plain table."""
    count, runs = session.sizes.bulk, list[Run]()
    samples: dict[str, list[Sample]] = {"keyed": [], "events": [], "copy": []}
    for turn in range(session.sizes.rounds):
        session.say(f"bulk enqueue, round {turn + 1} of {session.sizes.rounds}")
        jobs = {
            "keyed": [NewJob(PAYLOAD, f"bulk:{number}") for number in range(count)],
            "events": [NewJob(PAYLOAD) for _ in range(count)],
        }
        for name, batch in jobs.items():
            samples[name].append(_bulk(session, batch))
        samples["copy"].append(_copy(session, count))
        runs.append({key: value for name in samples for key, value in samples[name][-1].figures(name).items()})
    floor = _rate(samples["copy"])
    checks = (
        at_least("with keys", _rate(samples["keyed"]), 30_000, unit="jobs/s", floor=floor),
        at_least("events", _rate(samples["events"]), 80_000, unit="jobs/s", floor=floor),
        at_most("WAL, with keys", middle(samples["keyed"], "wal_bytes"), 450, unit="bytes/job"),
    )
    note = f"{count:,} jobs in one call; the floor is COPY into a table without an index but its key's"
    return Result("P4", "Bulk enqueue", session.variant("bulk"), checks, tuple(runs), note)


def _bulk(session: Session, jobs: Sequence[NewJob]) -> Sample:
    meter = Meter(session.arena)
    with session.arena.app().sync as producer:
        producer.enqueue_many(NOOP, [NewJob(PAYLOAD, "first")])  # the pool's first connection is not what is measured
        meter.start()
        answers = producer.enqueue_many(NOOP, jobs)
        meter.stop()
    sample = meter.sample(len(answers))
    session.arena.empty()
    return sample


def _copy(session: Session, count: int) -> Sample:
    meter = Meter(session.arena)
    with session.arena.connect() as connection:
        meter.start()
        with connection.cursor() as cursor, cursor.copy(session.arena.sql(_COPY)) as copy:
            for _ in range(count):
                copy.write_row([_JSON])
        meter.stop()
    session.arena.empty()
    return meter.sample(count)


def _rate(samples: Sequence[Sample]) -> float:
    return median([each.rate for each in samples])


# --- P5 -------------------------------------------------------------------------------------------------------------


def p5(session: Session) -> Result:
    """Single enqueues, over the app's own pool: 16 awaits at once, and one alone; the floor is a bare INSERT."""
    runs: list[Run] = []
    for turn in range(session.sizes.rounds):
        session.say(f"single enqueues, round {turn + 1} of {session.sizes.rounds}")
        run: Run = {}
        for name, count, tasks in (("", session.sizes.singles, PRODUCERS), ("alone_", session.sizes.alone, 1)):
            for who, work in (("subject", _enqueues), ("floor", _inserts)):
                sample, latencies = _timed(session, partial(work, session, count, tasks), count)
                run |= sample.figures(f"{name}{who}") | {f"{name}{who}_p50_ms": percentile(latencies, 0.5) * 1000}
        runs.append(run)

    def of(name: str) -> list[float]:
        return [run[name] or 0.0 for run in runs]

    ratios = [ours / bare for ours, bare in zip(of("alone_subject_p50_ms"), of("alone_floor_p50_ms"), strict=True)]
    rate, floor = median(of("subject_jobs_per_second")), median(of("floor_jobs_per_second"))
    checks = (
        at_least(f"{PRODUCERS} at once", rate, 10_000, unit="jobs/s", floor=floor),
        at_most("one alone, as a multiple of a bare INSERT", median(ratios), 1.1, floor=1.0),
        noted("one alone", median(of("alone_subject_p50_ms")), unit="ms", floor=median(of("alone_floor_p50_ms"))),
        noted(f"transactions, {PRODUCERS} at once", median(of("subject_transactions")), unit="1/job"),
    )
    return Result("P5", "Single enqueues, own pool", session.variant("singles"), checks, tuple(runs))


def _timed(session: Session, work: Callable[[], Awaitable[list[float]]], count: int) -> tuple[Sample, list[float]]:
    meter = Meter(session.arena)
    meter.start()
    began = time.monotonic()
    latencies = anyio.run(work)
    seconds = latencies.pop()  # without connecting and closing
    meter.stop()
    sample = meter.sample(count, seconds=min(seconds, time.monotonic() - began))
    session.arena.empty()
    return sample, latencies


async def _enqueues(session: Session, count: int, tasks: int) -> list[float]:
    async with session.arena.app() as app:
        await at_once(tasks, tasks, lambda _: app.enqueue(NOOP, PAYLOAD))  # its connections are made
        return await at_once(count, tasks, lambda _: app.enqueue(NOOP, PAYLOAD))


async def _inserts(session: Session, count: int, tasks: int) -> list[float]:
    statement = session.arena.sql(_INSERT)
    async with AsyncExitStack() as stack:
        free = [await _connection(session, stack) for _ in range(tasks)]

        async def insert(_: int) -> None:
            connection = free.pop()
            await connection.execute(statement, [_JSON])
            free.append(connection)

        await at_once(tasks * 6, tasks, insert)  # so that each has prepared its statement
        return await at_once(count, tasks, insert)


async def at_once(count: int, tasks: int, each: _Each) -> list[float]:
    """Do something so many times by so many tasks; each one's seconds, and at the end those of the whole."""
    numbers, latencies = itertools.count(), list[float]()

    async def work() -> None:
        while (number := next(numbers)) < count:
            began = time.perf_counter()
            await each(number)
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(tasks):
            group.start_soon(work)
    return [*latencies, time.perf_counter() - began]


async def _connection(session: Session, stack: AsyncExitStack) -> psycopg.AsyncConnection[object]:
    made = await psycopg.AsyncConnection[object].connect(conninfo(session.arena.dsn, "bench"), autocommit=True)
    return await stack.enter_async_context(made)


# --- P6 -------------------------------------------------------------------------------------------------------------


def p6(session: Session) -> Result:
    """Producers in transactions of their own, with wake-ups and without, in turn, while somebody listens."""
    runs: list[Run] = []
    legs = [("subject", True), ("floor", False)]
    pairs = 2 * session.sizes.pairs + 1  # one alone is short, and off by more than what is looked for
    for turn in range(pairs):
        session.say(f"producers' transactions, pair {turn + 1} of {pairs}")
        run: Run = {}
        for name, wake in legs[:: 1 - 2 * (turn % 2)]:
            with _listening(session):
                count = session.sizes.singles
                sample, _ = _timed(session, partial(_transactions, session, count, wake=wake), count)
            run |= sample.figures(name)
        runs.append(run)
    ours, bare = ([run[f"{name}_jobs_per_second"] or 0.0 for run in runs] for name, _ in legs)
    ratios = [one / other for one, other in zip(ours, bare, strict=True)]
    checks = (
        paired_at_least("share of the same inserts without NOTIFY", ratios, 0.95, floor=1.0),
        noted("commits", median(ours), unit="1/s", floor=median(bare)),
    )
    variant = session.variant("singles", "pairs")
    return Result("P6", "16 producers in transactions of their own", variant, checks, tuple(runs))


async def _transactions(session: Session, count: int, *, wake: bool) -> list[float]:
    async with session.arena.app() as app, AsyncExitStack() as stack:
        free: list[AnyAsyncConnection] = [await _connection(session, stack) for _ in range(PRODUCERS)]

        async def produce(_: int) -> None:
            connection = free.pop()
            async with connection.transaction():
                if wake:
                    await app.enqueue(NOOP, PAYLOAD, conn=connection)
                else:
                    await _enqueue_silently(app, connection)
            free.append(connection)

        await at_once(PRODUCERS * 6, PRODUCERS, produce)
        return await at_once(count, PRODUCERS, produce)


async def _enqueue_silently(app: App, connection: AnyAsyncConnection) -> None:
    """The same statement as App.enqueue's, and no hint: what nobody can have otherwise, as it would delay the job."""
    flow = put_jobs(app.settings.tables, app.kinds[NOOP], [NewJob(PAYLOAD)], if_pending="replace")
    await drive(flow, partial(send, connection))


@contextmanager
def _listening(session: Session) -> Generator[None, None, None]:
    """Somebody listens, as a worker would: a notification that nobody gets is a cheaper one."""
    with session.arena.connect("listen") as connection:
        connection.execute(f'listen "{session.arena.tables.channel}"'.encode())
        yield
