"""The audited stress is clean; and it is not clean when a statement is broken, whichever part of the fence it is."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest

from pgworker import statements
from pgworker.tablemap import TableMap
from tests.chaos.audit import Admin, install, told
from tests.races.stress import Stress


@pytest.fixture
def stress(dsn: str, admin: Admin) -> Iterator[Stress]:
    install(admin)
    stress = Stress(dsn, admin, random.getrandbits(32))
    sys.stdout.write(f"seed {stress.seed}\n")
    yield stress
    sys.stdout.write(f"{dict(stress.book.counts.most_common())}\n")


def stay_clean(stress: Stress, seconds: float, least: int) -> None:
    stress.run(seconds)
    stress.drain(15)
    found = stress.audit(drained=True)
    assert not found, f"seed {stress.seed}\n{told(found)}"
    counts = stress.book.counts
    for what in ("claimed", "done", "lost", "expired", "busy", "renewal done", "replaced", "unchanged", "superseded"):
        assert counts[what] >= least, f"too little happened to prove anything: {counts}"


@pytest.mark.ruling("0.1", "0.2", "0.5", "1.1", "1.2")
def test_nothing_is_lost_doubled_or_stranded_when_all_happens_at_once(stress: Stress) -> None:
    stay_clean(stress, 4, least=3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_it(stress: Stress) -> None:
    stay_clean(stress, 60, least=100)


FENCE = " and j.revision = i.revision and j.token = i.token"
TOKEN = " and j.token = i.token"
UNEXPIRED = "where held.lease_expires_at > now.at"
WAITS = "deadlock"
STOLEN = "transition that nobody was told of"  # the owner was not
# What is taken out of a statement, what takes its place, and what the audit must say.
BREAKS = {
    "finish, whoever owns the row": ("finish_jobs", FENCE, "", STOLEN),
    "finish, whoever has the token": ("finish_jobs", TOKEN, "", STOLEN),
    "finish after the expiry": ("finish_jobs", UNEXPIRED, "", "written after the expiry"),
    "finish that waits for rows": ("finish_jobs", " skip locked", "", WAITS),
    "settle, whoever owns the row": ("settle_jobs", FENCE, "", STOLEN),
    "settle that forgets a cancel": (
        "settle_jobs",
        "decided.state = 'pending' and j.cancel_requested_at is not null then 'cancelled'",
        "false then 'cancelled'",
        "cancel request forgotten",
    ),
    "renewal of whoever's lease": ("renew_leases", TOKEN, "", "renewal under another's token"),
    "renewal after the expiry": ("renew_leases", UNEXPIRED, "", "renewed after the expiry"),
    "claim of live leases": (
        "claim_jobs",
        "j.lease_expires_at <= (select at from now)\n",
        "true\n",
        "live lease taken over",
    ),
    "reaping of live leases": (
        "reap_expired",
        "lease_expires_at <= (select at from now)",
        "lease_expires_at is not null",
        "live lease reaped",
    ),
    "enqueue in no order": ("insert_jobs", 'order by i.key collate "C"\n', "order by random()\n", WAITS),
}


QUICK = {
    "finish, whoever owns the row",
    "finish after the expiry",
    "settle that forgets a cancel",
    "renewal after the expiry",
    "claim of live leases",
    "reaping of live leases",
}


@pytest.mark.parametrize(
    "broken", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in BREAKS]
)
def test_the_audit_finds_a_broken_statement(stress: Stress, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    name, part, instead, rule = BREAKS[broken]
    render = statements.render

    def broken_render(asked: str, tables: TableMap) -> bytes:
        text = render(asked, tables)
        if asked != name:
            return text
        assert part.encode() in text
        return text.replace(part.encode(), instead.encode())

    monkeypatch.setattr(statements, "render", broken_render)
    for _ in range(30):
        stress.run(0.5)
        found = stress.audit()
        if any(rule == broken_rule for broken_rule, _ in found):
            return
        assert not found, f"seed {stress.seed}\n{told(found)}"
    pytest.fail(f"the audit has found nothing; seed {stress.seed}, {stress.book.counts}")
