"""P1, P2, P3, P8: how fast workers empty a table of jobs that do nothing, and what each job costs.

A drain: the kind is paused, the jobs are enqueued, the workers start and report themselves; then the kind is resumed,
which is when the clock starts, and it ends with the last job's `finished_at`. The floor's loops wait for a line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from pgworker.bench.app import CONCURRENCY, NOOP, PAYLOAD, PREFETCH
from pgworker.bench.arena import Arena, new_schema, open_arena
from pgworker.bench.floors import BATCH
from pgworker.bench.meter import Meter
from pgworker.bench.processes import Child, floor_loops, workers
from pgworker.bench.results import Check, Result, Run, Sample, at_least, at_most, middle, noted, paired_at_least
from pgworker.bench.session import Session
from pgworker.bench.stats import median, spread
from pgworker.job import NewJob

_LOOK_EVERY: Final = 0.05
_CHUNK: Final = 5_000
_MANY_CORES: Final = 4

_FILL: Final = "insert into {raw_jobs} (kind, payload) select %s, to_jsonb(%s::text) from generate_series(1, %s)"
_TAKE_OUT: Final = "delete from {jobs} where kind = %s and key like 'drain:%%'"
_TAKE_OUT_RAW: Final = "truncate {raw_jobs}"

# Rows of the same kind, as an app would have them: planned for later, ended lately, ended long ago.
_BALLAST: Final = """
insert into {jobs} (kind, key, payload, state, ready_at, created_at, finished_at)
select %s, %s || ':' || n, to_jsonb(%s::text), %s, at, least(at, clock_timestamp()),
       case when %s <> 'pending' then at end
from generate_series(1, %s) n cross join lateral (
    select clock_timestamp() + %s * interval '1 day' + n * interval '10 milliseconds' as at) a"""


class Round(NamedTuple):
    """One drain of ours and one of the floor's, with the same number of processes."""

    subject: Sample
    floor: Sample
    enqueue: Sample
    """What putting the jobs had cost."""

    @property
    def ratio(self) -> float:
        """Ours as a share of the floor's."""
        return self.subject.rate / self.floor.rate


def drain(session: Session, arena: Arena, *, processes: int = 1) -> tuple[Sample, Sample]:
    """One drain of ours: what it cost, and what the enqueue had cost. The jobs stay, succeeded."""
    app = arena.app()
    with app.sync:
        app.sync.pause(NOOP)
        enqueue = _enqueue(session, arena)
        with workers(session, arena, "drains", processes) as started:
            meter = Meter(arena, [each.pid for each in started])
            meter.start()
            began = arena.now()
            app.sync.resume(NOOP)
            session.until_true(lambda: _is_drained(arena, started), every=_LOOK_EVERY)
            meter.stop()
    sample = meter.sample(session.sizes.drained, seconds=arena.last_finish() - began)
    return sample, enqueue


def _is_drained(arena: Arena, started: Sequence[Child]) -> bool:
    for each in started:
        each.check()
    return arena.is_drained()


def _enqueue(session: Session, arena: Arena) -> Sample:
    count = session.sizes.drained
    meter = Meter(arena)
    meter.start()
    with arena.app().sync as producer:
        for first in range(0, count, _CHUNK):
            numbers = range(first, min(first + _CHUNK, count))
            producer.enqueue_many(NOOP, [NewJob(PAYLOAD, f"drain:{number}") for number in numbers])
        meter.stop()
    return meter.sample(count)


def drain_floor(session: Session, *, processes: int = 1) -> Sample:
    """One drain of the hand-written table by as many hand-written loops."""
    arena, count = session.arena, session.sizes.drained
    arena.execute(_TAKE_OUT_RAW)
    arena.execute(_FILL, NOOP, PAYLOAD, count)
    with floor_loops(arena, "drain", processes) as started:
        meter = Meter(arena, [each.pid for each in started])
        meter.start()
        began = time.monotonic()
        for each in started:
            each.send("go")
        ended = max(json.loads(each.read(session.left()))["ended"] for each in started)
        meter.stop()
    return meter.sample(count, seconds=ended - began)


