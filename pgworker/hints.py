"""The NOTIFY side: tells the workers that something is ready, off the commit path, from a thread of its own.

A notification takes a database-wide lock when its transaction commits and fails when the server's queue is full, so it
never travels in a transaction that matters. A lost hint costs one poll, never a job.
"""

from __future__ import annotations

import atexit
import heapq
import logging
import os
import random
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import LiteralString, TypeVar

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

_log = logging.getLogger(__name__)

FIRST_ASK_SECONDS = 0.002
ASK_GROWTH = 1.5
LONGEST_ASK_SECONDS = 1.0
ASK_FOR_SECONDS = 60.0
ASK_BATCH = 1_000
_IDLE_SECONDS = 60.0  # then the connection is given back; the next hint opens one
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_NEVER = float("-inf")

_Entry = TypeVar("_Entry")

# No hint is worth waiting for the disk or a standby. The setting is local to the statement: behind a transaction pooler
# a SET would turn off durability for a stranger.
_SEND = (
    "select pg_catalog.set_config('synchronous_commit', 'off', true), pg_catalog.pg_notify(%s, hint.payload) "
    "from pg_catalog.unnest(%s::pg_catalog.text[]) as hint(payload)"
)
_ASK = (
    "select asked.id, pg_catalog.pg_xact_status(asked.id::pg_catalog.xid8) "
    "from pg_catalog.unnest(%s::pg_catalog.text[]) as asked(id)"
)


@dataclass(slots=True)
class _Question:
    """What to tell once a transaction has committed, and when to ask for it next."""

    ask_at: float
    delay: float
    give_up_at: float
    payloads: set[str] = field(default_factory=set[str])


class Outbox:
    """Which hints are due and which transactions to ask about: decisions only, no clock, no I/O, no locking.

    The first hint with a payload is due at once; those that follow within `spacing` become one, due at its end. At most
    `limit` hints and `limit` transactions are remembered; beyond that the oldest is forgotten.
    """

    def __init__(self, *, spacing: float, limit: int = 10_000) -> None:
        self._spacing = spacing
        self._limit = limit
        self._due: dict[str, float] = {}
        self._sent: dict[str, float] = {}
        self._questions: dict[str, _Question] = {}
        self._schedule: list[tuple[float, str]] = []  # a heap; an entry that its question does not confirm is stale
        self._ask_not_before = _NEVER

    def hint(self, payload: str, *, now: float) -> bool:
        """Take up a hint; False if an equal one is waiting already."""
        if payload in self._due:
            return False
        self._make_room(self._due)
        self._due[payload] = max(now, self._sent.get(payload, _NEVER) + self._spacing)
        return True

    def hint_once_committed(self, payload: str, transaction: str, *, now: float) -> bool:
        """Take up a hint that is void unless this transaction commits; False if it is being asked about already."""
        question = self._questions.get(transaction)
        if question is not None:
            question.payloads.add(payload)
            return False
        self._make_room(self._questions)
        question = _Question(now + FIRST_ASK_SECONDS, FIRST_ASK_SECONDS, now + ASK_FOR_SECONDS, {payload})
        self._questions[transaction] = question
        heapq.heappush(self._schedule, (question.ask_at, transaction))
        return True

    def next_at(self) -> float | None:
        """When there is something to send or to ask; None when nothing waits."""
        times = [min(self._due.values())] if self._due else []
        self._drop_stale()
        if self._schedule:
            times.append(max(self._schedule[0][0], self._ask_not_before))
        return min(times, default=None)

    def take_hints(self, now: float, *, everything: bool = False) -> list[str]:
        """Remove and return the payloads that are due, counting them as sent now."""
        payloads = [payload for payload, at in self._due.items() if everything or at <= now]
        self._sent = {payload: at for payload, at in self._sent.items() if at + self._spacing > now}
        for payload in payloads:
            del self._due[payload]
            self._sent[payload] = now
        return payloads

    def take_questions(self, now: float, *, everything: bool = False) -> list[str]:
        """Transactions to ask about now, each put off to its next turn, which comes later every time."""
        if now < self._ask_not_before and not everything:
            return []
        due: list[str] = []
        while self._question_is_due(now, everything=everything) and len(due) < ASK_BATCH:
            due.append(heapq.heappop(self._schedule)[1])
        transactions = [transaction for transaction in due if self._put_off(transaction, now)]
        if transactions:
            self._ask_not_before = now + FIRST_ASK_SECONDS
        return transactions

    def answer(self, transaction: str, status: str | None, *, now: float) -> None:
        """What the server said: committed makes the hints due, in progress changes nothing, all else voids them."""
        if status == "in progress":
            return
        question = self._questions.pop(transaction, None)
        if question is not None and status == "committed":
            for payload in question.payloads:
                self.hint(payload, now=now)

    def forget(self, transactions: list[str]) -> None:
        """Drop these questions: the server cannot answer them."""
        for transaction in transactions:
            self._questions.pop(transaction, None)

    def _question_is_due(self, now: float, *, everything: bool) -> bool:
        self._drop_stale()
        return bool(self._schedule) and (everything or self._schedule[0][0] <= now)

    def _put_off(self, transaction: str, now: float) -> bool:
        """Schedule the next turn, later each time; False when its time is over: then the poll has to find the job."""
        question = self._questions[transaction]
        if now >= question.give_up_at:
            del self._questions[transaction]
            return False
        question.delay = min(question.delay * ASK_GROWTH, LONGEST_ASK_SECONDS)
        question.ask_at = now + question.delay
        heapq.heappush(self._schedule, (question.ask_at, transaction))
        return True

    def _drop_stale(self) -> None:
        while self._schedule:
            at, transaction = self._schedule[0]
            question = self._questions.get(transaction)
            if question is not None and question.ask_at == at:
                return
            heapq.heappop(self._schedule)

    def _make_room(self, entries: dict[str, _Entry]) -> None:
        if len(entries) >= self._limit:
            del entries[next(iter(entries))]


