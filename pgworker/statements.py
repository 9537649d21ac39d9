"""Typed values for the statements of queries/*.sql: text, parameters, how to read the rows. Sends nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast
from uuid import UUID

from pgworker.job import Claim, EnqueueStatus, State, Verdict
from pgworker.outcome import Settlement, Success
from pgworker.policy import Facts
from pgworker.tablemap import TableMap

T = TypeVar("T")
Row: TypeAlias = tuple[object, ...]
Parameters: TypeAlias = Mapping[str, object]

_COMMENT = re.compile(r"\s*--[^\n]*")
_TABLE = re.compile(r"\{(\w+)\}")

FACTS: Mapping[Facts, int] = {"none": 0, "exceptional": 1, "all": 2}
"""How much of what happens a statement writes into the journal."""

Cursor: TypeAlias = tuple[datetime, int | str]
"""Where a page ended: the last row's ready_at, and what tells it from rows with the same (its id, its key)."""

BEGINNING: Cursor = (datetime.min.replace(tzinfo=UTC), -1)
"""A cursor before every job of a lane."""

_EARLIEST = datetime(1, 1, 3, tzinfo=UTC)  # stands for all instants before it, which the driver could not read


@dataclass(frozen=True, slots=True)
class Statement(Generic[T]):
    """One statement, ready to be sent: `read` turns its rows into what is wanted, `lists` names long parameters."""

    name: str
    sql: bytes
    parameters: Parameters
    read: Callable[[Sequence[Row]], T]
    lists: Sequence[str] = ()


class Lane(NamedTuple):
    """The jobs of one kind with equal class and priority; within it they run in order of ready_at."""

    kind: str
    urgency: int
    priority: int


class Due(NamedTuple):
    """A lane with unfinished jobs; the seconds until its first free job is due (None: all are leased)."""

    lane: Lane
    due_in_seconds: float | None
    paused: bool
    """Whether its kind may not be claimed at present."""
    start: Cursor = BEGINNING
    """Just before the first free job, if that is due: nothing that lies before it can be claimed."""
    seconds: float = 0.0
    """How long the server has taken to see this, by its own clock: not how far away it is, or how busy we are."""


class Put(NamedTuple):
    """What an insert did to one key. `transaction` is its transaction's id, None when nothing was written."""

    status: EnqueueStatus
    state: State
    transaction: str | None


class Answer(NamedTuple):
    """The verdict on one claimed job, and the state it has now if the verdict is done."""

    verdict: Verdict
    state: State | None


class Renewal(NamedTuple):
    """The verdict on one lease, and whether somebody asked for the job's cancellation."""

    verdict: Verdict
    cancel_requested: bool


class Reaped(NamedTuple):
    """What one page of the reaper read and did; `cursor` is its last row, None when the page was empty.

    `leased` is how many of the rows had a lease when they were read.
    """

    read: int
    ended_or_freed: int
    freed: int
    cursor: Cursor | None
    leased: int


class Insert(NamedTuple):
    """One row to insert; `revision` is '' when none was given, exactly one of the two times may be set."""

    key: str
    revision: str
    urgency: int
    priority: int
    delay_seconds: float
    ready_at: datetime | None
    max_attempts: int | None
    payload: str
    event: bool = False
    """Whether its key was made for it: it goes as a whole when it is old."""
    tenant: str | None = None
    """Whose it is, '' when that was not said; None when nobody asks, as the kind is not fair."""


def template(name: str) -> str:
    """The text of queries/<name>.sql without comments (the server need not parse them each time)."""
    text = resources.files("pgworker.queries").joinpath(f"{name}.sql").read_text(encoding="utf-8")
    return _COMMENT.sub("", text).strip()


@cache
def render(name: str, tables: TableMap) -> bytes:
    """The text of queries/<name>.sql for these tables."""
    return _TABLE.sub(lambda match: tables.qualified(match[1]), template(name)).encode()


def statement(
    name: str, tables: TableMap, parameters: Parameters, read: Callable[[Sequence[Row]], T], lists: Sequence[str] = ()
) -> Statement[T]:
    """The statement of queries/<name>.sql for these tables."""
    return Statement(name, render(name, tables), parameters, read, lists)


def after_ready(cursor: Cursor) -> datetime | str:
    """A cursor's instant; the beginning lies before everything that ready_at can be."""
    return "-infinity" if cursor == BEGINNING else cursor[0]


def read_rows(of: Callable[..., T]) -> Callable[[Sequence[Row]], list[T]]:
    """A reader that makes one thing of each row's columns."""
    return lambda rows: [of(*row) for row in rows]


def read_claims(rows: Sequence[Row]) -> list[Claim]:
    """The reader of a claim's rows, in their order."""
    return [*map(Claim._make, rows)]


