"""SIGKILL: nothing is lost, nothing succeeds twice, and what the dead process held runs again in time."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from pgworker import App, NewJob
from tests.chaos.audit import Admin, Change, by_job, findings, install, read, told
from tests.chaos.processes import Start, Worker, put, until, wait_until_ready
from tests.handles import Hand, hand, row

LEASE = 2.0
POLL = 1.0

QUICK_JOBS = """
@app.kind("work", concurrency=50, lease=Lease.renew(timedelta(seconds=2)))
async def work(job: Job[object]) -> str:
    await asyncio.sleep(0.01)
    return job.key
"""


def enqueue(hand: Hand, numbers: range) -> None:
    hand.enqueue_many([NewJob(None, f"k{number:04}", "r") for number in numbers])


def held_by(admin: Admin, worker: Worker) -> int:
    """How many live leases the process has."""
    found = admin.execute(
        "select count(*) from pgworker.jobs where token is not null and runner like %s", [f"%:{worker.pid}:%"]
    ).fetchone()
    assert found is not None
    return int(found[0])


def kill_with_leases(admin: Admin, worker: Worker) -> datetime:
    """Kill it at a moment at which it holds some; returns the moment by the database's clock."""
    for _ in range(100):
        until(lambda: held_by(admin, worker) > 0)
        worker.freeze()
        # what it had sent before is done with when its sessions are idle
        until(lambda: not admin.execute(_BUSY).fetchone() or held_by(admin, worker) > 0)
        if held_by(admin, worker):
            worker.kill()
            found: Any = admin.execute("select clock_timestamp()").fetchone()
            return datetime.fromisoformat(str(found[0]))
        worker.thaw()
    pytest.fail("it never held a lease")


_BUSY = "select 1 from pg_stat_activity where application_name like 'pgworker%' and state = 'active'"


def orphans(log: list[Change], pid: int) -> list[Change]:
    """The claims of the dead process that somebody else took over."""
    return [
        change
        for changes in by_job(log).values()
        for claim, change in pairwise(changes)
        if claim.token == change.old_token and f":{pid}:" in (claim.runner or "") and change.is_takeover
    ]


def succeeded(admin: Admin) -> int:
    found = admin.execute("select count(*) from pgworker.jobs where state = 'succeeded'").fetchone()
    assert found is not None
    return int(found[0])


def check_orphans(taken: list[Change], died_at: datetime) -> None:
    """Each was claimed again after its lease had ended, and soon; that cost an eviction and no attempt."""
    assert taken, "it held no lease when it died"
    for change in taken:
        assert change.old_expiry is not None
        assert change.old_expiry <= change.at <= died_at + timedelta(seconds=LEASE + POLL + 1), change
        assert (change.attempts, change.evictions) == (0, (change.old_evictions or 0) + 1), change


@pytest.mark.slow  # tests/chaos/test_ten_processes.py kills and freezes quick ones
@pytest.mark.contract("A26", "B46", "D27")
@pytest.mark.field("L01", "L08")
@pytest.mark.ruling("1.16")
def test_one_of_two_workers_dies_in_the_middle_of_5000_jobs(start: Start, hand: Hand, admin: Admin) -> None:
    install(admin)
    dying, living = start(QUICK_JOBS), start(QUICK_JOBS)
    wait_until_ready(admin, dying, living)
    enqueue(hand, range(5000))
    until(lambda: succeeded(admin) >= 2500)
    died_at = kill_with_leases(admin, dying)
    until(lambda: succeeded(admin) == 5000)
    living.stop()
    assert living.wait() == 0
    log = read(admin)
    found = findings(log)
    assert not found, told(found)
    assert sum(change.is_success for change in log) == 5000
    check_orphans(orphans(log, dying.pid), died_at)
    assert all(change.evictions == 1 for change in orphans(log, dying.pid))
    assert all(change.attempts == 0 for change in log if change.is_success)
    assert admin.execute("select count(*), count(distinct value) from pgworker.results").fetchone() == (5000, 5000)


def kill_again_and_again(start: Start, hand: Hand, admin: Admin, *, jobs: int, deaths: int) -> None:
    install(admin)
    start(SLOWER_JOBS)
    deaths_at: dict[int, datetime] = {}
    portion = jobs // (deaths + 1)
    for death in range(deaths):
        dying = start(SLOWER_JOBS)
        wait_until_ready(admin, dying)
        enqueue(hand, range(death * portion, (death + 1) * portion))
        deaths_at[dying.pid] = kill_with_leases(admin, dying)
    enqueue(hand, range(deaths * portion, jobs))
    until(lambda: succeeded(admin) == jobs, within=60)
    log = read(admin)
    found = findings(log)
    assert not found, told(found)
    assert sum(change.is_success for change in log) == jobs
    for pid, died_at in deaths_at.items():
        check_orphans(orphans(log, pid), died_at)
    assert all(change.attempts == 0 for change in log if change.is_success)
    assert admin.execute("select count(*), count(distinct value) from pgworker.results").fetchone() == (jobs, jobs)


