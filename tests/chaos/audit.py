"""What really happened: a trigger logs each committed change of a job's row, and the log is judged afterwards.

`findings` needs the log alone; it holds for any number of workers in any number of processes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import psycopg

from pgworker.job import MOVES, State

Admin: TypeAlias = psycopg.Connection[Any]
Finding: TypeAlias = tuple[str, str]
"""What rule was broken, and by what."""

_INSTALL = """
create table public.audit_log (
    seq bigint generated always as identity primary key, at timestamptz, txid text, op text, id bigint, key text,
    old_generation int, generation int, old_state text, state text, old_token uuid, token uuid,
    old_epoch bigint, epoch bigint, old_expiry timestamptz, expiry timestamptz, old_attempts int, attempts int,
    old_evictions int, evictions int, finished_at timestamptz, old_cancel_requested boolean, cancel_requested boolean,
    runner text, code text, revision text);
create function public.audit() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$ begin
    insert into public.audit_log values (default, clock_timestamp(), pg_current_xact_id()::text, tg_op,
        coalesce(new.id, old.id), coalesce(new.key, old.key), old.generation, new.generation, old.state, new.state,
        old.token, new.token, old.lease_epoch, new.lease_epoch, old.lease_expires_at, new.lease_expires_at,
        old.attempts, new.attempts, old.evictions, new.evictions, new.finished_at,
        old.cancel_requested_at is not null, new.cancel_requested_at is not null, new.runner, new.last_code,
        new.revision);
    return null;
end $$;
create trigger audit after insert or update or delete on pgworker.jobs for each row execute function public.audit()"""

_INSTALL_RESULTS = """
create table public.audit_results (
    seq bigint generated always as identity primary key, txid text, op text, key text, revision text);
create function public.audit_result() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$ begin
    insert into public.audit_results values (default, pg_current_xact_id()::text, tg_op, coalesce(new.key, old.key),
        new.revision);
    return null;
end $$;
create trigger audit after insert or update or delete on pgworker.results
    for each row execute function public.audit_result()"""


class Change(NamedTuple):
    """One line of the log. An insert has no old values, a delete no new ones."""

    seq: int
    at: datetime
    txid: str
    op: str
    id: int
    key: str
    old_generation: int | None
    generation: int | None
    old_state: State | None
    state: State | None
    old_token: UUID | None
    token: UUID | None
    old_epoch: int | None
    epoch: int | None
    old_expiry: datetime | None
    expiry: datetime | None
    old_attempts: int | None
    attempts: int | None
    old_evictions: int | None
    evictions: int | None
    finished_at: datetime | None
    old_cancel_requested: bool
    cancel_requested: bool
    runner: str | None
    code: str | None
    revision: str | None

    @property
    def is_put(self) -> bool:
        """An enqueue wrote the row."""
        return self.op == "INSERT" or (self.op == "UPDATE" and self.generation != self.old_generation)

    @property
    def is_claim(self) -> bool:
        """A claim took the row, ready or from an owner whose lease had run out."""
        return self.op == "UPDATE" and self.token is not None and self.token != self.old_token

    @property
    def is_takeover(self) -> bool:
        """A claim took the row from another."""
        return self.is_claim and self.old_token is not None

    @property
    def is_renewal(self) -> bool:
        """The lease was prolonged."""
        return (
            self.op == "UPDATE"
            and self.token is not None
            and self.token == self.old_token
            and self.expiry != self.old_expiry
        )

    @property
    def is_reaping(self) -> bool:
        """The reaper took an expired lease off (nothing else counts an eviction without a new owner)."""
        return self.op == "UPDATE" and self.old_token is not None and self.token is None and self._evicted

    @property
    def is_ending(self) -> bool:
        """The owner's finish or settle: the lease is given up, and the row was not replaced by the same change."""
        given_up = self.op == "UPDATE" and self.old_token is not None and self.token is None
        return given_up and not self.is_put and not self._evicted

    @property
    def is_success(self) -> bool:
        """The job became succeeded."""
        return self.op == "UPDATE" and self.state == "succeeded" and self.old_state != "succeeded"

    @property
    def _evicted(self) -> bool:
        return (self.evictions or 0) == (self.old_evictions or 0) + 1

    def __str__(self) -> str:
        return (
            f"#{self.seq} {self.op} id={self.id} {self.key} g{self.old_generation}->{self.generation} "
            f"{self.old_state}->{self.state} token {_short(self.old_token)}->{_short(self.token)} "
            f"epoch {self.old_epoch}->{self.epoch} evictions {self.old_evictions}->{self.evictions} "
            f"expiry {self.old_expiry} -> {self.expiry} at {self.at} finished {self.finished_at}"
        )


def _short(token: UUID | None) -> str:
    return str(token)[:8] if token else "-"


