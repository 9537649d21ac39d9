"""Worker processes that a test may kill, freeze and thaw: `pgworker run` over an app that the test writes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker import NewJob
from tests.commandline import APP, Command
from tests.handles import hand

Start: TypeAlias = Callable[..., "Worker"]


class Worker(Command):
    """One worker process."""

    @property
    def pid(self) -> int:
        """The process' id, which is part of its runners' names."""
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """SIGSTOP, and wait until it has come to a halt."""
        self.signal(signal.SIGSTOP)
        self.wait_until_frozen()

    def wait_until_frozen(self) -> None:
        """Wait for a process that stops itself."""
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)


@pytest.fixture
def start(dsn: str, tmp_path: Path) -> Iterator[Start]:
    """Start `pgworker run` with this source (after the prelude of tests/commandline.py), on the database of `dsn`."""
    started: list[Worker] = []

    def begin(source: str, *options: str, env: dict[str, str] | None = None) -> Worker:
        name = f"jobs{len(started)}"
        (tmp_path / f"{name}.py").write_text(APP + source)
        started.append(Worker("run", f"{name}:app", *options, cwd=tmp_path, dsn=dsn, env=env))
        return started[-1]

    yield begin
    for worker in started:
        worker.end()


def put(dsn: str, *keys: str, kind: str = "work") -> None:
    """Enqueue jobs by hand."""
    by_hand = hand(dsn, kind=kind)
    by_hand.enqueue_many([NewJob(None, key, "r") for key in keys])
    by_hand.connection.close()


def until(condition: Callable[[], bool], *, within: float = 20.0) -> None:
    """Ask the database, every few milliseconds, until it says so; for what tells no event to another process."""
    give_up_at = time.monotonic() + within
    while not condition():
        assert time.monotonic() < give_up_at, "it did not come to pass in time"
        time.sleep(0.01)


def wait_until_ready(admin: psycopg.Connection[Any], *workers: Worker) -> None:
    """Until they have reported themselves."""
    names = [f"%:{worker.pid}:%" for worker in workers]
    count = "select count(*) from pgworker.runners where runner like any(%s)"
    until(lambda: admin.execute(count, [names]).fetchone() == (len(workers),))
