"""Keeps the leases of a process alive, and learns who has lost one, from an OS thread with a connection of its own.

So a handler that blocks the event loop (but releases the interpreter) cannot lose its lease. The thread renews through
a shutdown too, until the last handler has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import psycopg

from pgworker.config import Settings, conninfo
from pgworker.db import SyncConnection, send_sync, session_settings
from pgworker.job import Cause, Claim
from pgworker.policy import Lease
from pgworker.queue import Renewals
from pgworker.statements import Renewal

_log = logging.getLogger("pgworker")

_BUSY_PAUSE_SECONDS = 0.03
_ERROR_PAUSE_SECONDS = 0.5
_LOOK_EVERY_SECONDS = 5.0
"""How often a lease that covers its whole run is looked at: no renewal would tell that it is gone."""
_LOOK_SPACING_SECONDS = 0.1
"""From one look that was asked for to the next, however often it is asked for."""
_LOCK_TIMEOUT = "set lock_timeout = '500ms'"
"""No statement here waits for a row. A whole table that somebody locks must not cost the leases in the others."""
_NEVER = float("inf")
_LOST = Renewal("lost", cancel_requested=False)
_STANDSTILL_SECONDS = 1.0
_BEAT_EVERY_SECONDS = 0.25
"""How often the event loop is asked whether it turns, while anything is held: nothing is to be told of an idle one."""


@dataclass(slots=True, eq=False)
class Held:
    """One lease that this process holds. `guard` is the local monotonic time past which it must be taken for lost."""

    claim: Claim
    lease: Lease
    renewals: Renewals
    guard: float
    ask_at: float
    """The monotonic time at which it is renewed or, if it covers its whole run, looked at."""
    cause: Cause | None = None
    """Why the run should stop, once it should."""
    stop: Callable[[Cause], None] | None = None
    """Told of it once, from the keeper's thread, unless no run has begun."""

    @property
    def seconds(self) -> float | None:
        """For how long a renewal prolongs it; None when it is only looked at."""
        return None if self.lease.heartbeat is None else self.lease.ttl.total_seconds()

    @property
    def interval(self) -> float:
        """Seconds from one question to the next."""
        return _interval(self.lease)

    def tell(self, cause: Cause) -> None:
        """Tell the run that it should stop, once."""
        if self.cause is None:
            self.cause = cause
            if self.stop is not None:  # looked at after the cause is there, as listen has it the other way round
                self.stop(cause)

    def listen(self, stop: Callable[[Cause], None]) -> None:
        """Have this run told from now on; at once, and perhaps twice, if it should stop already."""
        self.stop = stop
        if self.cause is not None:
            stop(self.cause)


_Asked: TypeAlias = Mapping[Held, float | None]
"""Leases to ask about: to be prolonged to so many seconds, or (None) only looked at."""


def _by_table(asked: _Asked) -> Iterable[tuple[Renewals, _Asked]]:
    """What goes into one statement. Two runs of a job do not: answers go by its id, and only one of the two owns it."""
    runs: Counter[tuple[Renewals, int]] = Counter()
    groups: defaultdict[tuple[Renewals, int], dict[Held, float | None]] = defaultdict(dict)
    for held, seconds in asked.items():
        run = held.renewals, held.claim.id
        groups[held.renewals, runs[run]][held] = seconds
        runs[run] += 1
    return [(renewals, group) for (renewals, _), group in groups.items()]


def _interval(lease: Lease) -> float:
    return _LOOK_EVERY_SECONDS if lease.heartbeat is None else lease.heartbeat.total_seconds()


def _guard(lease: Lease, sent_at: float) -> float:
    """When a lease that was asked for at `sent_at` may end: a little earlier, so that nobody runs beside its heir."""
    ttl = lease.ttl.total_seconds()
    return sent_at + ttl - min(1.0, ttl * 0.05)


