"""When the calls of a runner must have ended."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from datetime import timedelta

import anyio

_log = logging.getLogger("pgworker")


class Deadlines:
    """Cancels the scope of a call that takes too long.

    One timer for all calls of a runner, which have the same time: setting one for each cost more than a quick call.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._seconds = None if timeout is None else timeout.total_seconds()
        self._loop = asyncio.get_running_loop()
        self._until: dict[anyio.CancelScope, float] = {}
        """By the loop's time."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, scope: anyio.CancelScope) -> None:
        """A call begins in this scope."""
        if self._seconds is not None:
            until = self._until[scope] = self._loop.time() + self._seconds
            if self._timer is None:
                self._set_timer(until)

    def end(self, scope: anyio.CancelScope) -> bool:
        """It has ended; returns whether its time was up, even if nobody had a turn to cancel it."""
        if self._seconds is None:
            return False
        return self._loop.time() >= self._until.pop(scope)

    def _set_timer(self, until: float) -> None:
        # in a context of its own: a handler's would be kept alive by it
        self._timer = self._loop.call_at(until, self._cancel_late, context=contextvars.Context())

    def _cancel_late(self) -> None:
        self._timer = None
        now = self._loop.time()
        for scope, until in [*self._until.items()]:  # in the order of their times
            if until > now:
                self._set_timer(until)
                break
            try:
                scope.cancel()
            except Exception:  # noqa: BLE001 - what the handler awaits may raise: the others are to end all the same
                _log.exception("a call that is late could not be cancelled")
