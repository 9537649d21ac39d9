"""The NOTIFY side: tells who listens that something has happened, off the commit path, from a thread of its own.

A notification takes a database-wide lock when its transaction commits and fails when the server's queue is full, so it
never travels in a transaction that matters. A lost hint costs one poll, never a job.

Payloads: `r:KIND` jobs are ready, `c:KIND` somebody took jobs out of their runs' hands or paused the kind,
`d:KIND` jobs have ended.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TypeAlias

import psycopg
from psycopg.rows import TupleRow

from pgworker.db import array_literal

_log = logging.getLogger(__name__)

Hint: TypeAlias = tuple[str, str | None]
"""A payload, and the id of the transaction that must have committed, if there is one."""

FIRST_ASK_SECONDS = 0.002
LONGEST_ASK_SECONDS = 1.0
ASK_FOR_SECONDS = 60.0
_IDLE_SECONDS = 60.0  # then the connection is given back; the next hint opens one
_PAUSE_SECONDS = 1.0  # as long as a poll takes
_NEVER = float("-inf")

# An id from the snapshot's end on had not ended, or is another server's, for which pg_xact_status would raise an error.
# No hint is worth waiting for the disk or a standby. The setting is local to the statement: behind a transaction pooler
# a SET would turn off durability for a stranger.
# One row tells what is left, as most have been committed: for 64 of them the client's CPU time is 39 us and not 92.
_SEND = """
select pg_catalog.array_agg(array[payload, id, status])
           filter (where (status operator(pg_catalog.=) 'committed') is not true),
       pg_catalog.count(case when status operator(pg_catalog.=) 'committed' then pg_catalog.pg_notify(%s, payload) end),
       pg_catalog.set_config('synchronous_commit', 'off', true)
from (select payload, id, case
          when id is null then 'committed'
          when id::pg_catalog.xid8 operator(pg_catalog.>=)
               pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot()) then 'in progress'
          else pg_catalog.pg_xact_status(id::pg_catalog.xid8)
      end as status
      from rows from (pg_catalog.unnest(%s::pg_catalog.text[]), pg_catalog.unnest(%s::pg_catalog.text[]))
           as hint(payload, id) offset 0) as known"""


class Outbox:
    """Which hints are due: decisions only, no clock, no I/O, no locking.

    The first hint with a payload is due at once, the next one `spacing` after it was sent; those in between become one.
    A hint that waits for a transaction comes up ever less often, for a minute: then the poll has to find the job. At
    most `limit` are remembered; beyond that the oldest is forgotten.
    """

    def __init__(self, *, spacing: float, limit: int = 10_000) -> None:
        self._spacing = spacing
        self._limit = limit
        self._waiting: dict[Hint, tuple[float, float]] = {}  # since when, and the next turn
        self._sent: dict[str, float] = {}

    def add(self, hint: Hint, *, now: float) -> float:
        """Take up a hint, unless it waits already, and say when it is due."""
        if hint not in self._waiting:
            if len(self._waiting) >= self._limit:
                del self._waiting[next(iter(self._waiting))]
            self._waiting[hint] = now, now if hint[1] is None else now + FIRST_ASK_SECONDS
        return self._due_at(hint)

    def next_at(self) -> float | None:
        """When there is something to send; None when nothing waits."""
        return min(map(self._due_at, self._waiting), default=None)

    def take(self, now: float, *, everything: bool = False) -> dict[Hint, float]:
        """Remove and return the hints that are due, and since when each has waited."""
        due = {hint: since for hint, (since, _) in self._waiting.items() if everything or self._due_at(hint) <= now}
        for hint in due:
            del self._waiting[hint]
        return due

    def answer(self, taken: Mapping[Hint, float], left: Mapping[Hint, str | None], *, now: float) -> None:
        """Note what was sent: all but those `left`, whose transactions are in progress, or (any other status) void."""
        self._sent.update(dict.fromkeys((payload for payload, _ in taken.keys() - left.keys()), now))
        for hint, status in left.items():
            waited = now - taken[hint]
            if status == "in progress" and waited < ASK_FOR_SECONDS:
                pause = min(max(FIRST_ASK_SECONDS, waited / 2), LONGEST_ASK_SECONDS)
                self._waiting[hint] = taken[hint], now + pause

    def _due_at(self, hint: Hint) -> float:
        return max(self._waiting[hint][1], self._sent.get(hint[0], _NEVER) + self._spacing)


class _Sender:
    """The thread of one process, its connection (touched by no other thread) and its outbox (guarded by `_changed`)."""

    def __init__(self, conninfo: str, *, channel: str, spacing: float) -> None:
        self._conninfo = conninfo
        self._channel = channel
        self._outbox = Outbox(spacing=spacing)
        self._changed = threading.Condition()  # re-entrant, so that a signal handler may enqueue
        self._thread: threading.Thread | None = None
        self._wakes_at = _NEVER
        self._closing = False
        self._connection: psycopg.Connection[TupleRow] | None = None
        self._quiet_until = _NEVER
        self._troubled = False

    def tell(self, hint: Hint) -> None:
        """Take up a hint and see to it that the thread runs; never waits for the database."""
        with self._changed:
            due_at = self._outbox.add(hint, now=monotonic())
            if self._thread is None or not self._thread.is_alive():
                self._start()
            elif max(due_at, self._quiet_until) < self._wakes_at:
                self._changed.notify()

    def close(self, timeout: float) -> None:
        """Let the thread send what it has and end; waits for it at most so long."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="pgworker-hints", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads allowed, or the interpreter is ending: the poll has to find the jobs
            self._complain("no thread")
        else:
            self._thread = thread

    def _run(self) -> None:
        closing = False
        try:
            while not closing:
                closing = self._rest()
                self._send_due(everything=closing)
        finally:
            self._disconnect()

    def _rest(self) -> bool:
        """Wait until something is due; True when it is time to close. A connection long out of use is given back."""
        with self._changed:
            at = self._outbox.next_at()
            if not self._closing:
                self._wakes_at = float("inf") if at is None else max(at, self._quiet_until)
                idle = None if self._connection is None else _IDLE_SECONDS
                changed = self._changed.wait(idle if at is None else max(0.0, self._wakes_at - monotonic()))
                self._wakes_at = _NEVER
                if at is None and not changed:
                    self._disconnect()
            return self._closing

    def _send_due(self, *, everything: bool) -> None:
        """Send what is due; in trouble what was taken is dropped, and the server left alone for a while."""
        if monotonic() < self._quiet_until:
            return
        with self._changed:
            taken = self._outbox.take(monotonic(), everything=everything)
        if not taken:
            return
        try:
            left = self._execute([payload for payload, _ in taken], [id_ for _, id_ in taken])
        except (psycopg.Error, OSError) as error:
            # Class and code only: the text of a database error may quote the connection string or values.
            code = error.sqlstate if isinstance(error, psycopg.Error) else None
            self._complain(f"{type(error).__name__} {code}")
            self._disconnect()
            self._quiet_until = monotonic() + _PAUSE_SECONDS * random.uniform(0.5, 1.0)  # noqa: S311 - guards nothing
            return
        with self._changed:
            self._outbox.answer(taken, left, now=monotonic())
        if self._troubled:
            self._troubled = False
            _log.info("hints are sent again")

    def _execute(self, payloads: Sequence[str], ids: Sequence[str | None]) -> dict[Hint, str | None]:
        """Send the hints; the status of those that were not. A connection that broke in between is replaced once."""
        arguments = self._channel, array_literal(payloads), array_literal(ids)
        if self._connection is not None:
            try:
                return _left(self._connection.execute(_SEND, arguments))
            except psycopg.OperationalError:
                if not self._connection.broken:
                    raise
                self._disconnect()
        self._connection = psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        return _left(self._connection.execute(_SEND, arguments))

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _complain(self, what: str) -> None:
        """One warning for each time of trouble."""
        if not self._troubled:
            self._troubled = True
            _log.warning("hints cannot be sent error=%s; workers find jobs by polling meanwhile", what)