class LeaseKeeper:
    """The leases of this process. The event loop holds, any thread drops; `run` renews and `guard` watches, in threads.

    `call_soon` has the event loop call something, from another thread.
    """

    def __init__(
        self, settings: Settings, *, deadline: timedelta, call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        self._settings = settings
        self._deadline = deadline
        self._call_soon = call_soon
        self._held: set[Held] = set()
        self._verify_asked_at: dict[str, float] = {}
        self._to_verify: set[str] = set()
        self._next_look_at = 0.0
        self._changed = threading.Condition()
        self._closed = False
        self._renew_wakes_at = 0.0
        self._guard_wakes_at = 0.0
        self._next_guard = _NEVER
        self._connection: SyncConnection | None = None
        self._beat_at = time.monotonic()
        self._held_since_beat: dict[str, Lease] = {}
        self._told_of_beat = 0.0

    def hold(self, claims: Sequence[Claim], lease: Lease, renewals: Renewals, *, sent_at: float) -> list[Held]:
        """Keep the leases of these jobs of one kind alive from now on, one for each in order.

        `sent_at` is the monotonic time at which their claim was sent. Leases with equal `renewals` travel in one
        statement.
        """
        if not claims:
            return []
        guard, ask_at = _guard(lease, sent_at), sent_at + _interval(lease)
        held = [Held(claim, lease, renewals, guard, ask_at) for claim in claims]
        kind = claims[0].kind
        with self._changed:
            if not self._held:  # the loop was not asked meanwhile, and turns
                self._beat_at, self._held_since_beat = time.monotonic(), {}
            self._held.update(held)
            self._held_since_beat[kind] = lease
            self._next_guard = min(self._next_guard, guard)
            if sent_at <= self._verify_asked_at.get(kind, -_NEVER):
                self._verify(kind)  # it was asked for while this claim was under way
            if ask_at < self._renew_wakes_at or guard < self._guard_wakes_at:
                self._changed.notify_all()  # else both threads wake in time: most jobs end before they are looked at
        return held

    def verify(self, kind: str) -> None:
        """Look at once at what is held of this kind, as somebody may have superseded or cancelled it.

        Ten looks a second at most, whatever the number of calls and kinds. The lease of a claim that is still under way
        is looked at as soon as it is held.
        """
        with self._changed:
            self._verify_asked_at[kind] = time.monotonic()
            self._verify(kind)

    def _verify(self, kind: str) -> None:
        self._to_verify.add(kind)
        if self._next_look_at < self._renew_wakes_at:
            self._changed.notify_all()

    def drop(self, held: Iterable[Held]) -> None:
        """Renew these leases no more: their jobs are settled, or given up."""
        with self._changed:
            self._held.difference_update(held)

    def _warn_of_standstill(self) -> None:
        """Once for each standstill that lasts a third of a lease: the handlers beside it stand still as well."""
        seconds = time.monotonic() - self._beat_at
        thirds = [lease.ttl.total_seconds() / 3 for lease in self._held_since_beat.values()]
        if thirds and seconds > max(_STANDSTILL_SECONDS, min(thirds)) and self._told_of_beat != self._beat_at:
            self._told_of_beat = self._beat_at
            _log.warning(
                "the event loop stands still for %.1fs kinds=%s: a handler blocks it; as `def` it would have a thread",
                seconds, ",".join(sorted(self._held_since_beat)),
            )  # fmt: skip

    def close(self) -> None:
        """Let run return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self) -> None:
        """Renew what is due, until closed. Blocks its thread; an outage is logged and tried again."""
        try:
            self._connect_ahead()
            while (asked := self._wait_for_due()) is not None:
                self._ask(asked)
        finally:
            self._disconnect()

    def _connect_ahead(self) -> None:
        """Before there is need: a server that is out of connections later must not cost a healthy worker its leases."""
        try:
            self._connected()
        except psycopg.Error as error:
            _log.info("no connection for renewals yet, trying again when one is due: %s", type(error).__name__)
            self._disconnect()

    def guard(self) -> None:
        """Stop the runs whose lease may have ended, until closed. A thread of its own: run may hang in a dead net.

        It watches the event loop as well.
        """
        with self._changed:
            while not self._closed:
                self._watch(time.monotonic())
                self._sleep_until(self._guard_wakes_at)

    def _watch(self, now: float) -> None:
        if not self._held:  # what was known of those that are gone would keep the next from waking this thread
            self._next_guard = self._guard_wakes_at = _NEVER
            return
        self._warn_of_standstill()
        self._call_soon(self._beat)
        if self._next_guard <= now:
            self._give_up_late(now)
        self._guard_wakes_at = min(self._next_guard, now + _BEAT_EVERY_SECONDS)

    def _give_up_late(self, now: float) -> None:
        for held in [each for each in self._held if each.guard <= now]:
            self._held.discard(held)
            held.tell("lost")
        self._next_guard = min((each.guard for each in self._held), default=_NEVER)

    def _beat(self) -> None:
        """The event loop turns."""
        with self._changed:
            self._warn_of_standstill()
            self._beat_at = time.monotonic()
            self._held_since_beat = {held.claim.kind: held.lease for held in self._held}

    def _wait_for_due(self) -> _Asked | None:
        """The leases to ask about now; None when closed."""
        with self._changed:
            while not self._closed:
                if asked := self._due(time.monotonic()):
                    return asked
                looks_at = self._next_look_at if self._to_verify else _NEVER
                self._renew_wakes_at = min([looks_at, *(each.ask_at for each in self._held)])
                self._sleep_until(self._renew_wakes_at)
            return None

    def _due(self, now: float) -> _Asked:
        asked: dict[Held, float | None] = {}
        if self._to_verify and self._next_look_at <= now:
            kinds, self._to_verify = self._to_verify, set()
            asked = {each: None for each in self._held if each.claim.kind in kinds and each.cause is None}
            if asked:
                self._next_look_at = now + _LOOK_SPACING_SECONDS
        if any(each.ask_at <= now for each in self._held):
            # Whatever comes due soon travels with it: one statement for all.
            asked |= {each: each.seconds for each in self._held if each.ask_at <= now + 0.2 * each.interval}
        return asked

    def _sleep_until(self, wake_at: float) -> None:
        """Give up the lock until then, or until something changes."""
        self._changed.wait(None if wake_at == _NEVER else max(0.001, wake_at - time.monotonic()))

    def _ask(self, asked: _Asked) -> None:
        """One statement for each table. What cannot be asked is asked again soon."""
        unreachable = False
        for renewals, group in _by_table(asked):
            sent_at = time.monotonic()
            try:
                if not unreachable:
                    self._ask_together(renewals, group)
                    continue
            except psycopg.Error as error:
                _log.warning("renewal of %d leases failed, trying again: %s", len(group), type(error).__name__)
                unreachable = self._connection is None or self._connection.broken
                self._disconnect()
            for held in group:
                held.ask_at = sent_at + min(_ERROR_PAUSE_SECONDS, held.lease.ttl.total_seconds() / 10)

    def _ask_together(self, renewals: Renewals, asked: _Asked) -> None:
        sent_at = time.monotonic()
        answers = send_sync(self._connected(), renewals([(held.claim, seconds) for held, seconds in asked.items()]))
        for held, seconds in asked.items():
            answer = answers.get(held.claim.id, _LOST)
            match answer.verdict:
                case "done":
                    if seconds is not None:
                        held.guard = _guard(held.lease, sent_at)
                    if seconds == held.seconds:
                        held.ask_at = sent_at + held.interval
                    if answer.cancel_requested:
                        held.tell("cancel")
                case "busy":  # somebody holds the row's lock, which says nothing about the lease
                    held.ask_at = time.monotonic() + _BUSY_PAUSE_SECONDS
                case "lost" | "expired":
                    held.tell("lost")
                    self.drop([held])

    def _connected(self) -> SyncConnection:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(conninfo(self._settings.dsn, "lease"), autocommit=True)
            settings = session_settings(self._deadline, keep_plans=False)  # renewals of apps' own tables go here, too
            self._connection.execute(settings)
            self._connection.execute(_LOCK_TIMEOUT)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
