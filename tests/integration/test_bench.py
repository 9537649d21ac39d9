"""The benchmarks run, say what they found, and leave nothing behind. What they measure here means nothing."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from pgworker.bench import Sizes, new_schema, run_bench, to_json
from tests.commandline import Command, invoke
from tests.databases import MakeDsn, connect

TINY = Sizes(
    "tiny",
    drained=60,
    rounds=1,
    pairs=1,
    bulk=60,
    singles=40,
    alone=5,
    pickups=3,
    future=50,
    finished=20,
    expired=10,
    sustained_rate=100,
    sustained_seconds=0.4,
    window_seconds=0.2,
    idle_seconds=0.2,
    in_flight=50,
    tenanted=500,
    fair_claims=2,
)
LEFT = """
select (select count(*) from pg_namespace where nspname like 'pgworker_bench_%'),
       (select count(*) from pg_stat_activity
        where datname = current_database() and application_name like 'pgworker%')"""


def left(dsn: str) -> tuple[int, int]:
    """Schemas and sessions of the benchmark that are still there."""
    with connect(dsn) as connection:
        ((schemas, sessions),) = connection.execute(LEFT).fetchall()
    return schemas, sessions


def nothing_is_left(dsn: str) -> bool:
    """The server may take a moment to see that a process is gone."""
    until = time.monotonic() + 10
    while (found := left(dsn)) != (0, 0) and time.monotonic() < until:
        time.sleep(0.05)
    return found == (0, 0)


@pytest.mark.parametrize(
    "names",
    [
        ("P1", "P4", "P5", "P6", "P7", "P11"),
        pytest.param(("P2", "P3"), marks=pytest.mark.slow),  # these start a worker or two for each of their rounds
        pytest.param(("P8", "P9"), marks=pytest.mark.slow),
        pytest.param(("P10", "P12"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_every_scenario_runs_and_leaves_nothing_behind(names: tuple[str, ...], make_dsn: MakeDsn) -> None:
    dsn, said = make_dsn(), list[str]()
    report = run_bench(dsn, schema=new_schema(), names=names, sizes=TINY, limit_seconds=50, say=said.append)
    assert [result.name for result in report.results] == list(names)
    for result in report.results:
        assert result.missing == ""
        assert bool(result.checks) == bool(result.runs)
        assert all(check.value is not None for check in result.checks if check.bound == "at least")
        assert result.variant.startswith("reduced")
    assert json.loads(json.dumps(to_json(report)))["results"].keys() == set(names)
    assert said
    assert nothing_is_left(dsn)


@pytest.mark.contract("B79")
def test_throughput_is_reported_beside_that_of_the_floor(make_dsn: MakeDsn, tmp_path: Path) -> None:
    """Of enqueues one by one and at once, and of claims with their completions."""
    report = run_bench(make_dsn(), schema=new_schema(), names=["P1", "P4", "P5"], sizes=TINY, limit_seconds=50, say=len)
    rates = {
        (result.name, check.what): (check.value or 0, check.floor or 0)
        for result in report.results
        for check in result.checks
        if check.unit == "jobs/s"
    }
    assert rates.keys() == {("P1", "rate"), ("P4", "with keys"), ("P4", "events"), ("P5", "16 at once")}
    assert all(ours > 0 and floor > 0 for ours, floor in rates.values())
    told = json.loads(json.dumps(to_json(report)))["results"]
    assert {
        (name, check["what"]): (check["value"], check["floor"])
        for name, result in told.items()
        for check in result["checks"]
        if check["unit"] == "jobs/s"
    } == rates


def test_what_there_is_no_time_for_is_left_out(make_dsn: MakeDsn) -> None:
    dsn = make_dsn()
    report = run_bench(dsn, schema=new_schema(), names=["P1", "P4"], sizes=TINY, limit_seconds=0, say=len)
    assert [result.missing for result in report.results] == ["the time was up"] * 2
    assert nothing_is_left(dsn)


def test_the_command_says_what_it_will_do_and_writes_what_it_found(make_dsn: MakeDsn, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    ended = invoke("bench", "P4", "p11", "--quick", "--jobs", "100", "--json", str(file), dsn=make_dsn())
    assert ended.code == 0
    first, second, *_ = ended.out.splitlines()
    assert first.startswith("P4, P11 (quick, 100 jobs) on ")
    assert "in a new schema pgworker_bench_" in first
    assert second.endswith("the schema is dropped at the end")
    assert "Bulk enqueue" in ended.out
    assert json.loads(file.read_text())["results"].keys() == {"P4", "P11"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_its_workers_and_drops_its_schema(
    number: signal.Signals, make_dsn: MakeDsn, tmp_path: Path
) -> None:
    dsn = make_dsn()
    # A shell that starts the tests in the background has them ignore it, and so would all that they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = Command("bench", "P9", cwd=tmp_path, dsn=dsn)
    signal.signal(signal.SIGINT, before)
    try:
        command.log.expect("under a held snapshot")
        assert left(dsn)[0] == 1
        command.signal(number)
        assert command.wait() == 1
        assert command.log.text.endswith("stopped; the schema is dropped")
    finally:
        command.end()
    assert nothing_is_left(dsn)


@pytest.mark.parametrize("words", [["P13"], ["--quick", "--full"], ["--jobs", "5"]])
def test_wrong_usage_makes_no_schema(words: list[str], make_dsn: MakeDsn) -> None:
    dsn = make_dsn()
    assert invoke("bench", *words, dsn=dsn).code == 2
    assert nothing_is_left(dsn)
