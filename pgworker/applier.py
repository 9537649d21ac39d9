"""Completions in which the app's own code takes part: whether the result is still wanted, and the app's own writes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import anyio
import anyio.to_thread
import psycopg
from psycopg.errors import QueryCanceled
from psycopg.pq import TransactionStatus

from pgworker.db import PINNED, AsyncConnection, SyncConnection, is_conflict, is_data_error, is_outage, send, send_sync
from pgworker.ending import Ending
from pgworker.events import Event, RunnerTrouble
from pgworker.executors.guest import Contained, is_stopping
from pgworker.executors.results import raised
from pgworker.finisher import LOST, Finisher, backoff
from pgworker.job import Claim
from pgworker.kind import Kind
from pgworker.outcome import (
    NOT_ELIGIBLE,
    QUEUE_COMPLETE_FAILED,
    RESULT_REJECTED,
    Decision,
    Failed,
    Settlement,
    Success,
)
from pgworker.queue import Queue
from pgworker.shared import Shared
from pgworker.statements import Answer, Statement

_TIMEOUTS = 3
_NEW_WORK = Answer("done", "pending")
_UNWANTED = Settlement("cancelled", NOT_ELIGIBLE)
_ENDED = (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)


class Applier:
    """Writes one success at a time, in one transaction with the app's own code; any other verdict is the finisher's."""

    def __init__(
        self, kind: Kind, queue: Queue, shared: Shared, *, finisher: Finisher, tell: Callable[[Event], None]
    ) -> None:
        self._kind = kind
        self._queue = queue
        self._shared = shared
        self._finisher = finisher
        self._tell = tell
        self._threads = anyio.CapacityLimiter(kind.policy.concurrency)

    async def write(self, ending: Ending) -> None:
        """Succeed one job, or cancel it as unwanted, together with the app's own code; until it commits or fails.

        The order is the app's own (its rows first, the job's last), so that the two cannot deadlock. A value or row
        that the database refuses is the job's failure; a lost lease takes the app's writes back with it.
        """
        tries = _Tries()
        while not self._finisher.has_given_up(ending):
            pause = await self._try(ending, tries)
            if pause is None:
                return
            await anyio.sleep(pause)

    async def _try(self, ending: Ending, tries: _Tries) -> float | None:
        """One try; returns the seconds until the next, or None when the job has its verdict."""
        tries.made += 1
        try:
            answer, decision = await self._once(ending)
        except _TakeBack as back:
            answer, decision = back.answer, ending.decision
            if answer.verdict in ("lost", "done"):
                return await self._superseded(ending, tries)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # it is the app's code: whatever it raises is the job's failure
            if isinstance(error, asyncio.CancelledError) and is_stopping():
                raise
            return await self._failed(ending, error, tries)
        if answer.verdict == "busy":
            return random.uniform(0.005, 0.05)  # noqa: S311 - spreads retries
        if answer == _NEW_WORK:
            await self._finisher.write(
                [ending]
            )  # new work came meanwhile: nothing of this run is kept, the row waits again
        else:
            ending.decision = decision
            self._finisher.answered(ending, answer)
            self._finisher.announce()
        return None

    async def _superseded(self, ending: Ending, tries: _Tries) -> float | None:
        """Somebody put new work, which the next try's check will see; or apply did, which the rollback has undone."""
        tries.superseded += 1
        if tries.superseded == 1:
            return 0.0
        ending.decide_anew(Failed(QUEUE_COMPLETE_FAILED, "SupersededByItself"))
        await self._finisher.write([ending])
        return None

    async def _failed(self, ending: Ending, error: BaseException, tries: _Tries) -> float | None:
        tries.timed_out += isinstance(error, (TimeoutError, QueryCanceled))
        if (is_outage(error) or is_conflict(error)) and tries.timed_out < _TIMEOUTS:
            self._tell(RunnerTrouble(self._kind.name, QUEUE_COMPLETE_FAILED, type(error).__name__))
            return backoff(tries.made)
        (failed,) = raised(self._kind, error.error if isinstance(error, _ElsewhereError) else error, 1)
        if is_data_error(error):
            failed = replace(failed, code=RESULT_REJECTED)
        elif isinstance(error, (psycopg.Error, TimeoutError)):
            failed = replace(failed, code=QUEUE_COMPLETE_FAILED)
        ending.decide_anew(failed)
        await self._finisher.write([ending])
        return None

    # --- one transaction --------------------------------------------------------------------------------------------

    async def _once(self, ending: Ending) -> tuple[Answer, Decision]:
        """The verdict, and the decision that it is about."""
        if not self._kind.is_async:
            return await anyio.to_thread.run_sync(self._once_in_thread, ending, limiter=self._threads)
        async with self._shared.apply_database.transaction() as connection:
            generation = await send(connection, self._queue.check(ending.claim))
            if generation != ending.claim.generation:
                return LOST if generation is None else _NEW_WORK, ending.decision
            decision = ending.decision
            with anyio.CancelScope():  # one that a guest leaves open is found here, and not after the commit
                decision = await self._ask_guests(connection, ending)
            await connection.execute(PINNED)
            answers = await send(connection, self._statement(ending.claim, decision))
            return _kept(answers.get(ending.claim.id, LOST), decision), decision

    def _once_in_thread(self, ending: Ending) -> tuple[Answer, Decision]:
        with self._shared.sync_apply_database.transaction() as connection:
            generation = send_sync(connection, self._queue.check(ending.claim))
            if generation != ending.claim.generation:
                return LOST if generation is None else _NEW_WORK, ending.decision
            decision = self._ask_guests_in_thread(connection, ending)
            connection.execute(PINNED)
            answers = send_sync(connection, self._statement(ending.claim, decision))
            return _kept(answers.get(ending.claim.id, LOST), decision), decision

    async def _ask_guests(self, connection: AsyncConnection, ending: Ending) -> Decision:
        if self._kind.eligible is not None:
            with _apps_code(connection):
                async with Contained():
                    wanted = await self._kind.eligible(connection, ending.job)
            if not _is_yes(wanted):
                return _UNWANTED
        if self._kind.apply is not None:
            with _apps_code(connection):
                async with Contained():
                    await self._kind.apply(connection, ending.job, ending.itself)
        return ending.decision

    def _ask_guests_in_thread(self, connection: SyncConnection, ending: Ending) -> Decision:
        if self._kind.eligible is not None:
            with _apps_code(connection):
                wanted = self._kind.eligible(connection, ending.job)
            if not _is_yes(wanted):
                return _UNWANTED
        if self._kind.apply is not None:
            with _apps_code(connection):
                self._kind.apply(connection, ending.job, ending.itself)
        return ending.decision

    def _statement(self, claim: Claim, decision: Decision) -> Statement[dict[int, Answer]]:
        if isinstance(decision, Success):
            return self._queue.finish([(claim, decision)])
        return self._queue.settle([(claim, decision)])


