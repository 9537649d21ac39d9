"""What happened, told after the fact: observers get one frozen value each and cannot break the caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pgworker.errors import class_name
from pgworker.job import State

_log = logging.getLogger("pgworker")


@dataclass(frozen=True, slots=True)
class JobSettled:
    """The table now says what became of a claimed job. `counted` tells a judged failure from a park or a release."""

    kind: str
    key: str
    attempt: int
    state: State
    code: str | None
    counted: bool
    waited_seconds: float
    """From ready to claimed, by the database's clock."""
    run_seconds: float
    retry_in_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class JobLost:
    """A run's outcome was dropped: its lease was lost (superseded, taken over, deleted) or had expired.

    "refused": the database takes the outcome for good by no means; the job comes back when its lease ends.
    """

    kind: str
    key: str
    reason: Literal["lost", "expired", "guard", "refused"]


@dataclass(frozen=True, slots=True)
class RunnerTrouble:
    """A statement of a runner failed and will be tried again; `error` is the exception's class name."""

    kind: str
    code: str
    error: str


Event: TypeAlias = JobSettled | JobLost | RunnerTrouble
Observer: TypeAlias = Callable[[Event], None]


class Events:
    """The observers of an app. They are called in the loop's thread and must return at once."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def subscribe(self, observer: Observer) -> None:
        """Call this observer with every event from now on."""
        self._observers.append(observer)

    @property
    def hear_of_successes(self) -> bool:
        """Whether somebody wants to be told of each job that has succeeded: an observer, or the log."""
        return bool(self._observers) or _log.isEnabledFor(logging.DEBUG)

    def tell(self, event: Event) -> None:
        """Log the event and hand it to every observer; one that raises is logged and does not stop the others."""
        _log_event(event)
        for observer in self._observers:
            try:
                observer(event)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - whatever a guest raises stays with it
                _log.warning("observer failed event=%s error=%s", type(event).__name__, class_name(error))


def _log_event(event: Event) -> None:
    """One line an event: kind, key and code, never a payload, a result or an exception's text."""
    match event:
        case JobSettled():
            level = logging.DEBUG if event.code is None else logging.INFO
            _log.log(
                level,
                "job settled kind=%s key=%s attempt=%d state=%s code=%s run=%.3fs",
                event.kind, event.key, event.attempt, event.state, event.code, event.run_seconds,
            )  # fmt: skip
        case JobLost():
            _log.warning("lost lease kind=%s key=%s reason=%s", event.kind, event.key, event.reason)
        case RunnerTrouble():
            _log.warning("runner trouble kind=%s code=%s error=%s", event.kind, event.code, event.error)