SLOWER_JOBS = QUICK_JOBS.replace("50", "20, poll=0.1").replace("0.01", "0.05")


@pytest.mark.slow
@pytest.mark.race(9)
def test_workers_die_again_and_again(start: Start, hand: Hand, admin: Admin) -> None:
    kill_again_and_again(start, hand, admin, jobs=1000, deaths=3)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.race(9)
def test_workers_die_twenty_times(start: Start, hand: Hand, admin: Admin) -> None:
    kill_again_and_again(start, hand, admin, jobs=10_000, deaths=20)


@pytest.mark.contract("A28")
@pytest.mark.ruling("2.31")
def test_a_death_after_the_effect_repeats_it_under_the_same_idempotency_key(
    start: Start, dsn: str, admin: Admin
) -> None:
    source = """
@app.kind("work", poll=0.2, lease=Lease.renew(timedelta(seconds=0.6), timedelta(seconds=0.15)))
async def work(job: Job[object]) -> None:
    say("effect", job.key, job.revision, job.idempotency_key, job.token, job.attempts, job.evictions)
    await gate()
"""
    put(dsn, "k")
    dying = start(source)
    first = dying.out.expect("effect").split()
    heir = start(source)
    heir.log.expect("worker starts")
    dying.kill()
    second = heir.out.expect("effect").split()
    heir.open_gate()
    until(lambda: row(admin, "k")["state"] == "succeeded")
    assert first[1:4] == second[1:4] == ["k", "r", "work:k:r"]
    assert first[4] != second[4]
    assert (first[5:], second[5:]) == (["0", "0"], ["0", "1"])
    assert heir.out.silent(0)


DRAINED = """
@app.kind("work", preset="pool", concurrency=8, poll=0.1, lease=Lease.renew(timedelta(seconds=5)))
async def work(job: Job[object]) -> str:
    number = int(job.key.removeprefix("k"))
    if number % 4 == 3 and STAYS:
        await asyncio.sleep(3600)
    if number % 4 == 1 and STAYS:
        await gate()
    return job.key
"""
"""Of four jobs, one ends when the test says so, and one never; the others, and all of them elsewhere, at once.
Leases are long enough for a machine that stands still for two seconds."""


@pytest.mark.contract("B76")
def test_a_worker_that_is_killed_in_its_drain_leaves_each_job_one_completion(
    start: Start, hand: Hand, admin: Admin
) -> None:
    install(admin)
    enqueue(hand, range(100))
    dying = start("STAYS = True\n" + DRAINED)
    until(lambda: (held_by(admin, dying), succeeded(admin)) == (8, 8))
    dying.stop()
    living = start("STAYS = False\n" + DRAINED)
    dying.open_gate()
    until(lambda: held_by(admin, dying) == 4)
    dying.kill()
    until(lambda: succeeded(admin) == 100)
    living.stop()
    assert living.wait() == 0
    completions = "select key, count(*) from pgworker.facts where what = 'succeeded' group by key order by key"
    assert admin.execute(completions).fetchall() == [(f"k{number:04}", 1) for number in range(100)]
    by_the_dead = "select count(*) from pgworker.facts where what = 'succeeded' and runner like %s"
    assert admin.execute(by_the_dead, [f"%:{dying.pid}:%"]).fetchone() == (12,)  # four of them while it drained
    lost = "select key from pgworker.facts where what = 'evicted' and runner like %s order by key"
    found = admin.execute(lost, [f"%:{dying.pid}:%"]).fetchall()
    assert [key for (key,) in found] == ["k0003", "k0007", "k0011", "k0015"]
    assert not findings(read(admin))


CANCELLED = """
import pgworker.maintenance
pgworker.maintenance.REAP_EVERY = timedelta(seconds=0.2)

@app.kind("work", poll=0.1, facts="all", lease=Lease.renew(timedelta(seconds=60)))
async def work(job: Job[object]) -> None:
    say("began", job.key)
    await asyncio.sleep(3600)
"""


@pytest.mark.contract("B66")
def test_a_job_whose_cancel_was_asked_for_ends_unrun_after_its_workers_death(
    start: Start, dsn: str, admin: Admin
) -> None:
    operator = App(dsn)
    operator.declare("work", facts="all")
    with operator.sync:
        operator.sync.enqueue("work", key="k", revision="r")
        dying = start(CANCELLED)
        dying.out.expect("began k")
        dying.freeze()  # so that it hears of nothing
        assert operator.sync.cancel("work", key="k") == 1
    dying.kill()
    heir = start(CANCELLED)
    wait_until_ready(admin, heir)
    asked = row(admin, "k")
    assert (asked["state"], asked["token"] is None, asked["cancel_requested_at"] is None) == ("pending", False, False)
    admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp()")
    until(lambda: row(admin, "k")["state"] != "pending" or row(admin, "k")["lease_epoch"] > 1)
    ended = row(admin, "k")
    assert (ended["state"], ended["attempts"], ended["lease_epoch"], ended["token"]) == ("cancelled", 0, 1, None)
    heir.stop()
    assert heir.wait() == 0
    assert heir.out.text == ""
    told_of_it = admin.execute("select what from pgworker.facts where what <> 'evicted' order by id").fetchall()
    assert [what for (what,) in told_of_it] == ["enqueued", "claimed", "cancel_requested", "cancelled"]


