"""One round's account: which jobs it waits for, and what has become of the others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import anyio

from pgworker.demo.jobs import CHANGED
from pgworker.demo.report import percentile
from pgworker.demo.store import KIND
from pgworker.events import Event, JobSettled
from pgworker.job import Enqueued

_EXAMPLES = 5
_LOOKS = 3


@dataclass(slots=True)
class Round:
    """Counts enqueues and, as an observer of the app's events, the ends of jobs. Keys of other folders pass it by."""

    began: float = field(default_factory=time.monotonic)
    files: int | None = None
    looked_at: int = 0
    gone: int = 0
    unchanged: int = 0
    done: int = 0
    failed: int = 0
    elsewhere: int = 0
    closed: list[str] = field(default_factory=list[str])
    changed: list[str] = field(default_factory=list[str])
    outstanding: dict[str, str] = field(default_factory=dict[str, str])
    """The path behind each key whose job has not ended."""
    moved: anyio.Event = field(default_factory=anyio.Event)
    """Set, and replaced, whenever a job has been settled."""
    _fresh: set[str] = field(default_factory=set[str])
    _again: set[str] = field(default_factory=set[str])
    _looks: Counter[str] = field(default_factory=Counter[str])
    _ended_unseen: set[str] = field(default_factory=set[str])
    _pickups: list[float] = field(default_factory=list[float])
    _first_enqueue: float | None = None
    _last_end: float | None = None

    # --- enqueue ----------------------------------------------------------------------------------------------------

    def expect(self, paths: Iterable[str], enqueued: Iterable[Enqueued]) -> None:
        """Note what an enqueue did; before its commit, so that no end can come earlier."""
        self._first_enqueue = self._first_enqueue or time.monotonic()
        for path, each in zip(paths, enqueued, strict=True):
            if each.status != "unchanged":
                self._fresh.add(each.key)
                if len(self.changed) < _EXAMPLES:
                    self.changed.append(path)
            if each.state == "pending":
                self.outstanding[each.key] = path
            elif each.status == "unchanged":
                self.unchanged += 1

    def forgotten(self, paths: Sequence[str]) -> None:
        """Note documents that were removed."""
        self.gone += len(paths)
        self.changed += paths[: _EXAMPLES - len(self.changed)]

    def look_again(self) -> list[str]:
        """The paths whose content was not what had been enqueued, each at most three times."""
        paths = [self.outstanding[key] for key in self._again if key in self.outstanding]
        self._again.clear()
        self._looks.update(paths)
        return sorted(path for path in paths if self._looks[path] <= _LOOKS)

    # --- ends -------------------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Note the end of a job; see Events.subscribe."""
        if not isinstance(event, JobSettled) or event.kind != KIND or event.key not in self.outstanding:
            return
        if event.key in self._fresh:
            self._fresh.discard(event.key)
            self._pickups.append(event.waited_seconds)
        if event.state == "pending":
            if event.code == CHANGED:
                self._again.add(event.key)
        else:
            self.done += event.state == "succeeded"
            self.failed += event.state != "succeeded"
            self._last_end = time.monotonic()
            del self.outstanding[event.key]
        self._move()

    def ended_elsewhere(self, keys: Iterable[str]) -> None:
        """Note jobs that the table shows as ended; those of which no event has told by the next call were not ours."""
        ended = self.outstanding.keys() & set(keys)
        for key in ended & self._ended_unseen:
            del self.outstanding[key]
            self.elsewhere += 1
        self._ended_unseen = ended
        self._move()

    def _move(self) -> None:
        self.moved.set()
        self.moved = anyio.Event()

    # --- figures ----------------------------------------------------------------------------------------------------

    @property
    def settled(self) -> int:
        """Files that have come to their end in this round."""
        return self.unchanged + self.done + self.failed + self.elsewhere

    @property
    def jobs_per_second(self) -> float | None:
        """Jobs ended here, over the time from the first enqueue to the last end."""
        if self._first_enqueue is None or self._last_end is None:
            return None
        return (self.done + self.failed) / max(self._last_end - self._first_enqueue, 1e-6)

    @property
    def picked_up(self) -> int:
        """Jobs enqueued in this round that have been claimed here."""
        return len(self._pickups)

    def pickup(self, share: float) -> float | None:
        """The wait for a worker that this share of the jobs enqueued in this round did not exceed."""
        return percentile(self._pickups, share)
