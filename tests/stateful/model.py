"""The jobs table as plain Python: what each statement must answer, and what every column of every row must then be.

The model knows no SQL. Instants that the database's clock gives are predicted as `Near` and, once they have been seen
to lie where they must, taken over from the table. All others must be equal to the microsecond.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal, TypeAlias
from uuid import UUID

from pgworker.job import Claim
from tests.stateful.rows import FIELDS, Differs, End, Fact, Lane, Near, Result, Row, Seen, Wanted, at

FOR_EVER = datetime.max.replace(tzinfo=UTC)
Level: TypeAlias = Literal["all", "exceptional", "none"]
ORDINARY = {"enqueued", "replaced", "requeued", "claimed", "succeeded", "released"}
"""Facts of a job that goes as planned: only the level "all" keeps them."""


@dataclass
class Model:
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
            return row.state
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

    # --- enqueue ------------------------------------------------------------------------------------------------------

    def put(self, jobs: Sequence[Wanted], *, keep: bool, wait: bool = False) -> dict[str, tuple[str, str]]:
        """Jobs with different keys; what is answered for each: its status, and its state."""
        return {job.key: self._put(job, order, keep=keep, wait=wait) for order, job in enumerate(jobs, 1)}

    def _put(self, job: Wanted, order: int, *, keep: bool, wait: bool) -> tuple[str, str]:
        row = self.rows.get(job.key)
        if row is not None and job.revision and job.revision == row.revision:
            if row.state == "pending" and row.token is None:
                row.urgency = min(row.urgency, job.urgency)
            return "unchanged", row.state
        if row is not None and keep and row.state == "pending":
            return "kept", row.state
        ready_at = job.ready_at or Near(job.delay, spare=order)
        if row is None:
            row = self.rows[job.key] = Row(
                None, job.key, job.revision, job.payload, job.version, job.urgency, job.priority, job.max_attempts,
                ready_at, Near(),
            )  # fmt: skip
            status = "created"
        else:
            status = self._replace(row, job, ready_at, wait=wait)
        self._tell(row, "enqueued" if status == "created" else status)
        return status, "pending"

    def _replace(self, row: Row, job: Wanted, ready_at: datetime | Near, *, wait: bool) -> str:
        pending, leased, same = row.state == "pending", row.token is not None, row.revision == job.revision
        status = "replaced" if pending else "requeued"
        if wait and leased and not same:
            ends = Near(row.lease_seconds or 0.0) if self._lasts_too_long(row) else at(row.lease_expires_at)
            if row.not_before is None or self._roughly(ends) > self._roughly(row.not_before):
                row.not_before = ends
        if row.not_before is not None and self._roughly(row.not_before) > self._roughly(ready_at):
            ready_at = row.not_before
        if leased and not (same and self.live(row)):
            row.token = row.lease_expires_at = row.runner = None
            status = "superseded"
        row.revision, row.payload, row.version = job.revision, job.payload, job.version
        row.urgency = min(row.urgency, job.urgency) if pending else job.urgency
        row.priority, row.max_attempts, row.ready_at = job.priority, job.max_attempts, ready_at
        row.generation += 1
        row.state, row.attempts, row.evictions = "pending", 0, 0
        row.last_code = row.last_error = row.cancel_requested_at = row.finished_at = None
        return status

    def _roughly(self, instant: datetime | Near) -> datetime:
        """Good enough to compare with what is an hour away."""
        return self.now + timedelta(seconds=instant.seconds) if isinstance(instant, Near) else instant

    # --- runners ------------------------------------------------------------------------------------------------------

    def claim(
        self,
        lane: Lane,
        *,
        limit: int,
        token: UUID,
        runner: str,
        ttl: float,
        lasts: float,
        limit_of_evictions: int | None,
        version: int,
    ) -> list[Row]:
        """The rows that a claim gets; its leases are made to last longer than its `ttl` says."""
        if self.paused:
            return []
        taken = [
            row
            for row in self.due_in_lane(lane)
            if row.cancel_requested_at is None
            and row.version <= version
            and (row.token is None or self._may_be_taken_over(row, limit_of_evictions))
        ][:limit]
        for row in taken:
            if self._evicted(row, ttl):
                row.evictions += 1
                self._tell(row, "evicted", runner=row.runner)
            row.token, row.runner, row.lease_expires_at, row.lease_seconds = token, runner, Near(lasts), lasts
            row.lease_epoch += 1
            self._tell(row, "claimed", runner=runner)
        return taken

    def _may_be_taken_over(self, row: Row, limit_of_evictions: int | None) -> bool:
        return not self.live(row) and (limit_of_evictions is None or row.evictions + 1 < limit_of_evictions)

    def _evicted(self, row: Row, ttl: float) -> bool:
        """A lease that was granted before the server's start could not be renewed: that counts for nothing."""
        return row.token is not None and at(row.lease_expires_at) - timedelta(seconds=ttl) >= self.started

    def _verdict(self, claim: Claim) -> str:
        row = self.of(claim)
        return "lost" if row is None else "done" if self.live(row) else "expired"

    def finish(self, claim: Claim, value: str | None) -> tuple[str, str | None]:
        """The verdict on a success, and the state if it is done."""
        verdict, row = self._verdict(claim), self.of(claim)
        if row is None or verdict != "done":
            return verdict, None
        runner = row.runner
        if row.generation == claim.generation:
            row.state, row.finished_at, row.last_code, row.last_error = "succeeded", Near(), None, None
            if value is not None:
                self.results[row.key] = Result(row.revision, value, Near())
            elif row.has_result:
                del self.results[row.key]
            row.has_result = value is not None
        elif row.cancel_requested_at is not None:
            row.state, row.finished_at = "cancelled", Near()
        self._give_up(row)
        row.evictions = 0
        self._tell(row, "superseded" if row.state == "pending" else row.state, runner=runner)
        return verdict, row.state

    def settle(self, claim: Claim, end: End) -> tuple[str, str | None]:
        """The verdict on any other end, and the state if it is done."""
        verdict, row = self._verdict(claim), self.of(claim)
        if row is None or verdict != "done":
            return verdict, None
        runner = row.runner
        current = row.generation == claim.generation
        if end.counts:
            row.evictions = 0
        if not current:  # the payload that came meanwhile has been tried by nobody
            what, end = "superseded", End("pending", None)
        elif end.state == "pending":
            what = "retried" if end.counts else "released" if end.code is None else "parked"
        else:
            what = end.state
        row.attempts += int(end.counts)
        if end.code is not None:
            row.last_code, row.last_error = end.code, end.error
        if end.delay is not None:
            row.ready_at = Near(end.delay)
        row.state = end.state
        if end.state == "pending" and row.cancel_requested_at is not None:
            what = row.state = "cancelled"
        if row.state != "pending":
            row.finished_at = Near()
        self._give_up(row)
        self._tell(row, what, code=end.code, runner=runner)
        return verdict, row.state

    def _give_up(self, row: Row) -> None:
        row.token = row.lease_expires_at = row.runner = row.cancel_requested_at = None

    def renew(self, claim: Claim, ttl: float | None) -> tuple[str, bool]:
        """The verdict on a lease, and whether a cancel is requested; without a ttl nothing is renewed."""
        verdict, row = self._verdict(claim), self.of(claim)
        if row is not None and ttl is None:
            return "done", row.cancel_requested_at is not None
        if row is None or verdict != "done" or ttl is None:
            return verdict, False
        row.lease_expires_at = Near(ttl)
        return verdict, row.cancel_requested_at is not None

    def reap(self, lane: Lane, *, limit: int, ttl: float, limit_of_evictions: int | None) -> tuple[int, int, int]:
        """How many rows the page had, how many were ended or freed, and how many freed."""
        page = self.due_in_lane(lane)[:limit]
        gone = [row for row in page if row.token is not None and not self.live(row)]
        for row in page:
            if self._lasts_too_long(row):
                row.lease_expires_at = Near(row.lease_seconds or 0.0)
        for row in gone:
            self._reap(row, ttl, limit_of_evictions)
        return len(page), len(gone), sum(row.state == "pending" for row in gone)

    def _lasts_too_long(self, row: Row) -> bool:
        """The clock was set back: nobody can have asked for so long a lease."""
        if row.token is None or row.lease_seconds is None:
            return False
        return at(row.lease_expires_at) > self.now + timedelta(seconds=row.lease_seconds + 1)

    def _reap(self, row: Row, ttl: float, limit_of_evictions: int | None) -> None:
        runner, code = row.runner, None
        if self._evicted(row, ttl):
            row.evictions += 1
            self._tell(row, "evicted", runner=runner)
        if row.cancel_requested_at is not None:
            row.state = "cancelled"
        elif limit_of_evictions is not None and row.evictions >= limit_of_evictions:
            row.state = "failed"
            row.last_code, row.last_error = code, _ = "evicted_too_often", None
        self._give_up(row)
        if row.state != "pending":
            row.finished_at = Near()
            self._tell(row, row.state, code=code, runner=runner)

    # --- others -------------------------------------------------------------------------------------------------------

    def cancel(self, key: str) -> str | None:
        """What an operator's cancel answers: done where nobody holds the lease, else the holder is asked, once."""
        row = self.rows.get(key)
        if row is None:
            return None
        live = self.live(row)
        if row.state != "pending" or (live and row.cancel_requested_at is not None):
            return "passed"
        self._tell(row, "cancel_requested" if live else "cancelled", runner=row.runner)
        if live:
            row.cancel_requested_at = Near()
            return "requested"
        self._give_up(row)
        row.state, row.finished_at = "cancelled", Near()
        return "done"

    def reopen(self, key: str, *, states: Sequence[str], what: str, code: str | None) -> str | None:
        """What an operator's retry or rebuild answers: done for a row in one of these states, with this code if any."""
        row = self.rows.get(key)
        if row is None:
            return None
        if row.state not in states or (code is not None and row.last_code != code):
            return "passed"
        self._tell(row, what)
        waits = row.not_before is not None and at(row.not_before) > self.now
        row.state, row.ready_at, row.attempts, row.evictions = "pending", row.not_before if waits else Near(), 0, 0
        row.last_code = row.last_error = row.finished_at = None
        return "done"

    def forget(self, key: str) -> str:
        """What an operator's forget answers: requested where there was a lease."""
        row = self.rows.get(key)
        if row is None:
            return "passed"
        self._tell(row, "forgotten", runner=row.runner)
        self.delete(key)
        return "done" if row.token is None else "requested"

    def pause(self, until: datetime | None) -> None:
        """The longer of two pauses holds; None is for ever."""
        until = until or FOR_EVER
        self.paused_until = max(until, self.paused_until or until)

    def resume(self) -> bool:
        """Whether there was a pause to end."""
        paused = self.paused
        if paused:
            self.paused_until = None
        return paused

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

    def _tell(self, row: Row, what: str, *, code: str | None = None, runner: str | None = None) -> None:
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
