"""One call of a handler: hold the leases, decode, run within the deadline, decide, finish."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from pgworker.applier import Applier
from pgworker.errors import PayloadError
from pgworker.events import Event, JobLost
from pgworker.executors.guest import Contained, is_stopping
from pgworker.executors.results import raised
from pgworker.finisher import Ending, Finisher
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
from pgworker.queue import Renewals

_OF_THE_WHOLE_CALL = (HANDLER_FAILED, HANDLER_PANIC, HANDLER_RESULT_COUNT, HANDLER_TIMEOUT)


@dataclass(slots=True, eq=False)
class _Item:
    """One job of the call."""

    claim: Claim
    job: Job[object]
    stopped: Cause | None = None
    """What the lease keeper said, from a thread of its own, or the runner."""
    result: Result | None = None

    def stop(self, cause: Cause) -> None:
        """Tell the handler, and remember it for a later call of the same job; the first cause stays."""
        self.stopped = self.stopped or cause
        self.job.signal.set(cause)

    def begin_anew(self) -> None:
        """Forget the result, and that a deadline passed."""
        self.result = None
        object.__setattr__(self.job, "signal", Signal())
        if self.stopped is not None:  # looked at after the exchange: a stop that came before it set the old signal
            self.job.signal.set(self.stopped)


@dataclass(frozen=True, slots=True)
class Tools:
    """What a runner lends to each of its calls."""

    kind: Kind
    call: Next
    leases: LeaseKeeper
    renewals: Renewals
    finisher: Finisher
    applier: Applier
    pauses: Pauses
    tell: Callable[[Event], None]


class Attempt:
    """Runs the handler once, over a job or a batch. The leases are held from the start, so that waiting costs none."""

    def __init__(self, tools: Tools, claims: Sequence[Claim], *, sent_at: float) -> None:
        self._tools = tools
        self._loop = asyncio.get_running_loop()
        self._scope: anyio.CancelScope | None = None
        self._releasing = False
        self._items = [_Item(claim, _job(claim)) for claim in claims]
        self._called: Sequence[_Item] = ()
        self._held = {item: self._hold(item, sent_at) for item in self._items}

    def release(self) -> None:
        """Cut the call short and give its jobs back; what has been written already stays."""
        self._releasing = True
        for item in self._items:
            item.stop("release")
        self._cancel()

    async def run(self) -> None:
        """Run the call to its end, which is a verdict on each job. Never raises for anything that the handler does."""
        started = time.monotonic()
        try:
            await self._call()
            await self._finish(time.monotonic() - started)
        finally:
            for held in self._held.values():
                self._tools.leases.drop(held)

    def _hold(self, item: _Item, sent_at: float) -> Held:
        def stop(cause: Cause) -> None:  # called from the lease keeper's threads
            item.stop(cause)
            self._loop.call_soon_threadsafe(self._stop_if_none_is_left)

        lease = self._tools.kind.policy.lease
        return self._tools.leases.hold(item.claim, lease, self._tools.renewals, sent_at=sent_at, stop=stop)

    def _stop_if_none_is_left(self) -> None:
        """A call goes on as long as one of its jobs is still wanted."""
        if all(item.job.signal.is_set() for item in self._called):
            self._cancel()

    def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    # --- run --------------------------------------------------------------------------------------------------------

    async def _call(self) -> None:
        """Fill in each item's result; those that could not be decoded never reach the handler."""
        for item in self._items:
            self._decode(item)
        called = [item for item in self._items if item.result is None and self._is_wanted(item)]
        if not called or self._releasing:
            return
        await self._call_handler(called)
        if self._tools.kind.policy.singly and len(called) > 1 and all(_failed_with_its_call(item) for item in called):
            await self._call_singly(called)

    async def _call_singly(self, items: Sequence[_Item]) -> None:
        """Once more, each job alone with a deadline of its own: what one of them does is not the others' fault.

        None for which a stop has come: it may be why the call failed. What has no result then is given back.
        """
        for item in items:
            item.begin_anew()
        for item in items:
            if self._is_wanted(item):
                await self._call_handler([item])

    def _is_wanted(self, item: _Item) -> bool:
        """Whether a call may begin for this job."""
        if time.monotonic() >= self._held[item].guard:  # this process stood still: somebody else runs it
            item.stop("lost")
        return not item.job.signal.is_set()

    async def _call_handler(self, items: Sequence[_Item]) -> None:
        timeout = self._tools.kind.policy.timeout
        started = time.monotonic()
        results: Sequence[Result] = ()
        self._called, self._scope = items, anyio.CancelScope()
        with self._scope:
            if timeout is not None:
                self._scope.deadline = anyio.current_time() + timeout.total_seconds()
            results = await self._results([item.job for item in items])
        late = timeout is not None and time.monotonic() - started >= timeout.total_seconds()
        if late:  # whatever came after the deadline does not count
            results = [Failed(HANDLER_TIMEOUT)] * len(items)
        for item, result in zip(items, results, strict=False):
            item.result = result

    async def _results(self, jobs: Sequence[Job[object]]) -> Sequence[Result]:
        try:
            async with Contained():
                results = await self._tools.call(jobs)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a middleware may raise anything; the executors do not
            if isinstance(error, asyncio.CancelledError) and is_stopping():
                raise
            return raised(self._tools.kind, error, len(jobs))
        if len(results) != len(jobs):
            return [Failed(HANDLER_RESULT_COUNT, permanent=True)] * len(jobs)
        return [each if is_result(each) else Failed(RESULT_REJECTED, type(each).__name__) for each in results]

    def _decode(self, item: _Item) -> None:
        try:
            payload = self._tools.kind.payload.decode(item.claim.payload or "null")
        except PayloadError as error:
            item.result = Failed(PAYLOAD_INVALID, f"PayloadError at {error.path}", permanent=True)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a type's own code may raise anything; memory may be short
            (item.result,) = raised(self._tools.kind, error, 1)
        else:
            object.__setattr__(item.job, "payload", payload)

    # --- finish -----------------------------------------------------------------------------------------------------

    async def _finish(self, run_seconds: float) -> None:
        """Write every job's end; completions with the app's own code in them one by one, the rest together."""
        endings = [ending for item in self._items if (ending := self._ending(item, run_seconds)) is not None]
        guarded: list[Ending] = []
        if self._tools.kind.has_guests:
            guarded = [ending for ending in endings if isinstance(ending.decision, Success)]
            endings = [ending for ending in endings if not isinstance(ending.decision, Success)]
        settlements = [ending.decision for ending in endings if isinstance(ending.decision, Settlement)]
        paused = self._tools.pauses.start(settlements)  # before anything is awaited: no call may begin meanwhile
        await self._tools.finisher.write(endings)
        if paused:
            await self._tools.pauses.settled(paused)
        for ending in guarded:
            if self._releasing:
                ending.decision = decide(Released(), ending.rules, chance=0)
                await self._tools.finisher.write([ending])
            else:
                await self._tools.applier.write(ending)

    def _ending(self, item: _Item, run_seconds: float) -> Ending | None:
        """What is to be written of this job; None, and told, when its lease is gone."""
        result = self._verdict(item)
        if result is None:
            self._tools.tell(JobLost(item.claim.kind, item.claim.key, "lost"))
            return None
        policy = self._tools.kind.policy
        limit = item.claim.max_attempts if item.claim.max_attempts is not None else policy.max_attempts
        rules = Rules(item.claim.attempts, limit, policy.backoff)
        decision = decide(result, rules, chance=random.random())  # noqa: S311 - spreads retries, guards nothing
        itself = result.itself if isinstance(result, Returned) else None
        return Ending(item.claim, item.job, self._held[item], rules, decision, run_seconds, itself)

    def _verdict(self, item: _Item) -> Result | None:
        """The result that counts. A stop beats what the handler made of it; a finished job beats a late cancel."""
        cause = item.job.signal.cause
        if cause == "lost":
            return None
        if self._releasing:
            return Released()
        if item.result is not None:
            return item.result
        return Cancel() if cause == "cancel" else Released()


def _job(claim: Claim) -> Job[object]:
    return Job(
        kind=claim.kind,
        key=claim.key,
        revision=claim.revision or None,
        payload=None,
        attempts=claim.attempts,
        evictions=claim.evictions,
        generation=claim.generation,
        lease_epoch=claim.lease_epoch,
        ready_at=claim.ready_at,
        token=claim.token,
        signal=Signal(),
    )


def _failed_with_its_call(item: _Item) -> bool:
    """Whether the call is at fault and not, by what the handler said, this job."""
    return isinstance(item.result, Failed) and item.result.code in _OF_THE_WHOLE_CALL
