"""What a run has come to, on its way into the table."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pgworker.job import Claim, Job
from pgworker.leases import Held
from pgworker.outcome import Decision, Failed, Rules, Success, decide


class Group(Protocol):
    """Somebody who wants to know when the last of some endings has its verdict."""

    left: int
    """How many have none yet."""

    def all_written(self) -> None:
        """The last one has it."""
        ...


@dataclass(slots=True, eq=False)
class Ending:
    """A run's end on its way into the table."""

    job: Job[object]
    held: Held
    rules: Rules
    decision: Decision
    run_seconds: float
    itself: object = None
    """The returned value as the app's own writes get it."""
    refused_at: float | None = None
    """Since when the database refuses it, for what is no fault of a value."""
    stalls: int = 0
    """How many statements it was in that got no answer in time, or met a lock."""
    written: bool = False
    """Whether it has its verdict, or has been given up."""
    group: Group | None = None

    @property
    def claim(self) -> Claim:
        """The fence."""
        return self.held.claim

    def decide_anew(self, result: Failed) -> None:
        """Another decision than the first, which cannot be written."""
        self.decision = decide(result, self.rules, chance=random.random())  # noqa: S311 - spreads retries
        self.refused_at = None


def apart(endings: Sequence[Ending]) -> list[list[Ending]]:
    """So that no two are of one row: a run and the one that supersedes it, which the answers could not tell apart."""
    if len({ending.held.claim.id for ending in endings}) == len(endings):
        return [list(endings)] if endings else []
    parts: list[dict[int, Ending]] = []
    for ending in endings:
        fitting = next((part for part in parts if ending.claim.id not in part), None)
        if fitting is None:
            parts.append(fitting := {})
        fitting[ending.claim.id] = ending
    return [list(part.values()) for part in parts]


def size_of(ending: Ending) -> int:
    """In characters, which is near enough: bytes would cost a copy of each value."""
    return len(ending.decision.value or "") if isinstance(ending.decision, Success) else 0
