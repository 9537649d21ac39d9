"""Takes ready jobs for one runner: surveys its lanes, claims from those that are due, refuses unsound claims."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID, uuid4

import psycopg
from psycopg.errors import QueryCanceled

from pgworker.db import Database
from pgworker.errors import PgworkerError
from pgworker.job import URGENCIES, Claim
from pgworker.outcome import QUEUE_BATCH_LIMIT_EXCEEDED, QUEUE_CLAIM_FAILED, QUEUE_INVALID_CLAIM
from pgworker.queue import Queue
from pgworker.statements import Due

_MOST_BYTES = 32 * 1024 * 1024
"""Of payloads in one answer, as far as can be told beforehand."""
_ASSUMED_BYTES = 256 * 1024
"""What a payload is taken to weigh before any was seen."""


class Taken(NamedTuple):
    """What one round of claims brought. `full` tells that there may be more at once."""

    claims: list[Claim]
    sent_at: float
    """Monotonic time before the first claim was sent: no lease of the round is older."""
    full: bool
    due_in_seconds: float | None
    """When the next job that is known comes due."""
    paused: bool = False
    """Whether nothing was claimed because the kind is paused in the table."""
    asked_at: float = 0.0
    """Monotonic time before the survey was sent."""


class ClaimRefused(PgworkerError):
    """A round failed; `code` says how, `claims` are what it had taken and must be released."""

    def __init__(self, code: str, error: str, claims: Sequence[Claim] = ()) -> None:
        super().__init__(f"{code}: {error}")
        self.code = code
        self.error = error
        self.claims = claims


@dataclass(slots=True)
class Appetite:
    """How many jobs one answer may hold, learned from those before: payloads may be too large to be read in time.

    What was claimed but could not be read would only come back when its lease expires, and be asked for once more.
    """

    most: float = float("inf")
    """Halved by each claim that timed out, doubled by each that brought something."""
    bytes_each: float = _ASSUMED_BYTES
    """What a payload weighs on average; rises at once and falls slowly."""

    def bound(self, limit: int) -> int:
        """The number of jobs to ask for instead of `limit`: one at least."""
        return max(1, int(min(limit, self.most, _MOST_BYTES / max(1.0, self.bytes_each))))

    def choked(self, limit: int) -> None:
        """A claim of so many jobs got no answer in time."""
        self.most = max(1, limit // 2)

    def fed(self, claims: Sequence[Claim]) -> None:
        """A claim brought these."""
        if not claims:
            return
        average = sum(len(claim.payload or "") for claim in claims) / len(claims)
        self.bytes_each = max(average, (self.bytes_each + average) / 2)
        self.most *= 2


@dataclass(slots=True)
class Claimer:
    """The claims of one runner.

    A round prefers one class of jobs and fills up from the other. Of `weights`, the first says how many rounds in a row
    prefer fresh jobs, the second how many then prefer catch-up; rounds that find nothing count as well.
    """

    queue: Queue
    database: Database
    runner: str
    weights: tuple[int, int] = (4, 1)
    rounds: int = 0
    appetite: Appetite = field(default_factory=Appetite)

    async def round(self, limit: int) -> Taken:
        """Claim up to `limit` jobs over all lanes, in order. Raises ClaimRefused; never waits for a row's lock.

        Fewer than `limit`, if more might be too large for one answer; then it is full all the same.
        """
        limit = self.appetite.bound(limit)
        preferred = self._next_class()
        asked_at = time.monotonic()
        try:
            dues = await self.database.run(self.queue.survey())
        except (psycopg.Error, TimeoutError) as error:
            raise ClaimRefused(QUEUE_CLAIM_FAILED, type(error).__name__) from error
        sent_at = time.monotonic()  # after the survey, which may have waited for a connection: that is no lease's time
        if any(due.paused for due in dues):
            return Taken([], sent_at, full=False, due_in_seconds=None, paused=True, asked_at=asked_at)
        # (the survey has the priorities of each class in order, which a stable sort keeps)
        in_turn = sorted(dues, key=lambda due: due.lane.urgency != preferred)
        claims = await self._claim_from(in_turn, limit)
        waits = [due.due_in_seconds for due in dues if due.due_in_seconds is not None and due.due_in_seconds > 0]
        return Taken(claims, sent_at, len(claims) == limit, min(waits, default=None), asked_at=asked_at)

    def _next_class(self) -> int:
        fresh, catch_up = self.weights
        turn = self.rounds % (fresh + catch_up)
        self.rounds += 1
        return URGENCIES["fresh"] if turn < fresh else URGENCIES["catch_up"]

    async def _claim_from(self, dues: Sequence[Due], limit: int) -> list[Claim]:
        """Lane after lane until the limit is reached; an error after the first job ends the round, and loses none."""
        claims: list[Claim] = []
        try:
            for due in dues:
                if len(claims) < limit and due.due_in_seconds is not None and due.due_in_seconds <= 0:
                    claims += await self._claim(due, limit - len(claims))
        except (psycopg.Error, TimeoutError) as error:
            if not claims:
                raise ClaimRefused(QUEUE_CLAIM_FAILED, type(error).__name__) from error
        except ClaimRefused as refused:
            raise ClaimRefused(refused.code, refused.error, [*claims, *refused.claims]) from refused
        return claims

    async def _claim(self, due: Due, limit: int) -> list[Claim]:
        token = uuid4()
        try:
            claims = await self.database.run(self.queue.claim(due.lane, limit=limit, token=token, runner=self.runner))
        except (TimeoutError, QueryCanceled):
            self.appetite.choked(limit)
            raise
        self.appetite.fed(claims)
        if len(claims) > limit:
            raise ClaimRefused(QUEUE_BATCH_LIMIT_EXCEEDED, f"{len(claims)} jobs for a limit of {limit}", claims)
        if not _sound(claims, token, blank_keys=self.queue.has_blank_keys):
            raise ClaimRefused(QUEUE_INVALID_CLAIM, "blank or repeated identity", claims)
        return claims


def _sound(claims: Sequence[Claim], token: UUID, *, blank_keys: bool) -> bool:
    """Whether each claim can be told from every other and is really ours."""
    distinct = len({claim.id for claim in claims}) == len(claims)
    return distinct and all(
        claim.kind and (claim.key or blank_keys) and claim.token == token and claim.attempts >= 0 for claim in claims
    )