class _Sender:
    """The thread of one process, its connection (touched by no other thread) and its outbox (guarded by `_changed`)."""

    def __init__(self, conninfo: str, *, channel: str, spacing: float) -> None:
        self.pid = os.getpid()
        self._conninfo = conninfo
        self._channel = channel
        self._outbox = Outbox(spacing=spacing)
        self._changed = threading.Condition()  # re-entrant, so that a signal handler may enqueue
        self._thread: threading.Thread | None = None
        self._closing = False
        self._connection: psycopg.Connection[TupleRow] | None = None
        self._quiet_until = _NEVER
        self._pause = _FIRST_PAUSE_SECONDS
        self._troubled = False

    def tell(self, payload: str, transaction: str | None) -> None:
        """Take up a hint and see to it that the thread runs; never waits for the database."""
        with self._changed:
            now = monotonic()
            if transaction is None:
                new = self._outbox.hint(payload, now=now)
            else:
                new = self._outbox.hint_once_committed(payload, transaction, now=now)
            if self._thread is None or not self._thread.is_alive():
                self._start()
            elif new:
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
            return
        self._thread = thread
        _open_senders.add(self)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._sleep()
                self._work()
            self._work(everything=True)
        finally:
            self._disconnect()

    def _sleep(self) -> None:
        """Until something is due, the state has changed, or the connection has been idle for long enough."""
        with self._changed:
            at = self._outbox.next_at()
            if at is None:
                seconds = _IDLE_SECONDS if self._connection is not None else None
            else:
                seconds = max(at, self._quiet_until) - monotonic()
            if self._closing or (seconds is not None and seconds <= 0):
                return
            changed = self._changed.wait(seconds)
        if at is None and not changed:
            self._disconnect()

    def _work(self, *, everything: bool = False) -> None:
        """Ask and send what is due; in trouble what was taken is dropped, and the server left alone for a while."""
        if monotonic() < self._quiet_until:
            return
        try:
            worked = self._ask(everything=everything) | self._send(everything=everything)
        except (psycopg.Error, OSError) as error:
            # Class and code only: the text of a database error may quote the connection string or values.
            code = error.sqlstate if isinstance(error, psycopg.Error) else None
            self._complain(f"{type(error).__name__} {code}")
            self._disconnect()
            self._quiet_until = monotonic() + self._pause * random.uniform(0.5, 1.0)  # noqa: S311 - guards nothing
            self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)
            return
        if worked:
            self._recover()

    def _ask(self, *, everything: bool) -> bool:
        with self._changed:
            transactions = self._outbox.take_questions(monotonic(), everything=everything)
        if not transactions:
            return False
        try:
            rows = self._execute(_ASK, (transactions,))
        except psycopg.DataError:  # an id that this server has never given out: it belongs to another one
            with self._changed:
                self._outbox.forget(transactions)
            raise
        with self._changed:
            for transaction, status in rows:
                self._outbox.answer(transaction, status, now=monotonic())
        return True

    def _send(self, *, everything: bool) -> bool:
        with self._changed:
            payloads = self._outbox.take_hints(monotonic(), everything=everything)
        if payloads:
            self._execute(_SEND, (self._channel, payloads))
        return bool(payloads)

    def _execute(self, statement: LiteralString, arguments: tuple[object, ...]) -> list[TupleRow]:
        """Run a statement; a connection that broke while nobody used it is replaced once, on the spot."""
        if self._connection is not None:
            try:
                return self._connection.execute(statement, arguments).fetchall()
            except psycopg.OperationalError:
                if not self._connection.broken:
                    raise
                self._disconnect()
        self._connection = psycopg.connect(self._conninfo, autocommit=True, prepare_threshold=None)
        return self._connection.execute(statement, arguments).fetchall()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _complain(self, what: str) -> None:
        """One warning for each time of trouble."""
        if not self._troubled:
            self._troubled = True
            _log.warning("hints cannot be sent error=%s; workers find jobs by polling meanwhile", what)

    def _recover(self) -> None:
        self._pause = _FIRST_PAUSE_SECONDS
        if self._troubled:
            self._troubled = False
            _log.info("hints are sent again")


