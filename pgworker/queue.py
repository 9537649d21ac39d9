"""The queue that a runner works on: the statements of one kind over one table, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from pgworker import statements, tablestatements
from pgworker.fairness import FIRST_TENANT, Shares, claim_fair
from pgworker.job import Claim
from pgworker.kind import Kind
from pgworker.outcome import Settlement, Success
from pgworker.statements import BEGINNING, FACTS, Answer, Cursor, Due, Lane, Reaped, Renewal, Statement
from pgworker.tablemap import TableMap
from pgworker.tablestatements import OwnTable


class Renewals(Protocol):
    """How leases are renewed: equal values share a statement."""

    def __call__(self, leases: Sequence[tuple[Claim, float | None]]) -> Statement[dict[int, Renewal]]:
        """Prolong each lease to so many seconds from now, or only look at those without seconds."""
        ...

    def __hash__(self) -> int:
        """Equal values share a statement."""
        ...


class Queue(Protocol):
    """What a runner asks of a table: statements to be run by its own driver, each short and complete in itself."""

    @property
    def kind(self) -> Kind:
        """Whose jobs these are."""
        ...

    @property
    def renewals(self) -> Renewals:
        """How the leases of its claims are renewed."""
        ...

    @property
    def has_blank_keys(self) -> bool:
        """Whether an empty text may be the key of a row, rather than a fault of who claimed it."""
        ...

    def survey(self) -> Statement[list[Due]]:
        """The lanes that have unfinished jobs."""
        ...

    def claim(
        self, lane: Lane, *, limit: int, token: UUID, runner: str, after: Cursor = BEGINNING
    ) -> Statement[list[Claim]]:
        """Take up to `limit` ready jobs of a lane, those behind the cursor; a queue may not mind the cursor."""
        ...

    def finish(self, finished: Sequence[tuple[Claim, Success]]) -> Statement[dict[int, Answer]]:
        """Succeed these jobs, if they are still ours."""
        ...

    def settle(self, settled: Sequence[tuple[Claim, Settlement]]) -> Statement[dict[int, Answer]]:
        """Write any other end of a run, for those jobs that are still ours."""
        ...

    def check(self, claim: Claim) -> Statement[int | None]:
        """The claim's generation if the job is still ours, another if it is ours but there is new work, else None.

        For the start of a transaction that will finish it.
        """
        ...

    def reap(self, lane: Lane, *, limit: int, after: Cursor = BEGINNING) -> Statement[Reaped]:
        """End or free expired leases, reading at most `limit` jobs."""
        ...


@dataclass(frozen=True, slots=True)
class JobsRenewals:
    """The leases of one schema's jobs table, whatever their kinds."""

    tables: TableMap

    def __call__(self, leases: Sequence[tuple[Claim, float | None]]) -> Statement[dict[int, Renewal]]:
        """See Renewals."""
        return statements.renew_leases(self.tables, leases)


