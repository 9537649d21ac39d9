"""The command line. Only this package imports typer and rich; and rich only where a table is printed."""

from __future__ import annotations

from pgworker.cli.program import app

__all__ = ["app"]