_open_senders: weakref.WeakSet[_Sender] = weakref.WeakSet()


class Hints:
    """The hint sender of a process: hand it a kind, and workers that listen look for jobs of it soon after.

    Nothing here blocks or raises. The thread starts with the first hint. After a fork the child gets a thread and a
    connection of its own and leaves the parent's alone. `connect_kwargs` are libpq keywords and win over `conninfo`.
    """

    def __init__(
        self, conninfo: str, connect_kwargs: Mapping[str, object], *, channel: str, spacing: float = 0.010
    ) -> None:
        self._conninfo = make_conninfo(conninfo, **{name: str(value) for name, value in connect_kwargs.items()})
        self._channel = channel
        self._spacing = spacing
        self._senders: dict[int, _Sender] = {}
        # A forgotten object must not leave its thread behind; waiting for it is not for a garbage collector, though.
        weakref.finalize(self, _close_own, self._senders, 0.0).atexit = False

    def ready(self, kind: str, *, transaction: str | None = None) -> None:
        """Jobs of this kind are ready.

        `transaction` is `pg_current_xact_id()::text` of a transaction that may still be open: the hint is sent once it
        has committed and dropped if it is rolled back. The id is the whole transaction's, so work that was undone by a
        savepoint alone still gives a hint, which costs one empty claim.
        """
        self._tell(f"r:{kind}", transaction)

    def control(self, kind: str, *, transaction: str | None = None) -> None:
        """Whoever runs jobs of this kind should verify its leases; `transaction` as for `ready`."""
        self._tell(f"c:{kind}", transaction)

    def close(self, timeout: float = 1.0) -> None:
        """Send what is due and end the thread, waiting at most so long; a later hint starts anew."""
        _close_own(self._senders, timeout)

    def _tell(self, payload: str, transaction: str | None) -> None:
        pid = os.getpid()
        sender = self._senders.get(pid)
        if sender is None:  # setdefault, so that no lock of ours can be held by another thread at a fork
            new = _Sender(self._conninfo, channel=self._channel, spacing=self._spacing)
            sender = self._senders.setdefault(pid, new)
        sender.tell(payload, transaction)


def _close_own(senders: dict[int, _Sender], timeout: float) -> None:
    """Close this process's sender; a parent's stays untouched, connection and all, or the parent would lose it."""
    sender = senders.pop(os.getpid(), None)
    if sender is not None:
        sender.close(timeout)


@atexit.register
def _close_at_exit() -> None:
    for sender in list(_open_senders):
        if sender.pid == os.getpid():
            sender.close(1.0)
