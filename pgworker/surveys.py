"""Looks at the lanes of a process's kinds, those of many in one statement."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import psycopg
from psycopg.errors import QueryCanceled

from pgworker import statements
from pgworker.db import Database
from pgworker.queue import JobsTable, Queue
from pgworker.statements import Due, Statement

_QUICK_SECONDS = 1.0
"""A survey that takes no longer is made together with the others' again."""


@dataclass(slots=True, eq=False)
class _Look:
    """One statement, and those who wait for it."""

    queues: dict[str, JobsTable] = field(default_factory=dict[str, JobsTable])
    dues: list[Due] = field(default_factory=list[Due])
    error: psycopg.Error | TimeoutError | None = None
    answered: anyio.Event = field(default_factory=anyio.Event)


class Surveys:
    """The surveys of one process: whoever asks in the same turn of the event loop shares a statement.

    So a process with fifty idle kinds asks as often as one with a single kind: `Polls` has them all wake at once.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._next: _Look | None = None
        self._latest: dict[str, tuple[float, list[Due]]] = {}
        """By kind, the last answer, and when it was asked for."""
        self._apart: set[str] = set()
        """Kinds whose surveys may take so long that the others must not wait for them."""

    async def recent(self, queue: Queue, *, within: float) -> list[Due]:
        """As look, if nobody has looked within so many seconds; else what was seen then."""
        asked_at, dues = self._latest.get(queue.kind.name, (float("-inf"), []))
        return dues if time.monotonic() - asked_at <= within else await self.look(queue)

    async def look(self, queue: Queue) -> list[Due]:
        """The lanes of a queue that have unfinished jobs; an app's own table has a statement of its own.

        Raises psycopg.Error or TimeoutError. Sees cancelling through.
        """
        asked_at = time.monotonic()
        dues = await self._look(queue)
        self._latest[queue.kind.name] = asked_at, dues
        return dues

    async def _look(self, queue: Queue) -> list[Due]:
        if not isinstance(queue, JobsTable) or queue.kind.name in self._apart:
            return await self._look_apart(queue)
        look = self._next or _Look()
        look.queues[queue.kind.name] = queue
        with anyio.CancelScope(shield=True):  # the others wait for whoever came first
            if look is self._next:
                await look.answered.wait()
            else:
                self._next = look
                await anyio.lowlevel.checkpoint()  # until here others may join
                self._next = None
                await self._ask(look)
        if isinstance(look.error, QueryCanceled) and len(look.queues) > 1:
            self._apart.update(look.queues)  # one of them takes too long, and nobody knows which
            return await self._look_apart(queue)
        if look.error is not None:
            raise look.error
        return [due for due in look.dues if due.lane.kind == queue.kind.name]

    async def _look_apart(self, queue: Queue) -> list[Due]:
        began = time.monotonic()
        dues = await self._database.run(queue.survey())
        if time.monotonic() - began < _QUICK_SECONDS:
            self._apart.discard(queue.kind.name)
        return dues

    async def _ask(self, look: _Look) -> None:
        try:
            look.dues = await self._database.run(_survey(list(look.queues.values())))
        except (psycopg.Error, TimeoutError) as error:
            look.error = error
        finally:
            look.answered.set()


def _survey(queues: Sequence[JobsTable]) -> Statement[list[Due]]:
    if len(queues) == 1:
        return queues[0].survey()
    return statements.survey_lanes(queues[0].tables, [queue.kind.name for queue in queues])
