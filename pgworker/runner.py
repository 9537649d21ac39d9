"""One kind's loop: take free slots, claim, run, finish; and the ways in which it stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf

import anyio
import psycopg

from pgworker.applier import Applier
from pgworker.attempt import Tools
from pgworker.claimer import Claimer, ClaimRefused, Taken
from pgworker.deadlines import Deadlines
from pgworker.errors import AlreadyRunning
from pgworker.events import Event, JobSettled, RunnerTrouble
from pgworker.executors import Executor
from pgworker.executors.guest import Contained
from pgworker.executors.inline import InlineExecutor
from pgworker.executors.thread import ThreadExecutor
from pgworker.finisher import MOST_AT_ONCE, Finisher
from pgworker.job import Claim, Job
from pgworker.kind import Kind
from pgworker.listener import Wake
from pgworker.middleware import Next, compose
from pgworker.outcome import QUEUE_CLAIM_FAILED, QUEUE_RELEASE_FAILED, Result, Settlement
from pgworker.pauses import Pauses
from pgworker.policy import STORE_TIMEOUT
from pgworker.queue import Queue
from pgworker.shared import Shared
from pgworker.slots import Slots
from pgworker.status import RunnerStatus, Tally


class Runner:
    """Claims and runs the jobs of one kind until it is stopped; may be run again afterwards."""

    def __init__(self, kind: Kind, queue: Queue, shared: Shared) -> None:
        self.kind = kind
        self.wake = Wake()
        self._queue = queue
        self._shared = shared
        self._claimer = Claimer(
            queue, shared.database, shared.surveys, shared.name, kind.policy.weights, self._is_stopping
        )
        self._pauses = Pauses(kind.name, shared, tell=self._note, give_up_at=self._give_up_at)
        self._tally = Tally(kind.name)
        self._running = False
        self._reset()

    def _reset(self) -> None:
        self._stopping = anyio.Event()
        self._released_at: float | None = None
        self._slots: Slots | None = None

    # --- stop -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Claim nothing more and let running calls end, at most for the policy's grace."""
        self._stopping.set()
        if self._slots is not None:
            self._slots.close()

    def release(self) -> None:
        """Claim nothing more, cut running calls short and give their jobs back, within one store deadline."""
        self.drain()
        if self._released_at is None:
            self._released_at = time.monotonic()
            if self._slots is not None:
                self._slots.release()

    def stop(self) -> None:
        """Stop as the kind's policy says."""
        if self.kind.policy.stop.mode == "release":
            self.release()
        else:
            self.drain()

    def _is_stopping(self) -> bool:
        return self._stopping.is_set()

    # --- run --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until drain or release has come to its end. Cancelling means stop: it returns when the stop is done.

        Raises AlreadyRunning when it runs already.
        """
        if self._running:
            msg = f"the runner of kind {self.kind.name!r} runs already"
            raise AlreadyRunning(msg)
        self._running = True
        try:
            await run_to_its_end(self._run, self.stop)
        finally:
            self._running = False
            self._reset()  # now and not at the start: a stop that came before the start counts

    async def _run(self) -> None:
        finisher = Finisher(
            self.kind,
            self._queue,
            self._shared,
            tell=self._note,
            succeeded=self._tally.succeed,
            give_up_at=self._give_up_at,
        )
        tools = Tools(
            loop=asyncio.get_running_loop(),
            kind=self.kind,
            call=self._compose(),
            leases=self._shared.leases,
            finisher=finisher,
            applier=Applier(self.kind, self._queue, self._shared, finisher=finisher, tell=self._note),
            pauses=self._pauses,
            paused=self._give_buffered_back,
            deadlines=Deadlines(self.kind.policy.timeout),
            tell=self._note,
        )
        async with anyio.create_task_group() as helpers:
            helpers.start_soon(finisher.run)
            async with Slots(tools) as self._slots:
                await self._claim_until_stopped(self._slots)
                await self._drain(self._slots)
            helpers.cancel_scope.cancel()

    def _compose(self) -> Next:
        executor: Executor = InlineExecutor() if self.kind.is_async else ThreadExecutor(self.kind.policy.concurrency)

        call = partial(executor.execute, self.kind)
        if not self._shared.middleware:
            return call  # executors contain what handlers do
        composed = compose(self.kind.name, self._shared.middleware, call)

        async def contained(jobs: Sequence[Job[object]]) -> Sequence[Result]:
            async with Contained():
                return await composed(jobs)

        return contained

    async def _drain(self, slots: Slots) -> None:
        """Wait for the running calls; past the grace, release them."""
        grace = self.kind.policy.stop.grace
        with anyio.move_on_after(None if grace is None else grace.total_seconds()):
            await slots.until_idle()
        self.release()
        await slots.until_idle()

    def _give_up_at(self) -> float:
        """Past this monotonic time nothing is written any more: one deadline for all that a release gives back."""
        return float("inf") if self._released_at is None else self._released_at + STORE_TIMEOUT.total_seconds()

    def _give_buffered_back(self) -> None:
        if self._slots is not None:
            self._slots.give_back()

    # --- claim ------------------------------------------------------------------------------------------------------

    async def _claim_until_stopped(self, slots: Slots) -> None:
        full = False
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_when, self._stopping, group.cancel_scope)
            while not self._stopping.is_set():  # a claim is shielded: a cancelled scope alone would not end this
                room = await self._room(slots)
                if not full and self.kind.window:
                    await anyio.sleep(self.kind.window.total_seconds())
                if await self._pauses.wait_out():
                    continue  # more jobs may have come for the window
                if self.wake.clear():  # before the claim: a hint from here on is for the next round
                    self._claimer.poke()
                taken = await self._claim(room, slots)
                if taken is not None:
                    self._begin(slots, taken)
                full = taken is not None and taken.full
                if not full:
                    await self._wait_for_work(taken)

    async def _room(self, slots: Slots) -> int:
        """For how many jobs to claim now; meanwhile, what is buffered is given back when the kind is paused."""
        while slots.has_buffered:
            with anyio.move_on_after(self.kind.policy.poll.total_seconds()):
                return await slots.until_worthwhile()
            await self._look_for_pause()
        return await slots.until_worthwhile()

    async def _look_for_pause(self) -> None:
        asked_at = time.monotonic()
        try:
            dues = await self._shared.surveys.look(self._queue)
        except (psycopg.Error, TimeoutError) as error:
            self._note(RunnerTrouble(self.kind.name, QUEUE_CLAIM_FAILED, type(error).__name__))
        else:
            self._observe(paused=any(due.paused for due in dues), asked_at=asked_at)

    def _observe(self, *, paused: bool, asked_at: float) -> None:
        self._pauses.observe(paused=paused, asked_at=asked_at)
        if self._pauses.in_table:
            self._give_buffered_back()

    def _begin(self, slots: Slots, taken: Taken) -> None:
        """Hold the leases from now on, so that waiting costs none."""
        policy, renewals = self.kind.policy, self._queue.renewals
        slots.add(self._shared.leases.hold(taken.claims, policy.lease, renewals, sent_at=taken.sent_at))
        if self._pauses.hold:  # it came while others were given back
            slots.give_back()

    async def _claim(self, limit: int, slots: Slots) -> Taken | None:
        """One round of claims; None after a failed one, which has waited already."""
        try:
            taken = await self._claimer.round(limit)
        except ClaimRefused as refusal:
            self._tally.add("claimed", len(refusal.claims))
            self._note(RunnerTrouble(self.kind.name, refusal.code, refusal.error))
            await self._give_back(refusal.claims)
            await anyio.sleep(self.kind.policy.poll.total_seconds())
            return None
        if taken.trouble:
            self._note(RunnerTrouble(self.kind.name, QUEUE_CLAIM_FAILED, taken.trouble))
        self._tally.add("claimed", len(taken.claims))  # what is given back at once, too: the counts must balance
        self._observe(paused=taken.paused, asked_at=taken.asked_at)
        if self._stopping.is_set() or self._pauses.hold:  # it came while the claim was under way
            await self._give_back(taken.claims)
            return None
        return await self._set_apart(taken, slots)

    async def _set_apart(self, taken: Taken, slots: Slots) -> Taken:
        """Of jobs that end with the next lost worker, keep one at a time; the others wait for a poll.

        What kills its worker takes along what runs beside it. Without this those would end, too, run for run.
        """
        surplus = [claim for claim in taken.claims if self._is_on_last_chance(claim)]
        if surplus and not any(self._is_on_last_chance(held.claim) for held in slots.held):
            surplus = surplus[1:]
        if not surplus:
            return taken
        await self._give_back(surplus, delay_seconds=self.kind.policy.poll.total_seconds())
        return taken._replace(claims=[claim for claim in taken.claims if claim not in surplus])

    def _is_on_last_chance(self, claim: Claim) -> bool:
        limit = self.kind.policy.max_evictions
        return limit is not None and 0 < claim.evictions >= limit - 1

    async def _wait_for_work(self, taken: Taken | None) -> None:
        """Until a hint comes, the poll is due, or a job that the survey saw in the future is."""
        if taken is None:
            return
        due_in = inf if taken.due_in_seconds is None else taken.due_in_seconds
        await self._shared.polls.wait(self.wake, self.kind.policy.poll.total_seconds(), due_in)

    async def _give_back(self, claims: Sequence[Claim], *, delay_seconds: float | None = None) -> None:
        """Release claims that no call has begun; what cannot be written comes back when its lease expires."""
        if not claims:
            return
        release = Settlement("pending", None, delay_seconds=delay_seconds)
        for first in range(0, len(claims), MOST_AT_ONCE):
            part = [(claim, release) for claim in claims[first : first + MOST_AT_ONCE]]
            try:
                within = self._give_up_at() - time.monotonic()
                answers = await self._shared.database.run(self._queue.settle(part), within=within)
            except (psycopg.Error, TimeoutError) as error:
                self._note(RunnerTrouble(self.kind.name, QUEUE_RELEASE_FAILED, type(error).__name__))
                return
            self._tally.add("released", sum(answer.verdict == "done" for answer in answers.values()))

    # --- status -----------------------------------------------------------------------------------------------------

    def status(self) -> RunnerStatus:
        """How this runner fares right now; the lifecycle is derived, never stored."""
        in_flight = len(self._slots.held) if self._slots is not None else 0
        paused, until = self._pauses.in_table, self._pauses.until
        return self._tally.status(running=self._running, in_flight=in_flight, paused=paused, paused_until=until)

    def _note(self, event: Event) -> None:
        """Count what happened, then tell it on."""
        self._tally.note(event)
        if isinstance(event, JobSettled) and event.counted and event.state != "succeeded":
            self.wake.set()  # the next survey sees when the job is due again, which may be before the next poll
        self._shared.events.tell(event)


async def run_to_its_end(work: Callable[[], Awaitable[None]], stop: Callable[[], object]) -> None:
    """Run work that no cancelling reaches: it calls `stop` instead, and waits until the work has come to its end."""
    ended = anyio.Event()

    async def shielded() -> None:
        with anyio.CancelScope(shield=True):
            await work()
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(shielded)
        try:
            await ended.wait()
        finally:
            if not ended.is_set():
                stop()


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
