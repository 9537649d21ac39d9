"""Handles for tests: the runtime's statements one by one, the rows behind them, running workers, and events."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import anyio
import psycopg
from psycopg.rows import dict_row

from pgworker import App
from pgworker.client import put_jobs
from pgworker.db import drive_sync, send_sync, session_settings
from pgworker.events import Event
from pgworker.job import Claim, Enqueued, IfPending, NewJob
from pgworker.kind import Kind, declare_kind
from pgworker.outcome import Settlement, Success
from pgworker.policy import STORE_TIMEOUT, make_policy
from pgworker.statements import (
    BEGINNING,
    Answer,
    Lane,
    Reaped,
    Renewal,
    Statement,
    claim_jobs,
    finish_jobs,
    reap_expired,
    renew_leases,
    settle_jobs,
    survey_lanes,
)
from pgworker.tablemap import TableMap
from pgworker.worker import Worker

T = TypeVar("T")
E = TypeVar("E", bound=Event)

RELEASE = Settlement("pending", None)
RETRY = Settlement("pending", "handler_failed", counts=True, delay_seconds=60.0)
FAIL = Settlement("failed", "handler_failed", counts=True)


@dataclass
class Hand:
    """Sends the runtime's statements by hand, over one connection with the runtime's own session settings."""

    connection: psycopg.Connection[tuple[object, ...]]
    tables: TableMap = field(default_factory=TableMap)
    kind: str = "work"

    def send(self, statement: Statement[T]) -> T:
        """Run one statement (in a transaction of its own on an autocommit connection)."""
        return send_sync(self.connection, statement)

    def enqueue(
        self, key: str | None = None, revision: str | None = None, payload: object = None, **job: Any
    ) -> Enqueued:
        """Enqueue one job of the hand's kind."""
        if_pending = job.pop("if_pending", "replace")
        return self.enqueue_many([NewJob(payload, key, revision, **job)], if_pending=if_pending)[0]

    def enqueue_many(self, jobs: Sequence[NewJob], *, if_pending: IfPending = "replace") -> list[Enqueued]:
        """Enqueue jobs of the hand's kind in one statement."""
        flow = put_jobs(self.tables, untyped(self.kind), jobs, if_pending=if_pending)
        return drive_sync(flow, self.send).enqueued

    def claim(
        self,
        limit: int = 1,
        *,
        ttl_seconds: float = 60.0,
        urgency: int = 0,
        priority: int = 0,
        max_evictions: int | None = 5,
        version: int = 1,
        token: uuid.UUID | None = None,
        facts: int = 0,
    ) -> list[Claim]:
        """Claim ready jobs of one lane."""
        return self.send(
            claim_jobs(
                self.tables,
                Lane(self.kind, urgency, priority),
                limit=limit,
                token=token or uuid.uuid4(),
                runner="by hand",
                ttl_seconds=ttl_seconds,
                max_evictions=max_evictions,
                version=version,
                facts=facts,
            )
        )

    def finish(self, claim: Claim, value: str | None = None) -> Answer:
        """Succeed one claimed job; `value` is JSON text."""
        return self.send(finish_jobs(self.tables, self.kind, [(claim, Success(value))]))[claim.id]

    def settle(self, claim: Claim, settlement: Settlement) -> Answer:
        """Write any other end of one claimed job."""
        return self.send(settle_jobs(self.tables, self.kind, [(claim, settlement)]))[claim.id]

    def renew(self, claim: Claim, ttl_seconds: float | None = 60.0) -> Renewal:
        """Prolong one lease, or with None only look at it."""
        return self.send(renew_leases(self.tables, [(claim, ttl_seconds)]))[claim.id]

    def reap(self, *, ttl_seconds: float = 60.0, max_evictions: int | None = 5, limit: int = 1000) -> Reaped:
        """One page of the reaper over the lane (fresh, 0)."""
        return self.send(
            reap_expired(
                self.tables,
                Lane(self.kind, 0, 0),
                limit=limit,
                ttl_seconds=ttl_seconds,
                max_evictions=max_evictions,
                after=BEGINNING,
            )
        )

    def lanes(self) -> list[Lane]:
        """The lanes of the hand's kind."""
        return [due.lane for due in self.send(survey_lanes(self.tables, [self.kind]))]


def untyped(kind: str, *, version: int = 1) -> Kind:
    """A declared kind that takes any payload."""
    return declare_kind(kind, make_policy("standard", {}), payload=object, payload_limit=None, version=version)


