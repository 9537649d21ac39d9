"""The page on apps' own tables leaves no column out, and says of each which types it may have."""

from __future__ import annotations

import dataclasses

from pgworker import TableQueue, tablecheck
from tests.docs.markdown import codes, prose, table

PAGE = "docs/own-table.md"
SHORT = {"timestamp with time zone": "timestamptz", "character varying": "varchar"}


def test_every_column_is_told_with_its_types() -> None:
    needed, rest = columns("The columns"), later_columns()
    fields = {field.name: field for field in dataclasses.fields(TableQueue)}
    no_columns = {"table", "states", "where"}
    without_default = {name for name, field in fields.items() if field.default is dataclasses.MISSING} - no_columns
    assert set(needed) == without_default
    assert set(rest) == set(fields) - without_default - no_columns
    for name, told in (needed | rest).items():
        types = [SHORT.get(type_, type_) for type_ in tablecheck.TYPES.get(name, ())]
        assert told in (types, ["the same"]), name


def columns(heading: str) -> dict[str, list[str]]:
    return told(table(PAGE, heading)[1:])


def later_columns() -> dict[str, list[str]]:
    """The second table below the heading."""
    lines = prose(PAGE).partition("| column | type | without it |")[2].splitlines()[2:]
    rows = [line.strip("|").split("|") for line in lines[: lines.index("")]]
    return told([[cell.strip() for cell in row] for row in rows])


def told(rows: list[list[str]]) -> dict[str, list[str]]:
    return {codes(row[0])[0]: codes(row[1]) or (["the same"] if row[1].startswith("the same") else []) for row in rows}
