"""What an app asks of the jobs table, as flows of statements that the app drives."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple, TypeAlias, cast

from pgworker.db import Flow
from pgworker.errors import ConfigError, PayloadError, PgworkerError
from pgworker.job import URGENCIES, Enqueued, IfPending, NewJob
from pgworker.kind import Kind
from pgworker.payload import check_key, check_revision, check_tenant
from pgworker.statements import FACTS, Insert, Put, Statement, insert_events, insert_jobs
from pgworker.tablemap import TableMap

_ROUNDS = 5
_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "delay": (timedelta, int, float),
    "ready_at": (datetime,),
    "priority": (int,),
    "max_attempts": (int,),
}
_SMALLINT = 32_767
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


Done: TypeAlias = dict[str, tuple[Insert, Put]]
"""What was put for each key, and the row that was sent for it: of equal keys the last."""


def make_order(kind: Kind, jobs: Sequence[NewJob], *, if_pending: IfPending) -> Order:
    """Check and encode the jobs of one call. Raises PayloadError or ConfigError."""
    several = len(jobs) > 1
    rows = [
        _row(kind, job, f" (job {number} of {len(jobs)})" if several else "")
        for number, job in enumerate(jobs, start=1)
    ]
    if if_pending not in ("replace", "keep"):
        raise ConfigError(f"if_pending is 'replace' or 'keep', got {if_pending!r}")
    return Order(kind, rows, keep=if_pending == "keep", events=all(job.key is None for job in jobs))


def put_jobs(tables: TableMap, kind: Kind, jobs: Sequence[NewJob], *, if_pending: IfPending) -> Flow[PutMany]:
    """Enqueue jobs of one kind, in one statement as a rule.

    Of jobs with equal keys the last wins, the earlier ones count as replaced. Raises PayloadError or ConfigError before
    anything is sent. Locks: rows that change, until the transaction ends.
    """
    order = make_order(kind, jobs, if_pending=if_pending)
    done: Done = {}
    transaction = yield from put_orders(tables, [order], done)
    return PutMany(in_callers_order(order, done), transaction)


def put_orders(tables: TableMap, orders: Sequence[Order], done: Done) -> Flow[str | None]:
    """Put the orders of several calls, alike in kind, `keep` and `events`, as put_jobs does those of one.

    What is put is noted in `done`, and what is noted there is not put again: after an error in between, the rest of the
    orders, or a part of them, may be. Returns the id of a transaction that wrote, if one did.
    """
    wanted: dict[str, Insert] = {}
    for order in orders:
        for row in order.rows:
            wanted.pop(row.key, None)  # of equal keys the last one, where it was asked for
            wanted[row.key] = row
    missing = [row for key, row in wanted.items() if key not in done]
    transaction: str | None = None
    for _ in range(_ROUNDS):
        if not missing:
            return transaction
        puts: dict[str, Put] = yield _insert(tables, orders[0], missing)
        done.update((key, (wanted[key], put)) for key, put in puts.items())
        transaction = transaction or next((put.transaction for put in puts.values() if put.transaction), None)
        missing = [row for row in missing if row.key not in puts]
    if missing:
        name = orders[0].kind.name
        raise PgworkerError(f"{len(missing)} keys of kind {name!r} kept changing while they were enqueued; try again")
    return transaction


def _insert(tables: TableMap, like: Order, rows: Sequence[Insert]) -> Statement[dict[str, Put]]:
    """The statement for rows of such orders."""
    kind, facts = like.kind, FACTS[like.kind.policy.facts]
    if like.events:
        return insert_events(tables, kind.name, rows, version=kind.version, facts=facts)
    wait = kind.policy.supersede == "wait"
    return insert_jobs(tables, kind.name, rows, version=kind.version, keep=like.keep, wait=wait, facts=facts)


def in_callers_order(order: Order, done: Done) -> list[Enqueued]:
    """What became of the jobs of a call, once all its keys are done."""
    enqueued: list[Enqueued] = []
    for row in order.rows:
        winner, put = done[row.key]
        status = put.status if row is winner else "replaced"
        enqueued.append(Enqueued(order.kind.name, row.key, winner.revision or None, status, put.state))
    return enqueued


def _row(kind: Kind, job: NewJob, which: str) -> Insert:
    """The row of one job. Raises PayloadError for values that may not be stored, ConfigError for options that clash."""
    if not isinstance(cast("object", job), NewJob):
        raise ConfigError(f"enqueue_many takes NewJob objects, got {type(job).__name__}: NewJob(payload, key=...)")
    if job.key is not None:
        check_key(job.key)
    if job.revision is not None:
        check_revision(job.revision)
    if job.tenant is not None:
        check_tenant(job.tenant)
    _check_options(job, which)
    try:
        payload = kind.payload.encode(job.payload)
    except PayloadError as error:
        raise PayloadError(error.path, f"{error.reason} (payload of kind {kind.name!r}{which})") from None
    return Insert(
        key=job.key if job.key is not None else event_key(),
        revision=job.revision or "",
        urgency=URGENCIES[job.urgency],
        priority=job.priority,
        delay_seconds=_seconds(job.delay),
        ready_at=job.ready_at,
        max_attempts=job.max_attempts,
        payload=payload,
        event=job.key is None,
        tenant=job.tenant if job.tenant is not None else _NOBODY if kind.policy.fair else None,
    )


def _check_options(job: NewJob, which: str) -> None:
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
    raise ConfigError(problem + which)


def _wrong_type(job: NewJob) -> str | None:
    """What is of a type that the database would refuse without a name, or round in silence."""
    for name, wanted in _OPTION_TYPES.items():
        value: object = getattr(job, name)
        if value is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
            return f"{name} must be {' or '.join(each.__name__ for each in wanted)}, got {type(value).__name__}"
    return None


def _seconds(delay: timedelta | float | None) -> float:
    return delay.total_seconds() if isinstance(delay, timedelta) else float(delay or 0)


def event_key() -> str:
    """A key for an event: a UUID of version 7, time-ordered so that the index of keys grows at its end only."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76 | 0x3 << 62) | 0x7 << 76 | 0x2 << 62
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
