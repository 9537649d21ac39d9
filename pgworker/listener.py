"""The LISTEN side: one connection a process whose notifications wake the runners; the poll finds whatever it misses.

Payloads on the channel: those that hints.py tells of, and `p:...`, a listener's question to itself. Anything else
pokes everyone.
"""

from __future__ import annotations

import logging
import random
import secrets
import traceback
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from itertools import chain
from math import inf
from typing import TypeAlias

import anyio
import psycopg
from psycopg import sql
from psycopg.pq import PGnotify
from psycopg.rows import TupleRow

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 30.0  # over all hosts of the DSN; each has its own connect_timeout
_UNLISTEN_SECONDS = 1.0
# (why that setting, and why not by SET: see hints.py)
_NOTIFY = "select pg_catalog.set_config('synchronous_commit', 'off', true), pg_catalog.pg_notify(%s, %s)"

_Connection: TypeAlias = psycopg.AsyncConnection[TupleRow]


class Wake:
    """An event that is set once however often it is asked for: a burst of hints is one wake-up.

    Clear it *before* the claim and wait after it: a hint that comes between the two is then still there for the wait.
    All methods belong to the event loop's thread.
    """

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._hinted = False

    def set(self) -> None:
        """A hint: end the current wait, or else the next one."""
        self._hinted = True
        self._event.set()

    def ring(self) -> None:
        """As `set`, but it is only time to look, and no hint."""
        self._event.set()

    def clear(self) -> bool:
        """Forget the hints so far, and say whether there were any; whoever waits already has been woken by them."""
        hinted, self._hinted = self._hinted, False
        if self._event.is_set():
            self._event = anyio.Event()
        return hinted

    async def wait(self, timeout: float = inf) -> bool:  # noqa: ASYNC109 - running out of time is an answer here, not an error
        """Wait to be woken, at most so many seconds; True if that was so. Cancelling loses no hint."""
        event = self._event
        if timeout == inf:
            await event.wait()
        else:
            with anyio.move_on_after(timeout):
                await event.wait()
        return event.is_set()


class _CannotHearError(Exception):
    """The server answers, but notifications cannot reach this connection."""


class _StandbyError(_CannotHearError):
    """A server in recovery neither listens nor notifies; the next connection may find the new primary."""


