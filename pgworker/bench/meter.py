"""Measure what a piece of work costs: CPU of the workers and of their backends, WAL, transactions.

CPU and WAL hold still where rates do not, so they are measured always. A backend's CPU can be seen where the server
runs on this machine, outside of a container. Transactions are counted by the database, for everybody in it: figures are
good where nobody else is at work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, cast

from pgworker.bench.arena import Arena
from pgworker.bench.proc import cpu_seconds, is_backend
from pgworker.bench.results import Sample

_PATIENCE_SECONDS: Final = 2.0
_TICK: Final = 0.01

_BACKENDS = """
select pid from pg_stat_activity
where datname = current_database() and usename = session_user and backend_type = 'client backend'
  and pid <> pg_backend_pid()"""
_WAL = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
_COMMITS = "select pg_stat_get_db_xact_commit(oid) from pg_database where datname = current_database()"
_FLUSH = """
do $$ begin
    if current_setting('server_version_num')::int >= 150000 then perform pg_stat_force_next_flush(); end if;
end $$"""


class Meter:
    """Reads the counters: `start`, then the work, `stop` while the workers are still there, `sample` afterwards.

    A session's count of transactions reaches the statistics at its end at the latest; so they are read last.
    """

    def __init__(self, arena: Arena, worker_pids: Sequence[int] = ()) -> None:
        self._arena = arena
        self._workers = worker_pids

    def start(self) -> None:
        """From here on it counts."""
        self._commits = self._transactions()
        self._wal = self._arena.number(_WAL)
        self._before = self._pids()
        self._backends = self._cpu_of_backends()
        self._cpu = self._cpu_of_workers()
        self._began = time.monotonic()

    def stop(self) -> None:
        """Up to here it counts."""
        self._seconds = time.monotonic() - self._began
        cpu = self._cpu_of_workers()
        self._worker_cpu = None if cpu is None or self._cpu is None else cpu - self._cpu
        self._postgres_cpu = self._used_by_backends()
        self._wal_bytes = self._arena.number(_WAL) - self._wal

    def sample(self, jobs: int, *, seconds: float | None = None, running: bool = False) -> Sample:
        """The costs for each job; `seconds` if the work itself knows better when it began and ended.

        It waits until the work's sessions are gone, unless they are `running` on: of these some counts come late.
        """
        if not running:
            self._wait_for_exits()
        return Sample(
            jobs,
            self._seconds if seconds is None else seconds,
            _micro(self._worker_cpu, jobs),
            _micro(self._postgres_cpu, jobs),
            self._wal_bytes / jobs,
            max(0.0, (self._transactions() - self._commits) / jobs),
        )

    # --- counters ---------------------------------------------------------------------------------------------------

    def _transactions(self) -> float:
        """How many there were in this database, but for those of the arena's own connection."""
        self._arena.execute(_FLUSH)
        asked = self._arena.asked  # what is asked now counts when the next one is asked
        return self._arena.number(_COMMITS) - asked

    def _wait_for_exits(self) -> None:
        """Until the sessions that came meanwhile are gone, and have told their counts; strangers' may stay longer."""
        patience = time.monotonic() + _PATIENCE_SECONDS
        while self._pids() - self._before and time.monotonic() < patience:
            time.sleep(_TICK)

    def _cpu_of_workers(self) -> float | None:
        seen = [cpu_seconds(pid) for pid in self._workers]
        known = [each for each in seen if each is not None]
        return sum(known) if known and len(known) == len(seen) else None

    def _cpu_of_backends(self) -> dict[int, float]:
        """Each session's CPU time so far; none of them where the server's processes cannot be seen from here."""
        times = {pid: cpu_seconds(pid) for pid in self._pids() if is_backend(pid)}
        return {pid: used for pid, used in times.items() if used is not None}

    def _pids(self) -> set[int]:
        return {cast("int", pid) for (pid,) in self._arena.rows(_BACKENDS)}

    def _used_by_backends(self) -> float | None:
        now = self._cpu_of_backends()
        if not now:
            return None
        return sum(used - self._backends.get(pid, 0.0) for pid, used in now.items())


def _micro(seconds: float | None, jobs: int) -> float | None:
    return None if seconds is None else seconds / jobs * 1e6
