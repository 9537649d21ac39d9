"""What an app asks of the jobs table, as flows of statements that the app drives."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple, cast

from pgworker.db import Flow
from pgworker.errors import ConfigError, PayloadError, PgworkerError
from pgworker.job import URGENCIES, Enqueued, IfPending, NewJob
from pgworker.kind import Kind
from pgworker.payload import check_key, check_revision, check_tenant
from pgworker.statements import FACTS, Insert, Put, Statement, insert_events, insert_jobs, insert_missing_events
from pgworker.tablemap import TableMap

_ROUNDS = 5
_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "delay": (timedelta, int, float),
    "ready_at": (datetime,),
    "priority": (int,),
    "max_attempts": (int,),
}
_SMALLINT = 32_767
_PLAIN = NewJob()
_NOBODY = ""
"""The tenant of a job of which it is not said: one among the others."""


class PutMany(NamedTuple):
    """What an enqueue did, in the callers' order; `transaction` is the id of a transaction that wrote, if one did."""

    enqueued: list[Enqueued]
    transaction: str | None


@dataclass(frozen=True, slots=True)
class Order:
    """What one call puts, checked and encoded. With `keep` it leaves work alone that has not ended.

    Events are jobs without a key of the caller's: each has got one that was made for it.
    """

    kind: Kind
    rows: Sequence[Insert]
    keep: bool
    events: bool


class Done:
    """What became of each key, and the row that was sent for it: of equal keys the last."""

    __slots__ = ("puts", "sent")

    def __init__(self) -> None:
        self.puts: dict[str, Put] = {}
        self.sent: dict[str, Insert] = {}
        """Without those of events, of which no other has the same key."""

    def covers(self, order: Order) -> bool:
        """Whether all jobs of a call have been put."""
        return all(row.key in self.puts for row in order.rows)


def make_order(kind: Kind, jobs: Sequence[NewJob], *, if_pending: IfPending) -> Order:
    """Check and encode the jobs of one call. Raises PayloadError or ConfigError."""
    keys = event_keys()
    rows: list[Insert] = []

    def which() -> str:
        return f" (job {len(rows) + 1} of {len(jobs)})" if len(jobs) > 1 else ""

    for job in jobs:
        rows.append(_row(kind, job, keys, which))  # noqa: PERF401 - an error tells how many there are
    if if_pending not in ("replace", "keep"):
        raise ConfigError(f"if_pending is 'replace' or 'keep', got {if_pending!r}")
    return Order(kind, rows, keep=if_pending == "keep", events=all(row.event for row in rows))


def put_jobs(tables: TableMap, kind: Kind, jobs: Sequence[NewJob], *, if_pending: IfPending) -> Flow[PutMany]:
    """Enqueue jobs of one kind, in one statement as a rule.

    Of jobs with equal keys the last wins, the earlier ones count as replaced. Raises PayloadError or ConfigError before
    anything is sent. Locks: rows that change, until the transaction ends.
    """
    order = make_order(kind, jobs, if_pending=if_pending)
    done = Done()
    transaction = yield from put_orders(tables, [order], done)
    return PutMany(in_callers_order(order, done), transaction)


def put_orders(tables: TableMap, orders: Sequence[Order], done: Done, *, again: bool = False) -> Flow[str | None]:
    """Put the orders of several calls, alike in kind, `keep` and `events`, as put_jobs does those of one.

    What is put is noted in `done`, and what is noted there is not put again: after an error in between, the rest of the
    orders, or a part of them, may be. Returns the id of a transaction that wrote, if one did. `again`: events that have
    been sent without an answer, so that they may be there.
    """
    if orders[0].events:
        return (yield from _put_events(tables, orders, done, again=again))
    wanted: dict[str, Insert] = {}
    for order in orders:
        for row in order.rows:
            wanted.pop(row.key, None)  # of equal keys the last one, where it was asked for
            wanted[row.key] = row
    missing = [row for key, row in wanted.items() if key not in done.puts]
    transaction: str | None = None
    for _ in range(_ROUNDS):
        if not missing:
            return transaction
        puts: dict[str, Put] = yield _insert(tables, orders[0], missing)
        done.puts.update(puts)
        done.sent.update((key, wanted[key]) for key in puts)
        transaction = transaction or next((put.transaction for put in puts.values() if put.transaction), None)
        missing = [row for row in missing if row.key not in puts]
    if missing:
        name = orders[0].kind.name
        raise PgworkerError(f"{len(missing)} keys of kind {name!r} kept changing while they were enqueued; try again")
    return transaction


def _put_events(tables: TableMap, orders: Sequence[Order], done: Done, *, again: bool) -> Flow[str | None]:
    """As put_orders: each key is another, and one statement does for all."""
    missing = [row for order in orders for row in order.rows if row.key not in done.puts]
    if not missing:
        return None
    kind = orders[0].kind
    puts: dict[str, Put]
    if again or kind.policy.facts == "all":
        facts = FACTS[kind.policy.facts]
        puts = yield insert_missing_events(tables, kind.name, missing, version=kind.version, facts=facts)
    else:
        puts = yield insert_events(tables, kind.name, missing, version=kind.version)
    done.puts.update(puts)
    return puts[missing[0].key].transaction


