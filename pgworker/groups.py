"""Group commit: enqueues that wait at the same time in one event loop share a statement and its commit.

order  what one call puts; it stays whole
line   the calls of one sort that wait, in their order; a sort is a kind, `keep`, and whether they are events
flush  one statement for calls that were waiting when it began
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, TypeVar

import anyio.lowlevel
from psycopg import errors as pg
from psycopg_pool import PoolTimeout

from pgworker.client import Done, Order, in_callers_order, put_orders
from pgworker.db import NO_ANSWER, drive, is_outage
from pgworker.errors import PgworkerError
from pgworker.job import Enqueued
from pgworker.statements import Statement
from pgworker.tablemap import TableMap

T = TypeVar("T")

MAX_ROWS: Final = 500
MAX_BYTES: Final = 8 * 1024 * 1024
_PARTS: Final = 8  # the fewer steps lead to the call at fault, the less the others wait: each may wait for a lock

_CONFLICTS = (pg.LockNotAvailable, pg.DeadlockDetected, pg.SerializationFailure)


class Run(Protocol):
    """Runs and commits one statement, as Database.run does."""

    def __call__(self, statement: Statement[T], /, *, within: float = ...) -> Awaitable[T]:
        """Return what the statement read, or raise."""
        ...


class Call:
    """One call that waits for its answer."""

    __slots__ = ("answer", "order", "size", "timer", "until")

    def __init__(self, order: Order, answer: asyncio.Future[Done], until: float) -> None:
        self.order = order
        self.answer = answer
        self.size = _size(order)
        self.timer: asyncio.TimerHandle | None = None
        self.until = until  # when it gives up if it still waits, by the event loop's clock

    @property
    def is_large(self) -> bool:
        """Whether it is too large to share a statement."""
        return len(self.order.rows) > MAX_ROWS or self.size > MAX_BYTES

    @property
    def keys(self) -> Sequence[str]:
        """The keys that others may want, too: nobody else has an event's."""
        return () if self.order.events else [row.key for row in self.order.rows]


def _size(order: Order) -> int:
    """How many bytes the payloads take."""
    return sum(len(row.payload) if row.payload.isascii() else len(row.payload.encode()) for row in order.rows)


class Line:
    """The calls of one sort that wait. Decides who goes with the next flush; sends nothing."""

    def __init__(self) -> None:
        self.waiting: list[Call] = []
        self.flying: set[Call] = set()  # those that have been taken and have no answer yet
        self.busy = False  # whether somebody is about to take from it

    def take(self) -> list[Call]:
        """Move the calls of the next flush from those that wait to those that fly; none when all have to wait.

        They are as many as fit. It has to look as if the calls had been made one after the other, in their order. So
        one waits while an earlier call with a key of its own waits or flies; unless both just say what the latest value
        is, without revisions and equally urgent: then they fly together, and the later replaces the earlier.
        """
        taken: list[Call] = []
        left: list[Call] = []
        barred = {key for call in self.flying for key in call.keys}
        replaceable: dict[str, int] = {}
        rows = size = 0
        for call in self.waiting:
            if call.answer.done():
                continue
            rows, size = rows + len(call.order.rows), size + call.size
            full = rows > MAX_ROWS or size > MAX_BYTES  # for all that come later, too: none overtakes another
            if (full and taken) or not _may_join(call.order, barred, replaceable):
                left.append(call)
                barred.update(call.keys)
            else:
                taken.append(call)
                _join(call.order, barred, replaceable)
        self.waiting = left
        self.flying.update(taken)
        return taken

    def withdraw(self, call: Call) -> None:
        """Let go of a call that waits no more."""
        with suppress(ValueError):  # it may fly, or have ended
            self.waiting.remove(call)

    def part(self, calls: Sequence[Call]) -> list[Call]:
        """Of calls that do not fly well together, those without a common key; the later ones wait again, in front."""
        keys: set[str] = set()
        apart: list[Call] = []
        back: list[Call] = []
        for call in calls:
            (apart if keys.isdisjoint(call.keys) else back).append(call)
            keys.update(call.keys)
        self.flying.difference_update(back)
        self.waiting[:0] = back
        return apart


