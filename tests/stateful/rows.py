"""The columns of a job as Python values, and what must hold for every row, whatever led to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID


class Differs(AssertionError):
    """The table, or an answer, is not what the model says."""


class Near(NamedTuple):
    """So many seconds after the statement's own reading of the clock, with some microseconds to spare."""

    seconds: float = 0.0
    spare: int = 0


Instant: TypeAlias = datetime | Near | None


class Lane(NamedTuple):
    """Class and priority."""

    urgency: int
    priority: int


@dataclass
class Row:
    """One job: the columns of its row, but for the kind. `urgency` is the column `class`."""

    id: int | None  # None until it has been seen
    key: str
    revision: str
    payload: int | None  # None once it has been pruned
    version: int
    urgency: int
    priority: int
    max_attempts: int | None
    ready_at: Instant
    created_at: Instant
    tenant: str | None = None  # the model's kind is not fair
    generation: int = 1
    state: str = "pending"
    attempts: int = 0
    evictions: int = 0
    lease_epoch: int = 0
    token: UUID | None = None
    lease_expires_at: Instant = None
    not_before: Instant = None
    lease_seconds: float | None = None
    runner: str | None = None
    cancel_requested_at: Instant = None
    finished_at: Instant = None
    last_code: str | None = None
    last_error: str | None = None
    has_result: bool = False  # it ended with one, be it still there or not
    event: bool = False


FIELDS = tuple(each.name for each in fields(Row))
COLUMNS = tuple("class" if name == "urgency" else name for name in FIELDS)


@dataclass
class Result:
    """A stored result."""

    revision: str
    value: str
    finished_at: Instant


@dataclass(frozen=True)
class Wanted:
    """One job as an enqueue asks for it."""

    key: str
    revision: str
    payload: int
    urgency: int = 0
    priority: int = 0
    max_attempts: int | None = None
    version: int = 1
    delay: float = 0.0
    ready_at: datetime | None = None
    event: bool = False


class Fact(NamedTuple):
    """One line of the journal; the id of a new row is not known yet."""

    job_id: int | None
    generation: int
    attempts: int
    key: str
    revision: str
    what: str
    code: str | None
    runner: str | None


class End(NamedTuple):
    """What a settlement must write: the state, the code, whether an attempt counts, the wait, the error's class."""

    state: str
    code: str | None
    counts: bool = False
    delay: float | None = None
    error: str | None = None


class Cleared(NamedTuple):
    """What a page of ended jobs held, how many were deleted and how many lost their payload; the last one's id."""

    read: int
    deleted: int
    emptied: int
    last: int | None


class Seen(NamedTuple):
    """The database as it was read after a step."""

    clock: datetime
    rows: dict[str, tuple[Any, ...]]
    """Columns in the order of COLUMNS, by key."""
    results: dict[str, tuple[Any, ...]]
    """Revision, value and finished_at, by key."""
    facts: list[tuple[Fact, datetime]]


def at(instant: Instant) -> datetime:
    """An instant that has been seen."""
    assert isinstance(instant, datetime)
    return instant


def broken_rules(rows: Iterable[Row], results: dict[str, Result]) -> Iterator[str]:
    """What must hold for every row of the table, whatever led to it."""
    holders: dict[UUID, str | None] = {}
    for row in rows:
        if row.state == "pending" and row.token is None and row.cancel_requested_at is not None:
            yield f"{row.key}: pending with a cancel request, but without a lease: nobody will ever see it"
        if (row.token is None) != (row.lease_expires_at is None) or (row.token is None) != (row.runner is None):
            yield f"{row.key}: half a lease"
        if row.state != "pending" and (row.token is not None or row.finished_at is None or row.cancel_requested_at):
            yield f"{row.key}: ended, but with a lease, a cancel request, or no instant of its end"
        if row.state == "pending" and row.finished_at is not None:
            yield f"{row.key}: pending, but with an instant of its end"
        if row.token is not None and holders.setdefault(row.token, row.runner) != row.runner:
            yield f"{row.key}: a token of two runners (all rows of one claim have it, and no others)"
        yield from _broken_rules_of_payload_and_result(row, results.get(row.key))


def _broken_rules_of_payload_and_result(row: Row, result: Result | None) -> Iterator[str]:
    if row.payload is None and (row.event or row.state not in {"succeeded", "cancelled"}):
        yield f"{row.key}: {row.state}, event {row.event}, and the payload has been pruned"
    if result is not None and (not row.has_result or row.payload is None):
        yield f"{row.key}: has_result is {row.has_result}, the payload {row.payload}, but a result is there"
    if row.state == "succeeded" and row.has_result and row.payload is not None:
        if result is None:
            yield f"{row.key}: succeeded with a result that is not there"
        elif result.revision != row.revision or not result.value.startswith(f"{row.id} {row.generation} "):
            yield f"{row.key}: succeeded with the result of another generation: {result.value}"
