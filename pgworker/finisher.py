"""Writes what became of claimed jobs: many at once, each with its own verdict."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, cast

import anyio
import psycopg
from psycopg.errors import LockNotAvailable, QueryCanceled, RaiseException

from pgworker.db import is_conflict, is_data_error, is_outage
from pgworker.ending import Ending, Group, apart, size_of
from pgworker.events import Event, JobLost, JobSettled, RunnerTrouble
from pgworker.kind import Kind
from pgworker.leases import Held
from pgworker.outcome import (
    QUEUE_COMPLETE_FAILED,
    QUEUE_RELEASE_FAILED,
    QUEUE_RETRY_FAILED,
    QUEUE_WRITE_REFUSED,
    RESULT_REJECTED,
    Decision,
    Failed,
    Settlement,
    Success,
)
from pgworker.queue import Queue
from pgworker.shared import Shared
from pgworker.statements import Answer

MOST_AT_ONCE = 500
_MOST_BYTES = 8 * 1024 * 1024
"""Of values in one statement: they must have reached the server, and be stored, within its deadline."""
_STALLS = (TimeoutError, QueryCanceled, LockNotAvailable)
_PARTS = 8
"""Into so many goes what has stalled: the fewer steps lead to the one that is at fault, the less the others wait."""
_REFUSED_SECONDS = 30.0
"""How long a write is repeated that the database refuses, as when a right was taken away: somebody may mend it."""
LOST = Answer("lost", None)
_TAKEN = Answer("done", "succeeded")


class _Lane:
    """Groups of endings, each with the monotonic time from which on it may be written, one after the other."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, Sequence[Ending]]] = []
        self.changed = anyio.Event()

    def put(self, group: Sequence[Ending], at: float) -> None:
        self.waiting.append((at, group))
        self.changed.set()

    def take_due(self) -> list[Sequence[Ending]]:
        now = time.monotonic()
        due = [group for at, group in self.waiting if at <= now]
        self.waiting = [(at, group) for at, group in self.waiting if at > now]
        return due

    async def wait(self) -> None:
        """Until a group is due, or something has come since the last wait."""
        seconds = min((at for at, _ in self.waiting), default=float("inf")) - time.monotonic()
        with anyio.move_on_after(max(0.0, seconds)):
            await self.changed.wait()
        self.changed = anyio.Event()


class _Waiting:
    """Waits for the verdicts of some endings."""

    def __init__(self) -> None:
        self.left = 0
        self.written = anyio.Event()

    def all_written(self) -> None:
        self.written.set()