def _may_join(order: Order, barred: set[str], replaceable: dict[str, int]) -> bool:
    return order.events or all(
        row.key not in barred and (row.key not in replaceable or _is_replaceable(order, replaceable))
        for row in order.rows
    )


def _is_replaceable(order: Order, replaceable: dict[str, int]) -> bool:
    """Whether whatever of the order has an earlier row takes its place, and nothing tells that there was one."""
    return all(not row.revision and row.urgency == replaceable.get(row.key, row.urgency) for row in order.rows)


def _join(order: Order, barred: set[str], replaceable: dict[str, int]) -> None:
    for row in () if order.events else order.rows:
        if row.revision or order.keep:
            barred.add(row.key)
        else:
            replaceable[row.key] = row.urgency


class Groups:
    """The lines of one event loop.

    A call that finds its line idle starts a flush; what comes meanwhile goes with the next one: the return of a flush
    is the clock. A flush is a task of its own: whoever started it may be cancelled, by whatever means.

    `shared` gives up soon on rows that others hold; `alone`, over other connections, waits for them up to the deadline.
    A flush that is refused, for a value, a lock or whatever else, is tried again in parts, beside those that follow,
    down to the one call that is at fault: it alone waits, or gets the error. `committed` is told of each commit: the
    kind, and whether running jobs were superseded.

    When the answer of a flush is lost, with the connection, events are sent once more: insert_missing_events adds
    nothing to what was written. Jobs with keys of the caller's are not: without a revision that would put them anew,
    although the first may have run since; with one it would take back what others have put meanwhile, and answer
    `unchanged` for what was created. Their callers get the error, and know better.
    """

    def __init__(
        self, tables: TableMap, *, shared: Run, alone: Run, committed: Callable[[str, bool], None], patience: float
    ) -> None:
        self._tables = tables
        self._shared = shared
        self._alone = alone
        self._committed = committed
        self._patience = patience
        self._lines: dict[tuple[str, bool, bool], Line] = {}  # by sort
        self._tasks: set[asyncio.Task[None]] = set()

    async def put(self, order: Order) -> list[Enqueued]:
        """Put an order, together with others of its sort that wait; the answer, or the error, is its own.

        Raises what Database.run does; PoolTimeout if it has not been sent within `patience` seconds. Cancelled before
        that, it is withdrawn; after it, nobody knows. One too large to share is sent by itself, and holds up nobody.
        """
        loop = asyncio.get_running_loop()
        call = Call(order, loop.create_future(), loop.time() + self._patience)
        line = self._lines.setdefault((order.kind.name, order.keep and not order.events, order.events), Line())
        if line.busy or line.flying:
            _watch(call, loop)
        line.waiting.append(call)
        self._serve(line)
        try:
            done = await call.answer
        except BaseException:
            line.withdraw(call)  # at once, with its payloads: those before it may take long
            raise
        finally:
            if call.timer is not None:
                call.timer.cancel()
            if call.answer.done() and not call.answer.cancelled():
                call.answer.exception()  # seen, also if the caller was cancelled at the same moment
        return in_callers_order(order, done)

    async def close(self, within: float) -> None:
        """Let those end that are under way, whose callers may be gone."""
        until = time.monotonic() + within
        while self._tasks and (left := until - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=left)  # one may be followed by others, for parts of it

    # --- flushes ----------------------------------------------------------------------------------------------------

    def _serve(self, line: Line) -> None:
        if line.waiting and not line.busy:
            line.busy = True
            self._spawn(self._drain(line))

    def _spawn(self, flush: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(flush)  # noqa: TID251 - a caller's scope would end it for all others
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, line: Line) -> None:
        """Flush until nobody waits that may go."""
        try:
            while calls := line.take():
                for call in calls:
                    if call.timer is not None:
                        call.timer.cancel()
                if calls[0].is_large:
                    self._spawn(self._flush(line, calls, Done(), alone=True))
                else:
                    await self._flush(line, calls, Done())
                if line.waiting:  # those that have just been answered may come again: let them join
                    await anyio.lowlevel.cancel_shielded_checkpoint()
        except asyncio.CancelledError:
            _cancel(line.waiting)  # the event loop ends, and with it all tasks
            raise
        finally:
            line.busy = False

    async def _flush(self, line: Line, calls: Sequence[Call], done: Done, *, alone: bool = False) -> None:
        """Put the orders of these calls and answer them, or see to it that it is tried again."""
        landed = calls
        try:
            await self._send(calls, done, self._alone if alone else self._shared)
        except asyncio.CancelledError:
            _cancel(calls)
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is: callers wait for it
            _answer([call for call in calls if done.covers(call.order)], done)  # an earlier round has put them
            if alone or is_outage(error) or (len(calls) == 1 and not _is_held_up(error)):
                _fail(calls, error, done)
            else:
                landed = self._try_again(line, calls, done)
        else:
            _answer(calls, done)
        finally:
            line.flying.difference_update(landed)
            self._serve(line)

    def _try_again(self, line: Line, calls: Sequence[Call], done: Done) -> Sequence[Call]:
        """Start flushes for parts, or for one call alone; returns the calls that need none."""
        ended = [call for call in calls if call.answer.done()]
        apart = line.part([call for call in calls if not call.answer.done()])
        for call in line.waiting:  # those that do so once more, too
            _watch(call, asyncio.get_running_loop())
        size = -(-len(apart) // _PARTS)
        for first in range(0, len(apart), size or 1):
            self._spawn(self._flush(line, apart[first : first + size], done, alone=len(calls) == 1))
        return ended

    async def _send(self, calls: Sequence[Call], done: Done, run: Run) -> None:
        """Put the orders of these calls, and tell what is committed: when a later round fails, too."""
        orders = [call.order for call in calls]
        like = orders[0]
        new = {row.key for order in orders for row in order.rows if row.key not in done.puts}
        began = time.monotonic()
        try:
            await drive(put_orders(self._tables, orders, done), run)
        except Exception as error:
            if not (like.events and _is_unanswered(error)):
                raise
            left = self._patience - (time.monotonic() - began)
            try:
                await drive(put_orders(self._tables, orders, done, again=True), partial(run, within=left))
            except Exception:  # noqa: BLE001 - what says that nothing was sent would be wrong: the first may be written
                raise error from None
        finally:
            puts = [done.puts[key] for key in new if key in done.puts]
            if any(like.events or put.transaction for put in puts):
                self._committed(like.kind.name, any(put.status == "superseded" for put in puts))


def _watch(call: Call, loop: asyncio.AbstractEventLoop) -> None:
    """See to it that the call gives up in time, unless it is taken."""
    if call.timer is None or call.timer.cancelled():
        call.timer = loop.call_at(call.until, _give_up, call)


def _give_up(call: Call) -> None:
    if not call.answer.done():
        call.answer.set_exception(PoolTimeout("those before it have not been answered"))


def _answer(calls: Sequence[Call], done: Done) -> None:
    for call in calls:
        if not call.answer.done():
            call.answer.set_result(done)


def _fail(calls: Sequence[Call], error: Exception, done: Done) -> None:
    """Each caller gets an error of its own, which it may add notes and frames to."""
    for call in calls:
        if not call.answer.done():
            own = copy.copy(error) if len(calls) > 1 else error
            if isinstance(error, PoolTimeout) and any(row.key in done.puts for row in call.order.rows):
                own = TimeoutError("an earlier round has put a part")  # so something was sent
            call.answer.set_exception(own)


def _cancel(calls: Sequence[Call]) -> None:
    for call in calls:
        call.answer.cancel()


def _is_held_up(error: Exception) -> bool:
    """Whether others were in the way, who may let go: alone, a call can wait for them."""
    return isinstance(error, (*_CONFLICTS, PgworkerError))


def _is_unanswered(error: Exception) -> bool:
    """Whether the connection was lost, so that nobody knows whether the statement was committed; and at once."""
    return is_outage(error) and not isinstance(error, (*NO_ANSWER, pg.QueryCanceled))
