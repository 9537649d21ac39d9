"""A worker whose clock is wrong: leases and ready times are the database's, and its own waits count ticks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.chaos.audit import Admin, findings, install, read
from tests.chaos.processes import Start, put, until
from tests.handles import row

# Runs at the start of the interpreter, before anything has taken a clock in hand.
SHIFTED = """
import datetime, os, time

class Kind(type):
    def __instancecheck__(cls, value):
        return isinstance(value, real)

class Shifted(datetime.datetime, metaclass=Kind):
    @classmethod
    def now(cls, tz=None):
        return real.now(tz) + datetime.timedelta(seconds=by)

    @classmethod
    def utcnow(cls):
        return real.utcnow() + datetime.timedelta(seconds=by)

by = float(os.environ["CLOCK_IS_OFF_BY"])
real, seconds, nanoseconds = datetime.datetime, time.time, time.time_ns
Shifted.__name__ = Shifted.__qualname__ = "datetime"
Shifted.__module__ = "datetime"
datetime.datetime = Shifted
time.time = lambda: seconds() + by
time.time_ns = lambda: nanoseconds() + int(by * 1e9)
"""

SOURCE = """
from datetime import UTC, datetime

@app.kind("held", concurrency=3, poll=0.1, lease=SHORT)
async def held(job: Job[object]) -> str:
    say("holds", job.key, time.time(), datetime.now(UTC).timestamp())
    await gate()
    return job.key

# by each process whose clock is off: a kind of its own
BY = os.environ.get("CLOCK_IS_OFF_BY", "0")

@app.kind(f"producer{BY}", poll=0.1, lease=SHORT)
async def producer(job: Job[object]) -> str:
    await app.enqueue("work", key=f"made later {BY}", delay=1.5)
    await app.enqueue("work", key=f"made now {BY}")
    await app.enqueue("work")  # an event: its key has a time in it
    return job.key

@app.kind("work", poll=0.1, lease=SHORT)
async def work(job: Job[object]) -> str:
    return job.key
"""

HOUR = 3600


@pytest.mark.contract("X7")
@pytest.mark.race(10)
def test_workers_whose_clocks_are_an_hour_off_keep_to_leases_and_ready_times(
    start: Start, dsn: str, admin: Admin, tmp_path: Path
) -> None:
    install(admin)
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(SHIFTED)
    off = {by: {"CLOCK_IS_OFF_BY": str(by), "PYTHONPATH": str(tmp_path / "clock")} for by in (HOUR, -HOUR)}
    workers = {0: start(SOURCE), **{by: start(SOURCE, env=env) for by, env in off.items()}}
    until(lambda: count(admin, "distinct runner", "runners") == 3)
    put(dsn, *(f"k{number}" for number in range(9)), kind="held")  # three for each
    for by, worker in workers.items():
        for _ in range(3):
            _, _, seconds, stamp = worker.out.expect("holds").split()
            assert abs(float(seconds) - time.time() - by) < 100
            assert abs(float(stamp) - time.time() - by) < 100
    for by in off:
        put(dsn, f"p{by}", kind=f"producer{by}")
    until(lambda: count(admin, "*", "jobs where kind = 'work' and state = 'succeeded'") == 6)
    until(lambda: min(renewals(admin).values(), default=0) >= 7)  # more than two leases
    assert len(renewals(admin)) == 9
    for worker in workers.values():
        worker.open_gate()
    until(lambda: count(admin, "*", "jobs where state = 'pending'") == 0)
    for worker in workers.values():
        worker.stop()
    for worker in workers.values():
        assert worker.wait() == 0
    check(admin, [f"made later {by}" for by in off])


def check(admin: Admin, made_later: Iterable[str]) -> None:
    """No lease was lost, each was as long as it should be, and what was to be made later was begun later."""
    log = read(admin)
    assert not findings(log)
    assert not [change for change in log if change.is_takeover or change.is_reaping or change.evictions]
    for change in log:
        if change.is_claim or change.is_renewal:
            assert change.expiry is not None
            assert timedelta(0) < change.expiry - change.at <= timedelta(seconds=1)
    for key in made_later:
        (claimed,) = [change.at for change in log if change.is_claim and change.key == key]
        (made,) = [change.at for change in log if change.is_put and change.key == key]
        assert timedelta(seconds=1.4) < claimed - made
        stored = row(admin, key)
        assert stored["ready_at"] <= claimed
        assert timedelta(seconds=1.4) < stored["ready_at"] - made < timedelta(seconds=1.6)


def count(admin: Admin, what: str, rows: str) -> int:
    (found,) = admin.execute(f"select count({what}) from pgworker.{rows}").fetchone() or (0,)
    return int(found)


def renewals(admin: Admin) -> Counter[str]:
    """How often each held job's lease was prolonged."""
    return Counter(change.key for change in read(admin) if change.is_renewal and change.key.startswith("k"))
