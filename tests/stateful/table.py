"""The table that the model has: its rows, results and facts, what can be asked of them, time, and the comparison.

Instants that the database's clock gives are predicted as `Near` and, once they have been seen to lie where they must,
taken over from the table. All others must be equal to the microsecond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, TypeAlias

from pgworker.job import Claim
from tests.stateful.rows import FIELDS, Differs, Fact, Lane, Near, Result, Row, Seen, at

Level: TypeAlias = Literal["all", "exceptional", "none"]
ORDINARY = {"enqueued", "replaced", "requeued", "claimed", "succeeded", "released"}
"""Facts of a job that goes as planned: only the level "all" keeps them."""


@dataclass
class Table:
    """What the table must hold; `now` is the clock as last read, `started` the server's start."""

    now: datetime
    started: datetime
    level: Level
    rows: dict[str, Row] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    paused_until: datetime | None = None
    facts: list[Fact] = field(default_factory=list)
    """Those of the step under way."""

    # --- what is there ------------------------------------------------------------------------------------------------

    def live(self, row: Row) -> bool:
        """Whether somebody holds the row's lease."""
        return row.token is not None and at(row.lease_expires_at) > self.now

    def due(self, row: Row) -> bool:
        """Whether the row's time has come."""
        return row.state == "pending" and at(row.ready_at) <= self.now

    def state(self, key: str) -> str:
        """The derived state of a key's row."""
        row = self.rows.get(key)
        if row is None:
            return "absent"
        if row.state != "pending":
            return "pruned" if row.payload is None else row.state
        if row.token is None:
            return "ready" if self.due(row) else "scheduled"
        return ("" if self.live(row) else "expired ") + ("cancelling" if row.cancel_requested_at else "running")

    def lanes(self) -> list[Lane]:
        """The lanes with pending rows, in their order."""
        return sorted({Lane(row.urgency, row.priority) for row in self.rows.values() if row.state == "pending"})

    def rows_in_lane(self, lane: Lane) -> list[Row]:
        """All rows of a lane, whatever their state."""
        return [row for row in self.rows.values() if (row.urgency, row.priority) == lane]

    def due_in_lane(self, lane: Lane) -> list[Row]:
        """The due rows of a lane, in their order."""
        found = [row for row in self.rows_in_lane(lane) if self.due(row)]
        return sorted(found, key=lambda row: (at(row.ready_at), row.id or 0))

    @property
    def paused(self) -> bool:
        """Whether claims are refused."""
        return self.paused_until is not None and self.paused_until > self.now

    def of(self, claim: Claim) -> Row | None:
        """The row that this claim still owns, be its lease live or not."""
        row = self.rows.get(claim.key)
        mine = row and (row.id, row.revision, row.token) == (claim.id, claim.revision, claim.token)
        return row if mine else None

    # --- what happens to it whatever is sent --------------------------------------------------------------------------

    def delete(self, key: str) -> None:
        """The job and its result are gone."""
        self.rows.pop(key, None)
        self.results.pop(key, None)

    def age(self, seconds: float) -> None:
        """So much time passes."""
        by = timedelta(seconds=seconds)
        for row in self.rows.values():
            row.ready_at, row.created_at = at(row.ready_at) - by, at(row.created_at) - by
            row.lease_expires_at = row.lease_expires_at and at(row.lease_expires_at) - by
            row.not_before = row.not_before and at(row.not_before) - by
            row.finished_at = row.finished_at and at(row.finished_at) - by

    def expire(self, key: str) -> None:
        """The lease of this row, if there is one, ends now."""
        row = self.rows.get(key)
        if row is not None and row.token is not None:
            row.lease_expires_at = Near()

    def set_clock_back(self, key: str, by: timedelta) -> None:
        """The lease of this row, if there is one, ends so much later."""
        row = self.rows.get(key)
        if row is not None and row.token is not None:
            row.lease_expires_at = at(row.lease_expires_at) + by

    def tell(self, row: Row, what: str, *, code: str | None = None, runner: str | None = None) -> None:
        if self.level == "none" or (self.level == "exceptional" and what in ORDINARY):
            return
        self.facts.append(Fact(row.id, row.generation, row.attempts, row.key, row.revision, what, code, runner))

    # --- the table against it -----------------------------------------------------------------------------------------

    def compare(self, seen: Seen) -> None:
        """Raise Differs unless the table is as it must be; takes over what the database's clock has given."""
        found = [*self._compare_rows(seen), *self._compare_results(seen), *self._compare_facts(seen)]
        self.now, self.facts = seen.clock, []
        if found:
            raise Differs("\n".join(found))

    def _compare_rows(self, seen: Seen) -> Iterator[str]:
        if self.rows.keys() != seen.rows.keys():
            yield f"rows: {sorted(seen.rows)} instead of {sorted(self.rows)}"
        for key in self.rows.keys() & seen.rows.keys():
            row = self.rows[key]
            for name, actual in zip(FIELDS, seen.rows[key], strict=True):
                expected = getattr(row, name)
                if name == "id" and expected is None:
                    expected = actual
                if not self._equal(expected, actual, seen.clock):
                    yield f"{key}.{name}: {actual} instead of {expected}"
                setattr(row, name, actual)

    def _compare_results(self, seen: Seen) -> Iterator[str]:
        if self.results.keys() != seen.results.keys():
            yield f"results: {sorted(seen.results)} instead of {sorted(self.results)}"
        for key in self.results.keys() & seen.results.keys():
            result, (revision, value, finished_at) = self.results[key], seen.results[key]
            if (revision, value) != (result.revision, result.value):
                yield f"result of {key}: {value} of {revision!r} instead of {result.value} of {result.revision!r}"
            if not self._equal(result.finished_at, finished_at, seen.clock):
                yield f"result of {key}: finished at {finished_at} instead of {result.finished_at}"
            result.finished_at = finished_at

    def _compare_facts(self, seen: Seen) -> Iterator[str]:
        expected = Counter(each if each.job_id else each._replace(job_id=self.rows[each.key].id) for each in self.facts)
        actual = Counter(fact for fact, _ in seen.facts)
        yield from (f"no fact {fact}" for fact in (expected - actual).elements())
        yield from (f"fact that nothing made: {fact}" for fact in (actual - expected).elements())
        for fact, when in seen.facts:
            if not self.now <= when <= seen.clock:
                yield f"fact at {when}, not now: {fact}"

    def _equal(self, expected: object, actual: object, clock: datetime) -> bool:
        if not isinstance(expected, Near):
            return expected == actual
        by, spare = timedelta(seconds=expected.seconds), timedelta(microseconds=expected.spare)
        return isinstance(actual, datetime) and self.now + by <= actual <= clock + by + spare
