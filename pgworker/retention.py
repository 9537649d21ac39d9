"""Let go of what is old: ended jobs, their results and facts, a bounded page at a time, as a flow of statements."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import anyio
import psycopg

from pgworker.db import Database, Flow, drive
from pgworker.job import State
from pgworker.kind import Kind
from pgworker.operations import Cleared, Shelf, Torn, prune_facts, prune_jobs
from pgworker.policy import FACTS_KEPT
from pgworker.statements import Statement
from pgworker.tablemap import TableMap

_log = logging.getLogger("pgworker")

PRUNE_EVERY = timedelta(minutes=1)
_PAGE = 1_000  # rows looked at by one statement: a tenth of a second, however much there is to do
_SHARE = 0.04  # of the time, at most, that a process spends on this
_PASSES_ON = 60  # from where the last one ended; then one from the beginning, for rows that somebody held


class Pruned(NamedTuple):
    """What a pass did: events deleted, keyed jobs that lost their payload, facts deleted."""

    jobs: int = 0
    payloads: int = 0
    facts: int = 0


class Retention:
    """What some kinds keep, and up to where that has been looked through.

    Rows of the apps' own tables are theirs; kinds that have some are passed over.
    """

    def __init__(self, tables: TableMap, kinds: Sequence[Kind], *, facts: bool = True) -> None:
        self._tables = tables
        self._fresh = [shelf for kind in kinds if kind.queue is None for shelf in _shelves(kind)]
        self._facts = facts
        self.begin_anew()

    def begin_anew(self) -> None:
        """Let the next pass begin at the oldest."""
        self._shelves = list(self._fresh)
        self._fact = 0

    def clear(self) -> Flow[Pruned]:
        """One pass over everything, from where the last one ended, until nothing is old any more."""
        jobs, payloads = yield from self._clear_jobs()
        facts = 0
        if self._facts:
            facts = yield from self._clear_facts()
        return Pruned(jobs, payloads, facts)

    def _clear_jobs(self) -> Flow[tuple[int, int]]:
        """Page after page, of all shelves that may have more in one statement; first of each a little."""
        jobs = payloads = 0
        waiting = list(range(len(self._shelves)))
        while waiting:
            now, waiting = waiting[:_PAGE], waiting[_PAGE:]
            limit = _PAGE // len(now)
            pages: dict[int, Cleared] = yield prune_jobs(
                self._tables, [self._shelves[number] for number in now], limit=limit
            )
            for at, page in pages.items():
                self._shelves[now[at]] = self._shelves[now[at]]._replace(after=page.cursor)
                jobs, payloads = jobs + page.deleted, payloads + page.emptied
            waiting += [now[at] for at in sorted(pages) if pages[at].read == limit]
        return jobs, payloads

    def _clear_facts(self) -> Flow[int]:
        facts = 0
        while True:
            keep_seconds = FACTS_KEPT.total_seconds()
            page: Torn = yield prune_facts(self._tables, keep_seconds=keep_seconds, after=self._fact, limit=_PAGE)
            facts += page.deleted
            if page.last is None or page.deleted < page.read:
                return facts
            self._fact = page.last
            if page.read < _PAGE:
                return facts


def _shelves(kind: Kind) -> list[Shelf]:
    keep, keep_failed = kind.policy.keep, kind.policy.keep_failed
    keeps: list[tuple[State, timedelta | None]] = [("succeeded", keep), ("cancelled", keep), ("failed", keep_failed)]
    return [Shelf(kind.name, state, kept.total_seconds()) for state, kept in keeps if kept is not None]


async def prune_forever(tables: TableMap, kinds: Sequence[Kind], database: Database) -> None:
    """Once a minute, let go of what is old, slowly; errors are logged and outwaited."""
    retention = Retention(tables, kinds)

    async def run(statement: Statement[Any]) -> Any:  # noqa: ANN401 - as Flow has it
        began = time.monotonic()
        answer = await database.run(statement)
        await anyio.sleep((time.monotonic() - began) / _SHARE)
        return answer

    passes = 0
    # Soon, but after the jobs that wait for a start; and spread, as processes are started together.
    await anyio.sleep(PRUNE_EVERY.total_seconds() * random.uniform(0.1, 0.5))  # noqa: S311 - spreads, guards nothing
    while True:
        passes += 1
        if passes % _PASSES_ON == 0:
            retention.begin_anew()
        try:
            await drive(retention.clear(), run)
        except (psycopg.Error, TimeoutError) as error:
            _log.warning("what is old cannot be deleted, trying again error=%s", type(error).__name__)
        await anyio.sleep(PRUNE_EVERY.total_seconds() * random.uniform(0.9, 1.1))  # noqa: S311 - spreads, guards nothing
