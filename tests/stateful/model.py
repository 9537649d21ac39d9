"""The statements in plain Python: what each must answer, and what every column of every row must then be.

The model knows no SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from pgworker.job import Claim
from tests.stateful.rows import Cleared, End, Lane, Near, Result, Row, Wanted, at
from tests.stateful.table import Table

FOR_EVER = datetime.max.replace(tzinfo=UTC)


def _by_end(row: Row) -> tuple[datetime, int]:
    return at(row.finished_at), row.id or 0


class Model(Table):
    """What the table must hold after each statement."""

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
                ready_at, Near(), event=job.event,
            )  # fmt: skip
            status = "created"
        else:
            status = self._replace(row, job, ready_at, wait=wait)
        self.tell(row, "enqueued" if status == "created" else status)
        return status, "pending"

    def put_events(self, jobs: Sequence[Wanted]) -> dict[str, tuple[str, str]]:
        """Events with different keys; each is answered as new, also one that is there, of which nothing changes."""
        for order, job in enumerate(jobs, 1):
            if job.key not in self.rows:
                self._put(job, order, keep=True, wait=False)
        return {job.key: ("created", "pending") for job in jobs}

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
        row.event, row.revision, row.payload, row.version = job.event, job.revision, job.payload, job.version
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
                self.tell(row, "evicted", runner=row.runner)
            row.token, row.runner, row.lease_expires_at, row.lease_seconds = token, runner, Near(lasts), lasts
            row.lease_epoch += 1
            self.tell(row, "claimed", runner=runner)
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
                self.results.pop(row.key, None)  # (it may have been pruned)
            row.has_result = value is not None
        elif row.cancel_requested_at is not None:
            row.state, row.finished_at = "cancelled", Near()
        self._give_up(row)
        row.evictions = 0
        self.tell(row, "superseded" if row.state == "pending" else row.state, runner=runner)
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
        self.tell(row, what, code=end.code, runner=runner)
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
            self.tell(row, "evicted", runner=runner)
        if row.cancel_requested_at is not None:
            row.state = "cancelled"
        elif limit_of_evictions is not None and row.evictions >= limit_of_evictions:
            row.state = "failed"
            row.last_code, row.last_error = code, _ = "evicted_too_often", None
        self._give_up(row)
        if row.state != "pending":
            row.finished_at = Near()
            self.tell(row, row.state, code=code, runner=runner)

    # --- others -------------------------------------------------------------------------------------------------------

    def cancel(self, key: str) -> str | None:
        """What an operator's cancel answers: done where nobody holds the lease, else the holder is asked, once."""
        row = self.rows.get(key)
        if row is None:
            return None
        live = self.live(row)
        if row.state != "pending" or (live and row.cancel_requested_at is not None):
            return "passed"
        self.tell(row, "cancel_requested" if live else "cancelled", runner=row.runner)
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
        if row.payload is None:
            return "pruned"
        self.tell(row, what)
        waits = row.not_before is not None and at(row.not_before) > self.now
        row.state, row.ready_at, row.attempts, row.evictions = "pending", row.not_before if waits else Near(), 0, 0
        row.last_code = row.last_error = row.finished_at = None
        return "done"

    def forget(self, key: str) -> str:
        """What an operator's forget answers: requested where there was a lease."""
        row = self.rows.get(key)
        if row is None:
            return "passed"
        self.tell(row, "forgotten", runner=row.runner)
        self.delete(key)
        return "done" if row.token is None else "requested"

    def prune(self, state: str, *, keep: float, limit: int) -> Cleared:
        """What a page of what ended in this state longer ago than that held, and what has become of it.

        The row of a keyed job stays, and says that there was a result; a failed one keeps everything, for a retry.
        """
        old = [row for row in self.rows.values() if row.state == state and self._goes(row, keep)]
        page = sorted(old, key=_by_end)[:limit]
        for row in page:
            if row.event:
                self.delete(row.key)
            else:
                row.payload = None
                self.results.pop(row.key, None)
        deleted = sum(row.event for row in page)
        return Cleared(len(page), deleted, len(page) - deleted, page[-1].id if page else None)

    def _goes(self, row: Row, keep: float) -> bool:
        wanted = row.event or (row.payload is not None and row.state != "failed")
        return wanted and at(row.finished_at) < self.now - timedelta(seconds=keep)

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
