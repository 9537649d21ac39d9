"""Run the scenarios that were asked for, one after the other, within the time that was given."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final

from pgworker.bench.arena import open_arena
from pgworker.bench.drains import Drains, p8
from pgworker.bench.enqueues import p4, p5, p6
from pgworker.bench.latency import p7
from pgworker.bench.machine import cores, describe_machine, describe_settings, describe_versions
from pgworker.bench.resting import p10, p12
from pgworker.bench.results import Result
from pgworker.bench.session import OutOfTime, Session, Sizes
from pgworker.bench.sustained import p9
from pgworker.bench.tenants import p11
from pgworker.errors import ConfigError

NAMES: Final = tuple(f"P{number}" for number in range(1, 13))

UNBUILT: Final[dict[str, str]] = {}
"""Scenarios whose feature the runtime does not have yet. Once it has: a function like the others, in _scenarios."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that one run has found."""

    machine: dict[str, object]
    versions: dict[str, str]
    settings: dict[str, str]
    sizes: str
    made_at: datetime
    results: list[Result] = field(default_factory=list[Result])


def chosen(names: Sequence[str]) -> list[str]:
    """The scenarios of these names, in their order; all of them without any. Raises ConfigError for unknown ones."""
    wanted = {name.upper() for name in names}
    if unknown := sorted(wanted - set(NAMES)):
        raise ConfigError(f"no scenario {', '.join(unknown)}; there are {NAMES[0]} to {NAMES[-1]}")
    return [name for name in NAMES if name in wanted or not wanted]


def run_bench(
    dsn: str,
    *,
    schema: str,
    names: Sequence[str] = NAMES,
    sizes: Sizes,
    limit_seconds: float,
    say: Callable[[str], object],
) -> Report:
    """Make the schema, measure, drop the schema: also when this is interrupted. Raises SchemaError, psycopg.Error.

    When the time is up, what is not measured yet is left out, and its result says so.
    """
    with open_arena(dsn, schema) as arena:
        session = Session(arena, sizes, time.monotonic() + limit_seconds, say)
        settings = describe_settings(arena)
        report = Report(describe_machine(), describe_versions(arena), settings, sizes.name, datetime.now(UTC))
        scenarios = _scenarios(session, names)
        for name in names:
            report.results.append(_measure(session, name, scenarios.get(name)))
    return report


def _scenarios(session: Session, names: Sequence[str]) -> dict[str, Callable[[], Result]]:
    drains = Drains(session)
    if "P2" in names:  # so that all rounds of P1, P2 and P3 are interleaved
        drains.with_two_workers()
    each = (p4, p5, p6, p7, p8, p9, p10, p11, p12)
    of_session = {scenario.__name__.upper(): partial(scenario, session) for scenario in each}
    return {"P1": drains.p1, "P2": partial(drains.p2, cores()), "P3": drains.p3, **of_session}


def _measure(session: Session, name: str, scenario: Callable[[], Result] | None) -> Result:
    if scenario is None:
        return Result(name, UNBUILT[name], "", missing="not built")
    try:
        session.left()
        return scenario()
    except OutOfTime:
        session.arena.empty()
        return Result(name, name, "", missing="the time was up")
