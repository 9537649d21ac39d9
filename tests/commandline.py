"""Handles for tests of the command line: it runs in a process of its own, and says what it does line by line."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from typer.testing import CliRunner

from pgworker.cli import app

# The start of each app module that a test writes. A handler tells the test by `say` where it is, and waits for it in
# `gate`. (A thread that reads sys.stdin itself would break the interpreter's end.)
APP = """
import asyncio, os, signal, sys, threading, time
from datetime import timedelta
from pgworker import App, Job, Lease, Stop

app = App()
opened = threading.Event()
threading.Thread(target=lambda: (os.read(0, 1), opened.set()), daemon=True).start()

async def gate() -> None:
    while not opened.is_set():
        await asyncio.sleep(0.005)

def say(*words: object) -> None:
    print(*words, flush=True)

SHORT = Lease.renew(timedelta(seconds=1), timedelta(seconds=0.3))
"""

_PATIENCE_SECONDS = 20.0


class Ended(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


def invoke(*words: str, dsn: str | None = None, stdin: str | bytes | None = None, width: int | None = None) -> Ended:
    """Run a command in this process; whatever it leaves to the interpreter to report is raised."""
    env: dict[str, str | None] = {"PGWORKER_DSN": dsn, "PGWORKER_SCHEMA": None, "PGWORKER_LISTEN_DSN": None}
    env["COLUMNS"] = str(width) if width else None
    log = logging.getLogger("pgworker")
    level = log.level
    try:
        result = CliRunner().invoke(app, list(words), input=stdin, env=env, catch_exceptions=False)
    finally:
        log.setLevel(level)
    return Ended(result.exit_code, result.stdout, result.stderr)


class Lines:
    """What comes out of a process, line by line, as it comes."""

    def __init__(self, stream: IO[str]) -> None:
        self._lines: list[str] = []
        self._seen = 0
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=[stream], daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._lines.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def expect(self, text: str, *, within: float = _PATIENCE_SECONDS) -> str:
        """The next line with this text in it, waited for; lines before it are passed over."""
        until = time.monotonic() + within
        with self._changed:
            while True:
                while self._seen < len(self._lines):
                    self._seen += 1
                    if text in self._lines[self._seen - 1]:
                        return self._lines[self._seen - 1]
                assert not self._ended, f"ended without {text!r}: {self._lines}"
                assert self._changed.wait(until - time.monotonic()), f"no {text!r} so far: {self._lines}"

    def silent(self, seconds: float) -> bool:
        """Whether nothing more comes in this time."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._seen < len(self._lines), seconds)

    @property
    def text(self) -> str:
        """All of it; complete once the process has ended."""
        self._thread.join(_PATIENCE_SECONDS)
        return "\n".join(self._lines)


class Command:
    """`python -m pgworker ...` in a process of its own."""

    def __init__(self, *words: str, cwd: Path, dsn: str | None = None, env: Mapping[str, str] | None = None) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PGWORKER_")}
        if dsn is not None:
            clean["PGWORKER_DSN"] = dsn
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pgworker", *words],
            cwd=cwd,
            env={**clean, "PYTHONFAULTHANDLER": "1", **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.out = Lines(self.process.stdout)
        self.log = Lines(self.process.stderr)

    def open_gate(self) -> None:
        """Let the handlers that wait in gate() go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def stop(self) -> None:
        """Ask it to stop, and wait until it has taken note."""
        self.signal()
        self.log.expect("stopping")

    def wait(self, seconds: float = _PATIENCE_SECONDS) -> int:
        """The exit code; a process that does not end fails the test, with the stacks of its threads."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT)
            pytest.fail(f"still running after {seconds} s:\n{self.log.text}")

    def end(self) -> None:
        """Kill it if it still runs, and close its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        assert self.out.text is not None
        assert self.log.text is not None