@dataclass(slots=True)
class _Tries:
    """How often one job's completion was tried, and what stopped it."""

    made: int = 0
    timed_out: int = 0
    superseded: int = 0


class _TakeBack(Exception):
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.verdict)
        self.answer = answer


class _ElsewhereError(Exception):
    """The app's own code met a dead connection that is not the one it was given."""

    def __init__(self, error: psycopg.Error) -> None:
        super().__init__()
        self.error = error


class TransactionEndedError(Exception):
    """The app's own code has committed, rolled back or closed what was to be completed after it."""


class NoAnswerError(TypeError):
    """`eligible` must say True or False: a forgotten return must not pass for no."""


def _is_yes(wanted: object) -> bool:
    if not isinstance(wanted, bool):
        raise NoAnswerError
    return wanted


@contextmanager
def _apps_code(connection: AsyncConnection | SyncConnection) -> Generator[None, None, None]:
    """Around the app's own code: what it does to the connection is no outage, which would be waited out for ever."""
    try:
        yield
    except (psycopg.OperationalError, psycopg.InterfaceError) as error:
        if error.sqlstate is None and not connection.broken:
            raise _ElsewhereError(error) from error
        raise
    if connection.info.transaction_status in _ENDED and not connection.broken:
        raise TransactionEndedError


def _kept(answer: Answer, decision: Decision) -> Answer:
    """The answer, if the job has become what was decided; anything else takes the app's writes back."""
    wanted = "succeeded" if isinstance(decision, Success) else decision.state
    if answer.verdict != "done" or answer.state != wanted:
        raise _TakeBack(answer)
    return answer
