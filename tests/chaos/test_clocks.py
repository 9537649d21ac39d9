"""A worker whose clock is wrong: leases and ready times are the database's, and its own waits count ticks."""

from __future__ import annotations

import time
from collections import Counter
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

# by the process whose clock is off
@app.kind("producer" if "CLOCK_IS_OFF_BY" in os.environ else "nothing", poll=0.1, lease=SHORT)
async def producer(job: Job[object]) -> str:
    await app.enqueue("work", key="made later", delay=1.5)
    await app.enqueue("work", key="made now")
    await app.enqueue("work")  # an event: its key has a time in it
    return job.key

@app.kind("work", poll=0.1, lease=SHORT)
async def work(job: Job[object]) -> str:
    return job.key
"""


@pytest.mark.contract("X7")
@pytest.mark.race(10)
@pytest.mark.parametrize("hours", [1, -1])
def test_a_worker_whose_clock_is_an_hour_off_keeps_to_leases_and_ready_times(
    start: Start, dsn: str, admin: Admin, tmp_path: Path, hours: int
) -> None:
    install(admin)
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(SHIFTED)
    off = {"CLOCK_IS_OFF_BY": str(hours * 3600), "PYTHONPATH": str(tmp_path / "clock")}
    shifted, right = start(SOURCE, env=off), start(SOURCE)
    until(lambda: count(admin, "distinct runner", "runners") == 2)
    put(dsn, *(f"k{number}" for number in range(6)), kind="held")  # three for each
    for worker, by in ((shifted, hours * 3600), (right, 0)):
        for _ in range(3):
            _, _, seconds, stamp = worker.out.expect("holds").split()
            assert abs(float(seconds) - time.time() - by) < 100
            assert abs(float(stamp) - time.time() - by) < 100
    put(dsn, "p", kind="producer")
    until(lambda: count(admin, "*", "jobs where kind = 'work' and state = 'succeeded'") == 3)
    until(lambda: min(renewals(admin).values(), default=0) >= 7)  # more than two leases
    assert len(renewals(admin)) == 6
    for worker in (shifted, right):
        worker.open_gate()
    until(lambda: count(admin, "*", "jobs where state = 'pending'") == 0)
    for worker in (shifted, right):
        worker.stop()
        assert worker.wait() == 0
    log = read(admin)
    assert not findings(log)
    assert not [change for change in log if change.is_takeover or change.is_reaping or change.evictions]
    for change in log:
        if change.is_claim or change.is_renewal:
            assert change.expiry is not None
            assert timedelta(0) < change.expiry - change.at <= timedelta(seconds=1)
    (claimed,) = [change.at for change in log if change.is_claim and change.key == "made later"]
    (made,) = [change.at for change in log if change.is_put and change.key == "made later"]
    assert timedelta(seconds=1.4) < claimed - made
    stored = row(admin, "made later")
    assert stored["ready_at"] <= claimed
    assert timedelta(seconds=1.4) < stored["ready_at"] - made < timedelta(seconds=1.6)


def count(admin: Admin, what: str, rows: str) -> int:
    (found,) = admin.execute(f"select count({what}) from pgworker.{rows}").fetchone() or (0,)
    return int(found)


def renewals(admin: Admin) -> Counter[str]:
    """How often each held job's lease was prolonged."""
    return Counter(change.key for change in read(admin) if change.is_renewal and change.key.startswith("k"))
