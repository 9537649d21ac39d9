"""Waits for the ends of jobs: one thread a process, one LISTEN connection, one statement for all that is awaited.

The thread has an event loop of its own. So nobody who waits can hold up another, whatever their loops and threads do.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import cast

import anyio

from pgworker.config import Settings, conninfo
from pgworker.db import Database
from pgworker.errors import ConfigError, PgworkerError
from pgworker.kind import Kind
from pgworker.listener import Listener, Wake
from pgworker.operations import Seen
from pgworker.payload import check_key, check_revision
from pgworker.policy import STORE_TIMEOUT
from pgworker.waits import Desk, Wait, value_of

_GATHER_SECONDS = 0.010  # between two looks: whoever comes meanwhile goes with the next one


class Results:
    """The waits of an app. The thread starts with the first one; after a fork the child gets a thread of its own."""

    def __init__(self) -> None:
        self._watchers: dict[int, _Watcher] = {}
        # As in Hints: a forgotten app leaves no thread behind, and an ending interpreter no connection.
        weakref.finalize(self, _close_own, self._watchers, 0.0).atexit = False
        atexit.register(_close_own, self._watchers, 1.0)

    async def wait(
        self, settings: Settings, kind: Kind, key: str, *, revision: str | None, within: timedelta | float | None
    ) -> object:
        """Wait in an event loop; returns the value. See App.result."""
        seconds = _seconds(within)
        future = self._watch(settings, kind, key, revision)
        with anyio.move_on_after(seconds):
            return value_of(kind, await asyncio.wrap_future(future))  # whose cancelling cancels the future, too
        raise _timed_out(kind, key, seconds)

    def wait_sync(
        self, settings: Settings, kind: Kind, key: str, *, revision: str | None, within: timedelta | float | None
    ) -> object:
        """Wait in a thread; returns the value. See App.result."""
        seconds = _seconds(within)
        future = self._watch(settings, kind, key, revision)
        try:
            return value_of(kind, future.result(min(max(0.0, seconds), threading.TIMEOUT_MAX)))
        except TimeoutError:
            raise _timed_out(kind, key, seconds) from None
        finally:
            future.cancel()

    def _watch(self, settings: Settings, kind: Kind, key: str, revision: str | None) -> Future[Seen]:
        check_key(key)
        if revision is not None:
            check_revision(revision)
        pid = os.getpid()
        watcher = self._watchers.get(pid)
        if watcher is None:  # setdefault, so that no lock of ours can be held by another thread at a fork
            watcher = self._watchers.setdefault(pid, _Watcher(settings))
        wait = Wait(kind.name, key, revision)
        watcher.add(wait)
        return wait.future

    def close(self) -> None:
        """End the thread within a second, and with an error what is waited for; a later wait starts anew."""
        _close_own(self._watchers, 1.0)


def _seconds(timeout: timedelta | float | None) -> float:
    if timeout is None:
        return float("inf")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(cast("object", seconds), (int, float)) or seconds != seconds:  # noqa: PLR0124 - NaN
        raise ConfigError(f"timeout must be a timedelta or seconds, got {timeout!r}")
    return seconds


def _timed_out(kind: Kind, key: str, seconds: float) -> TimeoutError:
    return TimeoutError(f"job {key!r} of kind {kind.name!r} did not end within {seconds:g} s")


def _close_own(watchers: dict[int, _Watcher], timeout: float) -> None:
    """Close this process's thread; a parent's stays untouched, as its connections are the parent's."""
    watcher = watchers.pop(os.getpid(), None)
    if watcher is not None:
        watcher.close(timeout)


# --- The thread -----------------------------------------------------------------------------------------------------


class _Watcher:
    """The thread of one process, and what other threads hand to it (guarded by the lock)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.RLock()  # re-entrant, as a signal handler may ask for a result
        self._new: list[Wait] = []
        self._thread: threading.Thread | None = None
        self._wake: Callable[[], object] | None = None
        self._stop: Callable[[], object] | None = None
        self._closed = False

    def add(self, wait: Wait) -> None:
        """Have it looked after; starts the thread if need be. Raises PgworkerError when closed meanwhile."""
        with self._lock:
            if self._closed:
                raise _closed()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pgworker-results", daemon=True)
                thread.start()
                self._thread = thread
            self._new.append(wait)
            if self._wake is not None:
                self._wake()

    def close(self, timeout: float) -> None:
        """End the thread, waiting for it at most so long."""
        with self._lock:
            self._closed = True
            thread = self._thread
            if self._stop is not None:
                self._stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        try:
            anyio.run(self._serve)
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # else retired: what is new is another thread's
                    self._thread = self._wake = self._stop = None
                    _tell_closed(self._take_new())

    async def _serve(self) -> None:
        settings = self._settings
        database = Database(settings.dsn, "results", deadline=STORE_TIMEOUT, connections=1)
        listener = Listener(conninfo(settings.listen_dsn, "listen"), channel=settings.tables.channel)
        desk = Desk(settings.tables, database.run, listener.subscribe_done)
        async with anyio.create_task_group() as group:
            try:
                self._open_door(desk.changed, group.cancel_scope)
                await database.open()
                await self._watch(desk, lambda: group.start_soon(listener.run))
            finally:
                _tell_closed(desk.clear())
                with anyio.CancelScope(shield=True):
                    await database.close()
            group.cancel_scope.cancel()

    async def _watch(self, desk: Desk, listen: Callable[[], object]) -> None:
        """Look whenever there is something to look at; returns when there has been nothing for a while.

        Many ask for what is there already: the first whose job has not ended makes us listen.
        """
        listening = False
        while True:
            desk.changed.clear()
            desk.add(self._take_new())
            await desk.look()
            if not listening and not desk.is_empty:
                listening = True
                listen()
            await anyio.sleep(_GATHER_SECONDS)
            woken = await desk.changed.wait(desk.rest_seconds())
            if not woken and desk.is_empty and self._retire():
                return

    def _open_door(self, changed: Wake, scope: anyio.CancelScope) -> None:
        """Let other threads wake and stop this one."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._wake = lambda: loop.call_soon_threadsafe(changed.set)
            self._stop = lambda: loop.call_soon_threadsafe(scope.cancel)
            if self._closed:
                scope.cancel()

    def _take_new(self) -> list[Wait]:
        with self._lock:
            new, self._new = self._new, []
            return new

    def _retire(self) -> bool:
        """Give up the post, unless somebody has come meanwhile; whoever comes now starts another thread."""
        with self._lock:
            if self._new:
                return False
            self._thread = self._wake = self._stop = None
            return True


def _closed() -> PgworkerError:
    return PgworkerError("the app was closed, and the wait for a result with it")


def _tell_closed(waits: Iterable[Wait]) -> None:
    for wait in waits:
        wait.tell(_closed())
