"""`pgworker bench`: measure speed and cost on your own database, in a schema that is dropped again."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from pgworker.cli.database import describe, settings
from pgworker.cli.errors import Code, reported
from pgworker.cli.logs import log_to_stderr
from pgworker.cli.options import Debug, Dsn, duration, number
from pgworker.cli.output import complain, say


def bench(
    which: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCENARIO", show_default=False, help="Which ones, such as P1 P4; all, unless named."),
    ] = None,
    *,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=100, max=1_000_000, help="How many in each drain and bulk enqueue.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny, under a minute: shows that it works, no more.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Half a million other rows, a stream of ten minutes.")] = False,
    limit: Annotated[
        float,
        typer.Option("--limit", metavar="SECONDS", parser=number, help="When this time is up, the rest is left out."),
    ] = 1800,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file, too.")
    ] = None,
    dsn: Dsn = None,
    debug: Debug = False,
) -> None:
    """Measure speed and cost on your database, beside hand-written SQL.

    It makes a schema of its own, with a random name, runs producers and workers in it, and drops it at the end: after
    Ctrl-C or SIGTERM, too. It keeps two cores and the disk busy meanwhile, so not where users wait for an answer.
    """
    with reported(debug=debug), _stopped_by_signals():
        from pgworker import bench as suite

        if quick and full:
            raise typer.BadParameter("--quick and --full exclude each other")
        names, schema, found = suite.chosen(which or []), suite.new_schema(), settings(dsn, None)
        seconds = duration(limit, "--limit").total_seconds()
        sizes = suite.QUICK if quick else suite.FULL if full else suite.STANDARD
        sizes = sizes if jobs is None else suite.with_jobs(sizes, jobs)
        log_to_stderr("warning")
        say(f"{', '.join(names)} ({sizes.name}) on {describe(found.dsn)}, in a new schema {schema}")
        say(f"about {sizes.drained} jobs a drain; {seconds:g} s at most; the schema is dropped at the end")
        report = suite.to_json(
            suite.run_bench(
                found.dsn,
                schema=schema,
                names=names,
                sizes=sizes,
                limit_seconds=seconds,
                say=lambda text: typer.echo(f"  {text}", err=True),
            )
        )
        say("")
        typer.echo(
            "\n".join([suite.facts(report), "", suite.as_text(suite.result_rows(report)), "", *suite.remarks(report)])
        )
        if output is not None:
            output.write_text(json.dumps(report, indent=2) + "\n")


@contextmanager
def _stopped_by_signals() -> Generator[None, None, None]:
    """SIGTERM is as good as Ctrl-C: everything is cleaned up on the way out, and of that nothing is told but errors."""
    from pgworker.bench import as_ctrl_c

    driver = logging.getLogger("psycopg")  # it warns of each statement that a stop interrupts
    level = driver.level
    driver.setLevel(logging.ERROR)
    before = signal.signal(signal.SIGTERM, as_ctrl_c)
    try:
        yield
    except KeyboardInterrupt:
        complain("stopped; the schema is dropped")
        raise typer.Exit(Code.INTERNAL) from None
    finally:
        signal.signal(signal.SIGTERM, before)
        driver.setLevel(level)
