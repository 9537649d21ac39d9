"""The processes that a benchmark starts: workers as users run them, and the floors' loops. None outlives it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Final

from pgworker.bench.app import CHILD
from pgworker.bench.arena import Arena
from pgworker.bench.session import Session
from pgworker.errors import PgworkerError

_PATIENCE_SECONDS: Final = 30.0
_TICK: Final = 0.02
_REPORTED: Final = "select exists (select from {runners} where runner like %s)"
_TOLD_BYTES: Final = 2000
_NOTHING: Final[Mapping[str, str]] = {}


class Child:
    """One process, with its standard input held open and its standard output read line by line."""

    def __init__(self, command: Sequence[str], errors: IO[bytes], environ: Mapping[str, str]) -> None:
        self._errors = errors
        self._rest = b""
        # A session of its own keeps Ctrl-C from reaching it: it ends with us, in an orderly way.
        self.process = subprocess.Popen(  # noqa: S603 - lists of our own
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process' number."""
        return self.process.pid

    def send(self, line: str) -> None:
        """Write one line to its standard input."""
        assert self.process.stdin is not None  # noqa: S101 - a pipe was asked for
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def read(self, within: float = _PATIENCE_SECONDS) -> str:
        """The next line of its standard output. Raises PgworkerError when it has ended, or takes too long."""
        assert self.process.stdout is not None  # noqa: S101 - a pipe was asked for
        until = time.monotonic() + within
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                raise self._failure("ended" if ready else f"said nothing for {within:g} s")
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def check(self) -> None:
        """Raise PgworkerError, with its last words, when it has ended by itself."""
        if self.process.poll() is not None:
            raise self._failure(f"ended with {self.process.returncode}")

    def end(self) -> None:
        """Ask it to stop, and kill it if it does not; returns when it is gone."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.process.send_signal(number)
            try:
                self.process.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            break
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _failure(self, what: str) -> PgworkerError:
        self._errors.seek(0)
        told = self._errors.read()[-_TOLD_BYTES:].decode(errors="replace").strip()
        return PgworkerError(f"a process of the benchmark {what}: {told or 'without a word'}")


@contextmanager
def children(
    arena: Arena, words: Sequence[str], count: int = 1, *, extra: Mapping[str, str] = _NOTHING
) -> Generator[list[Child], None, None]:
    """Start so many of the same Python process; all of them are gone at the end."""
    # The DSN goes by the environment: a command line can be read by everybody.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PGWORKER_")}
    environ = {**clean, **extra, "PGWORKER_DSN": arena.dsn, "PGWORKER_SCHEMA": arena.tables.schema}
    with ExitStack() as stack:
        started: list[Child] = []
        for _ in range(count):
            errors = stack.enter_context(tempfile.TemporaryFile())
            child = Child([sys.executable, "-m", *words], errors, environ)
            stack.callback(child.end)
            started.append(child)
        yield started


@contextmanager
def workers(session: Session, arena: Arena, app: str, count: int = 1) -> Generator[list[Child], None, None]:
    """Worker processes for one of the apps of pgworker.bench.app, all of them ready."""
    words = ["pgworker", "run", f"pgworker.bench.app:{app}", "--log-level", "warning"]
    with children(arena, words, count, extra={CHILD: "1"}) as started:
        for each in started:
            _wait_until_ready(session, arena, each)
        yield started


def _wait_until_ready(session: Session, arena: Arena, worker: Child) -> None:
    def has_reported() -> bool:
        worker.check()
        return bool(arena.value(_REPORTED, f"%:{worker.pid}:%"))

    session.until_true(has_reported, every=_TICK)


@contextmanager
def floor_loops(arena: Arena, mode: str, count: int = 1) -> Generator[list[Child], None, None]:
    """Processes of pgworker.bench.floors, all of them ready to go."""
    with children(arena, ["pgworker.bench.floors", mode], count) as started:
        for each in started:
            each.read()
        yield started
