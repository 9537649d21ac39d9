"""The options that several commands have in common."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Annotated, TypeAlias

import typer

Dsn: TypeAlias = Annotated[
    str | None, typer.Option("--dsn", metavar="DSN", help="The database; without it, PGWORKER_DSN names it.")
]
Schema: TypeAlias = Annotated[
    str | None,
    typer.Option("--schema", metavar="NAME", help="Our schema there, else PGWORKER_SCHEMA, else pgworker."),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_MOST_SECONDS = timedelta(days=3650).total_seconds()


def number(text: str) -> float:
    """The number of an option that takes seconds. Raises typer.BadParameter, a usage error, that names the unit."""
    try:
        return float(text)
    except ValueError:
        msg = f"write a number of seconds, such as 90, got {text!r}"
        raise typer.BadParameter(msg) from None


def duration(seconds: float, option: str) -> timedelta:
    """An option's seconds as a time. Raises typer.BadParameter, a usage error, for what is none."""
    if not math.isfinite(seconds) or not 0 <= seconds <= _MOST_SECONDS:
        msg = f"seconds are 0 to {_MOST_SECONDS:.0f}, got {seconds}"
        raise typer.BadParameter(msg, param_hint=option)
    return timedelta(seconds=seconds)
