"""What the benchmarks' workers run: `python -m pgworker run pgworker.bench.app:drains`, as users would run theirs.

The database and the schema come from the environment. When the benchmark that started a worker is gone, and with it the
other end of standard input, the worker stops: nothing is left running on somebody's database.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Final

import anyio

from pgworker.app import App
from pgworker.job import Job
from pgworker.policy import Stop

CHILD: Final = "PGWORKER_BENCH_CHILD"
"""Set in a worker's environment: its standard input is held open by the benchmark."""

NOOP: Final = "noop"
STAMP: Final = "stamp"
HOLD: Final = "hold"

MANY: Final = 50
IN_FLIGHT: Final = 10_000

CONCURRENCY: Final = 500
"""Of the no-op kind: the best of a sweep, as the peers have theirs."""

PREFETCH: Final = 1_000
"""Of the no-op kind: the next jobs are claimed while the last ones are written."""

PAYLOAD: Final = "x" * 30
"""32 bytes of JSON, which the targets for WAL are meant for."""

drains = App()
"""One kind whose handler does nothing."""

stamps = App()
"""One kind whose handler says how long it took from the producer to here."""

holds = App()
"""One kind whose jobs do not end, and as many at once as a worker may have."""

many = App()
"""Fifty kinds with nothing to do."""


@drains.kind(NOOP, concurrency=CONCURRENCY, prefetch=PREFETCH, facts="exceptional")
async def noop(job: Job[str]) -> None:
    """Do nothing, and return nothing."""


@stamps.kind(STAMP)
async def stamp(job: Job[float]) -> None:
    """Print the milliseconds since the producer began, by the clock that all processes of a machine share."""
    print(f"{(time.monotonic() - job.payload) * 1000:.3f}", flush=True)  # noqa: T201 - read by who started this


@holds.kind(HOLD, concurrency=IN_FLIGHT, stop=Stop("release", timedelta(0)))
async def hold(job: Job[str]) -> None:  # noqa: ARG001 - a handler gets its job
    """Run until it is stopped."""
    await anyio.sleep_forever()


async def _nothing(job: Job[str]) -> None:
    pass


for _number in range(MANY):
    many.kind(f"idle{_number:02}")(_nothing)


def _end_with_the_benchmark() -> None:
    """Wait for the end of standard input: read, not through sys.stdin, which would break the interpreter's end."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if os.environ.get(CHILD):
    threading.Thread(target=_end_with_the_benchmark, daemon=True).start()
