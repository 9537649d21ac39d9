"""Scenarios of the crash simulation: how the runtime comes to send each of its statements while jobs are being done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio
import psycopg
import pytest

from pgworker.operations import count_jobs
from pgworker.presence import list_runners
from tests.chaos.stage import Stage
from tests.databases import TABLES
from tests.handles import running

Scenario: TypeAlias = Callable[[Stage], Awaitable[object]]


async def plain(stage: Stage) -> None:
    """A job that is simply done, which takes most of the statements."""
    await stage.job()


async def sharing(stage: Stage) -> None:
    """Jobs of two tenants, of a kind that is fair between them, until one round is: some go by age.

    One round in ten does, and those after a slow claim by shares, as one whose answer was lost is.
    """
    for _ in range(30):
        for tenant in ("a", "b"):
            await stage.job(kind="fair", tenant=tenant)
        await stage.until_idle()
        if stage.fired:
            break


async def event(stage: Stage) -> None:
    """A job without a key, which nobody enqueues again."""
    await stage.event()


async def told_event(stage: Stage) -> None:
    """The same, of a kind whose facts are all written."""
    await stage.event("spare")


async def again(stage: Stage) -> None:
    """A job whose first run asks for another."""
    await stage.job("again")


async def long(stage: Stage) -> None:
    """A job that outlasts its lease."""
    await stage.job("long")


async def applying(stage: Stage) -> None:
    """A job with the app's own writes in its completion."""
    await stage.job(kind="applied")


async def orphaned(stage: Stage) -> None:
    """A job whose worker is no more, which the reaper may find first."""
    later = await stage.job(delay=60)
    await stage.job()
    stage.hand.claim(ttl_seconds=0.01)
    await stage.until_reaped(later)


async def leaving(stage: Stage) -> None:
    """One more worker, which comes and goes."""
    async with running(stage.app.worker(["applied"])) as second:
        while not second.status():  # noqa: ASYNC110 - no event tells of it
            await anyio.sleep(0.01)
        await stage.job()


async def operating(stage: Stage) -> None:
    """Somebody calls off a job, and then all; and wants them again."""
    for which in ({"key": await stage.job(kind="spare", delay=60)}, {"all": True}):
        await stage.job(kind="spare", delay=60)
        await stage.insist(lambda which=which: stage.app.cancel("spare", **which))  # type: ignore[misc]
        await stage.insist(lambda which=which: stage.app.retry("spare", **which))  # type: ignore[misc]


async def operating_on_a_held_row(stage: Stage) -> None:
    """As before, while somebody holds the job's row."""
    key = await stage.job(kind="spare", delay=60)
    with stage.hand.connection.transaction():
        stage.hand.connection.execute("select 1 from pgworker.jobs where key = %s for update", [key])
        with pytest.raises(psycopg.OperationalError):
            await stage.app.cancel("spare", key=key)
    assert await stage.app.cancel("spare", key=key) == 1
    await stage.app.retry("spare", key=key)


async def forgetting(stage: Stage) -> None:
    """Somebody deletes a job, which is then wanted all the same."""
    key = await stage.job(kind="spare", delay=60)
    await stage.insist(lambda: stage.app.forget("spare", key))
    assert (await stage.app.enqueue("spare", "plain", key=key, revision="r")).status == "created"


async def pausing(stage: Stage) -> None:
    """A kind is paused, and a job comes meanwhile."""
    await stage.insist(lambda: stage.app.pause("spare"))
    await stage.job(kind="spare")
    await stage.job()
    assert [pause.kind for pause in await stage.insist(stage.app.pauses)] == ["spare"]
    lag = await stage.insist(lambda: stage.app.lag("spare"))
    assert [(each.kind, each.pending) for each in lag] == [("spare", 1)]
    await stage.insist(lambda: stage.app.resume("spare"))
    assert await stage.app.pauses() == []


async def waiting(stage: Stage) -> None:
    """Somebody waits for a result."""
    key = await stage.job()
    assert await stage.insist(lambda: stage.app.result("work", key, timeout=10)) == key


async def telling(stage: Stage) -> None:
    """An app tells of its own table's work in its transaction, which is repeated if it fails."""
    key = await stage.job(kind="spare", delay=60)

    async def transaction() -> None:
        async with await psycopg.AsyncConnection.connect(stage.proxy.dsn) as caller:
            await stage.app.enqueue("spare", "plain", key=key, revision="r2", conn=caller)
            await stage.app.notify("spare", conn=caller)

    await stage.insist(transaction)


async def listing(stage: Stage) -> None:
    """Somebody asks who works."""
    await stage.job()
    await stage.ask(lambda: list_runners(TABLES))


async def counting(stage: Stage) -> None:
    """Somebody asks how much there is to do."""
    await stage.job()
    counts = await stage.ask(lambda: count_jobs(TABLES, bound=1000))
    assert sum(count.jobs for count in counts) == stage.wanted + stage.events


async def own_plain(stage: Stage) -> None:
    """A row of the app's own table."""
    stage.row()


async def own_again(stage: Stage) -> None:
    """The same, which has to be run twice."""
    stage.row("again")


async def own_long(stage: Stage) -> None:
    """The same, which outlasts its lease."""
    stage.row("long")


async def own_applying(stage: Stage) -> None:
    """The same, with the app's own writes in its completion."""
    stage.row(table="things_applied")


async def own_orphaned(stage: Stage) -> None:
    """The same, whose worker is no more; and one that keeps the reaper looking."""
    later = stage.row(delay=60)
    stage.row(orphaned=True)
    await stage.until_reaped(later)


async def own_arriving(stage: Stage) -> None:
    """One more worker for such a table, which looks at it first."""
    stage.row()
    async with running(stage.app.worker(["things"])):
        await stage.until_fired()


SCENARIOS: dict[str, Scenario] = {
    "cancel_jobs": operating,
    "check_fence": applying,
    "claim_fair": sharing,
    "claim_jobs": plain,
    "count_jobs": counting,
    "count_lag": pausing,
    "current_transaction": telling,
    "expire_results": plain,
    "find_job": operating,
    "finish_jobs": plain,
    "forget_job": forgetting,
    "forget_runners": leaving,
    "insert_events": event,
    "insert_jobs": plain,
    "insert_missing_events": told_event,
    "list_ended": operating,
    "list_pauses": pausing,
    "list_pending": operating,
    "list_runners": listing,
    "pause_kind": pausing,
    "prune_facts": plain,
    "prune_jobs": plain,
    "read_results": waiting,
    "reap_expired": orphaned,
    "renew_leases": long,
    "reopen_jobs": operating,
    "report_runners": plain,
    "resume_kind": pausing,
    "settle_jobs": again,
    "survey_lanes": plain,
    "table_check": own_applying,
    "table_claim": own_plain,
    "table_finish": own_plain,
    "table_look": own_arriving,
    "table_reap": own_orphaned,
    "table_renew": own_long,
    "table_settle": own_again,
    "table_survey": own_plain,
    "wait_briefly": operating_on_a_held_row,
}
