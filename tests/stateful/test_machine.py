"""The runtime's statements against a model of what they should do, in long random sequences."""

from __future__ import annotations

import sys
import time

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pgworker import statements
from pgworker.tablemap import TableMap
from tests.handles import Hand
from tests.stateful.bench import Admin, Bench
from tests.stateful.machine import JobsMachine
from tests.stateful.rows import Differs
from tests.stateful.tally import VERDICTS, expected

QUICK = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    database=None,
    print_blob=True,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
FULL = settings(QUICK, max_examples=2000, stateful_step_count=50)
UNTIL_IT_FAILS = settings(
    QUICK, stateful_step_count=40, max_examples=200, phases=(Phase.generate,), report_multiple_bugs=False
)


@pytest.fixture
def bench(hand: Hand, admin: Admin) -> Bench:
    return Bench(hand, admin)


def run(bench: Bench, profile: settings) -> None:
    class Machine(JobsMachine):
        pass

    Machine.bench = bench
    run_state_machine_as_test(Machine, settings=profile)


@pytest.mark.timeout(400)  # for the shrinking, if it fails
@pytest.mark.ruling("2.2", "0.5")
def test_the_statements_do_what_the_model_does(bench: Bench) -> None:
    hit: list[tuple[str, ...]] = []
    verdicts: set[str] = set()
    for _ in range(4):  # one round misses a verdict with one seed in twelve
        run(bench, QUICK)
        hit = [each for each in expected() if bench.tally.hits[each]]
        verdicts = {each[2] for each in hit if each[0] == "outcome"}
        if verdicts == set(VERDICTS):
            break
    sys.stdout.write(f"{len(hit)} of {len(list(expected()))} hit, {len(bench.probed)} combinations of columns\n")
    assert len(hit) >= 100, bench.tally.report()
    assert verdicts == set(VERDICTS)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_thousands_of_examples_hit_each_cell_twenty_times(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    for _ in range(3):  # one round of two thousand may leave a rare cell at half of that
        run(bench, FULL)
        if not bench.tally.rare(20):
            break
    with capsys.disabled():
        sys.stdout.write(
            f"\n{bench.tally.report()}\n{len(bench.probed)} combinations of columns were seen to be taken\n"
        )
        sys.stdout.write(f"{time.monotonic() - began:.0f} s\n")
    rare = bench.tally.rare(20)
    assert not rare, "\n".join(rare)


UNEXPIRED = "where held.lease_expires_at > now.at"
# What is taken out of a statement, and what takes its place.
BREAKS = {
    "finish after the expiry": ("finish_jobs", UNEXPIRED, ""),
    "finish of a payload that nobody has tried": ("finish_jobs", "j.generation = i.generation as", "true as"),
    "finish that leaves an old result": ("finish_jobs", "d.current and d.result is null and d.had_result", "false"),
    "finish by whoever": ("finish_jobs", " and j.token = i.token", ""),
    "settle after the expiry": ("settle_jobs", "where held.lease_expires_at > now.at", ""),
    "settle that forgets a cancel": (
        "settle_jobs",
        "decided.state = 'pending' and j.cancel_requested_at is not null then 'cancelled'",
        "false then 'cancelled'",
    ),
    "renewal after the expiry": ("renew_leases", UNEXPIRED, ""),
    "claim that ignores a cancel": ("claim_jobs", "and j.cancel_requested_at is null", ""),
    "claim of a job at its limit": ("claim_jobs", "j.evictions + 1 <", "j.evictions <"),
    "claim of another kind's jobs": ("claim_jobs", "where j.kind = %(kind)s::text and", "where"),
    "enqueue that sinks": ("insert_jobs", "least(j.class, excluded.class)", "excluded.class"),
    "enqueue that leaves the old lease": (
        "insert_jobs",
        "where j.revision = excluded.revision and j.lease",
        "where j.lease",
    ),
    "reaping that ends nothing": ("reap_expired", ">= %(max_evictions)s::int then 'failed'", "< 0 then 'failed'"),
    "enqueue by name that leaves an event": ("insert_jobs", "event = excluded.event,", ""),
    "pruning of a key": ("prune_jobs", "where p.event and", "where"),
    "pruning of what may be retried": ("prune_jobs", "(j.payload is not null and j.state <> 'failed')", "true"),
    "pruning of any state": ("prune_jobs", "j.state = i.state and j.state", "j.state"),
    "pruning of what is still kept": ("prune_jobs", " and j.finished_at < i.until", ""),
    "pruning that leaves a result": ("prune_jobs", "union all select e.kind, e.key from emptied e", ""),
    "pruning of another kind's results": (
        "prune_jobs",
        "(r.key, r.kind) in (select e.key, e.kind",
        "r.key in (select e.key",
    ),
    "reopening without a payload": ("reopen_jobs", "and j.payload is not null)", ")"),
}
QUICKLY = {"finish after the expiry"}  # within 200 examples


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "broken", [pytest.param(name, marks=[] if name in QUICKLY else pytest.mark.slow) for name in BREAKS]
)
def test_the_model_finds_a_broken_statement(bench: Bench, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    name, part, instead = BREAKS[broken]
    render = statements.render

    def broken_render(asked: str, tables: TableMap) -> bytes:
        text = render(asked, tables)
        if asked != name:
            return text
        assert part.encode() in text
        return text.replace(part.encode(), instead.encode())

    monkeypatch.setattr(statements, "render", broken_render)
    with pytest.raises(Differs):
        run(bench, settings(UNTIL_IT_FAILS, max_examples=200 if broken in QUICKLY else 1000))
    sys.stdout.write(f"found in example {bench.tally.examples}\n")
