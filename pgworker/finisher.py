"""Writes what became of claimed jobs: many at once, each with its own verdict; and alone, with the app's own writes."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import cast

import anyio
import anyio.to_thread
import psycopg
from psycopg.errors import QueryCanceled
from psycopg.pq import TransactionStatus

from pgworker.db import (
    AsyncConnection,
    Database,
    SyncConnection,
    SyncDatabase,
    is_conflict,
    is_data_error,
    is_outage,
    send,
    send_sync,
)
from pgworker.events import Event, JobLost, JobSettled, RunnerTrouble
from pgworker.executors.guest import Contained, is_stopping
from pgworker.executors.results import raised
from pgworker.job import Claim, Job
from pgworker.kind import Kind
from pgworker.leases import Held
from pgworker.outcome import (
    QUEUE_COMPLETE_FAILED,
    QUEUE_RELEASE_FAILED,
    QUEUE_RETRY_FAILED,
    RESULT_REJECTED,
    Decision,
    Failed,
    Rules,
    Settlement,
    Success,
    decide,
)
from pgworker.queue import Queue
from pgworker.statements import Answer

_MOST_AT_ONCE = 500
_APPLY_TIMEOUTS = 3
_LOST = Answer("lost", None)
_NEW_WORK = Answer("done", "pending")
_ENDED = (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)


@dataclass(slots=True, eq=False)
class Ending:
    """A run's end on its way into the table."""

    claim: Claim
    job: Job[object]
    held: Held
    rules: Rules
    decision: Decision
    run_seconds: float
    itself: object = None
    """The returned value as the app's own writes get it."""
    written: anyio.Event = field(default_factory=anyio.Event)


