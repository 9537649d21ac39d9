"""Frozen, blocked and slow processes: who lost the lease writes nothing, who did not lose it is left alone."""

from __future__ import annotations

import pytest

from tests.chaos.audit import Admin, findings, install, read
from tests.chaos.processes import Start, put, until, wait_until_ready
from tests.handles import result, row


def end_state(admin: Admin) -> tuple[object, object, object, object]:
    stored, after = result(admin, "k"), row(admin, "k")
    return after["state"], after["attempts"], stored and stored["value"], after["lease_epoch"]


# Waited for to its end; what holds it and lives is done with it within milliseconds.
QUICK = """
QUICK = Lease.renew(timedelta(seconds=0.6), timedelta(seconds=0.2))
"""

FREEZES = {
    # in the middle of an asynchronous handler, which waits for something
    "waiting": """
import sys
@app.kind("work", poll=0.2, lease=QUICK)
async def work(job: Job[object]) -> str:
    say("began", job.key)
    try:
        await gate()
    except asyncio.CancelledError:
        say("cancelled", job.lost)
        raise
    return WHO
""",
    # in the handler's last step: it thaws with its value in hand
    "returning": """
@app.kind("work", poll=0.2, lease=QUICK)
async def work(job: Job[object]) -> str:
    say("began", job.key)
    if WHO == "first":
        os.kill(os.getpid(), signal.SIGSTOP)
    return WHO
""",
    # in the completion's transaction, past the question whether the lease is still there: the next that it sends is the
    # finish, and only the fence is left to refuse it
    "completing": """
async def store(connection: object, job: Job[object], value: str) -> None:
    await connection.execute("insert into public.stored values (%s)", [WHO])
    if WHO == "first":
        os.kill(os.getpid(), signal.SIGSTOP)

@app.kind("work", poll=0.2, lease=QUICK, apply=store)
async def work(job: Job[object]) -> str:
    say("began", job.key)
    return WHO
""",
}


@pytest.mark.contract("B50")
@pytest.mark.field("L02")
@pytest.mark.race(14)
@pytest.mark.parametrize("where", FREEZES)
def test_what_a_frozen_process_writes_after_its_lease_is_refused(
    start: Start, dsn: str, admin: Admin, where: str
) -> None:
    install(admin)
    admin.execute("create table public.stored (by text); grant all on public.stored to public")
    put(dsn, "k")
    source = QUICK + 'WHO = os.environ["WHO"]\n' + FREEZES[where]
    first = start(source, env={"WHO": "first"})
    first.out.expect("began k")
    if where == "waiting":
        first.freeze()
    else:
        first.wait_until_frozen()
    second = start(source, env={"WHO": "second"})
    second.out.expect("began k")
    if where == "waiting":
        second.open_gate()
    until(lambda: row(admin, "k")["state"] == "succeeded")
    before = end_state(admin)
    assert before == ("succeeded", 0, "second", 2)
    first.thaw()
    if where == "waiting":
        first.out.expect("cancelled True")  # by the local guard
    assert "kind=work key=k" in first.log.expect("lost lease")
    first.stop()
    assert first.wait() == 0
    assert end_state(admin) == before
    assert admin.execute("select by from public.stored").fetchall() == [("second",)] * (where == "completing")
    assert not findings(read(admin))
    assert sum(change.is_success for change in read(admin)) == 1


@pytest.mark.contract("B9", "D16")
@pytest.mark.field("L03")
def test_a_job_ten_leases_long_starts_once(start: Start, dsn: str, admin: Admin) -> None:
    source = """
@app.kind("work", poll=0.1, lease=Lease.renew(timedelta(seconds=0.4), timedelta(seconds=0.1)))
async def work(job: Job[object]) -> str:
    say("began", job.key)
    await asyncio.sleep(4)
    say("ends", job.key)
    return "done"
"""
    put(dsn, "k")
    workers = [start(source) for _ in range(3)]
    for worker in workers:
        worker.log.expect("worker starts")
    until(lambda: row(admin, "k")["state"] == "succeeded")
    for worker in workers:
        worker.stop()
        assert worker.wait() == 0
    assert sorted(line for worker in workers for line in worker.out.text.splitlines()) == ["began k", "ends k"]
    assert end_state(admin) == ("succeeded", 0, "done", 1)


