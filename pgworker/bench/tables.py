"""Figures for people: a plain table on the terminal, the same as markdown, and the JSON that both are read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Final, TypeAlias, cast

import msgspec

from pgworker.bench.results import Check, Result
from pgworker.bench.run import Report
from pgworker.bench.session import QUICK

Json: TypeAlias = dict[str, object]

HEADINGS: Final = ("", "what", "unit", "figure", "floor", "target", "verdict")
PEER_FIGURES: Final = {
    "one_worker": "jobs/s, 1 worker",
    "two_workers": "2 workers",
    "worker_cpu_us": "worker CPU us/job",
    "postgres_cpu_us": "Postgres CPU us/job",
    "enqueue_wal_bytes": "WAL bytes/job, enqueue",
    "wal_bytes": "execution",
    "transactions": "transactions/job",
    "pickup_p50_ms": "pickup p50 ms",
    "pickup_p99_ms": "p99 ms",
    "bulk_enqueue": "bulk enqueue jobs/s",
    "single_1": "single enqueues/s, 1 client",
    "single_16": "16 clients",
}
"""What is told of each queue: the name in the JSON, and the column's heading."""
PEER_HEADINGS: Final = ("", *PEER_FIGURES.values())
_BIG: Final = 999.5
_SMALL: Final = 0.0001
_SIGNS: Final = {"at least": ">=", "at most": "<="}
_VERDICTS: Final = {True: "met", False: "missed", None: ""}
_TEXTS: Final = {"what", "unit", "verdict"}


# --- JSON -----------------------------------------------------------------------------------------------------------


def to_json(report: Report) -> Json:
    """The report as plain values."""
    return {
        "machine": report.machine,
        "versions": report.versions,
        "settings": report.settings,
        "sizes": report.sizes,
        "made_at": report.made_at.isoformat(timespec="seconds"),
        "results": {result.name: _result(result) for result in report.results},
    }


def _result(result: Result) -> Json:
    headline = result.checks[0] if result.checks else None
    return {
        "title": result.title,
        "value": headline and headline.value,
        "target": headline and headline.target,
        "met": result.met,
        "floor": headline and headline.floor,
        "variant": result.variant,
        "note": result.note,
        "missing": result.missing,
        "checks": [asdict(check) for check in result.checks],
        "runs": list(result.runs),
    }


# --- tables ---------------------------------------------------------------------------------------------------------


def result_rows(report: Mapping[str, object]) -> list[tuple[str, ...]]:
    """The rows of the main table, from the JSON: one for each scenario and check. A tiny run gets no verdicts."""
    rows: list[tuple[str, ...]] = []
    judged = not str(report["sizes"]).startswith(QUICK.name)
    for name, result in results_of(report).items():
        verdict = str(result["missing"]) or _VERDICTS[cast("bool | None", result["met"]) if judged else None]
        rows.append((name, str(result["title"]), "", "", "", "", verdict))
        rows += [_check_row(each, judged=judged) for each in cast("list[Json]", result["checks"])]
    return rows


def remarks(report: Mapping[str, object]) -> list[str]:
    """What must be known before figures are quoted: how a scenario was smaller, what it leaves out."""
    lines: list[str] = []
    for name, result in results_of(report).items():
        told = [str(result[part]) for part in ("variant", "note") if result[part] not in {"", "full"}]
        lines += [f"{name}: {'; '.join(told)}"] if told else []
    return lines


def facts(report: Mapping[str, object]) -> str:
    """Where and when, in a line each: machine, versions, settings."""
    groups = [(name, cast("Json", report[name])) for name in ("machine", "versions", "settings")]
    lines = [f"- {name}: {', '.join(f'{key} {value}' for key, value in group.items())}" for name, group in groups]
    return "\n".join([*lines, f"- made at: {report['made_at']}, {report['sizes']}"])


def results_of(report: Mapping[str, object]) -> dict[str, Json]:
    """The scenarios' results by name; none of a report that has none."""
    return cast("dict[str, Json]", report.get("results", {}))


def peer_rows(report: Mapping[str, object]) -> list[tuple[str, ...]]:
    """The rows of the table that compares pgworker with other queues, one for each of them."""
    rows: list[tuple[str, ...]] = []
    for name, peer in cast("dict[str, dict[str, float | None]]", report["peers"]).items():
        figures = [peer.get(key) for key in PEER_FIGURES]
        rows.append((name, *("" if figure is None else number(figure) for figure in figures)))
    return rows


def _check_row(values: Json, *, judged: bool) -> tuple[str, ...]:
    check = msgspec.convert(values, Check)
    target = "" if check.bound is None or check.target is None else f"{_SIGNS[check.bound]} {number(check.target)}"
    value = "?" if check.value is None else number(check.value)
    if check.interval is not None:
        value += f" ({number(check.interval[0])} to {number(check.interval[1])})"
    floor = "" if check.floor is None else number(check.floor)
    return "", f"  {check.what}", check.unit, value, floor, target, _VERDICTS[check.met if judged else None]


def number(value: float) -> str:
    """A number in three digits or so, with thousands set apart."""
    if abs(value) < _SMALL or abs(value) >= _BIG:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def as_text(rows: Sequence[Sequence[str]], headings: Sequence[str] = HEADINGS) -> str:
    """A table for the terminal: columns by blanks, texts to the left and numbers to the right."""
    table = [tuple(headings), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    texts = _texts(headings)
    lines = [
        "  ".join(
            cell.ljust(width) if column in texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def as_markdown(rows: Sequence[Sequence[str]], headings: Sequence[str] = HEADINGS) -> str:
    """The same in markdown."""
    texts = _texts(headings)
    side = [":---" if column in texts else "---:" for column in range(len(headings))]
    lines = [[cell.strip().replace("|", "\\|") for cell in row] for row in (headings, side, *rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _texts(headings: Sequence[str]) -> set[int]:
    """The columns that hold texts: the names, and the words of the main table."""
    return {0} | {column for column, heading in enumerate(headings) if heading in _TEXTS}
