"""Prunes what is old: ended jobs, their results and facts, a bounded page at a time, as a flow of statements."""

from __future__ import annotations

import logging
import operator
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import anyio
import psycopg

from pgworker.db import Database, Flow, drive, is_outage
from pgworker.job import State
from pgworker.kind import Kind
from pgworker.operations import (
    BEGINNING,
    PrunedFacts,
    PrunedJobs,
    PrunedResults,
    Shelf,
    expire_results,
    prune_facts,
    prune_jobs,
)
from pgworker.policy import FACTS_KEPT
from pgworker.statements import Statement
from pgworker.tablemap import TableMap

_log = logging.getLogger("pgworker")

PRUNE_EVERY = timedelta(minutes=5)
_PAGE = 1_000  # rows looked at by one statement, however much there is to do
_SHARE = 0.04  # of the time, at most, that a process spends on this
_PASSES_ON = 12  # from where the last one ended; then one from the beginning, for rows that somebody held


class Pruned(NamedTuple):
    """What a pass did: events deleted, keyed jobs that lost their payload, results past their own time, facts."""

    jobs: int = 0
    payloads: int = 0
    results: int = 0
    facts: int = 0


class Retention:
    """What some kinds keep, and up to where that has been looked through.

    Rows of the apps' own tables are theirs; kinds that have some are passed over.
    """

    def __init__(self, tables: TableMap, kinds: Sequence[Kind], *, facts: bool = True) -> None:
        self._tables = tables
        ours = [kind for kind in kinds if kind.queue is None]
        self._jobs = [shelf for kind in ours for shelf in _job_shelves(kind)]
        self._results = [shelf for kind in ours for shelf in _result_shelves(kind)]
        self._facts_after = 0
        self._with_facts = facts

    @property
    def kinds(self) -> list[str]:
        """Those of which anything is to go."""
        return list(dict.fromkeys(shelf.kind for shelf in (*self._jobs, *self._results)))

    def begin_anew(self) -> None:
        """Let the next pass begin at the oldest."""
        self._jobs = [shelf._replace(after=BEGINNING) for shelf in self._jobs]
        self._results = [shelf._replace(after=BEGINNING) for shelf in self._results]
        self._facts_after = 0

    def prune_all(self) -> Flow[Pruned]:
        """Passes until one finds nothing: for a moment, what there is may be another process's turn."""
        pruned = Pruned()
        while any(more := (yield from self.prune())):
            pruned = Pruned(*map(operator.add, pruned, more))
        return pruned

    def prune(self) -> Flow[Pruned]:
        """One pass over everything, from where the last one ended, until nothing is old any more."""
        facts = (yield from self.prune_facts()) if self._with_facts else 0
        pruned = yield from self.prune_kinds(self.kinds)
        return pruned._replace(facts=facts)

    def prune_kinds(self, kinds: Collection[str]) -> Flow[Pruned]:
        """As prune, for what these kinds have."""
        jobs, payloads = yield from self._prune_jobs(kinds)
        results = yield from self._prune_results(kinds)
        return Pruned(jobs, payloads, results)

    def prune_facts(self) -> Flow[int]:
        """As prune, for the journal."""
        facts = 0
        keep_seconds = FACTS_KEPT.total_seconds()
        while True:
            page: PrunedFacts = yield prune_facts(
                self._tables, keep_seconds=keep_seconds, after=self._facts_after, limit=_PAGE
            )
            facts += page.deleted
            if page.last is not None and not page.has_young:
                self._facts_after = page.last
            if page.has_young or page.read < _PAGE:
                return facts

    def _prune_jobs(self, kinds: Collection[str]) -> Flow[tuple[int, int]]:
        """Page after page, of all shelves that may have more in one statement; first of each a little."""
        jobs = payloads = 0
        waiting = [number for number, shelf in enumerate(self._jobs) if shelf.kind in kinds]
        while waiting:
            now, waiting = waiting[:_PAGE], waiting[_PAGE:]
            limit = _PAGE // len(now)
            pages: dict[int, PrunedJobs] = yield prune_jobs(
                self._tables, [self._jobs[number] for number in now], limit=limit
            )
            for at, page in pages.items():
                self._jobs[now[at]] = self._jobs[now[at]]._replace(after=page.cursor)
                jobs, payloads = jobs + page.deleted, payloads + page.emptied
            waiting += [now[at] for at in sorted(pages) if pages[at].read == limit]
        return jobs, payloads

    def _prune_results(self, kinds: Collection[str]) -> Flow[int]:
        results = 0
        for number, shelf in enumerate(self._results):
            if shelf.kind not in kinds:
                continue
            read = _PAGE
            while read == _PAGE:
                page: PrunedResults = yield expire_results(self._tables, self._results[number], limit=_PAGE)
                read, results = page.read, results + page.deleted
                if page.cursor is not None:
                    self._results[number] = shelf._replace(after=page.cursor)
        return results


def _job_shelves(kind: Kind) -> list[Shelf]:
    keep, keep_failed = kind.policy.keep, kind.policy.keep_failed
    keeps: list[tuple[State, timedelta | None]] = [("succeeded", keep), ("cancelled", keep), ("failed", keep_failed)]
    return [Shelf(kind.name, state, kept.total_seconds()) for state, kept in keeps if kept is not None]


def _result_shelves(kind: Kind) -> list[Shelf]:
    """A job that has failed or was cancelled may have a result, too: that of the work before."""
    ttl = kind.policy.result_ttl
    states: tuple[State, ...] = ("succeeded", "failed", "cancelled")
    return [Shelf(kind.name, state, ttl.total_seconds()) for state in states] if ttl is not None else []


async def prune_forever(tables: TableMap, kinds: Sequence[Kind], database: Database) -> None:
    """Every five minutes, let go of what is old, slowly; errors are logged and outwaited."""
    retention = Retention(tables, kinds)

    async def run(statement: Statement[Any]) -> Any:  # noqa: ANN401 - as Flow has it
        began = time.monotonic()
        answer = await database.run(statement)
        await anyio.sleep((time.monotonic() - began) * (1 / _SHARE - 1))
        return answer

    passes = 0
    # Soon, but after the jobs that wait for a start; and spread, as processes are started together.
    await anyio.sleep(PRUNE_EVERY.total_seconds() * random.uniform(0.05, 0.2))  # noqa: S311 - spreads, guards nothing
    while True:
        passes += 1
        if passes % _PASSES_ON == 0:
            retention.begin_anew()
        await prune_apart(retention, run)
        await anyio.sleep(PRUNE_EVERY.total_seconds() * random.uniform(0.9, 1.1))  # noqa: S311 - spreads, guards nothing


async def prune_apart(retention: Retention, run: Callable[[Statement[Any]], Awaitable[Any]]) -> None:
    """One pass. What stops it for one kind, as an app's key that refers to its jobs may, stops it for no other."""
    await _attempt("facts", retention.prune_facts(), run)
    kinds = retention.kinds
    error = await _attempt(", ".join(kinds), retention.prune_kinds(kinds), run)
    if error is not None and not is_outage(error) and len(kinds) > 1:
        for kind in kinds:
            await _attempt(kind, retention.prune_kinds([kind]), run)


async def _attempt(what: str, flow: Flow[Any], run: Callable[[Statement[Any]], Awaitable[Any]]) -> Exception | None:
    """Drive the flow; returns the error that stopped it, which has been logged."""
    try:
        await drive(flow, run)
    except (psycopg.Error, TimeoutError) as error:
        _log.warning("what is old cannot be deleted, trying again of=%s error=%s", what, type(error).__name__)
        return error
    return None