def hand(dsn: str, *, kind: str = "work") -> Hand:
    """A hand on a new autocommit connection with the runtime's session settings; close `.connection` at the end."""
    connection: psycopg.Connection[tuple[object, ...]] = psycopg.connect(dsn, autocommit=True)
    connection.execute(session_settings(STORE_TIMEOUT))
    return Hand(connection, kind=kind)


def row(admin: psycopg.Connection[Any], key: str, *, kind: str = "work") -> dict[str, Any]:
    """The whole job row; fails the test when there is none. Two equal dicts mean equal row bytes."""
    with admin.cursor(row_factory=dict_row) as cursor:
        cursor.execute("select * from pgworker.jobs where kind = %s and key = %s", (kind, key))
        found = cursor.fetchone()
    assert found is not None, f"no job {key!r} of kind {kind!r}"
    return found


def result(admin: psycopg.Connection[Any], key: str, *, kind: str = "work") -> dict[str, Any] | None:
    """The stored result, or None."""
    with admin.cursor(row_factory=dict_row) as cursor:
        cursor.execute("select * from pgworker.results where kind = %s and key = %s", (kind, key))
        return cursor.fetchone()


def everything(admin: psycopg.Connection[Any], *, but: tuple[str, str]) -> dict[tuple[str, str], dict[str, Any]]:
    """All job rows by (kind, key), except one: what a statement that writes to that one must leave alone."""
    with admin.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute("select * from pgworker.jobs").fetchall()
    return {(each["kind"], each["key"]): each for each in rows if (each["kind"], each["key"]) != but}


def copy_of(admin: psycopg.Connection[Any], key: str, *, kind: str) -> None:
    """Copy a job of kind `work` into another kind, id, key, revision and lease included: only the kind differs."""
    admin.execute(
        "insert into pgworker.jobs select (jsonb_populate_record(j, jsonb_build_object('kind', %s::text))).*"
        " from pgworker.jobs j where j.kind = 'work' and j.key = %s",
        [kind, key],
    )


def age(admin: psycopg.Connection[Any], seconds: float, *, kind: str = "work") -> None:
    """Let time pass for the jobs of a kind: shift their instants into the past (the clock itself is left alone)."""
    admin.execute(
        "update pgworker.jobs set ready_at = ready_at - %(by)s, lease_expires_at = lease_expires_at - %(by)s,"
        " created_at = created_at - %(by)s, finished_at = finished_at - %(by)s where kind = %(kind)s",
        {"by": timedelta(seconds=seconds), "kind": kind},
    )


@contextlib.asynccontextmanager
async def running(worker: Worker, *, stop: str = "release") -> AsyncGenerator[Worker, None]:
    """The worker runs while the block does; it is then stopped by the named method, and waited for."""
    async with anyio.create_task_group() as group:
        group.start_soon(worker.run)
        try:
            yield worker
        finally:
            getattr(worker, stop)()


class Recorder:
    """Keeps an app's events and lets a test wait for them."""

    def __init__(self, app: App) -> None:
        self.events: list[Event] = []
        self._changed = anyio.Event()
        app.events.subscribe(self._record)

    def _record(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()
        self._changed = anyio.Event()

    def of(self, kind: type[E]) -> list[E]:
        """The events of one type so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def wait(self, until: Callable[[], bool], *, within: float = 10.0) -> None:
        """Until the condition holds, looked at after each event; fails the test when the time is up."""
        with anyio.fail_after(within):
            while not until():
                await self._changed.wait()

    async def count(self, kind: type[Event], count: int, *, within: float = 10.0) -> None:
        """Until there have been so many events of one type."""
        await self.wait(lambda: len(self.of(kind)) >= count, within=within)


class Gate:
    """Counts the calls inside, and holds them until it is opened."""

    def __init__(self) -> None:
        self.inside = 0
        self.peak = 0
        self.calls: list[int] = []
        self._opened = anyio.Event()
        self._changed = anyio.Event()

    def open(self) -> None:
        """Let everyone through, from now on."""
        self._opened.set()

    async def pass_through(self, jobs: int = 1) -> None:
        """To be called by a handler with so many jobs."""
        self.calls.append(jobs)
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        self._changed.set()
        self._changed = anyio.Event()
        try:
            await self._opened.wait()
        finally:
            self.inside -= 1

    async def until(self, inside: int) -> None:
        """Until so many calls are inside; fails the test when the time is up."""
        with anyio.fail_after(10):
            while self.inside < inside:
                await self._changed.wait()


def jobs(count: int, **options: Any) -> list[NewJob]:
    """So many jobs with keys in the order of their payloads."""
    return [NewJob(index, key=f"k{index:04}", revision="r", **options) for index in range(count)]
