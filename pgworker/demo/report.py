"""What a run says about itself while it goes on and at its end: plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Failures:
    """Files whose jobs stand as failed with one code, and the first few of them."""

    code: str
    files: int
    paths: list[str]


class Progress(NamedTuple):
    """How far a round is. `files` is None until the folder has been listed."""

    files: int | None
    settled: int
    failed: int


@dataclass(frozen=True, slots=True)
class Report:
    """One round of bringing the index up to date: the first over the whole folder, later ones over what changed."""

    folder: str
    files: int
    """Files in the folder."""
    looked_at: int
    """Files that the round looked into: in the first round all, later those that seemed changed."""
    changed: list[str]
    """The first few of the files that were gone, new or changed, as the database saw it."""
    gone: int
    """Documents that were removed with their jobs, since their files are no longer there."""
    closed: list[str]
    """Folders that could not be listed; what is known of them stays."""
    done: int
    """Jobs that the worker of this process completed."""
    unchanged: int
    """Files whose job had ended before, at the same revision: no handler ran."""
    elsewhere: int
    """Jobs that another process ended meanwhile."""
    failed: int
    """Jobs of this round that ended as failed; `failures` counts those of earlier rounds, too."""
    failures: list[Failures]
    waiting: int
    """Jobs that have not ended, as the round was interrupted. The next one goes on with them."""
    seconds: float
    """The whole round."""
    jobs_per_second: float | None
    """Jobs ended here, over the time from the first enqueue to the last end. None without any."""
    picked_up: int
    """Jobs enqueued in this round that a worker of this process claimed; the two times below are of these."""
    pickup_p50: float | None
    """Seconds from a job's enqueue to its first claim, by the database's clock; half waited no longer."""
    pickup_p99: float | None
    interrupted: bool


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of the values do not exceed; None for no values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
