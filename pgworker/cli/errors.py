"""From an error to one line and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from enum import IntEnum
from typing import cast

import psycopg
import typer

from pgworker.cli.output import complain
from pgworker.errors import (
    AppNotFound,
    ConfigError,
    DatabaseUnavailable,
    PayloadError,
    PayloadPruned,
    PgworkerError,
    SchemaError,
    UnknownKind,
)
from pgworker.worker import one_line


class Code(IntEnum):
    """The exit codes of every command."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    NO_APP = 3
    NO_DATABASE = 4
    NO_SCHEMA = 5
    FINDINGS = 6
    PRUNED = 7


# (the first line keeps the help's formatter from filling the paragraph)
EXIT_CODES = """\b
Exit codes:
  0  done; of run: stopped as asked, its jobs finished or given back
  1  an internal error, or a stop that had to be forced
  2  wrong usage: an option, a payload, a missing or malformed DSN
  3  the app cannot be imported, or the kind is unknown
  4  the database cannot be reached
  5  the schema is missing, too new, or could not be migrated
  6  status --check has findings
  7  a job cannot run again: its payload is no longer kept
"""

_CODES: tuple[tuple[type[PgworkerError], Code], ...] = (
    (AppNotFound, Code.NO_APP),
    (UnknownKind, Code.NO_APP),
    (DatabaseUnavailable, Code.NO_DATABASE),
    (SchemaError, Code.NO_SCHEMA),
    (ConfigError, Code.USAGE),
    (PayloadPruned, Code.PRUNED),
    (PgworkerError, Code.INTERNAL),
)


@contextmanager
def reported(*, debug: bool) -> Generator[None, None, None]:
    """Turn errors that are foreseen into one line on standard error and an exit code; `debug` adds the traceback."""
    try:
        yield
    except (PgworkerError, psycopg.Error, TimeoutError, ExceptionGroup) as raised:
        error = _innermost(raised)
        told = _told(error)
        if told is None:
            raise
        if debug:
            traceback.print_exception(raised, file=sys.stderr)
        text, code = told
        complain(text)
        raise typer.Exit(code) from None


def report_internal(error: Exception, *, debug: bool) -> Code:
    """Say that this was not foreseen. The error's text is not shown: it may quote a payload, or a password."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    complain(
        f"internal error: {type(_innermost(error)).__name__} at {frame.filename}:{frame.lineno}; --debug shows the rest"
    )
    return Code.INTERNAL


def _told(error: Exception) -> tuple[str, Code] | None:
    """The line and the code; None for what is an error of ours."""
    if isinstance(error, PayloadError):
        return f"the payload is refused at {error.path}: {error.reason}", Code.USAGE
    for kind, code in _CODES:
        if isinstance(error, kind):
            return str(error), code
    if isinstance(error, psycopg.OperationalError):
        return f"the database failed: {one_line(error)}", Code.NO_DATABASE
    if isinstance(error, TimeoutError):
        return "the database did not answer in time", Code.NO_DATABASE
    if isinstance(error, psycopg.Error):  # its text may quote a row
        name = f"{type(error).__name__}, SQLSTATE {error.sqlstate}"
        return f"the database refused a statement ({name}); --debug shows it", Code.INTERNAL
    return None


def _innermost(error: Exception) -> Exception:
    """The one error of a group of one, however deeply task groups have wrapped it."""
    if isinstance(error, ExceptionGroup):
        group = cast("ExceptionGroup[Exception]", error)
        return _innermost(group.exceptions[0]) if len(group.exceptions) == 1 else group
    return error
