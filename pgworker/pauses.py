"""What keeps a runner from claiming for a time: pauses that its own handlers asked for, and the kind's in the table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import psycopg

from pgworker import operations
from pgworker.events import Event, RunnerTrouble
from pgworker.outcome import QUEUE_PAUSE_FAILED, Settlement
from pgworker.shared import Shared


@dataclass(slots=True, eq=False)
class _Hold:
    """One pause in this process's memory."""

    seconds: float
    code: str
    shared: bool
    until: float


class Pauses:
    """The pauses of one runner. Of several the longest holds, whatever their order."""

    def __init__(
        self, kind: str, shared: Shared, *, tell: Callable[[Event], None], give_up_at: Callable[[], float]
    ) -> None:
        self.in_table = False
        """Whether the kind was paused for everybody when last looked at."""
        self._kind = kind
        self._shared = shared
        self._tell = tell
        self._give_up_at = give_up_at
        self._holds: set[_Hold] = set()
        self._changed = anyio.Event()
        self._shared_at = 0.0

    @property
    def until(self) -> float:
        """The monotonic time at which the last pause of this process's own ends; zero without any."""
        return max((hold.until for hold in self._holds), default=0.0)

    @property
    def hold(self) -> bool:
        """Whether what has been claimed must not begin."""
        return self.until > time.monotonic()

    async def wait_out(self) -> bool:
        """Wait until none of this process's own pauses holds; says whether there was one. Cancelling ends the wait."""
        waited = False
        while (seconds := self.until - time.monotonic()) > 0:
            waited = True
            with anyio.move_on_after(seconds):
                await self._changed.wait()
        return waited

    def observe(self, *, paused: bool, asked_at: float) -> None:
        """What the table said to a question of that monotonic time; older news than our own write are none."""
        if asked_at >= self._shared_at:
            self.in_table = paused

    def start(self, settlements: Sequence[Settlement]) -> list[_Hold]:
        """Claim nothing from now on, if one of these says so; hand what it returns to `settled`."""
        now = time.monotonic()
        longest: dict[bool, _Hold] = {}
        for each in settlements:
            seconds = each.pause_seconds or 0.0
            known = longest.get(each.pause_shared)
            if seconds > (known.seconds if known is not None else 0.0):
                longest[each.pause_shared] = _Hold(seconds, each.code or "paused", each.pause_shared, now + seconds)
        if longest:
            self._holds = {*(hold for hold in self._holds if hold.until > now), *longest.values()}
            self._turn()
        return list(longest.values())

    async def settled(self, started: Sequence[_Hold]) -> None:
        """The jobs that asked for these pauses are written: the time counts from now, as it does in their rows.

        What is for all goes to the table, and is the table's from then on: so a resume ends it here, too. If it cannot
        be written, that is told, and this runner at least pauses.
        """
        for hold in started:
            hold.until = time.monotonic() + hold.seconds
            if hold.shared and await self._share(hold):
                self._holds.discard(hold)
                self._turn()

    async def _share(self, hold: _Hold) -> bool:
        statement = operations.pause_kind(self._shared.tables, self._kind, hold.seconds, hold.code)
        try:
            # It may have to wait for somebody's pause or resume, which the sessions of the other database do not.
            await self._shared.apply_database.run(statement, within=self._give_up_at() - time.monotonic())
        except (psycopg.Error, TimeoutError) as error:
            self._tell(RunnerTrouble(self._kind, QUEUE_PAUSE_FAILED, type(error).__name__))
            return False
        self.in_table, self._shared_at = True, time.monotonic()
        return True

    def _turn(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
