"""How a runner fares: counted from what happened, derived when somebody asks."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from pgworker.events import Event, JobLost, JobSettled, RunnerTrouble

Lifecycle: TypeAlias = Literal["stopped", "running", "retrying", "paused"]


@dataclass(frozen=True, slots=True)
class RunnerStatus:
    """A runner at one moment, counted from its start. `last_error` is a safe code, cleared by the next success."""

    kind: str
    lifecycle: Lifecycle
    in_flight: int = 0
    claimed: int = 0
    succeeded: int = 0
    retried: int = 0
    failed: int = 0
    parked: int = 0
    cancelled: int = 0
    released: int = 0
    superseded: int = 0
    """Runs whose outcome was dropped because their lease was gone; no errors."""
    last_error: str | None = None
    retry_in_seconds: float | None = None
    last_success_at: datetime | None = None


_COUNTED = ("claimed", "succeeded", "retried", "failed", "parked", "cancelled", "released", "superseded")


class Tally:
    """The counters of one runner. The lifecycle is derived from them, never stored: no two writers can disagree."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._counts: Counter[str] = Counter()
        self._last_error: str | None = None
        self._last_success_at: datetime | None = None
        self._retry_at = 0.0

    def add(self, name: Literal["claimed", "released"], count: int) -> None:
        """Count what no event tells of."""
        self._counts[name] += count

    def succeed(self, count: int) -> None:
        """Count successes, of which no event tells."""
        self._counts["succeeded"] += count
        self._last_error = None
        self._last_success_at = datetime.now(UTC)

    def note(self, event: Event) -> None:
        """Count what happened."""
        match event:
            case JobSettled():
                if event.state == "succeeded":
                    self.succeed(1)
                    return
                self._counts[_counter(event)] += 1
                if event.counted:
                    self._last_error = event.code
                    self._retry_at = max(self._retry_at, time.monotonic() + (event.retry_in_seconds or 0))
            case JobLost():
                self._counts["superseded"] += event.reason != "refused"
            case RunnerTrouble():
                self._last_error = event.code

    def status(self, *, running: bool, in_flight: int, paused: bool, paused_until: float) -> RunnerStatus:
        """How the runner fares right now; `paused_until` is a monotonic time."""
        now = time.monotonic()
        retry_at = max(self._retry_at, paused_until)
        return RunnerStatus(
            self._kind,
            self._lifecycle(now, running=running, paused=paused or paused_until > now),
            in_flight=in_flight,
            last_error=self._last_error,
            retry_in_seconds=round(retry_at - now, 3) if retry_at > now else None,
            last_success_at=self._last_success_at,
            **{name: self._counts[name] for name in _COUNTED},
        )

    def _lifecycle(self, now: float, *, running: bool, paused: bool) -> Lifecycle:
        if not running:
            return "stopped"
        if paused:
            return "paused"
        return "retrying" if self._last_error is not None or self._retry_at > now else "running"


def _counter(event: JobSettled) -> str:
    if event.state != "pending":
        return event.state
    if event.counted:
        return "retried"
    return "released" if event.code is None else "parked"
