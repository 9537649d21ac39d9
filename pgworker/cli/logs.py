"""The log of a command: one line an event on standard error."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from pgworker.cli.output import one_line

_LOGGERS = ("pgworker", "psycopg")  # psycopg's pools say why they have no connection


LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """A record with line breaks, or control characters from a job's key, is still one line."""
        at = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
        return f"{at}Z {record.levelname:<7} {one_line(super().format(record))}"


def log_to_stderr(level: LogLevel | None) -> None:
    """Show our own log, unless the app has set up logging itself: then only a level that was asked for is set."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        ours = name == "pgworker"
        if ours and level is not None:
            logger.setLevel(level.upper())
        if logger.hasHandlers():
            continue
        handler = logging.StreamHandler()
        handler.setFormatter(_OneLine())
        logger.addHandler(handler)
        if level is None:
            logger.setLevel(logging.INFO if ours else logging.WARNING)
