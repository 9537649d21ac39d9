"""The little statistics that the benchmarks need; pure functions over plain numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

_RESAMPLES: Final = 2000
_SEED: Final = 4  # the same figures give the same interval each time


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle. Raises ValueError for none at all."""
    return percentile(values, 0.5)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies, interpolated between neighbours. Raises ValueError for none at all."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Sequence[float]) -> float:
    """How far apart the extremes are, as a share of the median; zero for a single value."""
    middle = median(values)
    return (max(values) - min(values)) / abs(middle) if middle else 0.0


def bootstrap_interval(values: Sequence[float], *, level: float = 0.9) -> tuple[float, float]:
    """Between which bounds the median lies, at this level of confidence: percentiles of the resampled medians."""
    chance = random.Random(_SEED)  # noqa: S311 - draws samples, guards nothing
    medians = [median(chance.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    tail = (1 - level) / 2
    return percentile(medians, tail), percentile(medians, 1 - tail)
