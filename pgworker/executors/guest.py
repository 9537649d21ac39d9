"""The app's own code in a task of ours: what it does to that task must not reach the runner."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from types import TracebackType
from typing import cast

import anyio


def is_stopping() -> bool:
    """Whether a scope around this code was cancelled: then a CancelledError means stop, and is to be passed on."""
    return anyio.current_effective_deadline() == -math.inf


class Contained:
    """`async with Contained():` the app's code, whose cancellations of its own task end here.

    A library's stray `task.cancel()` would else strike at the next await, which is ours. Passes every exception on; a
    CancelledError is the code's own doing unless `is_stopping()`. To be made in the task that it is for; `loop`, if it
    is known, saves a system call.
    """

    __slots__ = ("_before", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._task = cast("asyncio.Task[object]", asyncio.current_task(loop))
        self._before = self._task.cancelling()

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_struck:
            await self.mend()

    @property
    def is_struck(self) -> bool:
        """Whether the code has cancelled its task; for those to whom `async with` is too slow, with `mend`."""
        return self._task.cancelling() > self._before

    async def mend(self) -> None:
        """Take those cancellations back, unless something else says stop."""
        if is_stopping():
            return
        while self._task.cancelling() > self._before:
            self._task.uncancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # the last one may not have been delivered yet