def _left(cursor: psycopg.Cursor[TupleRow]) -> dict[Hint, str | None]:
    ((left, *_),) = cursor.fetchall()
    return {(payload, id_): status for payload, id_, status in left or ()}


class Hints:
    """The hint sender of a process: hand it a kind, and workers that listen see to it soon after.

    Nothing here blocks or raises. The thread starts with the first hint. After a fork the child gets a thread and a
    connection of its own and leaves the parent's alone.

    `transaction`, where it is taken, is `pg_current_xact_id()::text` of a transaction that may still be open: the hint
    is sent once it has committed and dropped if it is rolled back. The id is the whole transaction's, so work that was
    undone by a savepoint alone still gives a hint, which costs one empty look.
    """

    def __init__(self, conninfo: str, *, channel: str, spacing: float = 0.010) -> None:
        self._make = partial(_Sender, conninfo, channel=channel, spacing=spacing)
        self._senders: dict[int, _Sender] = {}
        # A forgotten object must not leave its thread behind; waiting for it is not for a garbage collector, though.
        weakref.finalize(self, _close_own, self._senders, 0.0).atexit = False
        atexit.register(_close_own, self._senders, 1.0)

    def ready(self, kind: str, *, transaction: str | None = None) -> None:
        """Jobs of this kind are ready."""
        self._tell(f"r:{kind}", transaction)

    def control(self, kind: str, *, transaction: str | None = None) -> None:
        """Somebody superseded or cancelled running jobs of this kind, or paused it: its workers look at once."""
        self._tell(f"c:{kind}", transaction)

    def done(self, kind: str) -> None:
        """Jobs of this kind have ended, which somebody may be waiting for."""
        self._tell(f"d:{kind}", None)

    def _tell(self, payload: str, transaction: str | None) -> None:
        pid = os.getpid()
        sender = self._senders.get(pid)
        if sender is None:  # setdefault, so that no lock of ours can be held by another thread at a fork
            sender = self._senders.setdefault(pid, self._make())
        sender.tell((payload, transaction))

    def close(self, timeout: float = 1.0) -> None:
        """Send what is due and end the thread, waiting at most so long; a later hint starts anew."""
        _close_own(self._senders, timeout)


def _close_own(senders: dict[int, _Sender], timeout: float) -> None:
    """Close this process's sender; a parent's stays untouched, connection and all, or the parent would lose it."""
    sender = senders.pop(os.getpid(), None)
    if sender is not None:
        sender.close(timeout)
