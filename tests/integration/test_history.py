"""A long history costs nothing, be its rows dead or alive: what a worker reads, counted in pages."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from pgworker import App, Job, NewJob
from pgworker.db import Database
from pgworker.events import JobSettled
from pgworker.statements import Statement
from tests.chaos.processes import until
from tests.handles import Hand, Recorder, running
from tests.plans.test_plans import Explainer, claim

Admin = psycopg.Connection[Any]

DONE = 100_000
DEAD = 4_000


def pages_read(admin: Admin) -> int:
    """Pages of our tables and of their indexes that all sessions have asked for; those of closed ones are counted."""
    ours = "select 1 from pg_stat_activity where application_name like 'pgworker%' and datname = current_database()"
    until(lambda: admin.execute(ours).fetchone() is None)
    if admin.info.server_version >= 150000:
        admin.execute("select pg_stat_force_next_flush()")
    else:
        admin.execute("select pg_sleep(1)")  # its statistics arrive when they arrive
    admin.execute("select pg_stat_clear_snapshot()")
    found = admin.execute(
        "select sum(coalesce(heap_blks_hit, 0) + coalesce(heap_blks_read, 0) + coalesce(idx_blks_hit, 0)"
        " + coalesce(idx_blks_read, 0))::bigint from pg_statio_all_tables where schemaname = 'pgworker'"
    ).fetchone()
    assert found is not None
    return int(found[0])


def keep_vacuum_out(admin: Admin) -> None:
    """It reads what it likes, when it likes."""
    tables = admin.execute(
        "select c.oid::regclass::text from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = 'pgworker' and c.relkind = 'r'"
    ).fetchall()
    for (table,) in tables:
        admin.execute(f"alter table {table} set (autovacuum_enabled = off)")


async def first_job(app: App, admin: Admin, key: str) -> int:
    """Start a worker, let it do one job, stop it; returns how many pages that took.

    The least of three times: a machine that is busy adds rounds and reports, which read a few pages each.
    """
    pages: list[int] = []
    for number in range(3):
        before = pages_read(admin)
        seen = Recorder(app)
        await app.enqueue("work", key=f"{key} {number}")
        async with running(app.worker()):
            await seen.count(JobSettled, 1)
        await app.close()
        pages.append(pages_read(admin) - before)
    return min(pages)


@pytest.mark.field("L30")
async def test_a_worker_starts_on_a_long_history_as_on_none(app: App, admin: Admin) -> None:
    keep_vacuum_out(admin)

    @app.kind("work", poll=30.0)
    async def work(job: Job[object]) -> int:
        return 1

    on_none = await first_job(app, admin, "early")
    admin.execute(
        "insert into pgworker.jobs (kind, key, revision, state, finished_at, payload)"
        " select 'work', 'd' || i, 'r', 'succeeded', clock_timestamp(), '{}' from generate_series(1, %s) i",
        [DONE],
    )
    on_history = await first_job(app, admin, "late")
    assert on_none > 0
    # a page or two more a look-up, as the indexes are deeper; the heap alone of the history has thousands
    assert on_history < on_none + 200


@pytest.mark.field("L29")
async def test_claims_read_no_more_the_longer_somebody_holds_an_old_snapshot(
    app: App, dsn: str, hand: Hand, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finished job leaves a dead entry at the beginning of its lane, which no vacuum takes away meanwhile."""
    keep_vacuum_out(admin)
    explainer = Explainer(hand.connection)
    read: list[int] = []
    run = Database.run

    async def watched(database: Database, statement: Statement[Any], *, within: float = float("inf")) -> Any:
        if statement.name == "claim_jobs":
            read.append(explainer.fresh(statement).part("pick").pages)
        return await run(database, statement, within=within)

    monkeypatch.setattr(Database, "run", watched)

    @app.kind("work", concurrency=10, poll=30.0)
    async def work(job: Job[object]) -> None: ...

    seen = Recorder(app)
    with psycopg.connect(dsn) as old:
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old.execute("select from pgworker.jobs")
        hand.enqueue_many([NewJob() for _ in range(DEAD)])
        async with running(app.worker()):
            await seen.count(JobSettled, DEAD, within=50)
        from_the_beginning = explainer.fresh(claim(10)).part("pick").pages
    tenth = len(read) // 10
    early, late = sorted(read[:tenth])[tenth // 2], sorted(read[-tenth:])[tenth // 2]
    assert from_the_beginning > 10 * early, "the dead ones were none: this test would prove nothing"
    assert late < 3 * early
    assert sum(read) < 3 * early * len(read)