@dataclass(frozen=True, slots=True)
class JobsTable:
    """The queue of one kind in the jobs table."""

    tables: TableMap
    kind: Kind

    @property
    def _ttl_seconds(self) -> float:
        return self.kind.policy.lease.ttl.total_seconds()

    @property
    def _facts(self) -> int:
        return FACTS[self.kind.policy.facts]

    @property
    def renewals(self) -> Renewals:
        """See Queue."""
        return JobsRenewals(self.tables)

    @property
    def has_blank_keys(self) -> bool:
        """See Queue."""
        return False

    def survey(self) -> Statement[list[Due]]:
        """See Queue."""
        return statements.survey_lanes(self.tables, [self.kind.name])

    def claim(
        self, lane: Lane, *, limit: int, token: UUID, runner: str, after: Cursor = BEGINNING
    ) -> Statement[list[Claim]]:
        """See Queue."""
        return statements.claim_jobs(
            self.tables,
            lane,
            limit=limit,
            token=token,
            runner=runner,
            ttl_seconds=self._ttl_seconds,
            max_evictions=self.kind.policy.max_evictions,
            version=self.kind.version,
            after=after,
            facts=self._facts,
        )

    def claim_fair(
        self,
        lane: Lane,
        *,
        limit: int,
        token: UUID,
        runner: str,
        served: str = FIRST_TENANT,
        after: Cursor = BEGINNING,
    ) -> Statement[Shares]:
        """Take an equal share of each tenant's ready jobs, those behind the cursor, from the tenant served last on."""
        return claim_fair(
            self.tables,
            lane,
            limit=limit,
            token=token,
            runner=runner,
            ttl_seconds=self._ttl_seconds,
            max_evictions=self.kind.policy.max_evictions,
            version=self.kind.version,
            served=served,
            after=after,
            facts=self._facts,
        )

    def finish(self, finished: Sequence[tuple[Claim, Success]]) -> Statement[dict[int, Answer]]:
        """See Queue."""
        return statements.finish_jobs(self.tables, self.kind.name, finished, facts=self._facts)

    def settle(self, settled: Sequence[tuple[Claim, Settlement]]) -> Statement[dict[int, Answer]]:
        """See Queue."""
        return statements.settle_jobs(self.tables, self.kind.name, settled, facts=self._facts)

    def check(self, claim: Claim) -> Statement[int | None]:
        """See Queue."""
        return statements.check_fence(self.tables, claim)

    def reap(self, lane: Lane, *, limit: int, after: Cursor = BEGINNING) -> Statement[Reaped]:
        """See Queue."""
        return statements.reap_expired(
            self.tables,
            lane,
            limit=limit,
            ttl_seconds=self._ttl_seconds,
            max_evictions=self.kind.policy.max_evictions,
            after=after,
            facts=self._facts,
        )


@dataclass(frozen=True, slots=True)
class RowRenewals:
    """The leases on the rows of one app's table, whatever the kinds that it is the queue of."""

    table: OwnTable

    def __call__(self, leases: Sequence[tuple[Claim, float | None]]) -> Statement[dict[int, Renewal]]:
        """See Renewals."""
        return tablestatements.renew_rows(self.table, leases)


@dataclass(frozen=True, slots=True)
class RowsQueue:
    """The queue of one kind in an app's own table. It writes no facts and, without a column for them, no results."""

    tables: TableMap
    kind: Kind
    table: OwnTable

    @property
    def _ttl_seconds(self) -> float:
        return self.kind.policy.lease.ttl.total_seconds()

    @property
    def renewals(self) -> Renewals:
        """See Queue."""
        return RowRenewals(self.table)

    @property
    def has_blank_keys(self) -> bool:
        """See Queue."""
        return True

    def survey(self) -> Statement[list[Due]]:
        """See Queue."""
        return tablestatements.survey_table(self.table, self.tables, self.kind.name)

    def claim(
        self, lane: Lane, *, limit: int, token: UUID, runner: str, after: Cursor = BEGINNING
    ) -> Statement[list[Claim]]:
        """See Queue; from the lane's beginning."""
        del after
        return tablestatements.claim_rows(
            self.table,
            self.tables,
            lane,
            limit=limit,
            token=token,
            runner=runner,
            ttl_seconds=self._ttl_seconds,
            max_evictions=self.kind.policy.max_evictions,
        )

    def finish(self, finished: Sequence[tuple[Claim, Success]]) -> Statement[dict[int, Answer]]:
        """See Queue."""
        return tablestatements.finish_rows(self.table, finished)

    def settle(self, settled: Sequence[tuple[Claim, Settlement]]) -> Statement[dict[int, Answer]]:
        """See Queue."""
        return tablestatements.settle_rows(self.table, settled)

    def check(self, claim: Claim) -> Statement[int | None]:
        """See Queue."""
        return tablestatements.check_row(self.table, claim)

    def reap(self, lane: Lane, *, limit: int, after: Cursor = BEGINNING) -> Statement[Reaped]:
        """See Queue."""
        return tablestatements.reap_rows(
            self.table,
            lane,
            limit=limit,
            ttl_seconds=self._ttl_seconds,
            max_evictions=self.kind.policy.max_evictions,
            after=after,
        )
