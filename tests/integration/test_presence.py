"""Who is at work: each runner has a row that is fresh while it lives, goes with it, and grows stale when it died."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version
from typing import Any, TypeAlias

import anyio
import psycopg
import pytest

from pgworker import App, Job
from pgworker.cli.report import STALE_SECONDS
from pgworker.db import Database
from pgworker.events import JobSettled
from pgworker.maintenance import REPORT_AGAIN, REPORT_EVERY
from pgworker.presence import Presence, forget_runners, list_runners, report_runners
from pgworker.statements import Statement
from tests.handles import Hand, Recorder, running

Admin: TypeAlias = psycopg.Connection[Any]


@pytest.fixture
def kinds(app: App) -> None:
    @app.kind("one")
    async def one(job: Job[int]) -> None: ...

    @app.kind("two", concurrency=3)
    def two(job: Job[int]) -> None: ...


def rows(admin: Admin) -> list[tuple[Any, ...]]:
    return admin.execute(
        "select runner, kind, status, started_at, seen_at from pgworker.runners order by kind"
    ).fetchall()


async def until(condition: Callable[[], bool]) -> None:
    """Until the table says so; nothing in the process tells of a report."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.02)


@pytest.mark.usefixtures("kinds")
async def test_runners_are_listed_at_once_kept_fresh_and_taken_off_at_the_end(
    app: App, admin: Admin, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworker.maintenance.REPORT_EVERY", timedelta(seconds=0.1))
    seen = Recorder(app)
    worker = app.worker()
    async with running(worker):
        await until(lambda: len(rows(admin)) == 2)
        first = rows(admin)
        assert [(runner, kind) for runner, kind, *_ in first] == [(worker.name, "one"), (worker.name, "two")]
        await app.enqueue("one", 1)
        await seen.wait(lambda: bool(seen.of(JobSettled)))
        await until(lambda: rows(admin)[0][2]["succeeded"] == 1)
        later = rows(admin)
        assert later[0][4] > first[0][4]
        assert [row[3] for row in later] == [row[3] for row in first]  # started once
        status = later[1][2]
        assert (status["kind"], status["lifecycle"], status["succeeded"]) == ("two", "running", 0)
        listed = hand.send(list_runners(hand.tables))
        assert [(each.kind, each.release) for each in listed] == [
            ("one", version("pgworker")),
            ("two", version("pgworker")),
        ]
        assert all(0 <= each.silent_seconds < 10 and each.up_seconds > 0 for each in listed)
    assert rows(admin) == []


@pytest.mark.usefixtures("kinds")
async def test_two_workers_are_two_names_and_take_off_their_own_rows_only(app: App, dsn: str, admin: Admin) -> None:
    async with App(dsn) as other:

        @other.kind("one")
        async def one(job: Job[int]) -> None: ...

        async with running(app.worker(["one"])) as mine:
            async with running(other.worker()) as theirs:
                await until(lambda: len(rows(admin)) == 2)
                assert names(admin) == sorted([mine.name, theirs.name])
            assert names(admin) == [mine.name]


def names(admin: Admin) -> list[str]:
    return sorted(row[0] for row in rows(admin))


def test_the_long_dead_are_forgotten_and_the_merely_silent_are_shown(hand: Hand, dsn: str, admin: Admin) -> None:
    for name in ("dead", "silent", "locked"):
        hand.send(report_runners(hand.tables, name, {"work": "{}"}, release="0"))
    admin.execute(
        "update pgworker.runners set seen_at = seen_at - interval '25 hours' where runner in ('dead', 'locked')"
    )
    admin.execute("update pgworker.runners set seen_at = seen_at - interval '1 hour' where runner = 'silent'")
    with psycopg.connect(dsn) as other:
        other.execute("select from pgworker.runners where runner = 'locked' for update")
        hand.send(report_runners(hand.tables, "new", {"work": '{"in_flight": 1}'}, release="0"))  # waits for nobody
    assert names(admin) == ["locked", "new", "silent"]
    silent = {each.runner: each.silent_seconds for each in hand.send(list_runners(hand.tables))}
    assert silent["silent"] > 3500
    assert silent["new"] < 10
    hand.send(report_runners(hand.tables, "new", {"work": '{"in_flight": 0}'}, release="0"))
    assert names(admin) == ["new", "silent"]
    hand.send(forget_runners(hand.tables, "new"))
    assert names(admin) == ["silent"]


def test_a_report_that_comes_back_keeps_its_start(hand: Hand) -> None:
    hand.send(report_runners(hand.tables, "mine", {"work": "{}", "more": "{}"}, release="0"))
    hand.send(report_runners(hand.tables, "mine", {"work": '{"claimed": 7}'}, release="0"))
    listed: list[Presence] = hand.send(list_runners(hand.tables))
    assert [(each.kind, json.loads(each.status)) for each in listed] == [("more", {}), ("work", {"claimed": 7})]
    assert listed[1].up_seconds > 0


@pytest.mark.usefixtures("kinds")
async def test_a_report_that_fails_is_logged_and_tried_again(
    app: App, admin: Admin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="pgworker")  # an in-process command line may have raised its level
    # a live one does not look stale, although two reports fail
    assert timedelta(seconds=STALE_SECONDS) > REPORT_EVERY + 2 * REPORT_AGAIN
    monkeypatch.setattr("pgworker.maintenance.REPORT_EVERY", timedelta(hours=1))
    monkeypatch.setattr("pgworker.maintenance.REPORT_AGAIN", timedelta(seconds=0.05))
    original = Database.run
    failures = 2

    async def run(self: Database, statement: Statement[Any], *, within: float = float("inf")) -> Any:
        nonlocal failures
        if statement.name == "report_runners" and failures:
            failures -= 1
            raise psycopg.OperationalError("SECRET")
        if statement.name == "forget_runners":
            raise TimeoutError
        return await original(self, statement, within=within)

    monkeypatch.setattr(Database, "run", run)
    async with running(app.worker()):
        await until(lambda: len(rows(admin)) == 2)
    assert len(rows(admin)) == 2  # the farewell failed: they grow stale
    assert caplog.text.count("report failed, trying again error=OperationalError") == 2
    assert "could not sign off error=TimeoutError" in caplog.text
    assert "SECRET" not in caplog.text
