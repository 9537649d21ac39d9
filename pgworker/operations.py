"""Statements of whoever runs the system: steer jobs and kinds, see what waits, read results, delete what is old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple, TypeAlias, cast

from pgworker.job import State, Urgency
from pgworker.statements import Lane, Row, Statement, read_nothing, read_rows, statement
from pgworker.tablemap import TableMap

Deed: TypeAlias = Literal["done", "requested", "busy", "pruned", "passed"]
"""What became of a job that was named to a verb. done: changed. requested: its runner has been asked. busy: somebody
holds the row's lock, or has just changed it: ask again. pruned: its payload is gone. passed: in no state for it."""

Cursor: TypeAlias = tuple[str, int]
"""A place in a list: an instant, as the database wrote it, and an id."""

BEGINNING: Cursor = ("-infinity", -1)

LAG_BOUND = 10_000
"""Up to here the counts of lag are exact."""


class Found(NamedTuple):
    """A job on a page of a list; `wanted` says whether the verb is for it."""

    id: int
    at: str
    wanted: bool
    until: str | None = None
    """The instant up to which a list of ended jobs goes."""

    @property
    def cursor(self) -> Cursor:
        """The place after this job."""
        return self.at, self.id


@dataclass(frozen=True, slots=True)
class KindPause:
    """A kind whose jobs are not claimed at present; `until` is None for one that waits to be resumed."""

    kind: str
    since: datetime
    until: datetime | None
    code: str


@dataclass(frozen=True, slots=True)
class Lag:
    """The pending jobs of a kind and urgency.

    `ready` are those that wait for a worker: due, and not running; `oldest_seconds` is for how long the first of them
    has been due, None if there is none. Counts go up to 10,000; beyond that `pending_exact` or `ready_exact` is False.
    """

    kind: str
    urgency: Urgency
    pending: int
    ready: int
    oldest_seconds: float | None
    pending_exact: bool = True
    ready_exact: bool = True


class KindCount(NamedTuple):
    """Jobs of a kind in one derived state, and the age in seconds of the oldest one that is ready."""

    kind: str
    state: str
    jobs: int
    oldest_ready_seconds: float | None


class Seen(NamedTuple):
    """A job as it was read for those who wait for it: what it is, how it stands, what it has succeeded with."""

    kind: str
    key: str
    id: int
    revision: str
    generation: int
    state: State
    code: str | None
    error_class: str | None
    has_result: bool
    """Whether it has succeeded with a value."""
    value: str | None
    """That value's JSON text; None when there is none, or it is no longer kept."""
    age_seconds: float | None
    """How long the value has been kept."""


def find_job(tables: TableMap, kind: str, key: str) -> Statement[list[int]]:
    """The id of this key's job, in a list that may be empty."""
    return statement("find_job", tables, {"kind": kind, "key": key}, read_rows(int))


def list_ended(
    tables: TableMap, kind: str, state: State, *, after: Cursor, until: str | None, code: str | None, limit: int
) -> Statement[list[Found]]:
    """Read up to `limit` jobs that ended in this state after the cursor, and up to `until` (None: now).

    The end of the list is for its reader to keep: what is reopened may end again behind it.
    """
    parameters = {"kind": kind, "state": state, "until": until, "code": code, "limit": limit}
    return statement("list_ended", tables, parameters | _after(after), read_rows(Found))


def list_pending(tables: TableMap, lane: Lane, *, after: Cursor, limit: int) -> Statement[list[Found]]:
    """Read up to `limit` pending jobs of a lane after the cursor."""
    parameters = {"kind": lane.kind, "class": lane.urgency, "priority": lane.priority, "limit": limit}
    return statement("list_pending", tables, parameters | _after(after), read_rows(Found))


def reopen_jobs(
    tables: TableMap, kind: str, ids: Sequence[int], *, states: Sequence[State], what: str, code: str | None, facts: int
) -> Statement[dict[int, Deed]]:
    """Put those of these jobs that have ended so back to work; `what` names the fact. Answers by id."""
    parameters = {"kind": kind, "ids": list(ids), "states": list(states), "what": what, "code": code, "facts": facts}
    return statement("reopen_jobs", tables, parameters, _deeds)


def cancel_jobs(tables: TableMap, kind: str, ids: Sequence[int], *, facts: int) -> Statement[dict[int, Deed]]:
    """End those of these jobs that are pending, and ask those that run. Answers by id."""
    parameters = {"kind": kind, "ids": list(ids), "facts": facts}
    return statement("cancel_jobs", tables, parameters, _deeds)


def forget_job(tables: TableMap, kind: str, key: str, *, facts: int) -> Statement[Deed]:
    """Delete this key's job and result; requested if it may be running."""
    parameters = {"kind": kind, "key": key, "facts": facts}
    return statement("forget_job", tables, parameters, lambda rows: cast("Deed", rows[0][0]))


def pause_kind(
    tables: TableMap, kind: str, seconds: float | None, code: str, *, until: datetime | None = None
) -> Statement[None]:
    """Pause a kind for so many seconds, until an instant, or until it is resumed; a longer pause stays."""
    parameters = {"kind": kind, "seconds": seconds, "until": until, "code": code}
    return statement("pause_kind", tables, parameters, read_nothing)


def resume_kind(tables: TableMap, kind: str) -> Statement[bool]:
    """End a kind's pause; says whether there was one."""
    return statement("resume_kind", tables, {"kind": kind}, bool)


