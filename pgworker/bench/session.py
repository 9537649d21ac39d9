"""One run of the benchmarks: where, how much, until when, and whom it tells."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Final

from pgworker.bench.arena import Arena
from pgworker.errors import PgworkerError


class OutOfTime(PgworkerError):
    """The run has used up the time that it was given."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work the scenarios do. `name` goes into the results, so that small figures are not taken for large."""

    name: str
    drained: int = 20_000
    rounds: int = 3
    pairs: int = 7
    bulk: int = 20_000
    singles: int = 8_000
    alone: int = 500
    pickups: int = 200
    future: int = 50_000
    finished: int = 20_000
    expired: int = 5_000
    sustained_rate: int = 4_000
    sustained_seconds: float = 60
    window_seconds: float = 10
    idle_seconds: float = 20
    in_flight: int = 10_000
    tenanted: int = 200_000
    fair_claims: int = 100


STANDARD: Final = Sizes("standard")
FULL: Final = Sizes(
    "full",
    drained=60_000,
    future=500_000,
    finished=200_000,
    expired=50_000,
    sustained_seconds=600,
    window_seconds=60,
    pickups=600,
    tenanted=1_000_000,
    fair_claims=400,
)
QUICK: Final = Sizes(
    "quick",
    drained=2_000,
    rounds=1,
    pairs=1,
    bulk=2_000,
    singles=500,
    alone=50,
    pickups=20,
    future=5_000,
    finished=2_000,
    expired=500,
    sustained_rate=500,
    sustained_seconds=4,
    window_seconds=2,
    idle_seconds=0.5,
    in_flight=1_000,
    tenanted=5_000,
    fair_claims=10,
)


def with_jobs(sizes: Sizes, jobs: int) -> Sizes:
    """The same with this many jobs in each drain and bulk enqueue; the ballast and the singles stay as they are."""
    return replace(sizes, name=f"{sizes.name}, {jobs} jobs", drained=jobs, bulk=jobs)


@dataclass(frozen=True, slots=True)
class Session:
    """What every scenario gets: the arena, the sizes, the end of its time, and whom to tell how far it is."""

    arena: Arena
    sizes: Sizes
    until: float
    """Monotonic time."""
    say: Callable[[str], object]

    def left(self) -> float:
        """The seconds that are left. Raises OutOfTime when there are none."""
        seconds = self.until - time.monotonic()
        if seconds <= 0:
            raise OutOfTime("the time that this run was given is used up")
        return seconds

    def until_true(self, condition: Callable[[], bool], *, every: float) -> None:
        """Ask again and again until it is so. Raises OutOfTime."""
        while not condition():
            time.sleep(min(every, self.left()))

    def variant(self, *fields: str) -> str:
        """Whether a scenario with these sizes is the full one, or how it is smaller."""
        smaller = [name for name in fields if getattr(self.sizes, name) != getattr(FULL, name)]
        if not smaller:
            return "full"
        return "reduced: " + ", ".join(f"{name.replace('_', ' ')} {getattr(self.sizes, name):g}" for name in smaller)


def as_ctrl_c(_number: int, _frame: FrameType | None) -> None:
    """A handler for SIGTERM that cleans up as Ctrl-C does: also where that one is ignored, as in a shell's background.

    An event loop has a handler of its own for SIGINT meanwhile, which cancels its main task.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)