class Stored(NamedTuple):
    """One change of a result."""

    txid: str
    op: str
    key: str
    revision: str | None


def install(admin: Admin) -> None:
    """Begin to log."""
    admin.execute(_INSTALL)


def install_results(admin: Admin) -> None:
    """Begin to log what happens to the results, too."""
    admin.execute(_INSTALL_RESULTS)


def read(admin: Admin, after: int = 0) -> list[Change]:
    """The log so far, each row's changes in the order in which they happened."""
    return [
        Change(*row)
        for row in admin.execute("select * from public.audit_log where seq > %s order by seq", [after]).fetchall()
    ]


def read_results(admin: Admin) -> list[Stored]:
    """The log of the results so far."""
    rows = admin.execute("select txid, op, key, revision from public.audit_results order by seq").fetchall()
    return [Stored(*row) for row in rows]


def stale_results(log: Iterable[Change], stored: Iterable[Stored]) -> list[Finding]:
    """The results that were written by anything but the success of the very revision that the key had then."""
    successes = {(change.txid, change.key, change.revision) for change in log if change.is_success}
    return [
        ("result without its success", str(each))
        for each in stored
        if each.op != "DELETE" and (each.txid, each.key, each.revision) not in successes
    ]


def evicted(log: Iterable[Change]) -> list[tuple[Change, Change]]:
    """Each loss of a lease by its expiry, and the claim (or last renewal) that had given it."""
    return [
        (claim, change)
        for changes in by_job(log).values()
        for claim, change in pairwise(changes)
        if change.is_takeover or change.is_reaping
    ]


def by_job(log: Iterable[Change]) -> dict[int, list[Change]]:
    """The log of each job."""
    jobs: dict[int, list[Change]] = defaultdict(list)
    for change in log:
        jobs[change.id].append(change)
    return jobs


def findings(log: Sequence[Change]) -> list[Finding]:
    """Everything in the log that must never happen."""
    found: list[Finding] = []
    for changes in by_job(log).values():
        found += _judge_job(changes)
    return found


def _judge_job(changes: Sequence[Change]) -> Iterator[Finding]:
    succeeded = Counter(change.generation for change in changes if change.is_success)
    for generation, times in succeeded.items():
        if times > 1:
            yield "a generation succeeded twice", f"{changes[0].key} generation {generation}: {times} times"
    for name, values in (("epoch", [c.epoch for c in changes if c.is_claim]), ("token", _tokens(changes))):
        if len(set(values)) < len(values):
            yield f"two claims with one {name}", str(changes[0])
    for change in changes:
        for rule in _broken_rules(change):
            yield rule, str(change)


def _tokens(changes: Sequence[Change]) -> list[UUID | None]:
    return [change.token for change in changes if change.is_claim]


def _broken_rules(change: Change) -> Iterator[str]:
    if change.op == "DELETE":
        return
    if change.state == "pending" and change.token is None and change.cancel_requested:
        yield "pending where neither claim nor reaper sees it"
    if change.op == "INSERT":
        return
    assert change.old_state is not None
    assert change.old_generation is not None
    assert change.generation is not None
    assert change.old_epoch is not None
    if change.old_cancel_requested and not change.is_put and change.state == "pending" and not change.cancel_requested:
        yield "cancel request forgotten"
    if change.state not in MOVES[change.old_state]:
        yield "illegal move of a state"
    if not change.old_generation <= change.generation <= change.old_generation + 1:
        yield "generation going back"
    if change.epoch != change.old_epoch + change.is_claim:
        yield "epoch that does not count the claims"
    yield from _broken_lease_rules(change)
    yield from _broken_attempts(change)


def _broken_lease_rules(change: Change) -> Iterator[str]:
    if change.is_success and change.old_token is None:
        yield "success without a lease"
    if change.is_takeover and change.old_expiry is not None and change.at < change.old_expiry:
        yield "live lease taken over"
    if change.is_reaping and change.old_expiry is not None and change.at < change.old_expiry:
        yield "live lease reaped"
    written = change.is_success or (change.is_ending and change.state == "failed")
    if written and change.old_expiry and change.finished_at and change.finished_at >= change.old_expiry:
        yield "written after the expiry"


def _broken_attempts(change: Change) -> Iterator[str]:
    assert change.old_attempts is not None
    if change.attempts == change.old_attempts or (change.is_put and change.attempts == 0):
        return
    if not (change.is_ending and change.attempts == change.old_attempts + 1):
        yield "attempt counted for what was no judged failure"


def told(found: Sequence[Finding], most: int = 5) -> str:
    """The findings in a few lines: how many of each rule, and the first examples."""
    counts = Counter(rule for rule, _ in found)
    lines = [f"{count} x {rule}" for rule, count in counts.most_common()]
    return "\n".join([*lines, *(f"  {rule}: {example}" for rule, example in found[:most])])