def due(kind: object, urgency: object, priority: object, *rest: object) -> Due:
    """One row of a survey; that of an app's own table does not say where the first free row is."""
    due_in, paused, seconds, *first = rest
    lane = Lane(cast("str", kind), cast("int", urgency), cast("int", priority))
    start = BEGINNING
    match first:
        case (datetime() as ready_at, int(id_)) if ready_at > _EARLIEST:
            start = (_utc(ready_at), id_ - 1)
        case _:
            pass
    return Due(lane, cast("float | None", due_in), cast("bool", paused), start, cast("float", seconds))


def after_claim(claim: Claim) -> Cursor:
    """From where on to go on behind a job."""
    return _utc(claim.ready_at), claim.id


def _utc(instant: datetime) -> datetime:
    """As cursors have it: Python compares instants of one zone by what clocks show, and some hours come twice."""
    return instant.astimezone(UTC)


def read_nothing(_rows: Sequence[Row]) -> None:
    """The reader of a statement that answers nothing."""


_FENCE = ("ids", "keys", "revisions", "tokens")


def fence_of(claims: Sequence[Claim]) -> dict[str, object]:
    """The columns by which every write of a run proves that it still owns its rows."""
    return {
        "ids": [claim.id for claim in claims],
        "keys": [claim.key for claim in claims],
        "revisions": [claim.revision for claim in claims],
        "tokens": [claim.token for claim in claims],
    }


def read_answers(rows: Sequence[Row]) -> dict[int, Answer]:
    """The reader of a finish or settle: answers by id."""
    return {cast("int", row[0]): Answer(cast("Verdict", row[1]), cast("State | None", row[2])) for row in rows}


def read_renewals(rows: Sequence[Row]) -> dict[int, Renewal]:
    """The reader of a renewal: answers by id."""
    return {cast("int", row[0]): Renewal(cast("Verdict", row[1]), cast("bool", row[2])) for row in rows}


def read_page(rows: Sequence[Row]) -> Reaped:
    """The reader of a page of the reaper, which is one row or, if it read nothing, none."""
    if not rows:
        return Reaped(0, 0, 0, None, 0)
    count, done, freed, ready_at, last, leased = rows[0]
    cursor = (_utc(cast("datetime", ready_at)), cast("int | str", last))
    return Reaped(cast("int", count), cast("int", done), cast("int", freed), cursor, cast("int", leased))


def insert_jobs(
    tables: TableMap, kind: str, jobs: Sequence[Insert], *, version: int, keep: bool, wait: bool = False, facts: int = 0
) -> Statement[dict[str, Put]]:
    """Put jobs of one kind, each key once; answers by key. A key without an answer is to be sent again.

    With `wait` a job that supersedes a running one is ready only when that lease would have ended.
    """
    options = {"kind": kind, "version": version, "keep": keep, "wait": wait, "facts": facts}
    return statement(
        "insert_jobs",
        tables,
        {
            **options,
            **_columns(jobs),
            "events": _unless([job.event for job in jobs], default=False),
            "revisions": _unless([job.revision for job in jobs], ""),
        },
        lambda rows: {row[0]: Put(*row[1:]) for row in cast("Sequence[tuple[Any, ...]]", rows)},
        lists=("keys", "revisions", "payloads"),
    )


def insert_events(tables: TableMap, kind: str, events: Sequence[Insert], *, version: int) -> Statement[dict[str, Put]]:
    """Put new jobs of one kind whose keys were made for them, without facts; answers by key: each was created.

    When the answer is lost, insert_missing_events may be sent in its place.
    """
    parameters = {"kind": kind, **_columns(events), "version": version}
    return statement("insert_events", tables, parameters, _read_created(events), lists=("keys", "payloads"))


def insert_missing_events(
    tables: TableMap, kind: str, events: Sequence[Insert], *, version: int, facts: int = 0
) -> Statement[dict[str, Put]]:
    """As insert_events, with facts; those that are there are left as they are, and answered as created, too."""
    parameters = {"kind": kind, **_columns(events), "version": version, "facts": facts}
    return statement("insert_missing_events", tables, parameters, _read_created(events), lists=("keys", "payloads"))


def _read_created(events: Sequence[Insert]) -> Callable[[Sequence[Row]], dict[str, Put]]:
    keys = [event.key for event in events]
    return lambda rows: dict.fromkeys(keys, Put("created", "pending", cast("str | None", rows[0][0])))


def _columns(jobs: Sequence[Insert]) -> dict[str, list[object]]:
    """What both of these say of each job."""
    return {
        "keys": [job.key for job in jobs],
        "classes": _unless([job.urgency for job in jobs], 0),
        "priorities": _unless([job.priority for job in jobs], 0),
        "delays": _unless([job.delay_seconds for job in jobs], 0.0),
        "ready_ats": _unless([job.ready_at for job in jobs], None),
        "max_attempts": _unless([job.max_attempts for job in jobs], None),
        "tenants": _unless([job.tenant for job in jobs], None),
        "payloads": [job.payload for job in jobs],
    }


