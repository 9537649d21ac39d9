"""One call of a handler: hold the leases, decode, run within the deadline, decide, finish."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from pgworker.applier import Applier
from pgworker.deadlines import Deadlines
from pgworker.ending import Ending
from pgworker.errors import PayloadError, class_name
from pgworker.events import Event, JobLost
from pgworker.executors.guest import Contained, is_stopping
from pgworker.executors.results import raised
from pgworker.finisher import Finisher
from pgworker.job import Cause, Claim, Job, Signal
from pgworker.kind import Kind
from pgworker.leases import Held, LeaseKeeper
from pgworker.middleware import Next
from pgworker.outcome import (
    HANDLER_FAILED,
    HANDLER_PANIC,
    HANDLER_RESULT_COUNT,
    HANDLER_TIMEOUT,
    PAYLOAD_INVALID,
    RESULT_REJECTED,
    Cancel,
    Failed,
    Released,
    Result,
    Returned,
    Rules,
    Settlement,
    Success,
    decide,
    is_result,
)
from pgworker.pauses import Pauses

_OF_THE_WHOLE_CALL = (HANDLER_FAILED, HANDLER_PANIC, HANDLER_RESULT_COUNT, HANDLER_TIMEOUT)


@dataclass(slots=True, eq=False)
class _Item:
    """One job of the call."""

    attempt: Attempt
    held: Held
    job: Job[object]
    signal: Signal
    """The job's, whatever the handler makes of that."""
    stopped: Cause | None = None
    """What the lease keeper said, from a thread of its own, or the runner."""
    result: Result | None = None

    def told(self, cause: Cause) -> None:
        """As stop, from a thread of the lease keeper's."""
        self.stop(cause)
        self.attempt.one_is_told()

    def stop(self, cause: Cause) -> None:
        """Tell the handler, and remember it for a later call of the same job; the first cause stays."""
        self.stopped = self.stopped or cause
        self.signal.set(cause)

    def begin_anew(self) -> None:
        """Forget the result, that a deadline passed, and what the handler has made of the job."""
        self.result = None
        self.job = _job(self.held.claim)
        self.signal = self.job.signal
        if self.stopped is not None:  # looked at after the exchange: a stop that came before it set the old signal
            self.signal.set(self.stopped)


@dataclass(frozen=True, slots=True)
class Tools:
    """What a runner lends to each of its calls."""

    loop: asyncio.AbstractEventLoop
    kind: Kind
    call: Next
    leases: LeaseKeeper
    finisher: Finisher
    applier: Applier
    pauses: Pauses
    paused: Callable[[], None]
    """Told when a job of this runner's has asked for a pause."""
    deadlines: Deadlines
    tell: Callable[[Event], None]


