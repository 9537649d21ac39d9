"""The list of the runners that live, as they report themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pgworker.statements import Statement, read_nothing, read_rows, statement
from pgworker.tablemap import TableMap


class Presence(NamedTuple):
    """A runner as it last reported itself."""

    runner: str
    kind: str
    release: str
    silent_seconds: float
    up_seconds: float
    status: str


def report_runners(tables: TableMap, runner: str, statuses: Mapping[str, str], *, release: str) -> Statement[None]:
    """Say that the runners of this process live; `statuses` are JSON texts by kind."""
    parameters = {"runner": runner, "kinds": list(statuses), "statuses": list(statuses.values()), "release": release}
    return statement("report_runners", tables, parameters, read_nothing)


def forget_runners(tables: TableMap, runner: str) -> Statement[None]:
    """Take this process's runners off the list."""
    return statement("forget_runners", tables, {"runner": runner}, read_nothing)


def list_runners(tables: TableMap) -> Statement[list[Presence]]:
    """The runners that reported themselves within the last day."""
    return statement("list_runners", tables, {}, read_rows(Presence))
