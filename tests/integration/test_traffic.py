"""What is sent to the server, counted by a proxy: by idle workers, by many that one job wakes, by those who enqueue."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import anyio
import psycopg
import pytest

import pgworker.maintenance
from pgworker import App, Job
from pgworker.events import JobSettled
from tests.chaos.proxy import Proxy, proxied
from tests.chaos.stage import recognize
from tests.databases import TABLES
from tests.handles import Hand, Recorder, running

Admin = psycopg.Connection[Any]


@pytest.fixture
def proxy(dsn: str) -> Iterator[Proxy]:
    with proxied(dsn) as proxy:
        yield proxy


def count(proxy: Proxy, statement: str, *, since: int = 0) -> int:
    return sum(recognize(statement)(text) for _, text in proxy.sent[since:])


async def until_quiet(proxy: Proxy) -> int:
    """Wait until nothing is sent for a while; returns how many have been sent."""
    with anyio.fail_after(15):
        while True:
            before = len(proxy.sent)
            await anyio.sleep(0.4)
            if len(proxy.sent) == before:
                return before


@pytest.mark.field("L33")
async def test_an_idle_worker_asks_hardly_more_than_once_a_poll(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REAP_EVERY", "REPORT_EVERY"):  # everything ten times as fast as it is
        monkeypatch.setattr(pgworker.maintenance, name, getattr(pgworker.maintenance, name) / 10)
    app = App(proxy.dsn)

    @app.kind("work", poll=timedelta(seconds=0.1))
    async def work(job: Job[object]) -> None: ...

    async with app, running(app.worker()):
        with anyio.fail_after(10):
            while count(proxy, "survey_lanes") < 5:  # noqa: ASYNC110 - no event tells of it
                await anyio.sleep(0.01)
        started = len(proxy.sent)
        with anyio.fail_after(20):
            while count(proxy, "survey_lanes", since=started) < 30:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        sent = proxy.sent[started:]
    assert count(proxy, "claim_jobs") == 0
    assert count(proxy, "report_runners", since=started) >= 3
    assert len(sent) <= 1.2 * 30 + 1, sorted({text[:60] for _, text in sent})


@pytest.mark.parametrize("hints", [1, 5], ids=["one hint", "five hints"])
async def test_one_job_that_wakes_all_workers_costs_each_one_look(
    proxy: Proxy, hand: Hand, admin: Admin, hints: int
) -> None:
    workers = 8
    settled: list[JobSettled] = []
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(workers):
            app = await stack.enter_async_context(App(proxy.dsn))

            @app.kind("work", poll=30.0)
            async def work(job: Job[object]) -> None: ...

            app.events.subscribe(lambda event: settled.append(event) if isinstance(event, JobSettled) else None)
            await stack.enter_async_context(running(app.worker()))
        started = await _until_listening(proxy, admin, workers)
        hand.enqueue("k")
        # in one transaction, to arrive together; equal ones would be one, and what is unknown is for everybody
        hint = "case n when 1 then 'r:work' else 'any ' || n end"
        admin.execute(f"select pg_notify(%s, {hint}) from generate_series(1, %s) n", [TABLES.channel, hints])
        with anyio.fail_after(10):
            while not settled:  # noqa: ASYNC110 - whichever it is
                await anyio.sleep(0.01)
        await until_quiet(proxy)
    assert len(settled) == 1
    # a look for the hint; one more for those that came while it was under way; and one after the job
    assert count(proxy, "survey_lanes", since=started) <= 2 * workers + 1
    # one took it; the others found it locked, the second look, too, until the claim was committed
    assert 1 <= count(proxy, "claim_jobs", since=started) <= 2 * workers
    assert count(proxy, "finish_jobs", since=started) == 1


async def _until_listening(proxy: Proxy, admin: Admin, workers: int) -> int:
    """Until all of them hear, and have nothing to do."""
    listening = (
        "select count(*) from pg_stat_activity where application_name = 'pgworker listen' and state = 'idle'"
        " and datname = current_database() and query <> ''"
    )
    with anyio.fail_after(15):
        while admin.execute(listening).fetchone() != (workers,):  # noqa: ASYNC110 - asks the server
            await anyio.sleep(0.02)
    await until_quiet(proxy)
    return await until_quiet(proxy)


@pytest.mark.field("L25")
def test_hints_are_sent_by_no_connection_that_somebody_commits_on_and_are_few(proxy: Proxy) -> None:
    clients, each = 16, 10
    app = App(proxy.dsn)
    app.declare("work")

    def client() -> None:
        with psycopg.connect(proxy.dsn) as connection:
            connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            for _ in range(each):
                app.sync.enqueue("work", conn=connection)
                connection.commit()
                app.sync.enqueue("work")

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.monotonic()
    with app.sync:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    seconds = time.monotonic() - began
    # (closing has sent the last hint)
    enqueuing = {pid for pid, text in proxy.sent if recognize("insert_events")(text)}
    hinting = [pid for pid, text in proxy.sent if b"pg_notify" in text.lower() or b"notify " in text.lower()[:20]]
    assert len(enqueuing) >= clients
    assert hinting
    assert not enqueuing & set(hinting), "a commit of somebody's waits in the line of those who notify"
    assert count(proxy, "insert_events") == 2 * clients * each
    assert len(hinting) <= seconds / 0.01 + 2  # whatever comes within 10 ms goes together


@pytest.mark.field("L25")
async def test_neither_who_enqueues_keyed_jobs_nor_who_finishes_them_notifies_in_what_it_commits(
    proxy: Proxy, admin: Admin
) -> None:
    clients, each = 8, 5
    app = App(proxy.dsn)

    @app.kind("work", concurrency=20)
    async def work(job: Job[object]) -> int:
        return 1

    async def client(number: int) -> None:
        async with await psycopg.AsyncConnection.connect(proxy.dsn) as connection:
            await connection.set_isolation_level(psycopg.IsolationLevel.READ_COMMITTED)
            for turn in range(each):
                await app.enqueue("work", key=f"theirs {number} {turn}", revision="r", conn=connection)
                await connection.commit()
                await app.enqueue("work", key=f"ours {number} {turn}", revision="r")

    seen = Recorder(app)
    began = time.monotonic()
    async with app, running(app.worker()):
        async with anyio.create_task_group() as group:
            for number in range(clients):
                group.start_soon(client, number)
        await seen.count(JobSettled, 2 * clients * each, within=30)
    seconds = time.monotonic() - began
    committing = {
        name: {pid for pid, text in proxy.sent if recognize(name)(text)}
        for name in ("insert_jobs", "claim_jobs", "finish_jobs")
    }
    hinting = [pid for pid, text in proxy.sent if b"pg_notify" in text.lower() or b"notify " in text.lower()[:20]]
    assert len(committing["insert_jobs"]) > clients  # theirs, and one of ours at least
    assert committing["claim_jobs"]
    assert committing["finish_jobs"]
    assert not set().union(*committing.values()) & set(hinting), "a commit waits in the line of those who notify"
    # new and done ones, whatever comes within 10 ms goes together; and the listener's questions to itself
    assert 0 < len(hinting) <= 2 * (seconds / 0.01 + 2) + seconds
    triggers = (
        "select t.tgname from pg_trigger t join pg_class c on c.oid = t.tgrelid"
        " where c.relnamespace = 'pgworker'::regnamespace and not t.tgisinternal"
    )
    assert admin.execute(triggers).fetchall() == [], "what it sends is seen by no proxy"
