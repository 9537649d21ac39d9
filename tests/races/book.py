"""What the sessions of the stress were told, and how that is held against what was logged."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, TypeAlias
from uuid import UUID

from pgworker.job import Claim, State
from pgworker.outcome import Settlement, Success
from tests.chaos.audit import Admin, Change, Finding, by_job

Lease: TypeAlias = tuple[int, UUID]
"""What a claim gave: the row's id under the claim's token."""


class Told(NamedTuple):
    """A worker was told that its write is done."""

    claim: Claim
    decision: Success | Settlement
    state: State | None


@dataclass
class Book:
    """What the sessions were told. Each list is appended to by many threads, which needs no lock."""

    claimed: list[Claim] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    puts: list[tuple[str, str]] = field(default_factory=list)
    """Transaction and key of each enqueue that was committed and said to have written."""
    renewed: list[Lease] = field(default_factory=list)
    ttls: dict[UUID, float] = field(default_factory=dict)
    unknown: set[Lease] = field(default_factory=set)
    """Writes whose answer never came."""
    unknown_tokens: set[UUID] = field(default_factory=set)
    """Claims whose answer never came."""
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


def judge(book: Book, log: Sequence[Change]) -> Iterator[Finding]:
    """What was told against what was logged, both ways."""
    claims = {(change.id, change.token): change for change in log if change.is_claim}
    endings = {(change.id, change.old_token): change for change in log if change.is_ending}
    yield from _judge_claims(book, claims)
    told: set[Lease] = set()
    for each in book.told:
        lease = (each.claim.id, each.claim.token)
        if lease in told:
            yield "told twice that it is done", str(each)
        told.add(lease)
        yield from _judge_told(each, endings.get(lease))
    accounted = told | book.unknown
    for (id_, token), change in endings.items():
        if token is not None and (id_, token) not in accounted:
            yield "transition that nobody was told of", str(change)
    written = {(change.txid, change.key) for change in log if change.is_put}
    yield from (("put without its row", f"{key} in {txid}") for txid, key in book.puts if (txid, key) not in written)
    yield from _judge_renewals(book, log)


def _judge_claims(book: Book, claims: dict[tuple[int, UUID | None], Change]) -> Iterator[Finding]:
    told = {(claim.id, claim.token): claim for claim in book.claimed}
    for lease, claim in told.items():
        change = claims.get(lease)
        if change is None or (change.epoch, change.generation) != (claim.lease_epoch, claim.generation):
            yield "claim that is not in the log", f"{claim} {change}"
    for (id_, token), change in claims.items():
        if token is not None and (id_, token) not in told and token not in book.unknown_tokens:
            yield "claim that nobody was told of", str(change)


def _judge_told(told: Told, change: Change | None) -> Iterator[Finding]:
    if change is None:
        yield "told done, but no such transition under its token", str(told)
    elif change.state != told.state:
        yield "told another state than was written", f"{told} {change}"
    elif change.is_success and change.generation != told.claim.generation:
        yield "success of another generation", f"{told} {change}"
    elif not change.is_success and isinstance(told.decision, Success) and change.generation == told.claim.generation:
        yield "success that was dropped", f"{told} {change}"


def _judge_renewals(book: Book, log: Sequence[Change]) -> Iterator[Finding]:
    told = Counter(book.renewed)
    logged: dict[Lease, int] = defaultdict(int)
    for change in log:
        if change.is_renewal and change.token is not None:
            logged[change.id, change.token] += 1
            ttl = timedelta(seconds=book.ttls[change.token])
            assert change.expiry is not None
            assert change.old_expiry is not None
            if change.expiry - ttl > change.old_expiry:
                yield "renewed after the expiry", str(change)
    for lease in told.keys() | logged.keys():
        if told[lease] != logged[lease]:
            yield "renewal under another's token", f"{lease}: told {told[lease]}, logged {logged[lease]}"


def judge_last_puts(log: Iterable[Change]) -> Iterator[Finding]:
    """After the last put of a row there must be an end, by whom it may be."""
    for changes in by_job(log).values():
        last = max(index for index, change in enumerate(changes) if change.is_put)
        if not any(change.op == "DELETE" or change.state != "pending" for change in changes[last:]):
            yield "last put never ended", str(changes[last])


def judge_results(book: Book, admin: Admin) -> Iterator[Finding]:
    """A succeeded row has the result of its own generation, or none if that had none."""
    wanted = {
        (each.claim.id, each.claim.generation): each.decision.value
        for each in book.told
        if isinstance(each.decision, Success) and each.state == "succeeded"
    }
    rows = admin.execute(
        "select j.id, j.generation, j.key, j.revision, j.has_result, r.revision, r.value::text"
        " from pgworker.jobs j left join pgworker.results r on r.kind = j.kind and r.key = j.key"
        " where j.state = 'succeeded'"
    ).fetchall()
    for id_, generation, key, revision, has_result, of, value in rows:
        want = wanted.get((id_, generation), value)  # without an answer any is right
        if (value, has_result) != (want, value is not None) or (value is not None and of != revision):
            yield "succeeded without its own result", f"{key} g{generation}: {value}, not {want}, of {of}"