POISON = """
import pgworker.maintenance
pgworker.maintenance.REAP_EVERY = timedelta(seconds=0.2)

@app.kind("work", concurrency=4, poll=0.2, lease=Lease.renew(timedelta(seconds=0.6)), max_evictions=3)
async def work(job: Job[object]) -> None:
    if job.key == "poison":
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.02)
    say("ran", job.key)
"""


@pytest.mark.contract("X10")
@pytest.mark.field("L19")
@pytest.mark.ruling("1.8", "1.16")
def test_a_job_that_kills_its_worker_ends_and_the_others_run(start: Start, dsn: str, admin: Admin) -> None:
    install(admin)
    put(dsn, "poison", *(f"k{number}" for number in range(12)))
    deaths = 0
    worker = start(POISON)

    def over() -> bool:
        nonlocal worker, deaths
        if worker.process.poll() is not None:  # the supervisor
            worker.end()
            deaths += 1
            worker = start(POISON)
        return succeeded(admin) == 12 and row(admin, "poison")["state"] == "failed"

    until(over, within=40)
    after = row(admin, "poison")
    assert (after["last_code"], after["evictions"], after["attempts"]) == ("evicted_too_often", 3, 0)
    assert deaths == 3
    assert not findings(read(admin))


@pytest.mark.field("L27")
def test_each_job_starts_once_also_those_that_came_while_no_worker_was_there(start: Start, dsn: str) -> None:
    source = """
@app.kind("work", poll=0.1)
async def work(job: Job[object]) -> None:
    say("started", job.key)
    await asyncio.sleep(0.3)  # so that each looks while the other is at it
"""
    both = [start(source), start(source)]
    for worker in both:
        worker.log.expect("worker starts")
    put(dsn, *(f"a{number}" for number in range(20)))
    finish_all(dsn)
    for worker in both:
        worker.stop()
        assert worker.wait() == 0
    put(dsn, *(f"b{number}" for number in range(20)))
    late = start(source)
    finish_all(dsn)
    late.stop()
    assert late.wait() == 0
    started = sorted(line for worker in both for line in worker.out.text.splitlines())
    assert started == sorted(f"started a{number}" for number in range(20))
    assert sorted(late.out.text.splitlines()) == sorted(f"started b{number}" for number in range(20))


AT_THE_GATE = """
@app.kind("work", concurrency=%s, fair=%s)
async def work(job: Job[object]) -> None:
    say("started", job.key)
    await gate()
"""


@pytest.mark.field("L27")
@pytest.mark.parametrize("fair", [False, True], ids=["by age", "by shares"])
def test_a_claim_passes_over_jobs_that_run_and_takes_none_of_them(
    start: Start, dsn: str, admin: Admin, *, fair: bool
) -> None:
    """A claim begins at the oldest free job, so that it meets those that run only if they are younger."""

    def put_with_tenant(*keys: str) -> None:
        """Of one tenant some run and some are free, of the other all run."""
        put(dsn, *keys)
        if fair:
            admin.execute(
                "update pgworker.jobs set tenant = case when key < 'a4' then 'one' when key < 'b' then 'other'"
                " else 'one' end where token is null"
            )

    put_with_tenant(*(f"a{number}" for number in range(7)))
    busy = start(AT_THE_GATE % (7, fair))
    for _ in range(7):
        busy.out.expect("started a")
    put_with_tenant("b0", "b1")
    admin.execute("update pgworker.jobs set ready_at = ready_at - interval '1 hour' where token is null")
    idle = start(AT_THE_GATE % (20, fair))  # which has room for all of them
    for _ in range(2):
        idle.out.expect("started b")
    for worker in (busy, idle):
        worker.open_gate()
    until(lambda: succeeded(admin) == 9)
    for worker in (busy, idle):
        worker.stop()
        assert worker.wait() == 0
    assert sorted(busy.out.text.splitlines()) == [f"started a{number}" for number in range(7)]
    assert sorted(idle.out.text.splitlines()) == ["started b0", "started b1"]
    assert admin.execute("select distinct lease_epoch, evictions from pgworker.jobs").fetchall() == [(1, 0)]


def finish_all(dsn: str) -> None:
    by_hand = hand(dsn)
    until(lambda: not by_hand.lanes())
    by_hand.connection.close()
