"""What an app asks of the jobs table, as flows of statements that the app drives."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple, cast
from uuid import UUID

from pgworker.db import Flow
from pgworker.errors import ConfigError, PayloadError, PgworkerError
from pgworker.job import URGENCIES, Enqueued, IfPending, NewJob
from pgworker.kind import Kind
from pgworker.payload import check_key, check_revision
from pgworker.statements import FACTS, Insert, Put, insert_jobs
from pgworker.tablemap import TableMap

_ROUNDS = 5
_OPTION_TYPES: dict[str, tuple[type, ...]] = {
    "delay": (timedelta, int, float),
    "ready_at": (datetime,),
    "priority": (int,),
    "max_attempts": (int,),
}
_SMALLINT = 32_767


class PutMany(NamedTuple):
    """What an enqueue did, in the callers' order; `transaction` is the id of a transaction that wrote, if one did."""

    enqueued: list[Enqueued]
    transaction: str | None


def put_jobs(tables: TableMap, kind: Kind, jobs: Sequence[NewJob], *, if_pending: IfPending) -> Flow[PutMany]:
    """Enqueue jobs of one kind, in one statement as a rule.

    Of jobs with equal keys the last wins, the earlier ones count as replaced. Raises PayloadError or ConfigError before
    anything is sent. Locks: rows that change, until the transaction ends.
    """
    rows = [
        _row(kind, job, f" (job {number} of {len(jobs)})" if len(jobs) > 1 else "")
        for number, job in enumerate(jobs, start=1)
    ]
    if if_pending not in ("replace", "keep"):
        raise ConfigError(f"if_pending is 'replace' or 'keep', got {if_pending!r}")
    puts: dict[str, Put] = {}
    last = {row.key: index for index, row in enumerate(rows)}
    missing = [rows[index] for index in sorted(last.values())]  # of equal keys the last one, where it was asked for
    for _ in range(_ROUNDS):
        if not missing:
            break
        puts |= yield insert_jobs(
            tables,
            kind.name,
            missing,
            version=kind.version,
            keep=if_pending == "keep",
            wait=kind.policy.supersede == "wait",
            facts=FACTS[kind.policy.facts],
        )
        missing = [row for row in missing if row.key not in puts]
    if missing:
        raise PgworkerError(
            f"{len(missing)} keys of kind {kind.name!r} kept changing while they were enqueued; try again"
        )
    transaction = next((put.transaction for put in puts.values() if put.transaction), None)
    return PutMany(_in_callers_order(kind, rows, last, puts), transaction)


def _in_callers_order(kind: Kind, rows: Sequence[Insert], last: dict[str, int], puts: dict[str, Put]) -> list[Enqueued]:
    enqueued: list[Enqueued] = []
    for index, row in enumerate(rows):
        put, winner = puts[row.key], last[row.key]
        status = put.status if index == winner else "replaced"
        enqueued.append(Enqueued(kind.name, row.key, rows[winner].revision or None, status, put.state))
    return enqueued


def _row(kind: Kind, job: NewJob, which: str) -> Insert:
    """The row of one job. Raises PayloadError for values that may not be stored, ConfigError for options that clash."""
    if not isinstance(cast("object", job), NewJob):
        raise ConfigError(f"enqueue_many takes NewJob objects, got {type(job).__name__}: NewJob(payload, key=...)")
    if job.key is not None:
        check_key(job.key)
    if job.revision is not None:
        check_revision(job.revision)
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
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(UUID(int=value))
