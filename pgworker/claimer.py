"""Takes ready jobs for one runner: surveys its lanes, claims from those that are due, refuses unsound claims."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import UUID, uuid4

import psycopg
from psycopg.errors import QueryCanceled

from pgworker.db import Database
from pgworker.errors import PgworkerError
from pgworker.fairness import FIRST_TENANT
from pgworker.job import URGENCIES, Claim
from pgworker.outcome import QUEUE_BATCH_LIMIT_EXCEEDED, QUEUE_CLAIM_FAILED, QUEUE_INVALID_CLAIM
from pgworker.queue import JobsTable, Queue
from pgworker.statements import Cursor, Due, Lane, after_claim
from pgworker.surveys import Surveys

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
    trouble: str = ""
    """By which error the survey failed, if the claims did without it."""


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


_LOOK_SECONDS = 0.05
"""How old a survey may be: so late a round may learn of a lane, or of a job that lies before where it claims from."""
_REMEMBERED = 8  # lanes that are empty
_LOOK_SHARE = 20
_CHEAP_SECONDS = 0.01
"""Surveys that take longer are made again only after a multiple of that time: what nobody can claim is in their way."""
_ASSUMED_BACK = timedelta(minutes=1)
"""How far back a worker begins that cannot see what there is: by its own clock, which may differ from the server's."""
_OLDEST_EACH = 10
"""Of so many rounds of a fair kind that prefer a class, one takes the oldest jobs. Shares never reach those without any
tenant, not even '', as whoever enqueued them did not know that the kind is fair."""
_SWIFT_SECONDS = 0.1
"""Claims by shares that take longer are followed by so much time of claims by age. A tenant's rows that died lately lie
before its next one, and are passed over again and again as long as some session holds an old snapshot, if others have
older jobs that hold the beginning back."""


@dataclass(slots=True)
class Lanes:
    """What is known of a kind's lanes, and from where on each is claimed: no clock, no I/O.

    Claims that began at the beginning of a lane would pass again and again over what is leased, or dead as long as some
    session holds an old snapshot. But a job may come to lie before a claim's end, too: one that was committed late, put
    back, skipped because it was locked, or whose lease ran out. A survey finds it, and has the lane claimed from there.

    Claims that are fair between tenants go through each tenant's own jobs. They begin where the last survey found the
    first free job of all, which bounds what they pass over by what has been claimed since, of whichever tenant.
    """

    fair: bool = False
    dues: Sequence[Due] = ()
    _places: dict[Lane, Cursor] = field(default_factory=dict[Lane, Cursor])
    _served: dict[Lane, str] = field(default_factory=dict[Lane, str])
    _dry: set[Lane] = field(default_factory=set[Lane])

    @property
    def known(self) -> bool:
        """Whether there are any to claim from."""
        return bool(self._places)

    @property
    def paused(self) -> bool:
        """Whether nothing may be claimed at present."""
        return any(due.paused for due in self.dues)

    def learn(self, dues: Sequence[Due]) -> None:
        """Take in a survey. A few lanes that are empty now are remembered: they may be used again."""
        self.dues = dues
        empty = self._places.keys() - {due.lane for due in dues}
        for lane in [lane for lane in self._places if lane in empty][:-_REMEMBERED]:
            del self._places[lane]
            self._served.pop(lane, None)
        self._dry = {*empty, *(due.lane for due in dues if not _is_due(due))}
        for due in dues:  # (of a lane that is not due nothing free lies before its place)
            place = self._places.get(due.lane, due.start)
            first = due.start if self.fair else min(place, due.start)
            self._places[due.lane] = first if _is_due(due) else place

    def assume(self, kind: str, since: datetime) -> None:
        """Nobody can say what there is: if nothing is known, claim what comes to the usual lanes."""
        if not self._places:
            self._places = {Lane(kind, urgency, 0): (since, -1) for urgency in URGENCIES.values()}

    def unpause(self) -> None:
        """Whether the kind is paused is not known: a claim of a paused one brings nothing."""
        self.dues = [due._replace(paused=False) for due in self.dues]

    def poke(self) -> None:
        """There may be something new in any of those that are known."""
        self._dry.clear()

    def in_turn(self, preferred: int) -> list[tuple[Lane, Cursor]]:
        """The lanes to claim from, and from where on: those of the preferred class first, each by its priorities."""
        wet = [lane for lane in self._places if lane not in self._dry]
        return [(lane, self._places[lane]) for lane in sorted(wet, key=lambda lane: (lane[1] != preferred, *lane[1:]))]

    def took(self, lane: Lane, claims: Sequence[Claim], limit: int) -> None:
        """A claim of up to `limit` brought these, in the lane's order."""
        if claims and not self.fair:
            self._places[lane] = after_claim(claims[-1])
        if len(claims) < limit:
            self._dry.add(lane)

    def last_served(self, lane: Lane) -> str:
        """The tenant behind which the lane's next fair claim begins."""
        return self._served.get(lane, FIRST_TENANT)

    def serve(self, lane: Lane, tenant: str | None) -> None:
        """A fair claim has come so far; nowhere with None."""
        if tenant is not None:
            self._served[lane] = tenant