class Finisher:
    """The writer of a runner: what gathers while a statement is under way goes with the next one.

    A lease is dropped with its job's verdict. Successes that nobody listens to are only counted, by `succeeded`.
    What has stalled goes on beside the rest, in ever smaller groups, so that it holds up nobody else.
    Past `give_up_at()`, a monotonic time, nothing is tried any more: what is left comes back when its lease expires.
    """

    def __init__(
        self,
        kind: Kind,
        queue: Queue,
        shared: Shared,
        *,
        tell: Callable[[Event], None],
        succeeded: Callable[[int], None],
        give_up_at: Callable[[], float],
    ) -> None:
        self._kind = kind
        self._queue = queue
        self._shared = shared
        self._tell = tell
        self._succeeded = succeeded
        self._fresh: deque[Ending] = deque()
        self._swift = _Lane()
        self._slow = _Lane()
        self._failures = 0
        self._give_up_at = give_up_at
        self._some_ended = False
        self._to_drop: list[Held] = []

    async def write(self, endings: Sequence[Ending]) -> None:
        """Write these ends and return when each has its verdict, or has been given up because its lease is gone."""
        if endings:
            waiting = _Waiting()
            self.put(endings, waiting)
            await waiting.written.wait()

    def put(self, endings: Sequence[Ending], group: Group) -> None:
        """Write these ends, which are some, as soon as may be, and tell the group when each has its verdict."""
        group.left = len(endings)
        for ending in endings:
            ending.group = group
        self._fresh.extend(endings)
        self._swift.changed.set()

    async def run(self) -> None:
        """Write until cancelled."""
        async with anyio.create_task_group() as lanes:
            lanes.start_soon(self._write_lane, self._swift)
            lanes.start_soon(self._write_lane, self._slow)

    async def _write_lane(self, lane: _Lane) -> None:
        while True:
            for group in lane.take_due():
                await self._write_group(group)
            if lane is self._swift and self._fresh:
                await self._write_group(self._take_fresh())
            else:
                await lane.wait()

    def _take_fresh(self) -> list[Ending]:
        """As many as one statement may hold, by number and by bytes; one at least."""
        group = [self._fresh.popleft()]
        size = size_of(group[0])
        while self._fresh and len(group) < MOST_AT_ONCE:
            size += size_of(self._fresh[0])
            if size > _MOST_BYTES:
                break
            group.append(self._fresh.popleft())
        return group

    def _put(self, endings: Sequence[Ending], at: float) -> None:
        lane = self._slow if any(ending.stalls for ending in endings) else self._swift
        lane.put(endings, at)

    async def _write_group(self, group: Sequence[Ending]) -> None:
        """Send a group as one statement for successes and one for the rest."""
        now = time.monotonic()
        if now < self._give_up_at() and all(ending.held.guard > now for ending in group):
            alive = group
        else:
            alive = [ending for ending in group if not self.has_given_up(ending)]
        successes = [ending for ending in alive if isinstance(ending.decision, Success)]
        others = [ending for ending in alive if isinstance(ending.decision, Settlement)]
        for part in (*apart(successes), *apart(others)):
            await self._send(part)
        self.announce()

    async def _send(self, endings: Sequence[Ending]) -> None:
        try:
            if isinstance(endings[0].decision, Success):
                statement = self._queue.finish([(each.claim, cast("Success", each.decision)) for each in endings])
            else:
                statement = self._queue.settle([(each.claim, cast("Settlement", each.decision)) for each in endings])
            answers = await self._shared.database.run(statement, within=self._give_up_at() - time.monotonic())
        except UnicodeError as error:  # of a text that cannot be sent, as a lone surrogate
            await self._send_again(endings, psycopg.DataError(type(error).__name__))
        except (psycopg.Error, TimeoutError) as error:
            await self._send_again(endings, error)
        else:
            self._failures = 0
            loud = endings
            if isinstance(endings[0].decision, Success) and not self._shared.events.hear_of_successes:
                loud = self._count(endings, answers)
            for ending in loud:
                self.answered(ending, answers.get(ending.claim.id, LOST))

    def _count(self, endings: Sequence[Ending], answers: Mapping[int, Answer]) -> list[Ending]:
        """Act on the successes that were taken as such without a word about each; returns the others."""
        loud: list[Ending] = []
        for ending in endings:
            if answers.get(ending.held.claim.id) == _TAKEN:
                self._end(ending)
            else:
                loud.append(ending)
        count = len(endings) - len(loud)
        if count:
            self._some_ended = True
            self._succeeded(count)
        return loud

    async def _send_again(self, endings: Sequence[Ending], error: psycopg.Error | TimeoutError) -> None:
        """After an error: part a batch with a poisonous value, fail the value's own job, else try again later."""
        now = time.monotonic()
        if _is_the_values_fault(error) and len(endings) > 1:
            self._put_apart(endings, 2)
        elif _is_the_values_fault(error) and isinstance(endings[0].decision, Success):
            endings[0].decide_anew(Failed(RESULT_REJECTED, type(error).__name__))
            self._put(endings, now)
        else:
            self._tell(RunnerTrouble(self._kind.name, _trouble_code(endings[0].decision), type(error).__name__))
            if isinstance(error, _STALLS):
                await self._stalled(endings, error)
            else:
                self._failures += 1
                lasting = not (is_outage(error) or is_conflict(error))
                self._put_patient(endings, error, lasting=lasting, pause=backoff(self._failures))

    async def _stalled(self, endings: Sequence[Ending], error: psycopg.Error | TimeoutError) -> None:
        """It was too much for one statement, or one of the rows that it writes to is locked: part them to find which.

        Alone, what is locked waits for its lock as long as its lease goes on; what is too much comes to an end.
        """
        for ending in endings:
            ending.stalls += 1
        if len(endings) > 1:
            self._put_apart(endings, _PARTS)
        else:
            lasting = not isinstance(error, LockNotAvailable) and await self._is_too_much(error)
            self._put_patient(endings, error, lasting=lasting, pause=backoff(endings[0].stalls))

    async def _is_too_much(self, error: psycopg.Error | TimeoutError) -> bool:
        """Whether it was the statement, and not an outage: the server itself says so, or it answers something else."""
        if isinstance(error, QueryCanceled):
            return True
        try:
            await self._shared.database.run(self._queue.survey(), within=self._give_up_at() - time.monotonic())
        except (psycopg.Error, TimeoutError):
            return False
        return True

    def _put_apart(self, endings: Sequence[Ending], parts: int) -> None:
        size = -(-len(endings) // parts)
        for first in range(0, len(endings), size):
            self._put(endings[first : first + size], time.monotonic())

    def _put_patient(
        self,
        endings: Sequence[Ending],
        error: psycopg.Error | TimeoutError,
        *,
        lasting: bool,
        pause: float,
    ) -> None:
        """Try them again after a pause, save those that have been refused for too long by an error that lasts."""
        now = time.monotonic()
        patient = [ending for ending in endings if not (lasting and self._is_refused(ending, error, now))]
        if patient:
            self._put(patient, now + pause)

    def _is_refused(self, ending: Ending, error: psycopg.Error | TimeoutError, now: float) -> bool:
        """Whether the time is up for an error that no repetition mends; sees to what is left to do then.

        A success becomes a failure of its job, if that at least can be written; what cannot be written as anything is
        left to the end of its lease. Without that, neither the job nor a drain would ever come to an end.
        """
        ending.refused_at = now if ending.refused_at is None else ending.refused_at
        if now - ending.refused_at < _REFUSED_SECONDS:
            return False
        if isinstance(ending.decision, Success):
            ending.decide_anew(Failed(QUEUE_COMPLETE_FAILED, type(error).__name__))
            self._put([ending], now)
        else:
            self._tell(RunnerTrouble(self._kind.name, QUEUE_WRITE_REFUSED, type(error).__name__))
            self._give_up(ending, "refused")
        return True

    def answered(self, ending: Ending, answer: Answer) -> None:
        """Act on the verdict about one job."""
        match answer.verdict:
            case "done":
                self._settled(ending, answer)
            case "busy":  # alone from now on: whoever holds this row must not hold up the others
                self._put([ending], time.monotonic() + random.uniform(0.005, 0.05))  # noqa: S311 - spreads retries
            case "lost" | "expired":
                self._tell(JobLost(self._kind.name, ending.claim.key, answer.verdict))
                self._end(ending)

    def _settled(self, ending: Ending, answer: Answer) -> None:
        """Tell what the table says now. A success that the table did not take met new work: that is a lost run."""
        decision = ending.decision
        self._end(ending)
        self._some_ended |= answer.state != "pending"
        if isinstance(decision, Success) and answer.state != "succeeded":
            self._tell(JobLost(self._kind.name, ending.claim.key, "lost"))
            return
        settlement = decision if isinstance(decision, Settlement) else None
        self._tell(
            JobSettled(
                kind=self._kind.name,
                key=ending.claim.key,
                attempt=ending.claim.attempts + 1,
                state=answer.state or "pending",
                code=settlement.code if settlement else None,
                counted=settlement is not None and settlement.counts,
                waited_seconds=ending.claim.waited_seconds,
                run_seconds=ending.run_seconds,
                retry_in_seconds=settlement.delay_seconds if settlement else None,
            )
        )

    def announce(self) -> None:
        """Tell those who wait for results, and drop the leases, once for all that have ended since the last time."""
        if self._to_drop:
            self._shared.leases.drop(self._to_drop)
            self._to_drop = []
        if self._some_ended and self._kind.policy.results == "notify":
            self._shared.done(self._kind.name)
        self._some_ended = False

    def has_given_up(self, ending: Ending) -> bool:
        """Whether there is no use in trying any longer; says so once."""
        if time.monotonic() < min(ending.held.guard, self._give_up_at()):
            return False
        if not ending.written:
            self._give_up(ending, "guard")
        return True

    def _give_up(self, ending: Ending, reason: Literal["guard", "refused"]) -> None:
        self._tell(JobLost(self._kind.name, ending.claim.key, reason))
        self._end(ending)

    def _end(self, ending: Ending) -> None:
        """It has its verdict, or no hope of one."""
        if ending.written:
            return
        ending.written = True
        self._to_drop.append(ending.held)
        group = ending.group
        if group is not None:
            group.left -= 1
            if not group.left:
                group.all_written()


def _trouble_code(decision: Decision) -> str:
    if isinstance(decision, Success):
        return QUEUE_COMPLETE_FAILED
    return QUEUE_RETRY_FAILED if decision.counts else QUEUE_RELEASE_FAILED


def backoff(failures: int) -> float:
    """Seconds before the next try after so many failures in a row: 50 ms doubling to a second, spread."""
    return min(1.0, 0.05 * float(2 ** min(failures, 10))) * random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries


def _is_the_values_fault(error: BaseException) -> bool:
    """Whether other values would do: by the server, by the driver itself, or by a trigger that raises."""
    return is_data_error(error) or isinstance(error, (psycopg.DataError, RaiseException))