class Finisher:
    """The one writer of a runner: what gathers while a statement is under way goes with the next one.

    Past `give_up_at()`, a monotonic time, nothing is tried any more: what is left comes back when its lease expires.
    """

    def __init__(
        self,
        kind: Kind,
        queue: Queue,
        *,
        database: Database,
        apply_database: Database,
        sync_apply_database: SyncDatabase,
        tell: Callable[[Event], None],
        give_up_at: Callable[[], float],
    ) -> None:
        self._kind = kind
        self._queue = queue
        self._database = database
        self._apply_database = apply_database
        self._sync_apply_database = sync_apply_database
        self._tell = tell
        self._fresh: deque[Ending] = deque()
        self._again: list[tuple[float, list[Ending]]] = []
        self._work = anyio.Event()
        self._failures = 0
        self._give_up_at = give_up_at
        self._threads = anyio.CapacityLimiter(kind.policy.concurrency)

    async def write(self, endings: Sequence[Ending]) -> None:
        """Write these ends and return when each has its verdict, or has been given up because its lease is gone."""
        self._fresh.extend(endings)
        self._work.set()
        for ending in endings:
            await ending.written.wait()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            for group in self._due_groups():
                await self._write_group(group)
            await self._wait()

    def _due_groups(self) -> list[list[Ending]]:
        now = time.monotonic()
        due = [group for at, group in self._again if at <= now]
        self._again = [(at, group) for at, group in self._again if at > now]
        while self._fresh:
            due.append([self._fresh.popleft() for _ in range(min(len(self._fresh), _MOST_AT_ONCE))])
        return due

    async def _wait(self) -> None:
        if self._fresh:
            return
        self._work = anyio.Event()
        seconds = min((at for at, _ in self._again), default=float("inf")) - time.monotonic()
        with anyio.move_on_after(max(0.0, seconds)):
            await self._work.wait()

    async def _write_group(self, group: Sequence[Ending]) -> None:
        """Send a group as one statement for successes and one for the rest."""
        alive = [ending for ending in group if not self._given_up(ending)]
        successes = [ending for ending in alive if isinstance(ending.decision, Success)]
        others = [ending for ending in alive if isinstance(ending.decision, Settlement)]
        for part in (successes, others):
            if part:
                await self._send(part)

    async def _send(self, endings: Sequence[Ending]) -> None:
        try:
            if isinstance(endings[0].decision, Success):
                statement = self._queue.finish([(each.claim, cast("Success", each.decision)) for each in endings])
            else:
                statement = self._queue.settle([(each.claim, cast("Settlement", each.decision)) for each in endings])
            answers = await self._database.run(statement, within=self._give_up_at() - time.monotonic())
        except (psycopg.Error, TimeoutError) as error:
            self._send_again(endings, error)
        else:
            self._failures = 0
            for ending in endings:
                self._answered(ending, answers.get(ending.claim.id, _LOST))

    def _send_again(self, endings: Sequence[Ending], error: psycopg.Error | TimeoutError) -> None:
        """After an error: halve a batch with a poisonous value, fail the value's own job, else try again later."""
        now = time.monotonic()
        if is_data_error(error) and len(endings) > 1:
            middle = len(endings) // 2
            self._again += [(now, list(endings[:middle])), (now, list(endings[middle:]))]
        elif is_data_error(error) and isinstance(endings[0].decision, Success):
            self._decide_anew(endings[0], Failed(RESULT_REJECTED, type(error).__name__))
            self._again.append((now, list(endings)))
        else:
            self._failures += 1
            self._tell(RunnerTrouble(self._kind.name, _trouble_code(endings[0].decision), type(error).__name__))
            self._again.append((now + _backoff(self._failures), list(endings)))

    def _answered(self, ending: Ending, answer: Answer) -> None:
        match answer.verdict:
            case "done":
                self._settled(ending, answer)
            case "busy":  # alone from now on: whoever holds this row must not hold up the others
                self._again.append((time.monotonic() + random.uniform(0.005, 0.05), [ending]))  # noqa: S311
            case "lost" | "expired":
                self._tell(JobLost(self._kind.name, ending.claim.key, answer.verdict))
                ending.written.set()

    def _settled(self, ending: Ending, answer: Answer) -> None:
        """Tell what the table says now. A success that the table did not take met new work: that is a lost run."""
        decision = ending.decision
        ending.written.set()
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

    def _given_up(self, ending: Ending) -> bool:
        """Whether there is no use in trying any longer; says so once."""
        if time.monotonic() < min(ending.held.guard, self._give_up_at()):
            return False
        if not ending.written.is_set():
            self._tell(JobLost(self._kind.name, ending.claim.key, "guard"))
            ending.written.set()
        return True

    def _decide_anew(self, ending: Ending, result: Failed) -> None:
        ending.decision = decide(result, ending.rules, chance=random.random())  # noqa: S311 - spreads retries

    # --- completions that carry the app's own writes ----------------------------------------------------------------

    async def write_applying(self, ending: Ending) -> None:
        """Succeed one job together with the app's own writes, in one transaction; repeated until it commits or fails.

        The order is the app's own (its rows first, the job's last), so that the two cannot deadlock. A value or row
        that the database refuses is the job's failure; a lost lease takes the app's writes back with it.
        """
        tries = _Tries()
        while not self._given_up(ending):
            pause = await self._try_to_apply(ending, tries)
            if pause is None:
                return
            await anyio.sleep(pause)

    async def _try_to_apply(self, ending: Ending, tries: _Tries) -> float | None:
        """One try; returns the seconds until the next, or None when the job has its verdict."""
        tries.made += 1
        try:
            answer = await self._apply_once(ending)
        except _TakeBack as back:
            answer = back.answer
            if answer.verdict in ("lost", "done"):
                return await self._superseded_in_apply(ending, tries)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # apply is the app's code: whatever it raises is the job's failure
            if isinstance(error, asyncio.CancelledError) and is_stopping():
                raise
            return await self._apply_failed(ending, error, tries)
        if answer.verdict == "busy":
            return random.uniform(0.005, 0.05)  # noqa: S311 - spreads retries
        if answer == _NEW_WORK:
            await self.write([ending])  # new work came meanwhile: nothing of this run is kept, the row waits again
        else:
            self._answered(ending, answer)
        return None

    async def _superseded_in_apply(self, ending: Ending, tries: _Tries) -> float | None:
        """Somebody put new work, which the next try's check will see; or apply did, which the rollback has undone."""
        tries.superseded += 1
        if tries.superseded == 1:
            return 0.0
        self._decide_anew(ending, Failed(QUEUE_COMPLETE_FAILED, "SupersededByItself"))
        await self.write([ending])
        return None

    async def _apply_failed(self, ending: Ending, error: BaseException, tries: _Tries) -> float | None:
        tries.timed_out += isinstance(error, (TimeoutError, QueryCanceled))
        if (is_outage(error) or is_conflict(error)) and tries.timed_out < _APPLY_TIMEOUTS:
            self._tell(RunnerTrouble(self._kind.name, QUEUE_COMPLETE_FAILED, type(error).__name__))
            return _backoff(tries.made)
        (failed,) = raised(self._kind, error.error if isinstance(error, _ElsewhereError) else error, 1)
        if is_data_error(error):
            failed = replace(failed, code=RESULT_REJECTED)
        elif isinstance(error, (psycopg.Error, TimeoutError)):
            failed = replace(failed, code=QUEUE_COMPLETE_FAILED)
        self._decide_anew(ending, failed)
        await self.write([ending])
        return None

    async def _apply_once(self, ending: Ending) -> Answer:
        if not self._kind.is_async:
            return await anyio.to_thread.run_sync(self._apply_in_thread, ending, limiter=self._threads)
        apply = self._kind.apply
        assert apply is not None  # noqa: S101 - only called for kinds that have one
        success = cast("Success", ending.decision)
        async with self._apply_database.transaction() as connection:
            generation = await send(connection, self._queue.check(ending.claim))
            if generation != ending.claim.generation:
                return _LOST if generation is None else _NEW_WORK
            with _apps_code(connection):
                async with Contained():
                    await apply(connection, ending.job, ending.itself)
            answers = await send(connection, self._queue.finish([(ending.claim, success)]))
            return _kept(answers.get(ending.claim.id, _LOST))

    def _apply_in_thread(self, ending: Ending) -> Answer:
        apply = self._kind.apply
        assert apply is not None  # noqa: S101 - only called for kinds that have one
        success = cast("Success", ending.decision)
        with self._sync_apply_database.transaction() as connection:
            generation = send_sync(connection, self._queue.check(ending.claim))
            if generation != ending.claim.generation:
                return _LOST if generation is None else _NEW_WORK
            with _apps_code(connection):
                apply(connection, ending.job, ending.itself)
            answers = send_sync(connection, self._queue.finish([(ending.claim, success)]))
            return _kept(answers.get(ending.claim.id, _LOST))


