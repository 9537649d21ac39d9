"""One call of a handler: hold the leases, decode, run within the deadline, decide, finish."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

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


@dataclass(slots=True, eq=False)
class _Item:
    """One job of the call."""

    claim: Claim
    held: Held
    signal: Signal
    job: Job[object]
    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """What a runner lends to each of its calls."""

    kind: Kind
    call: Next
    leases: LeaseKeeper
    finisher: Finisher
    tell: Callable[[Event], None]


class Attempt:
    """Runs the handler once, over a job or a batch. The leases are held from the start, so that waiting costs none."""

    def __init__(self, tools: Tools, claims: Sequence[Claim], *, sent_at: float) -> None:
        self._tools = tools
        self._loop = asyncio.get_running_loop()
        self._scope = anyio.CancelScope()
        self._releasing = False
        self._items = [self._hold(claim, sent_at) for claim in claims]
        self.pause_seconds = 0.0
        """How long the runner should claim nothing, if the handler said so."""

    def release(self) -> None:
        """Cut the call short and give its jobs back; what has been written already stays."""
        self._releasing = True
        for item in self._items:
            item.signal.set("release")
        self._scope.cancel()

    async def run(self) -> None:
        """Run the call to its end, which is a verdict on each job. Never raises for anything that the handler does."""
        started = time.monotonic()
        try:
            await self._call()
            await self._finish(time.monotonic() - started)
        finally:
            for item in self._items:
                self._tools.leases.drop(item.held)

    def _hold(self, claim: Claim, sent_at: float) -> _Item:
        signal = Signal()

        def stop(cause: Cause) -> None:  # called from the lease keeper's threads
            signal.set(cause)
            self._loop.call_soon_threadsafe(self._stop_if_none_is_left)

        held = self._tools.leases.hold(claim, self._tools.kind.policy.lease, sent_at=sent_at, stop=stop)
        job: Job[object] = Job(
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
            signal=signal,
        )
        return _Item(claim, held, signal, job)

    def _stop_if_none_is_left(self) -> None:
        """A call goes on as long as one of its jobs is still wanted."""
        if all(item.signal.is_set() for item in self._items):
            self._scope.cancel()

    # --- run --------------------------------------------------------------------------------------------------------

    async def _call(self) -> None:
        """Fill in each item's result; those that could not be decoded never reach the handler."""
        for item in self._items:
            if time.monotonic() >= item.held.guard:  # this process stood still since the claim: somebody else runs it
                item.signal.set("lost")
            self._decode(item)
        runnable = [item for item in self._items if item.result is None and not item.signal.is_set()]
        if not runnable or self._releasing:
            return
        timeout = self._tools.kind.policy.timeout
        started = time.monotonic()
        results: Sequence[Result] = ()
        with self._scope:
            if timeout is not None:
                self._scope.deadline = anyio.current_time() + timeout.total_seconds()
            results = await self._results([item.job for item in runnable])
        late = timeout is not None and time.monotonic() - started >= timeout.total_seconds()
        if late:  # whatever came after the deadline does not count
            results = [Failed(HANDLER_TIMEOUT)] * len(runnable)
        for item, result in zip(runnable, results, strict=False):
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
        """Write every job's end; completions with the app's own writes one by one, the rest together."""
        plain: list[Ending] = []
        applying: list[Ending] = []
        for item in self._items:
            ending = self._ending(item, run_seconds)
            if ending is not None:
                needs_apply = self._tools.kind.apply is not None and isinstance(ending.decision, Success)
                (applying if needs_apply else plain).append(ending)
        await self._tools.finisher.write(plain)
        for ending in applying:
            if self._releasing:
                ending.decision = decide(Released(), ending.rules, chance=0)
                await self._tools.finisher.write([ending])
            else:
                await self._tools.finisher.write_applying(ending)

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
        if isinstance(decision, Settlement) and decision.pause_seconds:
            self.pause_seconds = max(self.pause_seconds, decision.pause_seconds)
        itself = result.itself if isinstance(result, Returned) else None
        return Ending(item.claim, item.job, item.held, rules, decision, run_seconds, itself)

    def _verdict(self, item: _Item) -> Result | None:
        """The result that counts. A stop beats what the handler made of it; a finished job beats a late cancel."""
        if item.signal.cause == "lost":
            return None
        if self._releasing:
            return Released()
        if item.result is not None:
            return item.result
        return Cancel() if item.signal.cause == "cancel" else Released()
