"""What holds between loops, processes and programs: nobody gets another's job, and one program may do it all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Job, NewJob
from tests.chaos.processes import Start, start, until
from tests.commandline import Lines
from tests.handles import Gate, jobs, result, row, running

__all__ = ["start"]

Admin: TypeAlias = psycopg.Connection[Any]

AT_THE_GATE = """
@app.kind("work", preset="pool", concurrency=8)
async def work(job: Job[object]) -> None:
    say("ran", job.key)
    await gate()
"""


def count(admin: Admin, what: str) -> int:
    found = admin.execute(f"select count(*) from pgworker.{what}".encode()).fetchone()
    assert found is not None
    return int(found[0])


async def until_there_are(admin: Admin, expected: int, what: str) -> None:
    """Rows that other processes write have no event here."""
    with anyio.fail_after(20):
        while count(admin, what) != expected:  # noqa: ASYNC110 - said above
            await anyio.sleep(0.01)


@pytest.mark.contract("B34")
async def test_four_loops_and_two_processes_claim_disjoint_jobs(app: App, admin: Admin, start: Start) -> None:
    """The second ten lie before the first, one by one: whoever claims it passes over what the others run."""
    gate, ran = Gate(), list[str]()

    @app.kind("work", preset="pool", concurrency=8)
    async def work(job: Job[int]) -> None:
        ran.append(job.key)
        await gate.pass_through()

    processes = [start(AT_THE_GATE), start(AT_THE_GATE)]
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(running(app.worker()))
        await until_there_are(admin, 6, "runners")
        await app.enqueue_many("work", jobs(10))
        await until_there_are(admin, 10, "jobs where token is not null")
        long_ago = datetime.now(UTC) - timedelta(hours=1)
        for number in range(10):
            older = NewJob(number, f"older{number}", "r", ready_at=long_ago - timedelta(seconds=number))
            await app.enqueue_many("work", [older])
            await until_there_are(admin, 11 + number, "jobs where token is not null")
        gate.open()
        for process in processes:
            process.open_gate()
        await until_there_are(admin, 20, "jobs where state = 'succeeded'")
    for process in processes:
        process.stop()
        assert process.wait() == 0
        ran += [line.removeprefix("ran ") for line in process.out.text.splitlines()]
    assert sorted(ran) == [*(f"k{number:04}" for number in range(10)), *(f"older{number}" for number in range(10))]
    assert admin.execute("select distinct lease_epoch, evictions, attempts from pgworker.jobs").fetchall() == [
        (1, 0, 0)
    ]
    assert count(admin, "facts where what = 'claimed'") == count(admin, "facts where what = 'succeeded'") == 20
    assert count(admin, "facts") == 60


PROGRAM = """
import asyncio
import sys

from pgworker import App, Job

app = App()


@app.kind("double", preset="pool")
async def double(job: Job[int]) -> int:
    return 2 * job.payload


async def main() -> None:
    async with app, asyncio.TaskGroup() as group:
        worker = app.worker()
        group.create_task(worker.run())
        queued = await app.enqueue("double", 21, key="k", revision="r1", tenant="project")
        print("queued", queued.status, flush=True)
        print("answer", await app.result("double", "k"), flush=True)
        worker.drain()
    print("closed", flush=True)
    sys.stdin.read()


asyncio.run(main())
"""


@pytest.mark.contract("B37")
def test_one_program_enqueues_works_and_closes_what_it_has_opened(dsn: str, admin: Admin, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**_without_ours(), "PGWORKER_DSN": dsn},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    said = Lines(program.stdout)
    try:
        said.expect("queued created")
        said.expect("answer 42")
        said.expect("closed")
        until(_nobody_of_ours_is_connected(admin))  # although the program lives on
        program.stdin.close()
        assert program.wait(20) == 0
    finally:
        program.kill()
        program.wait()
        program.stdin.close()
        assert said.text is not None
    after, stored = row(admin, "k", kind="double"), result(admin, "k", kind="double")
    assert (after["state"], after["revision"], after["token"]) == ("succeeded", "r1", None)
    assert stored is not None
    assert stored["value"] == 42
    assert count(admin, "runners") == 0


def _without_ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PGWORKER_")}


def _nobody_of_ours_is_connected(admin: Admin) -> Callable[[], bool]:
    sessions = "select 1 from pg_stat_activity where application_name like 'pgworker%' and datname = current_database()"
    return lambda: admin.execute(sessions).fetchone() is None
