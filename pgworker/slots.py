"""The slots of a runner: what has been claimed and waits, and the tasks that call the handler."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import anyio

from pgworker.attempt import Attempt, Tools
from pgworker.errors import class_name
from pgworker.events import RunnerTrouble
from pgworker.executors.guest import Contained
from pgworker.executors.results import raised
from pgworker.leases import Held
from pgworker.outcome import HANDLER_PANIC

_STRETCH_SECONDS = 0.01
"""For so long calls follow each other in one task before the event loop has its turn."""
_PATIENCE_SECONDS = 0.005
"""For so long a free slot waits for others: one statement claims for all of them."""


class Slots:
    """Begins calls for what is buffered, in its order: at most as many at once as the policy's concurrency.

    What has been claimed and is not written yet is never more than the slots hold and the policy's prefetch.

    A call that has to wait for anything has its task for itself, to its end. Those that never wait follow each other in
    one task, as long as they leave its context as it was: a task costs more than such a call. No task is a child of the
    runner's: what a handler does to its own, as leaving a scope of anyio's open, ends there.

    `async with` ends when the last call has, and cancels them all if its body raises.
    """

    def __init__(self, tools: Tools) -> None:
        policy = tools.kind.policy
        self._tools = tools
        self._concurrency = policy.concurrency
        self._size = tools.kind.call_size
        self._prefetch = policy.prefetch
        self._enough = max(1, self._concurrency * self._size // 4, self._prefetch // 2)
        self._half_lease = policy.lease.ttl.total_seconds() / 2 if self._prefetch else 0.0
        self._context = contextvars.copy_context()
        self._buffer: deque[Held] = deque()
        self._calls: set[Attempt] = set()
        self._calling: set[Attempt] = set()
        """Those of them whose handler has not ended."""
        self._closed = False
        self._changed: anyio.Event | None = None
        self._leader: object = None
        """The task that has not waited for anything yet, in the loop's present turn."""
        self._turn_is_due = False
        self._burst = 1
        self._each_alone = False
        """Whether no call follows another in one task: what one has left behind has cancelled another."""
        self._tasks: dict[asyncio.Task[None], anyio.CancelScope] = {}
        """With the scope that each runs in from its first step to its last."""
        self._is_broken = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._closed = self._is_broken = True
            for scope in self._tasks.values():
                scope.cancel()
        stray: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while self._tasks:
                try:
                    await asyncio.wait(self._tasks)
                except asyncio.CancelledError as cancelled:  # not even the end of the loop leaves a call behind
                    stray = cancelled
        if stray is not None:
            raise stray

    # --- what is asked of it ----------------------------------------------------------------------------------------

    def add(self, held: Sequence[Held]) -> None:
        """Begin calls with these as slots are free; the leases are given up when the jobs are written."""
        self._buffer.extend(held)
        self._burst = 1
        if self._closed:
            self.give_back()
        self._rouse()

    def close(self) -> None:
        """Begin nothing more, and give back what is buffered."""
        self._closed = True
        self.give_back()

    def give_back(self) -> None:
        """Release what is buffered and no call has begun; the finisher writes it."""
        if self._buffer:
            self._return(list(self._buffer))
            self._buffer.clear()

    def release(self) -> None:
        """Cut all calls short."""
        for attempt in list(self._calls):
            attempt.release()

    @property
    def held(self) -> list[Held]:
        """The leases of all that is not written yet."""
        return [*self._buffer, *(held for attempt in self._calls for held in attempt.held)]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is buffered, and all calls have ended and are written."""
        return not self._calls and not self._buffer

    @property
    def has_buffered(self) -> bool:
        """Whether something waits for a slot."""
        return bool(self._buffer)

    async def until_idle(self) -> None:
        """Wait until it is."""
        while not self.is_idle:
            await self._change()

    async def until_worthwhile(self) -> int:
        """Wait until a claim is worth its statement, and say for how many jobs.

        That is when a good part is free, or everything; and soon when a slot is free and has nothing to begin with.
        """
        while (room := self._room()) < self._enough and not (room > 0 and self.is_idle):
            if room > 0 and not self._buffer:
                with anyio.move_on_after(_PATIENCE_SECONDS) as patience:
                    await self._change()
                if patience.cancelled_caught and (room := self._room()) > 0:
                    break
            else:
                await self._change()
        return room

    def _room(self) -> int:
        return (self._concurrency - len(self._calls)) * self._size + self._prefetch - len(self._buffer)

    async def _change(self) -> None:
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    def _ring(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    # --- calls ------------------------------------------------------------------------------------------------------

    def _rouse(self) -> None:
        """Have tasks begin in the loop's next turn, if there is anything to do for them."""
        if not self._turn_is_due:
            self._turn_is_due = True
            # (with a context, so that no task inherits what another's handler has set)
            self._tools.loop.call_soon(self._turn, context=self._context)

    def _turn(self) -> None:
        """The loop has its turn: whoever has begun a call before is waiting in it. Twice as many begin each time."""
        self._turn_is_due = False
        self._leader = None
        waiting = -(-len(self._buffer) // self._size)
        if waiting and not self._closed:
            for _ in range(min(waiting, self._concurrency - len(self._calling), self._burst)):
                self._start(self._work)
            self._burst = min(2 * self._burst, self._concurrency)

    def _start(self, work: Callable[[anyio.CancelScope], Coroutine[object, object, None]]) -> asyncio.Task[None]:
        scope = anyio.CancelScope()
        task = self._tools.loop.create_task(work(scope))
        task.add_done_callback(self._task_has_ended)
        self._tasks[task] = scope
        return task

    def _task_has_ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lost_track(error)
        self._rouse()

    async def _work(self, whole: anyio.CancelScope) -> None:
        """Call after call, until one of them has to wait or leaves something to do."""
        me = self._leader = object()
        self._rouse()
        context = contextvars.copy_context()
        until = time.monotonic() + _STRETCH_SECONDS
        is_first = True
        attempt: Attempt | None = None
        try:
            with whole:
                async with Contained():
                    with anyio.CancelScope() as scope:
                        while (attempt := self._begin()) is not None:
                            await attempt.call(scope)
                            if not is_first and attempt.excuse():
                                self._each_alone = True  # so that no job is excused again and again
                            if not attempt.hand_over():
                                break
                            self._calling.discard(attempt)
                            attempt, is_first = None, False
                            if scope.cancel_called or not self._may_go_on(me, until, context):
                                break
                if attempt is not None:
                    await attempt.call_again()
                    self._calling.discard(attempt)
                    self._rouse()
                    await attempt.finish()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - one call must not take the worker along
            self._each_alone = True
            self._lost_track(error)
            if attempt is not None and attempt.can_be_finished and not self._is_broken:
                rest = self._start(partial(_finish, attempt))  # a scope that was left open would strike here, too
                rest.add_done_callback(partial(self._forsake, attempt))
                attempt = None
        finally:
            if attempt is not None:
                self._forsake(attempt)

    def _may_go_on(self, me: object, until: float, context: contextvars.Context) -> bool:
        """Whether one more call may begin in the same task."""
        has_not_waited = self._leader is me
        return has_not_waited and not self._each_alone and time.monotonic() < until and _is_as_it_was(context)

    def _begin(self) -> Attempt | None:
        """A call of as many jobs as it takes, if there is a slot; those whose lease has run too low are given back."""
        if self._closed or len(self._calling) >= self._concurrency:
            return None
        held: list[Held] = []
        low: list[Held] = []
        latest = time.monotonic() + self._half_lease
        while self._buffer and len(held) < self._size:
            each = self._buffer.popleft()
            (low if self._half_lease and each.guard < latest else held).append(each)
        if low:
            self._return(low)
        if not held:
            return None
        attempt = Attempt(self._tools, held, self._end)
        self._calls.add(attempt)
        self._calling.add(attempt)
        return attempt

    def _return(self, held: Sequence[Held]) -> None:
        attempt = Attempt(self._tools, held, self._end)
        self._calls.add(attempt)
        attempt.give_back()

    def _forsake(self, attempt: Attempt, _: object = None) -> None:
        """Do no more for its jobs; the leases of those that are not written run out."""
        self._calling.discard(attempt)
        self._tools.leases.drop(attempt.held)
        self._end(attempt)

    def _end(self, attempt: Attempt) -> None:
        self._calls.discard(attempt)
        attempt.close()
        self._ring()

    def _lost_track(self, error: BaseException) -> None:
        """A call ended without a verdict on its jobs: their leases run out, and they run again."""
        raised(self._tools.kind, error, 1)  # says where it came from
        self._tools.tell(RunnerTrouble(self._tools.kind.name, HANDLER_PANIC, class_name(error)))


async def _finish(attempt: Attempt, whole: anyio.CancelScope) -> None:
    with whole:
        await attempt.finish()


def _is_as_it_was(context: contextvars.Context) -> bool:
    """Whether no variable has another value; one that cannot be compared is taken for another."""
    try:
        return contextvars.copy_context() == context
    except Exception:  # noqa: BLE001 - whatever the comparison of an app's values raises
        return False