class Attempt:
    """Runs the handler once, over a job or a batch, whose leases are held already.

    Its end is told to `ended`, once the finisher has written all that `hand_over` or `give_back` left to it.

    First `call` in a scope of the caller's, then `hand_over`; or, if there is more to do, `call_again` and `finish`
    outside of it. Never raises for anything that the handler does.
    """

    __slots__ = ("_called", "_ended", "_is_finishing", "_items", "_releasing", "_scope", "_started", "_tools", "left")

    def __init__(self, tools: Tools, held: Sequence[Held], ended: Callable[[Attempt], None]) -> None:
        self._tools = tools
        self._ended = ended
        self.left = 0
        self._scope: anyio.CancelScope | None = None
        self._releasing = False
        self._is_finishing = False
        self._called: Sequence[_Item] = ()
        self._started = time.monotonic()
        self._items = [_Item(self, each, job := _job(each.claim), job.signal) for each in held]
        for item in self._items:
            item.held.listen(item.told)

    @property
    def held(self) -> list[Held]:
        """The leases of its jobs."""
        return [item.held for item in self._items]

    def release(self) -> None:
        """Cut the call short and give its jobs back; what has been written already stays."""
        self._releasing = True
        for item in self._items:
            item.stop("release")
        self._cancel()

    def close(self) -> None:
        """Let go of the jobs, which are written: what refers to itself would have to wait for the garbage collector."""
        self._items, self._called = [], ()

    def one_is_told(self) -> None:
        """One of the jobs shall stop; called from the lease keeper's threads."""
        self._tools.loop.call_soon_threadsafe(self._stop_if_none_is_left)

    def _stop_if_none_is_left(self) -> None:
        """A call goes on as long as one of its jobs is still wanted."""
        if all(item.signal.is_set() for item in self._called):
            self._cancel()

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    # --- run --------------------------------------------------------------------------------------------------------

    async def call(self, scope: anyio.CancelScope) -> None:
        """Call the handler in this scope, which a stop or the deadline cancels; what does not fit never gets there."""
        for item in self._items:
            self._decode(item)
        called = [item for item in self._items if item.result is None and self._is_wanted(item)]
        if called and not self._releasing:
            await self._call_handler(called, scope)

    @property
    def can_be_finished(self) -> bool:
        """Whether it is known of some job at least what is to become of it, and nobody has begun to write that."""
        is_known = self._releasing or any(item.result is not None or item.signal.is_set() for item in self._items)
        return is_known and not self._is_finishing

    def excuse(self) -> bool:
        """Give back the jobs of a call that somebody unknown has cancelled; says whether there are any.

        For calls that were not the first of their task: an earlier one may have left a timer behind that cancels it.
        """
        struck = [item for item in self._called if isinstance(item.result, Failed) and item.result.is_cancelled]
        for item in struck:
            item.result = Released()
        return bool(struck)

    def hand_over(self) -> bool:
        """Leave the writing to the finisher, if all has gone well and there is nothing else to do.

        False, and nothing done, if there is.
        """
        if self._releasing or self._tools.kind.has_guests:
            return False
        for item in self._items:
            if type(item.result) is not Returned or item.signal.is_set():
                return False
        run_seconds = time.monotonic() - self._started
        endings = [self._ending(item, item.result, run_seconds) for item in self._items if item.result is not None]
        self._tools.finisher.put(endings, self)
        return True

    def give_back(self) -> None:
        """Release the jobs, which no call has begun; the finisher writes it."""
        self.release()
        endings = [self._ending(item, Released(), 0.0) for item in self._items]
        self._tools.finisher.put(endings, self)

    def all_written(self) -> None:
        """What was left to the finisher has its verdicts."""
        self._ended(self)

    async def call_again(self) -> None:
        """Call the handler for each job alone, if the policy says so and the call has failed as a whole."""
        if self._tools.kind.policy.singly and len(self._called) > 1 and all(map(_failed_with_its_call, self._called)):
            await self._call_singly(self._called)

    async def _call_singly(self, items: Sequence[_Item]) -> None:
        """Once more, each job alone with a deadline of its own: what one of them does is not the others' fault.

        None for which a stop has come: it may be why the call failed. What has no result then is given back.
        """
        for item in items:
            item.begin_anew()
        for item in items:
            self._decode(item)
            if item.result is None and self._is_wanted(item):
                async with Contained():
                    with anyio.CancelScope() as scope:
                        await self._call_handler([item], scope)

    def _is_wanted(self, item: _Item) -> bool:
        """Whether a call may begin for this job."""
        if time.monotonic() >= item.held.guard:  # this process stood still: somebody else runs it
            item.stop("lost")
        return not item.signal.is_set()

    async def _call_handler(self, items: Sequence[_Item], scope: anyio.CancelScope) -> None:
        results: Sequence[Result] = ()
        self._called, self._scope = items, scope
        self._tools.deadlines.begin(scope)
        try:
            results = await self._results([item.job for item in items])
        except asyncio.CancelledError as error:
            if scope.cancel_called:
                raise
            results = raised(self._tools.kind, error, len(items))  # by a scope that the handler has left open
        finally:
            self._scope = None
            if self._tools.deadlines.end(scope):  # what came after the deadline does not count
                results = [Failed(HANDLER_TIMEOUT)] * len(items)
            for item, result in zip(items, results, strict=False):
                item.result = result

    async def _results(self, jobs: Sequence[Job[object]]) -> Sequence[Result]:
        try:
            results = await self._tools.call(jobs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a middleware may raise anything; the executors do not
            if isinstance(error, asyncio.CancelledError) and is_stopping():
                raise
            return raised(self._tools.kind, error, len(jobs))
        if len(results) != len(jobs):
            return [Failed(HANDLER_RESULT_COUNT, permanent=True)] * len(jobs)
        return [each if is_result(each) else Failed(RESULT_REJECTED, class_name(each)) for each in results]

    def _decode(self, item: _Item) -> None:
        try:
            payload = self._tools.kind.payload.decode(item.held.claim.payload or "null")
        except PayloadError as error:
            item.result = Failed(PAYLOAD_INVALID, f"PayloadError at {error.path}", permanent=True)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a type's own code may raise anything; memory may be short
            (item.result,) = raised(self._tools.kind, error, 1)
        else:
            item.job.payload = payload

    # --- finish -----------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Write every job's end; completions with the app's own code in them one by one, the rest together."""
        self._is_finishing = True
        run_seconds = time.monotonic() - self._started
        endings: list[Ending] = []
        for item in self._items:
            result = self._verdict(item)
            if result is None:
                self._tools.tell(JobLost(item.held.claim.kind, item.held.claim.key, "lost"))
            else:
                endings.append(self._ending(item, result, run_seconds))
        guarded: list[Ending] = []
        if self._tools.kind.has_guests:
            guarded = [ending for ending in endings if isinstance(ending.decision, Success)]
            endings = [ending for ending in endings if not isinstance(ending.decision, Success)]
        settlements = [ending.decision for ending in endings if isinstance(ending.decision, Settlement)]
        paused = self._tools.pauses.start(settlements)  # before anything is awaited: no call may begin meanwhile
        if paused:
            self._tools.paused()
        await self._tools.finisher.write(endings)
        if paused:
            await self._tools.pauses.settled(paused)
        for ending in guarded:
            if self._releasing:
                ending.decision = decide(Released(), ending.rules, chance=0)
                await self._tools.finisher.write([ending])
            else:
                await self._tools.applier.write(ending)

    def _ending(self, item: _Item, result: Result, run_seconds: float) -> Ending:
        """What is to be written of this job."""
        policy = self._tools.kind.policy
        claim = item.held.claim
        limit = claim.max_attempts if claim.max_attempts is not None else policy.max_attempts
        rules = Rules(claim.attempts, limit, policy.backoff)
        decision = decide(result, rules, chance=random.random())  # noqa: S311 - spreads retries, guards nothing
        itself = result.itself if isinstance(result, Returned) else None
        return Ending(item.job, item.held, rules, decision, run_seconds, itself)

    def _verdict(self, item: _Item) -> Result | None:
        """The result that counts; None when the lease is gone.

        A stop beats what the handler made of it; a finished job beats a late cancel.
        """
        cause = item.signal.cause
        if cause == "lost":
            return None
        if self._releasing:
            return Released()
        if item.result is not None:
            return item.result
        return Cancel() if cause == "cancel" else Released()


def _job(claim: Claim) -> Job[object]:
    return Job(  # in the order of its fields: names take longer
        claim.kind,
        claim.key,
        claim.revision or None,
        None,
        claim.attempts,
        claim.evictions,
        claim.generation,
        claim.lease_epoch,
        claim.ready_at,
        claim.token,
        Signal(),
    )


def _failed_with_its_call(item: _Item) -> bool:
    """Whether the call is at fault and not, by what the handler said, this job."""
    return isinstance(item.result, Failed) and item.result.code in _OF_THE_WHOLE_CALL
