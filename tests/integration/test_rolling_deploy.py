"""Old and new workers side by side: what a worker does not know, it leaves alone."""

from __future__ import annotations

from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker import App, Job, UnknownKind
from pgworker.db import Database
from pgworker.events import JobSettled
from pgworker.maintenance import Reaper
from pgworker.policy import STORE_TIMEOUT
from pgworker.queue import JobsTable
from pgworker.surveys import Surveys
from pgworker.tablemap import TableMap
from tests.handles import Hand, Recorder, age, row, running

Admin: TypeAlias = psycopg.Connection[Any]


@pytest.mark.field("L18")
async def test_rows_of_a_kind_that_a_worker_does_not_know_stay_as_they_are(
    app: App, hand: Hand, admin: Admin, dsn: str
) -> None:
    @app.kind("known")
    async def known(job: Job[object]) -> None: ...

    hand.enqueue("ready", "r")
    hand.enqueue("expired", "r")
    hand.claim(1)
    age(admin, 3600)
    before = {key: row(admin, key) for key in ("ready", "expired")}
    seen = Recorder(app)
    database = Database(dsn, "test", deadline=STORE_TIMEOUT, connections=1)
    async with running(app.worker()):
        await app.enqueue("known", 1)
        await seen.count(JobSettled, 1)
        await app.enqueue("known", 1, delay=3600)  # so that there is a lane to be reaped
        await database.open()
        assert await Reaper(Surveys(database), database).reap(JobsTable(TableMap(), app.kinds["known"])) == 0
        await database.close()
    assert {key: row(admin, key) for key in before} == before
    with pytest.raises(UnknownKind, match="unknown kind 'work' \\(known: known\\)"):
        await app.enqueue("work", 1)


@pytest.mark.ruling("2.21")
async def test_a_worker_leaves_payloads_of_a_newer_version_alone(app: App, admin: Admin, dsn: str) -> None:
    @app.kind("work", version=2)
    async def work(job: Job[int]) -> int:
        return job.payload

    newer = App(dsn)
    newer.declare("work", payload=object, version=3)
    seen = Recorder(app)
    async with newer:
        await newer.enqueue("work", {"shape": "of version 3"}, key="v3")
    before = row(admin, "v3")
    async with running(app.worker()):
        await app.enqueue("work", 2, key="v2")
        admin.execute("insert into pgworker.jobs (kind, key, payload) values ('work', 'v1', '1')")
        await seen.count(JobSettled, 2)
    assert row(admin, "v3") == before
    assert {row(admin, key)["state"] for key in ("v1", "v2")} == {"succeeded"}


@pytest.mark.ruling("2.20")
async def test_a_rows_own_limit_of_attempts_wins_over_the_kinds(app: App, admin: Admin) -> None:
    @app.kind("work", max_attempts=5)
    async def work(job: Job[object]) -> None:
        raise ValueError

    seen = Recorder(app)
    await app.enqueue("work", 1, key="own", max_attempts=1)
    await app.enqueue("work", 1, key="kinds")
    async with running(app.worker()):
        await seen.count(JobSettled, 2)
    assert (row(admin, "own")["state"], row(admin, "kinds")["state"]) == ("failed", "pending")
