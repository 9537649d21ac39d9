"""The steps of two runners: claims, and whatever becomes of them, in time or too late."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

from hypothesis import event
from hypothesis import strategies as st

from pgworker import Cancel, Park, Pause, Permanent, Retry
from pgworker import statements as sql
from pgworker.job import Claim
from pgworker.outcome import Failed, Released, Result, Rules, Settlement, Success, decide
from pgworker.retry import Backoff
from tests.stateful.bench import LATER, LIMIT_OF_EVICTIONS, SHORT, TTL, Machine, Runner
from tests.stateful.rows import Differs, End, Lane, at
from tests.stateful.steps import step

MOST_ATTEMPTS = 10
PICK = st.integers(0, 5)
_PROLONG = """
update pgworker.jobs set lease_expires_at = lease_expires_at + %(by)s * interval '1 second',
    lease_seconds = lease_seconds + %(by)s
where kind = %(kind)s and token = %(token)s"""


class Case(NamedTuple):
    """An outcome: what the handler gave, the wait after a failure, and what must be written."""

    result: Result
    wait: float
    end: End


NOW = 1e-6  # the shortest backoff there is
CASES: dict[str, Sequence[Case]] = {
    "retry": [
        Case(Retry(code="again"), NOW, End("pending", "again", counts=True, delay=NOW)),
        Case(Retry(code="again"), LATER, End("pending", "again", counts=True, delay=LATER)),
    ],
    "error": [
        Case(Failed("broken", "ValueError"), NOW, End("pending", "broken", counts=True, delay=NOW, error="ValueError"))
    ],
    "last attempt": [
        Case(Failed("broken", "ValueError"), NOW, End("failed", "broken", counts=True, error="ValueError"))
    ],
    "permanent": [Case(Permanent("no"), NOW, End("failed", "no", counts=True))],
    "panic": [
        Case(
            Failed("panic", "SystemExit", permanent=True), NOW, End("failed", "panic", counts=True, error="SystemExit")
        )
    ],
    "park": [
        Case(Park("parked", 0), NOW, End("pending", "parked", delay=0.0)),
        Case(Park("parked", LATER), NOW, End("pending", "parked", delay=LATER)),
    ],
    "pause": [Case(Pause(0, "down"), NOW, End("pending", "down", delay=0.0))],
    "cancel": [Case(Cancel("unwanted"), NOW, End("cancelled", "unwanted"))],
    "release": [Case(Released(), NOW, End("pending", None))],
}


class Runs(Machine):
    """What runners do."""

    @step(
        8,
        runner=st.sampled_from(("A", "B")),
        lane=st.integers(0, 3),
        limit=st.sampled_from((1, 1, 2, 10)),
        ttl=st.sampled_from((SHORT, SHORT, TTL)),
        evictions=st.sampled_from((LIMIT_OF_EVICTIONS, LIMIT_OF_EVICTIONS, 3, None)),
        version=st.sampled_from((2, 2, 2, 1)),
    )
    def claim(self, *, runner: Runner, lane: int, limit: int, ttl: float, evictions: int | None, version: int) -> None:
        """A runner claims from one of the lanes that have jobs."""
        self.claim_from(runner, self._lane(lane), limit=limit, ttl=ttl, evictions=evictions, version=version)

    def claim_from(
        self, runner: Runner, chosen: Lane, *, limit: int, ttl: float, evictions: int | None, version: int
    ) -> None:
        self.hit_rows("claim", self.model.rows_in_lane(chosen))
        token = uuid.uuid4()
        claims = self.hand.send(
            sql.claim_jobs(
                self.hand.tables, sql.Lane(self.kind, *chosen), limit=limit, token=token, runner=runner,
                ttl_seconds=ttl, max_evictions=evictions, version=version, facts=self.facts,
            )
        )  # fmt: skip
        lasts = ttl
        if ttl < TTL and claims:  # so that nothing ends by itself
            lasts = ttl + TTL
            self.admin.execute(_PROLONG, {"by": TTL, "kind": self.kind, "token": token})
        expected = self.model.claim(
            chosen, limit=limit, token=token, runner=runner, ttl=ttl, lasts=lasts, limit_of_evictions=evictions,
            version=version,
        )  # fmt: skip
        if [claim.id for claim in claims] != [row.id for row in expected]:
            raise Differs(f"claim: {claims} instead of {expected}")
        self.claimed = list(zip(claims, expected, strict=True))
        self.claims.extend((runner, claim) for claim in claims)
        self.hit("claimed", "something" if claims else "paused" if self.model.paused else "nothing")

    @step(1, runner=st.sampled_from(("A", "B")))
    def crash(self, runner: Runner) -> None:
        """A runner is gone: nothing of what it claimed will ever be ended by it."""
        for whose, claim in self.claims:
            if whose == runner and self.model.of(claim):
                self.hit_key("crash", claim.key)
        self.claims = deque(each for each in self.claims if each[0] != runner)

    @step(3, picks=st.lists(st.tuples(PICK, st.booleans()), min_size=1, max_size=3))
    def complete(self, picks: list[tuple[int, bool]]) -> None:
        """Some claims succeed, held or long lost, with a value or without."""
        finished: dict[int, tuple[Claim, Success]] = {}
        for pick, with_value in picks:
            claim = self.pick(pick)
            value = f'"{claim.id} {claim.generation} {claim.token}"' if with_value else None
            finished.setdefault(claim.id, (claim, Success(value)))
        for claim, _ in finished.values():
            self.hit_key("complete", claim.key)
        answers = self.hand.send(
            sql.finish_jobs(self.hand.tables, self.kind, list(finished.values()), facts=self.facts)
        )
        for claim, success in finished.values():
            value = success.value
            expected = self.model.finish(claim, None if value is None else value.strip('"'))
            self._judge("no value" if value is None else "value", claim, expected, answers[claim.id])

    @step(
        4,
        pick=PICK,
        outcome=st.sampled_from(("retry", "retry", "error", "last attempt", "permanent", "panic")),
        case=st.integers(0, 1),
    )
    def fail(self, pick: int, outcome: str, case: int) -> None:
        """A judged failure, which may be the last one allowed."""
        self.hit_key("fail", self.pick(pick).key)
        self._settle(pick, outcome, case)

    @step(3, pick=PICK, outcome=st.sampled_from(("park", "pause", "cancel", "release")), case=st.integers(0, 1))
    def give_back(self, pick: int, outcome: str, case: int) -> None:
        """An end that is nobody's failure."""
        self.hit_key("give_back", self.pick(pick).key)
        self._settle(pick, outcome, case)

    def _settle(self, pick: int, outcome: str, case: int) -> None:
        claim = self.pick(pick)
        cases = CASES[outcome]
        result, wait, end = cases[case % len(cases)]
        most = claim.max_attempts or MOST_ATTEMPTS
        if outcome == "last attempt":  # by the kind's limit; the job's own is met below
            most = claim.attempts + 1
        elif outcome in {"retry", "error"} and claim.attempts + 1 >= most:
            outcome, end = "last attempt", End("failed", end.code, counts=True, error=end.error)
        by = timedelta(seconds=wait)
        decision = decide(result, Rules(claim.attempts, most, Backoff(by, by, "none")), chance=0.5)
        assert isinstance(decision, Settlement)
        statement = sql.settle_jobs(self.hand.tables, self.kind, [(claim, decision)], facts=self.facts)
        answer = self.hand.send(statement)[claim.id]
        self._judge(outcome, claim, self.model.settle(claim, end), answer)

    def _judge(self, outcome: str, claim: Claim, expected: tuple[str, str | None], answer: sql.Answer) -> None:
        self.hit("outcome", outcome, answer.verdict)
        event(f"{outcome}: {answer.verdict}")
        if answer != expected:
            raise Differs(f"{outcome} of {claim}: {answer} instead of {expected}")
        if answer.verdict != "expired":  # it is of no more use, but may still be used
            held = next(each for each in self.claims if each[1] is claim)
            self.claims.remove(held)
            self.claims.appendleft(held)

    @step(4, pick=PICK, mode=st.sampled_from(("renew", "look", "check_fence")))
    def keep_lease(self, pick: int, mode: str) -> None:
        """A runner renews a lease, looks whether it is still there, or checks it before the app's own writes."""
        claim = self.pick(pick)
        self.hit_key(mode, claim.key)
        expected: object
        actual: object
        if mode == "check_fence":
            row = self.model.of(claim)
            expected = row.generation if row and self.model.live(row) else None
            with self.hand.connection.transaction(force_rollback=True):  # it changes settings
                actual = self.hand.send(sql.check_fence(self.hand.tables, claim))
        else:
            ttl = TTL if mode == "renew" else None
            expected = self.model.renew(claim, ttl)
            actual = self.hand.send(sql.renew_leases(self.hand.tables, [(claim, ttl)]))[claim.id]
        if actual != expected:
            raise Differs(f"{mode} of {claim}: {actual} instead of {expected}")

    @step(
        3,
        lane=st.integers(0, 3),
        limit=st.sampled_from((1, 1000)),
        ttl=st.sampled_from((SHORT, SHORT, TTL)),
        evictions=st.sampled_from((LIMIT_OF_EVICTIONS, 1, None)),
    )
    def reap(self, lane: int, limit: int, ttl: float, evictions: int | None) -> None:
        """The reaper reads a page of one lane."""
        chosen = self._lane(lane)
        self.hit_rows("reap", self.model.rows_in_lane(chosen))
        page = self.hand.send(
            sql.reap_expired(
                self.hand.tables, sql.Lane(self.kind, *chosen), limit=limit, ttl_seconds=ttl, max_evictions=evictions,
                after=sql.BEGINNING, facts=self.facts,
            )
        )  # fmt: skip
        due = self.model.due_in_lane(chosen)[:limit]
        cursor, leased = (due[-1].ready_at, due[-1].id) if due else None, sum(row.token is not None for row in due)
        expected = (*self.model.reap(chosen, limit=limit, ttl=ttl, limit_of_evictions=evictions), cursor, leased)
        if page != expected:
            raise Differs(f"reap: {page} instead of {expected}")

    @step(1)
    def survey(self) -> None:
        """A runner asks which lanes have jobs, and how long to wait."""
        self.hit_rows("survey", self.model.rows.values())
        found = self.hand.send(sql.survey_lanes(self.hand.tables, [self.kind]))
        if [each.lane for each in found] != [sql.Lane(self.kind, *lane) for lane in self.model.lanes()]:
            raise Differs(f"survey: {found} instead of {self.model.lanes()}")
        for each in found:
            self._judge_survey(each)

    def _judge_survey(self, found: sql.Due) -> None:
        lane = (found.lane.urgency, found.lane.priority)
        free = [
            row
            for row in self.model.rows.values()
            if (row.urgency, row.priority) == lane and row.state == "pending" and not self.model.live(row)
        ]
        wait = min(((at(row.ready_at) - self.model.now).total_seconds() for row in free), default=None)
        right = (found.due_in_seconds is None) == (wait is None)
        if wait is not None and found.due_in_seconds is not None:  # it is right to a few seconds, if that near
            right = abs(max(wait, -86_400.0) - found.due_in_seconds) < 60
        if not right or found.paused != self.model.paused:
            raise Differs(f"survey: {found}, the first free job is due in {wait}, paused {self.model.paused}")

    def _lane(self, lane: int) -> Lane:
        """One of the lanes that have something due, if there is one; of all that have jobs, for 3."""
        lanes = self.model.lanes()
        due = [each for each in lanes if lane < 3 and self.model.due_in_lane(each)]
        chosen = due or lanes or [Lane(0, 0)]
        return chosen[lane % len(chosen)]
