"""What a worker does beside its jobs: free expired leases, say that it lives. Bounded, repeatable, no leader."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import anyio
import psycopg

from pgworker.db import Database
from pgworker.presence import forget_runners, report_runners
from pgworker.queue import Queue
from pgworker.schema.files import release
from pgworker.statements import BEGINNING, Cursor, Lane
from pgworker.surveys import Surveys
from pgworker.tablemap import TableMap

_log = logging.getLogger("pgworker")

REAP_EVERY = timedelta(seconds=15)
REPORT_EVERY = timedelta(seconds=7.5)
REPORT_AGAIN = timedelta(seconds=1)
"""After a report that failed: a runner is taken for gone when nothing is heard of it for ten seconds."""
_SIGN_OFF_SECONDS = 1.0  # a stop must not wait for what is only a courtesy
_PAGE = 1_000  # rows read by one statement: a few milliseconds, however long the backlog
_HEAD_PAGES = 100
_TAIL_PAGES = 20
_FAIR_TAIL_PAGES = 200
"""How many pages of a lane one pass may read at its head, where the leased rows are, and in the rest of it; of a kind
that is fair between tenants, leased rows lie all over the lane."""
RELEASE = release()


async def reap_forever(
    queues: Sequence[Queue], surveys: Surveys, database: Database, wakes: Mapping[str, Callable[[], None]]
) -> None:
    """Every quarter of a minute, free or end the expired leases of these queues; errors are logged and outwaited.

    Claims take most expired leases over by themselves. This ends what a claim may not take: jobs at their limit of
    evictions, and those whose cancel was requested.
    """
    reaper = Reaper(surveys, database)
    while True:
        # Spread, so that processes which were started together do not all read at once.
        await anyio.sleep(REAP_EVERY.total_seconds() * random.uniform(0.9, 1.1))  # noqa: S311 - spreads, guards nothing
        async with anyio.create_task_group() as group:
            for queue in queues:
                group.start_soon(_reap_queue, queue, reaper, wakes[queue.kind.name])


async def _reap_queue(queue: Queue, reaper: Reaper, wake: Callable[[], None]) -> None:
    try:
        if await reaper.reap(queue):
            wake()
    except (psycopg.Error, TimeoutError) as error:
        _log.warning("reaping failed, trying again error=%s", type(error).__name__)


class Reaper:
    """The passes of one process over the leased rows, of which there is no index: it would cost each claim.

    Claims leave them at a lane's head. So each pass reads that until a page has none, and then a few pages of the rest,
    where the last pass stopped: a backlog of millions is not read again and again.
    """

    def __init__(self, surveys: Surveys, database: Database) -> None:
        self._surveys = surveys
        self._database = database
        self._tails: dict[Lane, Cursor] = {}
        """Up to where the rest of a lane has been read, unless it was to its end."""

    async def reap(self, queue: Queue) -> int:
        """One pass over all lanes, in short statements; returns how many jobs are claimable again.

        A runner that polls has just seen which lanes there are; one that has come since then is for the next pass.
        """
        dues = await self._surveys.recent(queue, within=REAP_EVERY.total_seconds())
        return sum([await self._reap_lane(queue, due.lane) for due in dues])

    async def _reap_lane(self, queue: Queue, lane: Lane) -> int:
        tail = self._tails.pop(lane, BEGINNING)
        freed, after = 0, BEGINNING
        left, in_head = _HEAD_PAGES, True
        while left:
            page = await self._database.run(queue.reap(lane, limit=_PAGE, after=after))
            freed += page.freed
            if page.cursor is None or page.read < _PAGE:
                return freed
            after = page.cursor
            left -= 1
            if in_head and (not page.leased or not left):
                left, in_head = _FAIR_TAIL_PAGES if queue.kind.policy.fair else _TAIL_PAGES, False
                after = tail if tail[0] >= after[0] else after  # (ids of an app's own table have an order of their own)
        self._tails[lane] = after
        return freed


async def report_forever(
    tables: TableMap, database: Database, runner: str, statuses: Callable[[], Mapping[str, str]]
) -> None:
    """Report every few seconds how this process's runners fare; an error is logged and tried at the next turn."""
    while True:
        pause = REPORT_EVERY
        try:
            await database.run(report_runners(tables, runner, statuses(), release=RELEASE))
        except (psycopg.Error, TimeoutError) as error:
            _log.warning("report failed, trying again error=%s", type(error).__name__)
            pause = min(pause, REPORT_AGAIN)
        await anyio.sleep(pause.total_seconds())


async def sign_off(tables: TableMap, database: Database, runner: str) -> None:
    """Take this process off the list of runners; without a database it grows stale there instead."""
    try:
        await database.run(forget_runners(tables, runner), within=_SIGN_OFF_SECONDS)
    except (psycopg.Error, TimeoutError) as error:
        _log.info("could not sign off error=%s", type(error).__name__)