@pytest.mark.field("L04")
@pytest.mark.ruling("1.5")
def test_a_handler_that_blocks_the_loop_keeps_its_lease_and_is_warned_of(start: Start, dsn: str, admin: Admin) -> None:
    source = """
@app.kind("work", poll=0.1, lease=Lease.renew(timedelta(seconds=0.5), timedelta(seconds=0.1)))
async def work(job: Job[object]) -> str:
    say("began", job.key)
    time.sleep(2.5)  # which releases the interpreter
    return "done"
"""
    blocked, idle = start(source), start(source)
    wait_until_ready(admin, blocked, idle)
    idle.freeze()  # so that it is the other who gets it
    put(dsn, "k")
    blocked.out.expect("began k")
    idle.thaw()
    assert "kinds=work" in blocked.log.expect("the event loop stands still")
    assert row(admin, "k")["state"] == "pending"  # it is said while it lasts
    until(lambda: row(admin, "k")["state"] == "succeeded")
    assert end_state(admin) == ("succeeded", 0, "done", 1)
    assert idle.out.silent(0)


GREEDY = """
import re
WHO = os.environ["WHO"]

def hopeless(length: int, times: int = 1) -> float:
    began = time.thread_time()
    re.match("(?!(?:a+)+b)" * times, "a" * length)  # lets go of the interpreter after the last of them
    return time.thread_time() - began

@app.kind("work", poll=0.1, lease=QUICK)
async def work(job: Job[object]) -> str:
    if WHO == "first":
        length = next(length for length in range(14, 40) if hopeless(length) > 0.02)  # each letter doubles the time
        say("began", job.key)
        hopeless(length, round(1.8 / hopeless(length)))
    return WHO
"""


@pytest.mark.field("L04")
@pytest.mark.ruling("1.5")
def test_a_handler_that_keeps_the_interpreter_to_itself_loses_its_lease_and_writes_nothing(
    start: Start, dsn: str, admin: Admin
) -> None:
    install(admin)
    source = QUICK + GREEDY
    first, second = start(source, env={"WHO": "first"}), start(source, env={"WHO": "second"})
    wait_until_ready(admin, first, second)
    second.freeze()
    put(dsn, "k")
    first.out.expect("began k")
    second.thaw()
    until(lambda: row(admin, "k")["state"] == "succeeded")
    assert "kind=work key=k" in first.log.expect("lost lease")
    first.stop()
    assert first.wait() == 0
    assert "the event loop stands still" in first.log.text
    assert end_state(admin) == ("succeeded", 0, "second", 2)
    assert not findings(read(admin))


@pytest.mark.ruling("4.6")
@pytest.mark.parametrize("batch", [0, 64])
def test_a_handler_does_not_start_on_a_lease_that_ended_after_the_claim(
    start: Start, dsn: str, admin: Admin, batch: int
) -> None:
    source = (
        QUICK
        + """
from pgworker.claimer import Claimer
from pgworker.leases import LeaseKeeper
WHO = os.environ["WHO"]
original = Claimer.round

async def round(self, limit):
    taken = await original(self, limit)
    if WHO == "first" and taken.claims:
        os.kill(os.getpid(), signal.SIGSTOP)
    return taken

def no_guard(self):  # the thread that would notice comes too late
    with self._changed:
        while not self._closed:
            self._changed.wait()

Claimer.round = round
LeaseKeeper.guard = no_guard

@app.kind("work", poll=0.2, lease=QUICK)
async def work(job: Job[object]) -> str:
    say("began", job.key, job.lease_epoch)
    return WHO
"""
    )
    if batch:
        source = source.replace('"work", poll', '"work", batch=64, poll').replace("(job: Job[object]) -> str", "(jobs)")
        source = source.replace('say("began", job.key', 'for job in jobs: say("began", job.key')
        source = source.replace("return WHO\n", "return [WHO] * len(jobs)\n")
    keys = [f"k{number}" for number in range(5)]
    put(dsn, *keys)
    first = start(source, env={"WHO": "first"})
    first.wait_until_frozen()
    second = start(source, env={"WHO": "second"})
    until(lambda: all(row(admin, key)["state"] == "succeeded" for key in keys))
    first.thaw()
    for _ in keys:
        first.log.expect("lost lease")
    for worker in (first, second):
        worker.stop()
        assert worker.wait() == 0
    assert first.out.text == ""
    assert sorted(second.out.text.splitlines()) == [f"began {key} 2" for key in keys]
