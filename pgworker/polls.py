"""When the runners of a process look for work by themselves, if nothing wakes them."""

from __future__ import annotations

import asyncio
import contextvars
import random
import time
from collections import defaultdict
from math import inf

from pgworker.listener import Wake

_TIMER_SECONDS = 0.002
"""By so much an event loop that counts in milliseconds, as uvloop does, may miss the instant of a timer."""


class Polls:
    """The rhythms in which one process polls. All runners that poll equally often wake in one turn of the event loop.

    By one timer, and not by one each: those of fifty kinds fired a few milliseconds apart, and what is woken together
    shares a survey.
    """

    def __init__(self) -> None:
        self._phase = random.random()  # noqa: S311 - processes that were started together shall not poll together
        self._waiting: defaultdict[float, set[Wake]] = defaultdict(set)
        """By the seconds of their rhythm. One that is known here has its timer."""

    def until_next(self, poll: float) -> float:
        """Seconds to the next instant of this rhythm; of one that has just come, to the one after it."""
        rest = poll - (time.monotonic() + self._phase * poll) % poll
        return rest if rest > min(_TIMER_SECONDS, poll / 2) else rest + poll

    async def wait(self, wake: Wake, poll: float, at_most: float = inf) -> None:
        """Until the wake is set, the next instant of this rhythm comes, or `at_most` seconds have passed."""
        if poll not in self._waiting:
            # in a context of its own: that of whoever waits first would be kept alive by it
            asyncio.get_running_loop().call_later(
                self.until_next(poll), self._ring, poll, context=contextvars.Context()
            )
        waiting = self._waiting[poll]
        waiting.add(wake)
        try:
            await wake.wait(at_most)
        finally:
            waiting.discard(wake)

    def _ring(self, poll: float) -> None:
        for wake in self._waiting.pop(poll):
            wake.ring()