def list_pauses(tables: TableMap) -> Statement[list[KindPause]]:
    """The kinds that are paused."""
    return statement("list_pauses", tables, {}, read_rows(KindPause))


def count_lag(tables: TableMap, kind: str | None, *, bound: int = LAG_BOUND) -> Statement[list[Lag]]:
    """What waits, by kind (this one, or all) and urgency; counts are exact up to `bound`."""

    def lag(kind: str, urgency: int, pending: int, ready: int, oldest_seconds: float | None) -> Lag:
        return Lag(
            kind,
            "catch_up" if urgency else "fresh",
            min(pending, bound),
            min(ready, bound),
            oldest_seconds,
            pending_exact=pending <= bound,
            ready_exact=ready <= bound,
        )

    return statement("count_lag", tables, {"kind": kind, "bound": bound + 1}, read_rows(lag))


def count_jobs(tables: TableMap, *, bound: int) -> Statement[list[KindCount]]:
    """Jobs by kind and derived state; a count that reaches `bound` stands for that many or more."""
    return statement("count_jobs", tables, {"bound": bound}, read_rows(KindCount))


def read_results(tables: TableMap, wanted: Sequence[tuple[str, str]]) -> Statement[list[Seen]]:
    """Read these jobs, given as (kind, key); those that do not exist are missing from the answer."""
    parameters = {"kinds": [kind for kind, _ in wanted], "keys": [key for _, key in wanted]}
    return statement("read_results", tables, parameters, read_rows(Seen))


class Shelf(NamedTuple):
    """The ended jobs of one kind and state: how long something of them is kept, and where that was left off."""

    kind: str
    state: State
    keep_seconds: float
    after: Cursor = BEGINNING


class PrunedJobs(NamedTuple):
    """What a page of one shelf held, and what became of it; `cursor` is its last job."""

    read: int
    deleted: int
    emptied: int
    cursor: Cursor


class PrunedResults(NamedTuple):
    """What a page of one shelf held, and how many results went; `cursor` is its last job, None when it was empty."""

    read: int
    deleted: int
    cursor: Cursor | None


class PrunedFacts(NamedTuple):
    """What a page of the journal held; `last` is its last id, None when the page was empty."""

    read: int
    deleted: int
    last: int | None
    has_young: bool
    """Whether some were too young: then all that come after them are."""


def prune_jobs(tables: TableMap, shelves: Sequence[Shelf], *, limit: int) -> Statement[dict[int, PrunedJobs]]:
    """Delete the events and empty the keyed jobs that are past their time: up to `limit` of each shelf.

    Answers by the shelf's number; one without an answer has nothing that is old enough, or is another process's turn.
    """

    def read(rows: Sequence[Row]) -> dict[int, PrunedJobs]:
        return {
            cast("int", number): PrunedJobs(
                cast("int", count), cast("int", deleted), cast("int", emptied), (cast("str", at), cast("int", last_id))
            )
            for number, count, at, last_id, deleted, emptied in rows
        }

    parameters = {
        "kinds": [shelf.kind for shelf in shelves],
        "states": [shelf.state for shelf in shelves],
        "keeps": [shelf.keep_seconds for shelf in shelves],
        "afters": [shelf.after[0] for shelf in shelves],
        "after_ids": [shelf.after[1] for shelf in shelves],
        "turn": f"pgworker prune {tables.schema} jobs",
        "limit": limit,
    }
    return statement("prune_jobs", tables, parameters, read)


def expire_results(tables: TableMap, shelf: Shelf, *, limit: int) -> Statement[PrunedResults]:
    """Read up to `limit` jobs that ended longer ago than the shelf keeps, and delete their results of such an age."""

    def read(rows: Sequence[Row]) -> PrunedResults:
        if not rows:
            return PrunedResults(0, 0, None)
        count, deleted, at, last_id = rows[0]
        return PrunedResults(cast("int", count), cast("int", deleted), (cast("str", at), cast("int", last_id)))

    parameters = {"kind": shelf.kind, "state": shelf.state, "ttl": shelf.keep_seconds, "limit": limit}
    return statement("expire_results", tables, parameters | _after(shelf.after), read)


def prune_facts(tables: TableMap, *, keep_seconds: float, after: int, limit: int) -> Statement[PrunedFacts]:
    """Read up to `limit` facts after this id, and delete those that are older than that."""
    turn = f"pgworker prune {tables.schema} facts"
    parameters = {"keep": keep_seconds, "after": after, "limit": limit, "turn": turn}
    return statement("prune_facts", tables, parameters, lambda rows: read_rows(PrunedFacts)(rows)[0])


def wait_briefly(tables: TableMap, seconds: float) -> Statement[None]:
    """Let a moment pass, by the database's clock and on the caller's own way of waiting for it."""
    return statement("wait_briefly", tables, {"seconds": seconds}, read_nothing)


def current_transaction(tables: TableMap) -> Statement[str | None]:
    """The id of the transaction that this is sent in, None if it has written nothing."""
    return statement("current_transaction", tables, {}, lambda rows: cast("str | None", rows[0][0]))


def _after(cursor: Cursor) -> dict[str, object]:
    return {"after": cursor[0], "after_id": cursor[1]}


def _deeds(rows: Sequence[Row]) -> dict[int, Deed]:
    return {cast("int", row[0]): cast("Deed", row[1]) for row in rows}