def _unless(values: list[T], default: T) -> list[object]:
    """The values, or none if all are the default, which the statement knows: that saves the driver 0.3 us each."""
    return [] if values.count(default) == len(values) else list[object](values)


def survey_lanes(tables: TableMap, kinds: Sequence[str]) -> Statement[list[Due]]:
    """The lanes of these kinds that have unfinished jobs, in the order in which they are to be claimed."""
    return statement("survey_lanes", tables, {"kinds": list(kinds)}, read_rows(due))


def claim_jobs(
    tables: TableMap,
    lane: Lane,
    *,
    limit: int,
    token: UUID,
    runner: str,
    ttl_seconds: float,
    max_evictions: int | None,
    version: int,
    after: Cursor = BEGINNING,
    facts: int = 0,
) -> Statement[list[Claim]]:
    """Take up to `limit` ready jobs of a lane, in its order, under a token that was never used before."""
    return statement(
        "claim_jobs",
        tables,
        {
            "kind": lane.kind,
            "class": lane.urgency,
            "priority": lane.priority,
            "limit": limit,
            "token": token,
            "runner": runner,
            "ttl": ttl_seconds,
            "max_evictions": max_evictions,
            "version": version,
            "after_ready": after_ready(after),
            "after_id": after[1],
            "facts": facts,
        },
        read_claims,
    )


def finish_jobs(
    tables: TableMap, kind: str, finished: Sequence[tuple[Claim, Success]], *, facts: int = 0
) -> Statement[dict[int, Answer]]:
    """Succeed these jobs of one kind and store their values; answers by id."""
    claims = [claim for claim, _ in finished]
    parameters = fence_of(claims) | {
        "kind": kind,
        "generations": [claim.generation for claim in claims],
        "results": [success.value for _, success in finished],
        "facts": facts,
    }
    return statement("finish_jobs", tables, parameters, read_answers, lists=(*_FENCE, "generations", "results"))


def settle_jobs(
    tables: TableMap, kind: str, settled: Sequence[tuple[Claim, Settlement]], *, facts: int = 0
) -> Statement[dict[int, Answer]]:
    """Retry, park, release, fail or cancel these jobs of one kind; answers by id."""
    claims = [claim for claim, _ in settled]
    parameters = fence_of(claims) | {
        "kind": kind,
        "generations": [claim.generation for claim in claims],
        "states": [settlement.state for _, settlement in settled],
        "counts": [int(settlement.counts) for _, settlement in settled],
        "delays": [settlement.delay_seconds for _, settlement in settled],
        "codes": [settlement.code for _, settlement in settled],
        "errors": [settlement.error_class for _, settlement in settled],
        "facts": facts,
    }
    return statement("settle_jobs", tables, parameters, read_answers, lists=_FENCE)


def renew_leases(tables: TableMap, leases: Sequence[tuple[Claim, float | None]]) -> Statement[dict[int, Renewal]]:
    """Prolong these leases, of any kinds, each to its own seconds from now; answers by id.

    One without seconds is only looked at, without a lock: done while it is ours, else lost.
    """
    claims = [claim for claim, _ in leases]
    parameters = fence_of(claims) | {
        "kinds": [claim.kind for claim in claims],
        "ttls": [ttl_seconds for _, ttl_seconds in leases],
    }
    return statement("renew_leases", tables, parameters, read_renewals, lists=(*_FENCE, "kinds", "ttls"))


def reap_expired(
    tables: TableMap,
    lane: Lane,
    *,
    limit: int,
    ttl_seconds: float,
    max_evictions: int | None,
    after: Cursor,
    facts: int = 0,
) -> Statement[Reaped]:
    """Read up to `limit` due jobs of a lane after the cursor, and end or free those whose lease has expired."""
    parameters = {
        "kind": lane.kind,
        "class": lane.urgency,
        "priority": lane.priority,
        "limit": limit,
        "ttl": ttl_seconds,
        "max_evictions": max_evictions,
        "after_ready": after_ready(after),
        "after_id": after[1],
        "facts": facts,
    }
    return statement("reap_expired", tables, parameters, read_page)


def check_fence(tables: TableMap, claim: Claim) -> Statement[int | None]:
    """The job's generation if this claim still owns it; also readies the transaction for the app's own statements."""
    return statement(
        "check_fence",
        tables,
        {"kind": claim.kind, "id": claim.id, "key": claim.key, "revision": claim.revision, "token": claim.token},
        lambda rows: cast("int | None", rows[0][0]),
    )
