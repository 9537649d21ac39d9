"""What comes of a benchmark: samples, checks against a target, and one result for each scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from pgworker.bench.stats import bootstrap_interval, median

Run: TypeAlias = dict[str, float | None]
"""The figures of one measured round by their names, as they go into the JSON."""

Bound: TypeAlias = Literal["at least", "at most"]

_PAIRED_MEDIAN: Final = 0.92
"""Ratios close to one: so much the median must be, and the interval must reach the target."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One piece of measured work, and its costs for each job. None: this cannot be seen from here."""

    jobs: int
    seconds: float
    worker_cpu_us: float | None = None
    postgres_cpu_us: float | None = None
    wal_bytes: float | None = None
    transactions: float | None = None

    @property
    def rate(self) -> float:
        """Jobs a second."""
        return self.jobs / self.seconds

    def figures(self, name: str) -> Run:
        """Everything as named figures, under this name."""
        found: Run = {"jobs_per_second": round(self.rate, 1)}
        for cost in ("worker_cpu_us", "postgres_cpu_us", "wal_bytes", "transactions"):
            value: float | None = getattr(self, cost)
            found[cost] = None if value is None else round(value, 4)
        return {f"{name}_{key}": value for key, value in found.items()}


@dataclass(frozen=True, slots=True)
class Check:
    """One figure beside its target and its floor. `met` is None where there is no target, or no figure."""

    what: str
    value: float | None
    unit: str = ""
    bound: Bound | None = None
    target: float | None = None
    floor: float | None = None
    met: bool | None = None
    interval: tuple[float, float] | None = None


def at_least(what: str, value: float, target: float, *, unit: str = "", floor: float | None = None) -> Check:
    """A figure that must reach its target."""
    return Check(what, value, unit, "at least", target, floor, value >= target)


def at_most(what: str, value: float | None, target: float, *, unit: str = "", floor: float | None = None) -> Check:
    """A figure that must stay within its target; one that could not be measured is neither met nor missed."""
    return Check(what, value, unit, "at most", target, floor, None if value is None else value <= target)


def noted(what: str, value: float | None, *, unit: str = "", floor: float | None = None) -> Check:
    """A figure without a target of its own."""
    return Check(what, value, unit, floor=floor)


def paired_at_least(what: str, ratios: Sequence[float], target: float, *, floor: float | None = None) -> Check:
    """A ratio close to one over interleaved pairs, of which noise alone makes some too small.

    Met when the median is 0.92 at least and the upper end of its 90 % bootstrap interval reaches the target.
    """
    interval = bootstrap_interval(ratios)
    value = median(ratios)
    met = value >= _PAIRED_MEDIAN and interval[1] >= target
    return Check(what, value, "", "at least", target, floor, met, interval)


@dataclass(frozen=True, slots=True)
class Result:
    """One scenario's outcome. The first check is the headline; all that have a target must be met."""

    name: str
    title: str
    variant: str
    """How far it was taken: `full`, or in which way it was smaller."""
    checks: tuple[Check, ...] = ()
    runs: tuple[Run, ...] = ()
    note: str = ""
    missing: str = field(default="")
    """Why there are no figures: not built, out of time."""

    @property
    def met(self) -> bool | None:
        """Whether every target is met; None when none of them could be looked at."""
        verdicts = [check.met for check in self.checks if check.met is not None]
        return all(verdicts) if verdicts else None


def middle(samples: Sequence[Sample], cost: str) -> float | None:
    """The median of one cost over the samples; None when it was seen in none."""
    values: list[float] = [value for sample in samples if (value := getattr(sample, cost)) is not None]
    return median(values) if values else None
