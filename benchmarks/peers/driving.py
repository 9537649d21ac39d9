"""What every queue's driver has in common; it runs in that queue's own environment, so it imports nothing but Python.

prepare             make the tables
bulk JOBS           enqueue so many no-op jobs the quickest way there is; prints the seconds
single JOBS CLIENTS enqueue them one by one, by so many tasks at once; prints the seconds
pickup JOBS         enqueue a stamp twenty times a second; prints nothing, the workers do
work                run a worker; prints `first TIME` at the first no-op job, and `pickup MS` for each stamp
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

PAYLOAD = "x" * 30
_EVERY_SECONDS = 0.05


class Driver(Protocol):
    """One queue. A producer is opened before it is used, and closed."""

    async def prepare(self) -> None:
        """Make the tables."""
        ...

    async def open(self) -> None:
        """Connect as a producer."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...

    async def put_many(self, jobs: int) -> None:
        """Enqueue no-op jobs."""
        ...

    async def put(self) -> None:
        """Enqueue one no-op job in a transaction of its own."""
        ...

    async def put_stamp(self, now: float) -> None:
        """Enqueue a stamp."""
        ...

    async def work(self) -> None:
        """Run a worker until the process is ended."""
        ...


_begun = False


def note_noop() -> None:
    """Called by every no-op job: the first one is told."""
    global _begun  # noqa: PLW0603 - one process, one worker
    if not _begun:
        _begun = True
        say(f"first {time.monotonic()}")


def note_stamp(stamp: float) -> None:
    """Called by every stamp."""
    say(f"pickup {(time.monotonic() - stamp) * 1000:.3f}")


def say(line: str) -> None:
    """Tell whoever has started this."""
    print(line, flush=True)


def main(make: Callable[[str], Driver], work: Callable[[str], None] | None = None) -> None:
    """Do what the command line says. `work` runs a worker, where users do so by a program of the queue's own."""
    dsn, mode, *numbers = sys.argv[1:]
    if mode == "work":
        threading.Thread(target=_end_with_the_benchmark, daemon=True).start()
    if mode == "work" and work is not None:
        work(dsn)
    else:
        asyncio.run(_run(make(dsn), mode, [int(number) for number in numbers]))


def _end_with_the_benchmark() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


async def _run(driver: Driver, mode: str, numbers: list[int]) -> None:
    if mode == "prepare":
        await driver.prepare()
        return
    if mode == "work":
        await driver.work()
        return
    await driver.open()
    if mode == "bulk":
        await _timed(driver.put_many(numbers[0]))
    elif mode == "single":
        await driver.put()  # connects
        await _timed(_at_once(numbers[0], numbers[1], driver.put))
    else:
        await _stamps(numbers[0], driver)
    await driver.close()


async def _timed(work: Awaitable[None]) -> None:
    began = time.perf_counter()
    await work
    say(f"{time.perf_counter() - began}")


async def _at_once(jobs: int, clients: int, put: Callable[[], Awaitable[None]]) -> None:
    numbers = itertools.count()

    async def produce() -> None:
        while next(numbers) < jobs:
            await put()

    await asyncio.gather(*(produce() for _ in range(clients)))


async def _stamps(jobs: int, driver: Driver) -> None:
    due = time.monotonic()
    for _ in range(jobs):
        await driver.put_stamp(time.monotonic())
        due += _EVERY_SECONDS
        await asyncio.sleep(max(0.0, due - time.monotonic()))