def _insert(tables: TableMap, like: Order, rows: Sequence[Insert]) -> Statement[dict[str, Put]]:
    """The statement for rows of such orders, which have keys of the caller's."""
    kind, facts = like.kind, FACTS[like.kind.policy.facts]
    wait = kind.policy.supersede == "wait"
    return insert_jobs(tables, kind.name, rows, version=kind.version, keep=like.keep, wait=wait, facts=facts)


def in_callers_order(order: Order, done: Done) -> list[Enqueued]:
    """What became of the jobs of a call, once all its keys are done."""
    kind = order.kind.name
    if order.events:
        return [Enqueued(kind, row.key, None, "created", "pending") for row in order.rows]
    enqueued: list[Enqueued] = []
    for row in order.rows:
        winner, put = done.sent[row.key], done.puts[row.key]
        status = put.status if row is winner else "replaced"
        enqueued.append(Enqueued(kind, row.key, winner.revision or None, status, put.state))
    return enqueued


def _row(kind: Kind, job: NewJob, keys: Iterator[str], which: Callable[[], str]) -> Insert:
    """The row of one job; `which` says which one, for errors.

    Raises PayloadError for values that may not be stored, ConfigError for options that clash.
    """
    if not isinstance(cast("object", job), NewJob):
        raise ConfigError(f"enqueue_many takes NewJob objects, got {type(job).__name__}: NewJob(payload, key=...)")
    if job.key is not None:
        check_key(job.key)
    if job.revision is not None:
        check_revision(job.revision)
    if job.tenant is not None:
        check_tenant(job.tenant)
    if not _has_no_options(job):
        _check_options(job, which)
    try:
        payload = kind.payload.encode(job.payload)
    except PayloadError as error:
        raise PayloadError(error.path, f"{error.reason} (payload of kind {kind.name!r}{which()})") from None
    event = job.key is None
    key = next(keys) if job.key is None else job.key
    urgency, delay = URGENCIES[job.urgency], _seconds(job.delay)
    tenant = job.tenant if job.tenant is not None else _NOBODY if kind.policy.fair else None
    return Insert(  # by position: names cost half as much again as everything else here
        key, job.revision or "", urgency, job.priority, delay, job.ready_at, job.max_attempts, payload, event, tenant
    )


def _has_no_options(job: NewJob) -> bool:
    """Whether all is as it is by default, to the very object: as most are in a call with many."""
    return (
        job.revision is None
        and job.delay is None
        and job.ready_at is None
        and job.max_attempts is None
        and job.priority is _PLAIN.priority
        and job.urgency is _PLAIN.urgency
    )


def _check_options(job: NewJob, which: Callable[[], str]) -> None:
    if (wrong := _wrong_type(job)) is not None:
        problem = wrong
    elif job.revision is not None and job.key is None:
        problem = "a revision says which version of a key's thing this is: give the key, too"
    elif job.delay is not None and job.ready_at is not None:
        problem = "give delay or ready_at, not both"
    elif _seconds(job.delay) < 0:
        problem = "a delay is not negative"
    elif job.ready_at is not None and job.ready_at.tzinfo is None:
        problem = "ready_at needs a time zone: datetime.now(UTC), not datetime.now()"
    elif cast("str", job.urgency) not in URGENCIES:
        problem = f"urgency is 'fresh' or 'catch_up', got {job.urgency!r}"
    elif not -_SMALLINT <= job.priority <= _SMALLINT:
        problem = f"priority is {-_SMALLINT} to {_SMALLINT}, got {job.priority}"
    elif job.max_attempts is not None and job.max_attempts < 1:
        problem = f"max_attempts is at least 1, got {job.max_attempts}"
    else:
        return
    raise ConfigError(problem + which())


def _wrong_type(job: NewJob) -> str | None:
    """What is of a type that the database would refuse without a name, or round in silence."""
    for name, wanted in _OPTION_TYPES.items():
        value: object = getattr(job, name)
        if value is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
            return f"{name} must be {' or '.join(each.__name__ for each in wanted)}, got {type(value).__name__}"
    return None


def _seconds(delay: timedelta | float | None) -> float:
    return delay.total_seconds() if isinstance(delay, timedelta) else float(delay or 0)


def event_keys() -> Iterator[str]:
    """Keys for the events of one call: UUIDs of version 7, each the next number after the one before.

    Ordered by time, so that the index of keys grows at its end only. They begin at random: 73 bits.
    """
    value = int.from_bytes(os.urandom(10))
    group, low = 0x8000 | value >> 64 & 0x3FFF, value & 0x7FFF_FFFF_FFFF  # with room for counting above it
    text = f"{time.time_ns() // 1_000_000:012x}"
    prefix = f"{text[:8]}-{text[8:]}-7{value >> 48 & 0xFFF:03x}-{group:04x}-"
    while True:
        yield f"{prefix}{low:012x}"
        low += 1