class Drains:
    """The interleaved rounds with one and two processes, measured once for P1, P2 and P3 together."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rounds: dict[int, list[Round]] = {1: []}

    def with_two_workers(self) -> None:
        """Each round has drains by two processes as well."""
        self._rounds[2] = []

    def _measure(self) -> None:
        """All rounds, if there are none yet: for every number of processes, first ours and then the floor's."""
        sizes = self._session.sizes
        for turn in range(len(self._rounds[1]), sizes.rounds):
            for number, rounds in self._rounds.items():
                self._session.say(f"drain by {number}, round {turn + 1} of {sizes.rounds}")
                rounds.append(self._round(number))

    def _round(self, processes: int) -> Round:
        arena = self._session.arena
        subject, enqueue = drain(self._session, arena, processes=processes)
        arena.empty()
        floor = drain_floor(self._session, processes=processes)
        return Round(subject, floor, enqueue)

    def p1(self) -> Result:
        """One worker process against one hand-written loop."""
        self._measure()
        rounds = self._rounds[1]
        ratios = [each.ratio for each in rounds]
        checks = (
            at_least("share of the raw-SQL floor", median(ratios), 0.7, floor=1.0),
            noted("rate", _rate(rounds), unit="jobs/s", floor=_floor_rate(rounds)),
            noted("spread of the share", spread(ratios)),
        )
        return Result("P1", "Drain, one worker", self._variant(), checks, _runs(rounds), self._conditions())

    def p2(self, cores: int) -> Result:
        """What a second worker adds, against what a second loop adds."""
        self._measure()
        pairs = list(zip(self._rounds[1], self._rounds[2], strict=True))
        gains = [two.subject.rate / one.subject.rate for one, two in pairs]
        of_floor = [two.floor.rate / one.floor.rate for one, two in pairs]
        shares = [ours / theirs for ours, theirs in zip(gains, of_floor, strict=True)]
        checks = [at_least("gain, as a share of the floor's gain", median(shares), 0.95, floor=1.0)]
        if cores >= _MANY_CORES:
            checks.insert(0, at_least("gain by a second worker", median(gains), 1.6, floor=median(of_floor)))
        else:
            checks.append(noted("gain by a second worker", median(gains), floor=median(of_floor)))
        checks.append(noted("rate", _rate(self._rounds[2]), unit="jobs/s", floor=_floor_rate(self._rounds[2])))
        return Result("P2", "Drain, two workers", self._variant(), tuple(checks), _runs(self._rounds[2]))

    def p3(self) -> Result:
        """What a job costs at P1's settings."""
        self._measure()
        subjects, floors = ([getattr(each, name) for each in self._rounds[1]] for name in ("subject", "floor"))
        enqueues = [each.enqueue for each in self._rounds[1]]

        def cost(what: str, name: str, target: float, unit: str) -> Check:
            return at_most(what, middle(subjects, name), target, unit=unit, floor=middle(floors, name))

        checks = (
            cost("worker CPU", "worker_cpu_us", 35, "us/job"),
            cost("Postgres CPU", "postgres_cpu_us", 50, "us/job"),
            cost("WAL, execution", "wal_bytes", 800, "bytes/job"),
            at_most("WAL, enqueue", middle(enqueues, "wal_bytes"), 450, unit="bytes/job"),
            noted("transactions", middle(subjects, "transactions"), unit="1/job", floor=middle(floors, "transactions")),
        )
        return Result("P3", "Cost of a job", self._variant(), checks, _runs(self._rounds[1]))

    def _conditions(self) -> str:
        ours = (
            f"{self._session.sizes.drained:,} keyed jobs a drain, {CONCURRENCY} at once and {PREFETCH:,} claimed ahead"
        )
        return f"{ours}; the floor has batches of {BATCH}"

    def _variant(self) -> str:
        return self._session.variant("drained")


def _rate(rounds: Sequence[Round]) -> float:
    return median([each.subject.rate for each in rounds])


def _floor_rate(rounds: Sequence[Round]) -> float:
    return median([each.floor.rate for each in rounds])


def _runs(rounds: Sequence[Round]) -> tuple[Run, ...]:
    return tuple(
        {
            **each.subject.figures("subject"),
            **each.floor.figures(f"floor_{BATCH}"),
            "enqueue_wal_bytes": each.enqueue.wal_bytes,
        }
        for each in rounds
    )


# --- P8 -------------------------------------------------------------------------------------------------------------


def p8(session: Session) -> Result:
    """Drain the same jobs with and without half a million others around them, in turn, in two schemas."""
    sizes = session.sizes
    with open_arena(session.arena.dsn, new_schema()) as full:
        _add_ballast(session, full)
        runs: list[Run] = []
        arenas = [("among_others", full), ("alone", session.arena)]
        for turn in range(sizes.pairs):
            session.say(f"drain among others, pair {turn + 1} of {sizes.pairs}")
            samples = {name: _drain_and_clear(session, arena) for name, arena in arenas[:: 1 - 2 * (turn % 2)]}
            runs.append({**samples["among_others"].figures("among_others"), **samples["alone"].figures("alone")})
    names = [f"{name}_jobs_per_second" for name, _ in arenas]
    others, alone = ([run[name] or 0.0 for run in runs] for name in names)
    ratios = [ours / theirs for ours, theirs in zip(others, alone, strict=True)]
    checks = (
        paired_at_least("share of a drain without them", ratios, 0.95, floor=1.0),
        noted("rate", median(others), unit="jobs/s", floor=median(alone)),
    )
    variant = session.variant("future", "finished", "expired", "drained", "pairs")
    ballast = f"{sizes.future:,} planned and {sizes.finished:,} finished jobs"
    note = f"as P1, among {ballast}, and {sizes.expired:,} that retention is to delete"
    return Result("P8", "Drain among future and finished rows", variant, checks, tuple(runs), note)


def _add_ballast(session: Session, arena: Arena) -> None:
    sizes = session.sizes
    session.say(f"adding {sizes.future + sizes.finished + sizes.expired} other rows")
    kinds = (("pending", sizes.future, 30), ("succeeded", sizes.finished, -2), ("failed", sizes.expired, -60))
    for state, count, days in kinds:
        session.left()
        arena.execute(_BALLAST, NOOP, state, PAYLOAD, state, state, count, days)
    arena.execute("vacuum analyze {jobs}")


def _drain_and_clear(session: Session, arena: Arena) -> Sample:
    sample, _ = drain(session, arena)
    arena.execute(_TAKE_OUT, NOOP)
    arena.execute("vacuum {jobs}")
    return sample