class Listener:
    """Holds the LISTEN connection of a process, proves that it hears, and calls the subscribers."""

    def __init__(
        self,
        conninfo: str,
        *,
        channel: str,
        probe_interval: float = 30.0,
        probe_timeout: float = 3.0,
        first_delay: float = 0.1,
        max_delay: float = 2.0,
    ) -> None:
        self._conninfo = conninfo
        self._channel = channel
        self._probe_interval = probe_interval
        self._probe_timeout = probe_timeout
        self._first_delay = first_delay
        self._max_delay = max_delay
        self._callbacks: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)  # by payload
        self._probe = ""
        self._delay = first_delay
        self._told: set[str] = set()

    def subscribe(self, kind: str, wake: Callable[[], None]) -> None:
        """Call `wake` in the loop's thread when jobs of the kind are ready, and when hints may have been missed."""
        self._callbacks[f"r:{kind}"].append(wake)

    def subscribe_control(self, kind: str, callback: Callable[[], None]) -> None:
        """As subscribe, for when somebody superseded or cancelled jobs of the kind that run, or paused it."""
        self._callbacks[f"c:{kind}"].append(callback)

    def subscribe_done(self, kind: str, callback: Callable[[], None]) -> None:
        """As subscribe, for when jobs of the kind have ended."""
        self._callbacks[f"d:{kind}"].append(callback)

    async def run(self) -> None:
        """Listen until cancelled, which closes the connection; an outage is logged once and outwaited, never raised."""
        while True:
            longest = await self._session_until_lost()
            pause = min(self._delay, longest)
            self._delay = pause * 2
            await anyio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - spreads reconnects, guards nothing

    async def _session_until_lost(self) -> float:
        """One connection's life; returns the longest pause that makes sense before the next."""
        longest = self._max_delay
        try:
            await self._session()
        except _StandbyError:
            self._tell_once("standby", "LISTEN reached a standby, which cannot listen; polling goes on, trying again")
        except _CannotHearError:
            # A pooler does not change its mind, so once a probe interval is often enough to ask.
            longest = max(self._max_delay, self._probe_interval)
            self._tell_once(
                "deaf",
                "notifications do not arrive channel=%s: most likely a transaction pooler lies between; "
                "polling goes on. Set PGWORKER_LISTEN_DSN to a direct connection",
                self._channel,
            )
        except (psycopg.Error, OSError, anyio.BusyResourceError, anyio.ClosedResourceError) as error:
            # (those of anyio: the app waits for a socket of its own that it has closed, under whose number ours came.)
            # Class and code only: the text of a database error may quote the connection string or values.
            code = error.sqlstate if isinstance(error, psycopg.Error) else None
            self._tell_once(
                "unreachable",
                "LISTEN connection lost or refused error=%s sqlstate=%s; polling goes on, trying again",
                type(error).__name__, code,
            )  # fmt: skip
        return longest

    async def _session(self) -> None:
        """Connect, listen, poke everyone, then receive and probe; raises when the connection is of no more use."""
        async with self._connect() as connection:
            connection.pgconn.notify_handler = self._hear  # of those that come with the answer to a statement
            through_pooler = await self._listen(connection)
            try:
                self._poke_all()  # what was committed before LISTEN took effect was not heard
                while True:
                    await self._send_probe(connection, through_pooler=through_pooler)
                    await self._receive(connection, self._probe_timeout)
                    if self._probe:
                        raise _CannotHearError
                    await self._receive(connection, max(0.0, self._probe_interval - self._probe_timeout))
            finally:
                if through_pooler:
                    await self._unlisten(connection)

    @asynccontextmanager
    async def _connect(self) -> AsyncGenerator[_Connection, None]:
        try:
            with anyio.fail_after(_CONNECT_SECONDS):
                connection = await psycopg.AsyncConnection.connect(
                    self._conninfo, autocommit=True, prepare_threshold=None
                )
        except BaseException as error:
            # A half-made connection lives on in the frames of a cancelled connect until they are collected. Meanwhile
            # the server waits for its password, for a minute, and whatever needs all its backends (DROP DATABASE) too.
            traceback.clear_frames(error.__traceback__)
            raise
        try:
            yield connection
        finally:
            await connection.close()

    async def _listen(self, connection: _Connection) -> bool:
        """Start to listen; True if something between us and the server stands in for its sessions."""
        if connection.info.parameter_status("in_hot_standby") == "on":
            raise _StandbyError
        with anyio.fail_after(self._probe_timeout):
            await connection.execute(sql.SQL("listen {}").format(sql.Identifier(self._channel)))
            cursor = await connection.execute("select pg_catalog.pg_backend_pid()")
            return await cursor.fetchone() != (connection.info.backend_pid,)

    async def _send_probe(self, connection: _Connection, *, through_pooler: bool) -> None:
        """Notify ourselves with a fresh random text.

        A transaction pooler passes on what the server sends while a statement runs, hence also the answer to a probe
        from this very connection, and nothing else. So behind any pooler the probe comes from another connection.
        """
        self._probe = f"p:{secrets.token_hex(8)}"
        async with self._connect() if through_pooler else nullcontext(connection) as sender:
            with anyio.fail_after(self._probe_timeout):
                await sender.execute(_NOTIFY, (self._channel, self._probe))

    async def _receive(self, connection: _Connection, seconds: float) -> None:
        """Hand out notifications for so long; raises as soon as the connection breaks."""
        with anyio.move_on_after(seconds):
            while True:
                await anyio.wait_readable(connection.fileno())  # psycopg's own wait looks up ten times a second
                connection.pgconn.consume_input()
                while (told := connection.pgconn.notifies()) is not None:
                    self._hear(told)

    async def _unlisten(self, connection: _Connection) -> None:
        """Leave the pooler's own connection as it was, or its next users get what was meant for us.

        Done even when we are being cancelled, for a second at most; if it fails nothing is lost but the courtesy.
        """
        with suppress(psycopg.Error, OSError), anyio.move_on_after(_UNLISTEN_SECONDS, shield=True):
            await connection.execute("unlisten *")

    def _hear(self, told: PGnotify) -> None:
        self._dispatch(told.extra.decode(errors="replace"))  # anybody may notify, of whatever

    def _dispatch(self, payload: str) -> None:
        match payload.partition(":")[0]:
            case "r" | "c" | "d":
                for callback in self._callbacks.get(payload, ()):
                    callback()
            case "p":
                self._hear_probe(payload)
            case _:
                self._poke_all()

    def _hear_probe(self, payload: str) -> None:
        if payload != self._probe:
            return  # another process's
        self._probe = ""
        self._delay = self._first_delay
        if self._told:
            self._told.clear()
            _log.info("notifications arrive again channel=%s", self._channel)

    def _poke_all(self) -> None:
        for callback in chain.from_iterable(self._callbacks.values()):
            callback()

    def _tell_once(self, trouble: str, message: str, *arguments: object) -> None:
        """Warn of each kind of trouble once, until notifications arrive again."""
        if trouble not in self._told:
            self._told.add(trouble)
            _log.warning(message, *arguments)