@dataclass(slots=True)
class _Tries:
    """How often one job's own writes were tried, and what stopped them."""

    made: int = 0
    timed_out: int = 0
    superseded: int = 0


class _TakeBack(Exception):
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.verdict)
        self.answer = answer


class _ElsewhereError(Exception):
    """The app's own writes met a dead connection that is not the one they were given."""

    def __init__(self, error: psycopg.Error) -> None:
        super().__init__()
        self.error = error


class TransactionEndedError(Exception):
    """The app's own writes have committed, rolled back or closed what was to be completed after them."""


@contextmanager
def _apps_code(connection: AsyncConnection | SyncConnection) -> Generator[None, None, None]:
    """Around the app's own writes: what they do to the connection is no outage, which would be waited out for ever."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        if error.sqlstate is None and not connection.broken:
            raise _ElsewhereError(error) from error
        raise
    if connection.info.transaction_status in _ENDED and not connection.broken:
        raise TransactionEndedError


def _kept(answer: Answer) -> Answer:
    """The answer, if the job did succeed; anything else takes the app's writes back."""
    if answer.verdict != "done" or answer.state != "succeeded":
        raise _TakeBack(answer)
    return answer


def _trouble_code(decision: Decision) -> str:
    if isinstance(decision, Success):
        return QUEUE_COMPLETE_FAILED
    return QUEUE_RETRY_FAILED if decision.counts else QUEUE_RELEASE_FAILED


def _backoff(failures: int) -> float:
    """Seconds before the next try after so many failures in a row: 50 ms doubling to a second, spread."""
    return min(1.0, 0.05 * float(2 ** min(failures, 10))) * random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries
