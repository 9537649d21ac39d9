"""Many who enqueue the same at the same moment: one job, one fact, and all are told of it."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Enqueued
from tests.chaos.processes import until
from tests.integration.test_facts import told

Admin: TypeAlias = psycopg.Connection[Any]

CALLERS = 20


def waiting(admin: Admin) -> int:
    """How many sessions wait for another's lock."""
    found = admin.execute(
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    ).fetchone()
    assert found is not None
    return int(found[0])


def check(admin: Admin, answers: list[Enqueued]) -> None:
    """One job and one fact, and the row that is there in every answer."""
    assert {(each.kind, each.key, each.revision, each.state) for each in answers} == {("work", "k", "r", "pending")}
    assert admin.execute("select key, revision, payload, generation from pgworker.jobs").fetchall() == [
        ("k", "r", "same", 1)
    ]
    assert told(admin) == ["enqueued"]


@pytest.mark.contract("B41")
def test_twenty_transactions_that_enqueue_one_key_make_one_job_and_one_fact(dsn: str, admin: Admin) -> None:
    app = App(dsn)
    app.declare("work", facts="all")

    def enqueue(conn: psycopg.Connection[Any]) -> Enqueued:
        conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        return app.sync.enqueue("work", "same", key="k", revision="r", conn=conn)

    def enqueue_beside() -> Enqueued:
        with psycopg.connect(dsn) as conn:
            return enqueue(conn)

    with app.sync, ThreadPoolExecutor(CALLERS) as pool, psycopg.connect(dsn) as first:
        answers = [enqueue(first)]
        others = [pool.submit(enqueue_beside) for _ in range(CALLERS - 1)]
        until(lambda: waiting(admin) == CALLERS - 1)
        first.commit()
        answers += [other.result(20) for other in others]
    assert Counter(each.status for each in answers) == {"created": 1, "unchanged": CALLERS - 1}
    check(admin, answers)


@pytest.mark.contract("B41")
async def test_twenty_tasks_that_enqueue_one_key_make_one_job_and_one_fact(app: App, admin: Admin) -> None:
    app.declare("work", facts="all")
    answers: list[Enqueued] = []

    async def enqueue() -> None:
        answers.append(await app.enqueue("work", "same", key="k", revision="r"))

    async with anyio.create_task_group() as group:
        for _ in range(CALLERS):
            group.start_soon(enqueue)
    assert len(answers) == CALLERS
    check(admin, answers)