@dataclass(slots=True)
class Claimer:
    """The claims of one runner.

    A round prefers one class of jobs and fills up from the other. Of `weights`, the first says how many rounds in a row
    prefer fresh jobs, the second how many then prefer catch-up; rounds that find nothing count as well. If the kind is
    fair, each tenant of a lane gets its share first, and what that leaves goes to the lane's oldest jobs.
    """

    queue: Queue
    database: Database
    surveys: Surveys
    runner: str
    weights: tuple[int, int] = (4, 1)
    is_stopping: Callable[[], bool] = lambda: False
    """Whether nothing more shall be claimed: a round then ends with the statement that is under way."""
    rounds: int = 0
    appetite: Appetite = field(default_factory=Appetite)
    _lanes: Lanes = field(default_factory=Lanes)
    _preferred: Counter[int] = field(default_factory=Counter[int])
    """How many rounds have preferred each class."""
    _fair_seconds: float = 0.0
    _fair_at: float = 0.0
    """When there may be claims by shares again, monotonic."""
    _poked: bool = False
    _look_seconds: float = 0.0
    _asked_at: float = 0.0
    _look_at: float = 0.0
    """When the lanes must be looked at again, and when they may be, both monotonic."""
    _may_look_at: float = 0.0
    _slow: tuple[str, float] | None = None
    """The error of the round's survey that took too long, and its seconds."""

    def __post_init__(self) -> None:
        self._lanes.fair = self.queue.kind.policy.fair

    def poke(self) -> None:
        """There may be something new, which the next round should look for."""
        self._poked = True

    async def round(self, limit: int) -> Taken:
        """Claim up to `limit` jobs over all lanes, in order. Raises ClaimRefused; never waits for a row's lock.

        Fewer than `limit`, if more might be too large for one answer; then it is full all the same.
        """
        limit = self.appetite.bound(limit)
        preferred = self._next_class()
        poked, self._poked, self._slow = self._poked, False, None
        looked = await self._look(now=poked)
        sent_at = time.monotonic()  # after the survey, which may have waited for a connection: that is no lease's time
        claims = await self._claim(preferred, limit)
        if len(claims) < limit and not looked and not self.is_stopping():
            looked, claims = await self._look_for_more(preferred, limit, claims)
        trouble = self._spare_surveys()
        paused = self._lanes.paused and not claims
        due_in = self._due_in(blind=len(claims) < limit and not looked)
        return Taken(claims, sent_at, len(claims) == limit, due_in, paused, self._asked_at, trouble)

    async def _look_for_more(self, preferred: int, limit: int, claims: list[Claim]) -> tuple[bool, list[Claim]]:
        """What known lanes do not give, others may; an error loses nothing of what has been claimed."""
        try:
            looked = await self._look(now=True)
        except ClaimRefused:
            if not claims:
                raise
            return False, claims
        return looked, await self._claim(preferred, limit, claims) if looked else claims

    def _next_class(self) -> int:
        fresh, catch_up = self.weights
        turn = self.rounds % (fresh + catch_up)
        self.rounds += 1
        preferred = URGENCIES["fresh"] if turn < fresh else URGENCIES["catch_up"]
        self._preferred[preferred] += 1
        return preferred

    async def _look(self, *, now: bool) -> bool:
        """Survey the lanes, if it is time to, or `now` if that may be already; whether there may be news.

        A survey passes over all that nobody can claim, which may take too long: dead rows by the million, as long as a
        session holds an old snapshot. Then whatever is known is claimed from, from where the last claims ended, or what
        comes from now on to the usual lanes; and so it is while there may be none.
        """
        asked_at = time.monotonic()
        if asked_at < self._look_at and not now:
            return False
        if asked_at < self._may_look_at:
            self._look_at = asked_at + _LOOK_SECONDS
            self._lanes.poke()
            return False
        try:
            dues = await self.surveys.look(self.queue)
        except (psycopg.Error, TimeoutError) as error:
            if isinstance(error, QueryCanceled) and isinstance(self.queue, JobsTable):
                self._lanes.assume(self.queue.kind.name, datetime.now(UTC) - _ASSUMED_BACK)
            if not (isinstance(error, (TimeoutError, QueryCanceled)) and self._lanes.known):
                raise ClaimRefused(QUEUE_CLAIM_FAILED, type(error).__name__) from error
            self._slow = type(error).__name__, time.monotonic() - asked_at
            self._lanes.unpause()
            self._lanes.poke()
            return True
        self._lanes.learn(dues)
        seconds = max((due.seconds for due in dues), default=time.monotonic() - asked_at)
        usual, self._look_seconds = min(seconds, self._look_seconds), seconds
        self._asked_at = asked_at
        self._rest(usual)
        return True

    def _spare_surveys(self) -> str:
        """After claims that were answered: if a survey was not, it was not the server's fault; returns its error."""
        if self._slow is None:
            return ""
        error, seconds = self._slow
        self._rest(seconds)
        return error

    def _rest(self, seconds: float) -> None:
        """Make no survey for a time, if they take so long."""
        now = time.monotonic()
        self._may_look_at = now + _LOOK_SHARE * max(0.0, seconds - _CHEAP_SECONDS)
        self._look_at = now + _LOOK_SECONDS

    def _due_in(self, *, blind: bool) -> float | None:
        """In how many seconds something that is known comes due, or what is not known may be looked for.

        At once, if it has come due since the survey: that round's claims have passed over its lane.
        """
        now = time.monotonic()
        waits = [due.due_in_seconds for due in self._lanes.dues if not _is_due(due) and due.due_in_seconds is not None]
        lefts = [wait - (now - self._asked_at) for wait in waits]
        if not blind:
            return max(0.0, min(lefts)) if lefts else None
        return max(0.0, min([self._may_look_at - now, *(left for left in lefts if left > 0)]))

    async def _claim(self, preferred: int, limit: int, claims: Sequence[Claim] = ()) -> list[Claim]:
        """Lane after lane until the limit is reached; an error after the first job ends the round, and loses none."""
        taken = list(claims)
        if self._lanes.paused:
            return taken
        try:
            for lane, after in self._lanes.in_turn(preferred):
                for fair in self._ways(preferred):
                    if len(taken) < limit and not self.is_stopping():
                        taken += await self._claim_from(lane, after, limit - len(taken), fair=fair)
        except (psycopg.Error, TimeoutError) as error:
            if not taken:
                raise ClaimRefused(QUEUE_CLAIM_FAILED, type(error).__name__) from error
        except ClaimRefused as refused:
            raise ClaimRefused(refused.code, refused.error, [*taken, *refused.claims]) from refused
        return taken

    def _ways(self, preferred: int) -> Sequence[bool]:
        """Whether to claim from a lane by shares, then by age, or by age only."""
        in_turn = self._preferred[preferred] % _OLDEST_EACH == 0
        by_age = not self._lanes.fair or in_turn or time.monotonic() < self._fair_at
        return (False,) if by_age else (True, False)

    async def _claim_from(self, lane: Lane, after: Cursor, limit: int, *, fair: bool = False) -> list[Claim]:
        token = uuid4()
        try:
            claims = await self._send(lane, after, limit, token, fair=fair)
        except (TimeoutError, QueryCanceled):
            self.appetite.choked(limit)
            raise
        self.appetite.fed(claims)
        if len(claims) > limit:
            raise ClaimRefused(QUEUE_BATCH_LIMIT_EXCEEDED, f"{len(claims)} jobs for a limit of {limit}", claims)
        if not _sound(claims, token, blank_keys=self.queue.has_blank_keys):
            raise ClaimRefused(QUEUE_INVALID_CLAIM, "blank or repeated identity", claims)
        if not fair:
            self._lanes.took(lane, claims, limit)
        return claims

    async def _send(self, lane: Lane, after: Cursor, limit: int, token: UUID, *, fair: bool) -> list[Claim]:
        if not fair or not isinstance(self.queue, JobsTable):
            claim = self.queue.claim(lane, limit=limit, token=token, runner=self.runner, after=after)
            return await self.database.run(claim)
        served = self._lanes.last_served(lane)
        claim_fair = self.queue.claim_fair(
            lane, limit=limit, token=token, runner=self.runner, served=served, after=after
        )
        began = time.monotonic()
        try:
            shares = await self.database.run(claim_fair)
        finally:  # also when it got no answer in time
            ended = time.monotonic()
            usual, self._fair_seconds = min(ended - began, self._fair_seconds), ended - began
            self._fair_at = ended + max(0.0, usual - _SWIFT_SECONDS)
        self._lanes.serve(lane, shares.served)
        return shares.claims


def _is_due(due: Due) -> bool:
    return due.due_in_seconds is not None and due.due_in_seconds <= 0


def _sound(claims: Sequence[Claim], token: UUID, *, blank_keys: bool) -> bool:
    """Whether each claim can be told from every other and is really ours."""
    distinct = len({claim.id for claim in claims}) == len(claims)
    return distinct and all(
        claim.kind and (claim.key or blank_keys) and claim.token == token and claim.attempts >= 0 for claim in claims
    )
