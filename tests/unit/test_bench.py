"""The benchmarks' arithmetic: statistics, what the kernel says of processes, targets, tables."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import pytest

from pgworker.bench import (
    FULL,
    NAMES,
    PEER_HEADINGS,
    QUICK,
    STANDARD,
    Check,
    Report,
    Result,
    Sample,
    as_markdown,
    as_text,
    chosen,
    facts,
    peer_rows,
    remarks,
    result_rows,
    to_json,
    with_jobs,
)
from pgworker.bench.proc import cpu_seconds, is_backend, memory, parse_stat, parse_status
from pgworker.bench.results import at_least, at_most, middle, noted, paired_at_least
from pgworker.bench.stats import bootstrap_interval, median, percentile, spread
from pgworker.bench.tables import number
from pgworker.errors import ConfigError

# --- statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "middle"), [([3], 3), ([5, 1, 3], 3), ([4, 1, 3, 2], 2.5), ([1, 1, 9], 1)])
def test_the_median_is_the_middle_whatever_the_order(values: list[float], middle: float) -> None:
    assert median(values) == middle


@pytest.mark.parametrize(("share", "value"), [(0, 10), (0.25, 20), (0.5, 30), (0.9, 46), (1, 50)])
def test_percentiles_lie_between_their_neighbours(share: float, value: float) -> None:
    assert percentile([50, 10, 40, 20, 30], share) == pytest.approx(value)


def test_of_nothing_there_is_no_median() -> None:
    with pytest.raises(ValueError, match="no values"):
        median([])


def test_the_spread_is_a_share_of_the_median() -> None:
    assert spread([90, 100, 120]) == pytest.approx(0.3)
    assert spread([7]) == 0
    assert spread([0, 0]) == 0


def test_the_interval_holds_the_median_and_is_the_same_each_time() -> None:
    values = [0.90, 0.93, 0.95, 0.96, 0.97, 0.99, 1.02]
    low, high = bootstrap_interval(values)
    assert min(values) <= low < median(values) < high <= max(values)
    assert bootstrap_interval(values) == (low, high)
    narrow = bootstrap_interval(values, level=0.5)
    assert low <= narrow[0] <= narrow[1] <= high
    assert narrow != (low, high)


def test_the_interval_of_equal_values_is_that_value() -> None:
    assert bootstrap_interval([0.95]) == (0.95, 0.95)


# --- processes ------------------------------------------------------------------------------------------------------

STAT = "4711 (a (strange) name) S 17 4711 4711 0 -1 4194304 101 202 0 0 250 50 7 8 20 0 3 0 12345 1000 200 1 2 3"
STATUS = "Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t   300 kB\nVmRSS:\t   200 kB\nThreads:\t3\n"


def test_the_processor_time_is_that_of_user_and_system() -> None:
    assert parse_stat(STAT) == (17, 300)


def test_the_memory_is_in_bytes() -> None:
    assert parse_status(STATUS) == (200 * 1024, 300 * 1024)


def test_of_ourselves_the_kernel_knows_all() -> None:
    used, held = cpu_seconds(os.getpid()), memory(os.getpid())
    assert used is not None
    assert used > 0
    assert held is not None
    assert held.peak >= held.now > 1_000_000
    assert not is_backend(os.getpid())


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert (cpu_seconds(child), memory(child), is_backend(child)) == (None, None, False)


# --- targets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "met"), [(0.69, False), (0.7, True), (2, True)])
def test_at_least_is_met_by_the_target_itself(value: float, *, met: bool) -> None:
    assert at_least("share", value, 0.7).met is met


@pytest.mark.parametrize(("value", "met"), [(36, False), (35, True), (0, True), (None, None)])
def test_at_most_is_neither_met_nor_missed_where_nothing_could_be_measured(
    value: float | None, *, met: bool | None
) -> None:
    assert at_most("cpu", value, 35).met is met


@pytest.mark.parametrize(
    ("ratios", "met"),
    [
        ([0.97] * 7, True),
        ([0.93] * 7, False),  # the interval's upper end stays below
        ([0.93, 0.93, 0.93, 0.93, 0.96, 0.97, 0.98], True),
        ([0.90, 0.90, 0.91, 0.91, 0.99, 0.99, 0.99], False),  # its median is too small, whatever the interval says
        ([1.2], True),
    ],
)
def test_a_ratio_close_to_one_is_judged_by_median_and_interval(ratios: list[float], *, met: bool) -> None:
    check = paired_at_least("share", ratios, 0.95)
    assert check.met is met
    assert check.value == median(ratios)
    assert check.interval == bootstrap_interval(ratios)


def test_a_result_is_met_when_all_its_targets_are() -> None:
    good, bad, plain = at_least("a", 1, 1), at_most("b", 2, 1), noted("c", 3)
    assert Result("P1", "", "full", (good, plain)).met is True
    assert Result("P1", "", "full", (good, bad)).met is False
    assert Result("P1", "", "full", (plain,)).met is None
    assert Result("P1", "", "", missing="not built").met is None


def test_costs_that_were_not_seen_do_not_count() -> None:
    samples = [Sample(10, 1, 3.0), Sample(10, 1), Sample(10, 1, 5.0)]
    assert middle(samples, "worker_cpu_us") == 4
    assert middle(samples, "postgres_cpu_us") is None


def test_a_sample_gives_its_figures_under_a_name() -> None:
    assert Sample(100, 0.5, wal_bytes=12.0).figures("floor") == {
        "floor_jobs_per_second": 200,
        "floor_worker_cpu_us": None,
        "floor_postgres_cpu_us": None,
        "floor_wal_bytes": 12,
        "floor_transactions": None,
    }


# --- which ----------------------------------------------------------------------------------------------------------


def test_scenarios_are_chosen_by_name_and_run_in_their_order() -> None:
    assert chosen(["p4", "P1", "P1"]) == ["P1", "P4"]
    assert chosen([]) == list(NAMES)
    with pytest.raises(ConfigError, match="no scenario P13, X; there are P1 to P12"):
        chosen(["P1", "x", "P13"])


def test_other_sizes_say_so() -> None:
    sizes = with_jobs(STANDARD, 500)
    assert (sizes.drained, sizes.bulk, sizes.name) == (500, 500, "standard, 500 jobs")
    assert len({FULL.name, STANDARD.name, QUICK.name}) == 3


# --- tables ---------------------------------------------------------------------------------------------------------

REPORT = to_json(
    Report(
        machine={"cores": 2},
        versions={"pgworker": "1.2"},
        settings={"fsync": "on"},
        sizes="full",
        made_at=datetime(2026, 1, 2, tzinfo=UTC),
        results=[
            Result(
                "P1",
                "Drain",
                "reduced: drained 10",
                (at_least("share | part", 0.7512, 0.7, floor=1.0), noted("rate", 18_765.4, unit="jobs/s")),
                ({"subject_jobs_per_second": 18_765.4},),
            ),
            Result("P8", "Drain among others", "full", (paired_at_least("share", [0.96], 0.95),)),
            Result("P11", "Fairness", "", missing="not built"),
        ],
    )
)


def test_the_json_has_the_headline_and_every_run() -> None:
    results = REPORT["results"]
    assert isinstance(results, dict)
    assert {name: results["P1"][name] for name in ("value", "target", "met", "floor")} == {
        "value": 0.7512,
        "target": 0.7,
        "met": True,
        "floor": 1.0,
    }
    assert results["P1"]["runs"] == [{"subject_jobs_per_second": 18_765.4}]
    assert (results["P11"]["value"], results["P11"]["met"], results["P11"]["missing"]) == (None, None, "not built")


def test_a_row_for_each_scenario_and_each_check() -> None:
    assert result_rows(REPORT) == [
        ("P1", "Drain", "", "", "", "", "met"),
        ("", "  share | part", "", "0.751", "1", ">= 0.7", "met"),
        ("", "  rate", "jobs/s", "18,765", "", "", ""),
        ("P8", "Drain among others", "", "", "", "", "met"),
        ("", "  share", "", "0.96 (0.96 to 0.96)", "", ">= 0.95", "met"),
        ("P11", "Fairness", "", "", "", "", "not built"),
    ]
    assert remarks(REPORT) == ["P1: reduced: drained 10"]


def test_a_tiny_run_gets_no_verdicts() -> None:
    verdicts = {row[-1] for row in result_rows({**REPORT, "sizes": "quick, 200 jobs"})}
    assert verdicts == {"", "not built"}


def test_what_could_not_be_measured_is_no_figure() -> None:
    checks = (at_most("cpu", None, 35, unit="us"), Check("n", 1.0))
    report = to_json(Report({}, {}, {}, "", datetime.now(UTC), [Result("P3", "Cost", "full", checks)]))
    assert result_rows(report)[1] == ("", "  cpu", "us", "?", "", "<= 35", "")


def test_the_text_is_aligned() -> None:
    lines = as_text([("P1", "a", "", "1", "", "", "met"), ("", "bb", "", "100", "", "", "")]).splitlines()
    assert lines[0].startswith("    what  unit  figure")
    assert set(lines[1]) == {"-"}
    assert lines[2].endswith("met")
    assert lines[2].index("1", 3) == lines[3].index("100") + 2


def test_markdown_has_one_line_a_row_and_escapes_what_would_part_cells() -> None:
    lines = as_markdown(result_rows(REPORT)).splitlines()
    assert lines[1] == "| :--- | :--- | :--- | ---: | ---: | ---: | :--- |"
    assert lines[3] == "|  | share \\| part |  | 0.751 | 1 | >= 0.7 | met |"
    assert len(lines) == 8


def test_the_facts_say_where_and_when() -> None:
    assert facts(REPORT).splitlines() == [
        "- machine: cores 2",
        "- versions: pgworker 1.2",
        "- settings: fsync on",
        "- made at: 2026-01-02T00:00:00+00:00, full",
    ]


def test_peers_have_a_row_each() -> None:
    rows = peer_rows({"peers": {"other": {"one_worker": 1234.5, "transactions": 0.004}}})
    assert [len(row) for row in rows] == [len(PEER_HEADINGS)]
    assert [cell for cell in rows[0] if cell] == ["other", "1,234", "0.004"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.00012, "0.00012"),
        (0.0000123, "0"),
        (0.0779, "0.0779"),
        (12.345, "12.3"),
        (999, "999"),
        (1e6, "1,000,000"),
    ],
)
def test_numbers_have_about_three_digits(value: float, text: str) -> None:
    assert number(value) == text
