"""The vocabulary: what a job is, the states it can be in, and which moves between them are legal.

job         one piece of work: a row of the jobs table, identified by (kind, key)
kind        a name for jobs of one sort, with one handler
key         names the thing worked on; an event has a key of its own, made for it
revision    says which version of that thing; compared for equality only
generation  counts the replacements of a row: 1 as inserted, one more with each new revision or payload
claim       taking ready jobs: each gets the claim's token and a lease
lease       the right to write a job's outcome; held until it expires or is given up
token       a random value that tells this claim from every other
runner      what claims and runs the jobs of one kind; a worker is a process with one or more runners
attempt     a run that was judged a failure; only these count against max_attempts
eviction    a lease that ran out: its worker died, froze or was cut off
settle      to write what became of a claimed job
superseded  replaced by a new revision while it ran: its outcome is dropped
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

P = TypeVar("P")

State: TypeAlias = Literal["pending", "succeeded", "failed", "cancelled"]
"""Stored states. pending: waits or runs (scheduled, ready, running, expired are derived from its times and lease) until
a settle or an operator ends it. succeeded, failed, cancelled: ended; only a new enqueue or an operator reopens."""

Urgency: TypeAlias = Literal["fresh", "catch_up"]
"""Priority class: fresh is what users wait for, catch_up is backfill."""

IfPending: TypeAlias = Literal["replace", "keep"]
"""What an enqueue does to work of the same key that has not ended: replace it, or leave it alone."""

EnqueueStatus: TypeAlias = Literal["created", "replaced", "superseded", "unchanged", "kept", "requeued"]
"""created: a new row. replaced: pending work has the new payload. superseded: so it has, and a running attempt lost
its lease. unchanged: same revision, nothing was written. kept: if_pending="keep" found pending work. requeued: it had
ended."""

Verdict: TypeAlias = Literal["done", "expired", "busy", "lost"]
"""Answer of a fenced statement for one row. done: written. expired: the lease had run out. busy: somebody holds the
row's lock, ask again. lost: superseded, taken over, ended or deleted."""

MOVES: dict[State, frozenset[State]] = {
    # by a settle: any; by a reaper: failed, cancelled, or again pending; by an enqueue: pending
    "pending": frozenset({"pending", "succeeded", "failed", "cancelled"}),
    # by an enqueue of new work only
    "succeeded": frozenset({"pending"}),
    "failed": frozenset({"pending"}),
    "cancelled": frozenset({"pending"}),
}
"""The state machine: what each stored state may become. Nothing else moves a state (tests check it with a trigger)."""

URGENCIES: dict[Urgency, int] = {"fresh": 0, "catch_up": 1}


@dataclass(frozen=True, slots=True)
class NewJob:
    """One job to enqueue: the payload and, for latest-value work, the key and revision of what it is about.

    `delay` (a number is seconds) counts from the database's clock at the insert; `ready_at` is an aware instant; at
    most one is given.
    A smaller `priority` runs first. `tenant` says whose job it is: a kind that is fair gives each tenant its share.
    """

    payload: object = None
    key: str | None = None
    revision: str | None = None
    delay: timedelta | float | None = None
    ready_at: datetime | None = None
    priority: int = 0
    urgency: Urgency = "fresh"
    max_attempts: int | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What an enqueue did to one job, and the state that the row has now."""

    kind: str
    key: str
    revision: str | None
    status: EnqueueStatus
    state: State

    @property
    def created(self) -> bool:
        """Whether the row is new."""
        return self.status == "created"


class Claim(NamedTuple):
    """One claimed row: the fence (id, key, revision, token), and what the run needs to know."""

    kind: str
    id: int
    key: str
    revision: str
    generation: int
    token: UUID
    attempts: int
    max_attempts: int | None
    evictions: int
    lease_epoch: int
    priority: int
    urgency: int
    ready_at: datetime
    waited_seconds: float
    payload: str | None


Cause: TypeAlias = Literal["lost", "cancel", "timeout", "release"]
"""Why a handler should stop: its lease is gone, somebody cancelled the job, its deadline passed, the worker stops."""


_making_event = threading.Lock()


class Signal:
    """Tells a running handler, from any thread, that it should stop, and why."""

    __slots__ = ("_event", "cause")

    def __init__(self) -> None:
        self._event: threading.Event | None = None  # made for those who wait: most jobs end before anybody does
        self.cause: Cause | None = None

    def set(self, cause: Cause) -> None:
        """Raise the signal; the first cause stays."""
        if self.cause is None:
            self.cause = cause
        if self._event is not None:  # looked at after the cause is there, as wait makes it before it looks at the cause
            self._event.set()

    def is_set(self) -> bool:
        """Whether the handler should stop."""
        return self.cause is not None

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block this thread until the signal comes or the time is up; says whether it came."""
        with _making_event:
            event = self._event = self._event or threading.Event()
        return self.is_set() or event.wait(timeout_seconds)


@dataclass(slots=True, eq=False)
class Job(Generic[P]):
    """What a handler gets: the typed payload and the identity of the work.

    A handler may run more than once for the same job (its worker may die after an effect and before the completion):
    pass `idempotency_key` to whatever must not do the same thing twice.
    """

    kind: str
    key: str
    revision: str | None
    payload: P
    attempts: int
    """Judged failures so far: 0 in the first run."""
    evictions: int
    """Runs since the last judged outcome whose worker was lost."""
    generation: int
    lease_epoch: int
    ready_at: datetime
    token: UUID = field(repr=False)
    signal: Signal = field(repr=False)

    @property
    def idempotency_key(self) -> str:
        """`kind:key:revision`: equal in every attempt at the same work, different for any other."""
        return f"{self.kind}:{self.key}:{self.revision or self.generation}"

    @property
    def lost(self) -> bool:
        """Whether the lease is gone: the job was superseded, cancelled or taken over, and nothing will be stored."""
        return self.signal.cause == "lost"

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop, for whatever reason; thread handlers look at it between steps."""
        return self.signal.is_set()
