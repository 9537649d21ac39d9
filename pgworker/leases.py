"""Keeps the leases of a process alive, from an OS thread with a connection of its own.

So a handler that blocks the event loop (but releases the interpreter) cannot lose its lease. The thread renews through
a shutdown too, until the last handler has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import psycopg

from pgworker.config import Settings, conninfo
from pgworker.db import SyncConnection, send_sync, session_settings
from pgworker.job import Cause, Claim
from pgworker.policy import Lease
from pgworker.statements import renew_leases

_log = logging.getLogger("pgworker")

_BUSY_PAUSE_SECONDS = 0.03
_ERROR_PAUSE_SECONDS = 0.5
_NEVER = float("inf")
_STANDSTILL_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Held:
    """One lease that this process holds. `guard` is the local monotonic time past which it must be taken for lost."""

    claim: Claim
    lease: Lease
    guard: float
    renew_at: float
    stop: Callable[[Cause], None]
    """Told once, from the keeper's thread, when the handler should stop."""
    told: bool = False

    def tell(self, cause: Cause) -> None:
        """Tell the run that it should stop, once."""
        if not self.told:
            self.told = True
            self.stop(cause)


def _guard(lease: Lease, sent_at: float) -> float:
    """When a lease that was asked for at `sent_at` may end: a little earlier, so that nobody runs beside its heir."""
    ttl = lease.ttl.total_seconds()
    return sent_at + ttl - min(1.0, ttl * 0.05)


class LeaseKeeper:
    """The leases of this process. Any thread may hold and drop; `run` renews and `guard` watches, each in a thread."""

    def __init__(self, settings: Settings, *, deadline: timedelta) -> None:
        self._settings = settings
        self._deadline = deadline
        self._held: set[Held] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._renew_wakes_at = 0.0
        self._guard_wakes_at = 0.0
        self._connection: SyncConnection | None = None
        self._beat_at = time.monotonic()
        self._held_since_beat: dict[str, Lease] = {}
        self._told_of_beat = 0.0

    def hold(self, claim: Claim, lease: Lease, *, sent_at: float, stop: Callable[[Cause], None]) -> Held:
        """Keep this lease alive from now on; `sent_at` is the monotonic time at which its claim was sent."""
        heartbeat = _NEVER if lease.heartbeat is None else lease.heartbeat.total_seconds()
        held = Held(claim, lease, guard=_guard(lease, sent_at), renew_at=sent_at + heartbeat, stop=stop)
        with self._changed:
            self._held.add(held)
            self._held_since_beat[claim.kind] = lease
            if held.renew_at < self._renew_wakes_at or held.guard < self._guard_wakes_at:
                self._changed.notify_all()  # else both threads wake in time: most jobs end before they are looked at
        return held

    def drop(self, held: Held) -> None:
        """Renew this lease no more: its job is settled, or given up."""
        with self._changed:
            self._held.discard(held)

    def beat(self) -> None:
        """The event loop says that it turns; call this a few times a second."""
        with self._changed:
            self._warn_of_standstill()
            self._beat_at = time.monotonic()
            self._held_since_beat = {held.claim.kind: held.lease for held in self._held}

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
            while (due := self._wait_for_due()) is not None:
                self._renew(due)
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
        """Stop the runs whose lease may have ended, until closed. A thread of its own: run may hang in a dead net."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for held in [each for each in self._held if each.guard <= now]:
                    self._held.discard(held)
                    held.tell("lost")
                self._guard_wakes_at = min((each.guard for each in self._held), default=_NEVER)
                self._sleep_until(self._guard_wakes_at)

    def _wait_for_due(self) -> list[Held] | None:
        """The leases to renew now; None when closed."""
        with self._changed:
            self._warn_of_standstill()  # (once a heartbeat, that is)
            while not self._closed:
                now = time.monotonic()
                if any(each.renew_at <= now for each in self._held):
                    # Whatever comes due soon travels with it: one statement for all.
                    return [each for each in self._held if each.renew_at <= now + _slack(each)]
                self._renew_wakes_at = min((each.renew_at for each in self._held), default=_NEVER)
                self._sleep_until(self._renew_wakes_at)
            return None

    def _sleep_until(self, wake_at: float) -> None:
        """Give up the lock until then, or until something changes."""
        self._changed.wait(None if wake_at == _NEVER else max(0.001, wake_at - time.monotonic()))

    def _renew(self, due: Sequence[Held]) -> None:
        sent_at = time.monotonic()
        leases = [(held.claim, held.lease.ttl.total_seconds()) for held in due]
        try:
            renewed = send_sync(self._connected(), renew_leases(self._settings.tables, leases))
        except psycopg.Error as error:
            _log.warning("renewal of %d leases failed, trying again: %s", len(due), type(error).__name__)
            self._disconnect()
            for held in due:
                held.renew_at = sent_at + min(_ERROR_PAUSE_SECONDS, held.lease.ttl.total_seconds() / 10)
            return
        for held in due:
            answer = renewed[held.claim.id]
            match answer.verdict:
                case "done":
                    held.guard = _guard(held.lease, sent_at)
                    held.renew_at = sent_at + cast("timedelta", held.lease.heartbeat).total_seconds()
                    if answer.cancel_requested:
                        held.tell("cancel")
                case "busy":  # somebody holds the row's lock, which says nothing about the lease
                    held.renew_at = time.monotonic() + _BUSY_PAUSE_SECONDS
                case "lost" | "expired":
                    held.tell("lost")
                    self.drop(held)

    def _connected(self) -> SyncConnection:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(conninfo(self._settings.dsn, "lease"), autocommit=True)
            self._connection.execute(session_settings(self._deadline))
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _slack(held: Held) -> float:
    return 0.2 * held.lease.heartbeat.total_seconds() if held.lease.heartbeat is not None else 0.0
