"""What a signal does to a running worker: the first stops it, the second hurries it, the third ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Final, NoReturn, Self, TypeAlias

from pgworker.kind import Kind
from pgworker.policy import STORE_TIMEOUT, Stop
from pgworker.worker import Worker

_log = logging.getLogger("pgworker")

_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_SIGNAL: Final = b"!"
_LAST: Final = 3
_STDERR: Final = 2
_RELEASE_SECONDS: Final = STORE_TIMEOUT.total_seconds() + 0.5  # the release's one budget, and a moment to sign off
_FOR_EVER: Final = float("inf")


class StoppedEarlyError(BaseException):
    """A signal came before there was a worker to stop. No Exception: an app that is being imported lets it through."""


class StopSignals:
    """SIGTERM and SIGINT, from the start of the command to its end.

    Before `serve` a signal ends the command. From then on the first stops the worker as its kinds' policies say, the
    second releases what runs, within five seconds, and a third ends the process at once. So does a stop that outlasts
    its time: the leases of what it leaves behind run out, and those jobs run elsewhere.

    The signals are acted upon by a thread of its own, so that a handler which blocks the event loop cannot keep the
    process alive; the signal handler itself takes no lock and only wakes the thread.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="pgworker-signals", daemon=True)
        self._read, self._write = os.pipe()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Worker | None = None
        self._stop_seconds = _FOR_EVER
        self._early = 0
        self._pid = os.getpid()
        self._previous: dict[int, _Handler] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        self._previous = {number: signal.getsignal(number) or signal.SIG_DFL for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, self._signalled)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def serve(self, worker: Worker, kinds: Sequence[Kind]) -> None:
        """Steer this worker from now on; called in its event loop. Raises StoppedEarlyError if that was asked for."""
        self._stop_seconds = stop_seconds(kinds)
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        if self._early:  # and the app's import did not let the exception through
            raise StoppedEarlyError

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a fork that a handler made has our signal handlers, and its end is its own
            signal.signal(number, self._previous[number])
            signal.raise_signal(number)
        elif self._loop is not None:
            os.write(self._write, _SIGNAL)
        else:
            self._early += 1
            if self._early == 1:
                raise StoppedEarlyError
            if self._early >= _LAST:
                _leave("stopped by a third signal")

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        signals = 0
        give_up_at = _FOR_EVER
        while True:
            seconds = give_up_at - time.monotonic()
            ready, _, _ = select.select([self._read], [], [], None if seconds == _FOR_EVER else max(0.0, seconds))
            if not ready:
                _leave("the stop outlasted its time")
            if os.read(self._read, 1) != _SIGNAL:
                return  # closed: the command is at its end
            signals += 1
            give_up_at = min(give_up_at, time.monotonic() + self._act(signals))

    def _act(self, signals: int) -> float:
        """Do what this signal asks for; returns the seconds that the worker may take over it."""
        if signals >= _LAST:
            _leave("stopped by a third signal")
        order, seconds = (self._stop, self._stop_seconds) if signals == 1 else (self._release, _RELEASE_SECONDS)
        assert self._loop is not None  # noqa: S101 - nothing is written to the pipe before
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended already
            self._loop.call_soon_threadsafe(order)
        return seconds

    # --- in the loop ------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        _log.info("stopping: nothing more is claimed; a second signal gives back what still runs")
        assert self._worker is not None  # noqa: S101 - set before the loop
        self._worker.stop()

    def _release(self) -> None:
        _log.info("releasing: what still runs is given back; a third signal ends the process")
        assert self._worker is not None  # noqa: S101 - set before the loop
        self._worker.release()


def stop_seconds(kinds: Sequence[Kind]) -> float:
    """The longest that an ordinary stop takes: the longest grace, then a release; a drain without grace has no end."""
    return max(_grace_seconds(kind.policy.stop) for kind in kinds) + _RELEASE_SECONDS


def _grace_seconds(stop: Stop) -> float:
    if stop.mode == "release":
        return 0.0
    return _FOR_EVER if stop.grace is None else stop.grace.total_seconds()


def _leave(why: str) -> NoReturn:
    """End the process now. Nothing is given back: what it held is claimed again when the leases have run out."""
    line = f"pgworker: {why}; jobs that still ran come back when their leases have run out\n"
    if select.select([], [_STDERR], [], 0)[1]:  # whoever should read it may be stuck
        os.write(_STDERR, line.encode())
    os._exit(1)
