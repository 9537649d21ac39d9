"""`pgworker status`: what waits, what has ended, and who works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from pgworker import schema as migrations
from pgworker.cli.database import connected, settings
from pgworker.cli.errors import Code, reported
from pgworker.cli.logs import log_to_stderr
from pgworker.cli.options import Debug, Dsn, Json, Schema
from pgworker.cli.output import age, plain, print_json, print_table, say, table
from pgworker.cli.report import KindRow, Report, RunnerRow, make_report, tell_pause
from pgworker.db import send_sync, session_settings
from pgworker.operations import LAG_BOUND, Lag, count_jobs, count_lag, list_pauses
from pgworker.policy import STORE_TIMEOUT
from pgworker.presence import list_runners

_ALWAYS = ("ready", "running", "succeeded", "failed")  # the other states get a column when there is something in it
_RUNNER_HEADINGS = ("kind", "runner", "state", "up", "in flight", "outcomes", "last error")


def status(
    *,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Only this kind; may be given several times."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Exit with 6 when a kind that has work, or is named by --kind, has no live runner."
        ),
    ] = False,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the jobs of each kind by state, and who works on them.

    First all jobs by state, then those that have not ended by urgency, with the age of the oldest that is ready, then
    runners. A runner reports every seven seconds; after ten of silence it is stale: killed, frozen or cut off. Counts
    are exact up to 10,000; beyond, they end with a plus sign.
    """
    with reported(debug=debug):
        log_to_stderr("warning")
        report = _ask(dsn, schema, kind or [])
    if as_json:
        print_json(report)
    else:
        _print(report, kind or [])
    if check and report.findings:
        raise typer.Exit(Code.FINDINGS)


def _ask(dsn: str | None, schema: str | None, kinds: Sequence[str]) -> Report:
    found = settings(dsn, schema)
    with connected(found, "status") as connection:
        migrations.check(connection, found.tables)
        connection.execute(session_settings(STORE_TIMEOUT))
        counts = send_sync(connection, count_jobs(found.tables, bound=LAG_BOUND))
        lag = send_sync(connection, count_lag(found.tables, None))
        pauses = send_sync(connection, list_pauses(found.tables))
        runners = send_sync(connection, list_runners(found.tables))
        info = connection.info
        database = f"{info.user}@{info.host}:{info.port}/{info.dbname}"
    return make_report(
        database, found.tables.schema, counts, runners, bound=LAG_BOUND, kinds=kinds, lag=lag, pauses=pauses
    )


def _print(report: Report, asked: Sequence[str]) -> None:
    of_kind = f" of kind {' or '.join(asked)}" if asked else ""
    say(f"{report.database}, schema {report.schema}")
    if report.kinds:
        _print_kinds(report.kinds)
    else:
        say(f"no jobs{of_kind or ' yet'}")
    if report.lag:
        _print_lag(report.lag)
    for pause in report.pauses:
        say(tell_pause(pause))
    if report.runners:
        _print_runners(report.runners)
    else:
        say(f"no runner{of_kind} has reported within the last day")
    for finding in report.findings:
        say(f"finding: {finding}")


def _print_kinds(rows: Sequence[KindRow]) -> None:
    states = [state for state in rows[0].counts if state in _ALWAYS or any(row.counts[state] for row in rows)]
    shown = table(["kind", *states], numbers=states)
    for row in rows:
        cells = [_count(count, bounded=state in row.at_least) for state, count in row.counts.items() if state in states]
        shown.add_row(plain(row.kind), *cells)
    print_table(shown, names=1)


def _print_lag(rows: Sequence[Lag]) -> None:
    numbers = ["pending", "ready", "oldest ready"]
    shown = table(["kind", "urgency", *numbers], numbers=numbers)
    for row in rows:
        counts = (
            _count(row.pending, bounded=not row.pending_exact), _count(row.ready, bounded=not row.ready_exact)
        )  # fmt: skip
        oldest = "" if row.oldest_seconds is None else age(row.oldest_seconds)
        shown.add_row(plain(row.kind), row.urgency, *counts, oldest)
    print_table(shown, names=1)


def _count(count: int, *, bounded: bool) -> str:
    return f"{count:,}+" if bounded else f"{count:,}" if count else "-"


def _print_runners(rows: Sequence[RunnerRow]) -> None:
    shown = table(_RUNNER_HEADINGS, numbers=["up", "in flight"], texts=["outcomes"])
    for row in rows:
        state = f"stale {age(row.silent_seconds)}" if row.stale else row.lifecycle
        outcomes = ", ".join(f"{count:,} {name}" for name, count in row.outcomes.items() if count)
        texts = (row.kind, row.runner, state, age(row.up_seconds), f"{row.in_flight:,}", outcomes, row.last_error or "")
        shown.add_row(*map(plain, texts), style="yellow" if row.stale else None)
    print_table(shown, names=2)
