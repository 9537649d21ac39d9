"""Drive every queue through the same work and measure it with the same meter."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psycopg.conninfo import make_conninfo

from benchmarks.peers.catalogue import PEERS, Peer
from benchmarks.peers.install import installed, version_of
from pgworker.bench.arena import Arena, connect
from pgworker.bench.meter import Meter
from pgworker.bench.processes import Child
from pgworker.bench.results import Sample
from pgworker.bench.stats import median, percentile
from pgworker.tablemap import TableMap

_HERE: Final = Path(__file__).parent
_ROUNDS: Final = 3
_PATIENCE_SECONDS: Final = 300.0
_LOOK_EVERY: Final = 0.02
_SLOW_SHARE: Final = 4
_SINGLES_SHARE: Final = 10
_PICKUPS: Final = 200
_WARM_UP: Final = 10

Figures = dict[str, float | str | None]


def run_peers(dsn: str, *, jobs: int, say: Callable[[str], object]) -> dict[str, Figures]:
    """A row for each queue, by its name. Raises CalledProcessError when pip or a driver fails."""
    rows: dict[str, Figures] = {}
    for peer in PEERS:
        say(f"{peer.name}: installing")
        python = installed(peer)
        with _database(dsn, peer) as arena:
            driven = _Driven(peer, python, arena, jobs // (_SLOW_SHARE if peer.slow else 1), say)
            rows[peer.name] = {"version": version_of(peer, python), **driven.figures()}
    return rows


@contextmanager
def _database(dsn: str, peer: Peer) -> Generator[Arena, None, None]:
    """A new database, dropped at the end."""
    name = f"peer_{peer.name}"
    with connect(dsn, "bench") as server:
        server.execute(f'drop database if exists "{name}" with (force)'.encode())
        server.execute(f'create database "{name}"'.encode())
        try:
            own = make_conninfo(dsn, dbname=name)
            with connect(own, "bench") as connection:
                yield Arena(own, TableMap("public"), connection)
        finally:
            server.execute(f'drop database if exists "{name}" with (force)'.encode())


@dataclass(slots=True)
class _Driven:
    """One queue under measurement."""

    peer: Peer
    python: Path
    arena: Arena
    jobs: int
    say: Callable[[str], object]

    def figures(self) -> Figures:
        """All columns of its row."""
        self._call("prepare")
        ones = [self._drain(1) for _ in range(_ROUNDS)]
        twos = [self._drain(2) for _ in range(_ROUNDS)]
        drains, enqueues = [drain for drain, _, _ in ones], [enqueue for _, enqueue, _ in ones]
        singles = max(50, self.jobs // _SINGLES_SHARE)
        pickups = self._pickups()
        return {
            "one_worker": median([each.rate for each in drains]),
            "two_workers": median([each.rate for each, _, _ in twos]),
            "worker_cpu_us": _middle([each.worker_cpu_us for each in drains]),
            "postgres_cpu_us": _middle([each.postgres_cpu_us for each in drains]),
            "enqueue_wal_bytes": _middle([each.wal_bytes for each in enqueues]),
            "wal_bytes": _middle([each.wal_bytes for each in drains]),
            "transactions": _middle([each.transactions for each in drains]),
            "pickup_p50_ms": percentile(pickups, 0.5),
            "pickup_p99_ms": percentile(pickups, 0.99),
            "bulk_enqueue": median([self.jobs / seconds for _, _, seconds in [*ones, *twos]]),
            "single_1": singles / self._single(singles, 1),
            "single_16": singles / self._single(singles, 16),
        }

    def _drain(self, workers: int) -> tuple[Sample, Sample, float]:
        """What a drain cost, what the enqueue before it cost, and how many seconds that took."""
        self.say(f"{self.peer.name}: drain by {workers}")
        meter = Meter(self.arena)
        meter.start()
        seconds = float(self._call("bulk", self.jobs))
        meter.stop()
        enqueue = meter.sample(self.jobs)
        with self._workers(workers) as started:
            meter = Meter(self.arena, [each.pid for each in started])
            began = float(_told(started[0], "first"))
            meter.start()
            self._wait_until_done()
            ended = time.monotonic()
            meter.stop()
        return meter.sample(self.jobs, seconds=ended - began), enqueue, seconds

    def _pickups(self) -> list[float]:
        self.say(f"{self.peer.name}: pickup latency")
        with self._workers(1) as (worker,):
            self._call("pickup", _WARM_UP)
            for _ in range(_WARM_UP):
                _told(worker, "pickup")
            self._call("pickup", _PICKUPS)
            pickups = [float(_told(worker, "pickup")) for _ in range(_PICKUPS)]
            self._wait_until_done()
            return pickups

    def _single(self, jobs: int, clients: int) -> float:
        self.say(f"{self.peer.name}: single enqueues by {clients}")
        seconds = float(self._call("single", jobs, clients))
        with self._workers(1):
            self._wait_until_done()
        return seconds

    def _wait_until_done(self) -> None:
        until = time.monotonic() + _PATIENCE_SECONDS
        while self.arena.value(self.peer.left):
            if time.monotonic() > until:
                raise TimeoutError(f"{self.peer.name} has not finished {self.jobs} jobs in {_PATIENCE_SECONDS:g} s")
            time.sleep(_LOOK_EVERY)

    # --- its processes ----------------------------------------------------------------------------------------------

    def _command(self, mode: str, *numbers: int) -> list[str]:
        return [str(self.python), str(_HERE / f"drive_{self.peer.name}.py"), self.arena.dsn, mode, *map(str, numbers)]

    def _call(self, mode: str, *numbers: int) -> str:
        """Run a command to its end; what it said."""
        command = self._command(mode, *numbers)
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603 - our own list

    @contextmanager
    def _workers(self, count: int) -> Generator[list[Child], None, None]:
        with tempfile.TemporaryFile() as errors:
            started = [Child(self._command("work"), errors, os.environ) for _ in range(count)]
            try:
                yield started
            finally:
                for each in started:
                    each.process.kill()  # queues differ in how long they take to stop
                    each.end()


def _told(worker: Child, what: str) -> str:
    """The rest of the next line that begins so."""
    while True:
        word, _, rest = worker.read(_PATIENCE_SECONDS).partition(" ")
        if word == what:
            return rest


def _middle(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
