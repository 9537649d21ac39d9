"""Who waits for the end of which job, when to read it, and what to tell them. Knows no thread and no connection."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TypeAlias, assert_never

import anyio
import psycopg

from pgworker.db import is_conflict, is_outage
from pgworker.errors import AboutJob, JobCancelled, JobFailed, PgworkerError, ResultGone, Superseded, UnknownJob
from pgworker.kind import Kind
from pgworker.listener import Wake
from pgworker.operations import Seen, read_results
from pgworker.payload import codec_for
from pgworker.statements import Statement
from pgworker.tablemap import TableMap

_log = logging.getLogger("pgworker")

POLL_SECONDS = 1.0
MOST_AT_ONCE = 1_000
"""Jobs that one statement reads."""
IDLE_SECONDS = 60.0  # then the thread ends, and its connections with it; the next wait starts another

_PLAIN = codec_for(object)
_Name: TypeAlias = tuple[str, str]
_Read: TypeAlias = Callable[[Statement[list[Seen]]], Awaitable[list[Seen]]]


@dataclass(slots=True, eq=False)
class Wait:
    """One caller's wait for one job; `first` is how the job was when it was first looked at."""

    kind: str
    key: str
    revision: str | None
    first: Seen | None = None
    future: Future[Seen] = field(default_factory=Future[Seen])

    def look(self, seen: Seen | None) -> bool:
        """Take in how the job is now (None: there is none); True when the wait is over, and its caller told."""
        end = verdict(self, seen)
        if end is None:
            self.first = self.first or seen
        else:
            self.tell(end)
        return end is not None

    def tell(self, end: Seen | PgworkerError) -> None:
        """End the wait, unless its caller has given up."""
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(end, PgworkerError):
            self.future.set_exception(end)
        else:
            self.future.set_result(end)


def verdict(wait: Wait, seen: Seen | None) -> Seen | AboutJob | None:
    """What ends this wait: the job that has succeeded, or an error; None while it has to go on."""
    if seen is None:
        return UnknownJob(wait.kind, wait.key)
    if not _is_awaited(wait, seen):
        return Superseded(wait.kind, wait.key, seen.revision or None)
    match seen.state:
        case "pending":
            return None
        case "succeeded":
            return seen
        case "failed":
            return JobFailed(wait.kind, wait.key, seen.code, seen.error_class)
        case "cancelled":
            return JobCancelled(wait.kind, wait.key, seen.code)
        case _:
            assert_never(seen.state)


def _is_awaited(wait: Wait, seen: Seen) -> bool:
    """Whether the job is still the work that is waited for: by its revision, or, without one, by its generation."""
    revision = wait.revision or (wait.first.revision if wait.first else "")
    if revision:
        return seen.revision == revision
    return wait.first is None or (seen.id, seen.generation) == (wait.first.id, wait.first.generation)


def value_of(kind: Kind, seen: Seen) -> object:
    """The value of a job that has succeeded, as the kind's type if that is known. Raises ResultGone, PayloadError."""
    if not seen.has_result:
        return None
    ttl = kind.policy.result_ttl
    if seen.value is None or (ttl is not None and (seen.age_seconds or 0.0) > ttl.total_seconds()):
        raise ResultGone(seen.kind, seen.key)
    return (kind.result or _PLAIN).decode(seen.value)


class Desk:
    """What a thread looks after, in its event loop: which jobs to read when, and whom to tell.

    A job is read when its wait is new, when jobs of its kind have ended, and once a poll. An outage is outwaited; any
    other error of the database ends the waits that it met.
    """

    def __init__(self, tables: TableMap, read: _Read, subscribe: Callable[[str, Callable[[], None]], None]) -> None:
        self.changed = Wake()
        self._tables = tables
        self._read = read
        self._subscribe = subscribe
        self._waits: dict[_Name, list[Wait]] = {}
        self._due: set[_Name] = set()
        self._heard: set[str] = set()
        self._subscribed: set[str] = set()
        self._poll_at = 0.0
        self._troubled = False

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._waits

    def add(self, waits: Iterable[Wait]) -> None:
        """Look after these, too."""
        for wait in waits:
            name = wait.kind, wait.key
            self._waits.setdefault(name, []).append(wait)
            self._due.add(name)
            if wait.kind not in self._subscribed:
                self._subscribed.add(wait.kind)
                self._subscribe(wait.kind, partial(self._hear, wait.kind))

    def clear(self) -> list[Wait]:
        """Look after nothing any more; returns whose waits these were."""
        left = [wait for waits in self._waits.values() for wait in waits]
        self._waits.clear()
        return left

    def rest_seconds(self) -> float:
        """How long there is nothing to do, if nothing happens."""
        return max(0.0, self._poll_at - monotonic()) if self._waits else IDLE_SECONDS

    async def look(self) -> None:
        """Read what is due, and tell those whose wait is over."""
        self._drop_cancelled()
        due = self._take_due()
        for start in range(0, len(due), MOST_AT_ONCE):
            names = due[start : start + MOST_AT_ONCE]
            try:
                rows = await self._read(read_results(self._tables, names))
            except (psycopg.Error, TimeoutError) as error:
                if is_outage(error) or is_conflict(error):
                    await self._outwait(error)
                    break
                self._fail(names, error)
            else:
                self._troubled = False
                self._tell(names, {(seen.kind, seen.key): seen for seen in rows})

    def _hear(self, kind: str) -> None:
        self._heard.add(kind)
        self.changed.set()

    def _drop_cancelled(self) -> None:
        for name, waits in list(self._waits.items()):
            self._keep(name, [wait for wait in waits if not wait.future.done()])

    def _keep(self, name: _Name, waits: list[Wait]) -> None:
        if waits:
            self._waits[name] = waits
        else:
            self._waits.pop(name, None)

    def _take_due(self) -> list[_Name]:
        now = monotonic()
        every = now >= self._poll_at
        if every:
            self._poll_at = now + POLL_SECONDS
        due = [name for name in self._waits if every or name in self._due or name[0] in self._heard]
        self._due.clear()
        self._heard.clear()
        return due

    def _tell(self, names: Sequence[_Name], seen: Mapping[_Name, Seen]) -> None:
        for name in names:
            self._keep(name, [wait for wait in self._waits[name] if not wait.look(seen.get(name))])

    async def _outwait(self, error: psycopg.Error | TimeoutError) -> None:
        """Say so once, leave the server alone for a while, and have all be read then."""
        if not self._troubled:
            self._troubled = True
            # The class only: the text of a database error may quote the connection string or values.
            _log.warning("results cannot be read, trying again error=%s", type(error).__name__)
        await anyio.sleep(POLL_SECONDS)
        self._poll_at = 0.0

    def _fail(self, names: Sequence[_Name], error: psycopg.Error | TimeoutError) -> None:
        for name in names:
            for wait in self._waits.pop(name):
                problem = PgworkerError(f"results cannot be read: {type(error).__name__}")
                problem.__cause__ = error
                wait.tell(problem)
