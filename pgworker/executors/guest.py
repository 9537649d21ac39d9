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

    A library's stray `task.cancel()` would else strike at the next await, which is the runner's, and take the task
    group of all its calls along. Passes every exception on; a CancelledError is the code's own doing unless
    `is_stopping()`.
    """

    __slots__ = ("_before", "_task")

    async def __aenter__(self) -> None:
        self._task = cast("asyncio.Task[object]", asyncio.current_task())
        self._before = self._task.cancelling()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task.cancelling() <= self._before or is_stopping():
            return
        while self._task.cancelling() > self._before:
            self._task.uncancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)  # the last one may not have been delivered yet
