"""What commands print: safe texts, JSON, tables, times for people."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BREAK = re.compile(r"\s*[\r\n]+\s*")
_UNPRINTABLE = re.compile("[\x7f-\xa0\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_WIDE = 200  # columns of a table that no terminal shows: a program or a pager gets each row on one line
_ANY_WIDTH = 10_000
_NOTHING = ("", "-")  # cells that say nothing

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def plain(text: str) -> str:
    """A text from elsewhere that cannot steer a terminal: what does not print is shown as an escape."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def one_line(text: str) -> str:
    """As plain, with the lines of a message for people put into one."""
    return plain(_BREAK.sub("; ", text.strip()))


def say(text: str) -> None:
    """Print a line to standard output."""
    typer.echo(plain(text))


def complain(text: str) -> None:
    """Print a line to standard error."""
    typer.echo(f"pgworker: {one_line(text)}", err=True)


def print_json(value: object) -> None:
    """Print a value as indented JSON to standard output; what could steer a terminal is escaped."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    typer.echo(_UNPRINTABLE.sub(lambda found: json.dumps(found[0])[1:-1], text))


def console() -> Console:
    """Where tables are printed. Nothing in a cell is markup: cells hold what others have written."""
    from rich.console import Console

    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _WIDE
    return Console(width=wide, markup=False, emoji=False, highlight=False)


def table(headings: Sequence[str], *, numbers: Collection[str] = (), texts: Collection[str] = ()) -> Table:
    """A table with these columns. Where it is too wide its texts are folded; numbers are aligned to the right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in headings:
        side: Literal["left", "right"] = "right" if heading in numbers else "left"
        made.add_column(heading, justify=side, overflow="fold", no_wrap=heading not in texts)
    return made


def print_table(shown: Table, *, names: int) -> None:
    """Print a table whose first columns are names, which are never folded: they are there to be copied.

    Where it is too wide for that, the names of each row have a line of their own, and the rest of it is below.
    """
    from rich.padding import Padding

    out = console()
    if _least_width(shown, out) <= out.width:
        out.print(shown)
        return
    headings = [str(column.header) for column in shown.columns]
    out.print()
    for row, *cells in zip(shown.rows, *(map(str, column.cells) for column in shown.columns), strict=True):
        together = "  ".join(cells[:names])
        for line in [together] if len(together) < out.width else cells[:names]:
            out.print(f" {line}", style=row.style, soft_wrap=True)
        rest = list(zip(headings, cells, strict=True))[names:]
        said = "; ".join(f"{heading} {cell}" for heading, cell in rest if cell not in _NOTHING)
        out.print(Padding(said, (0, 0, 0, 3), expand=False), style=row.style)
    out.print()


def _least_width(shown: Table, out: Console) -> int:
    """How wide a table is when nothing is folded but its texts, and those between words."""
    from rich.measure import Measurement

    for column in shown.columns:
        if column.no_wrap:
            column.min_width = max(len(str(cell)) for cell in (column.header, *column.cells))
    return Measurement.get(out, out.options.update(max_width=_ANY_WIDTH), shown).minimum


def age(seconds: float) -> str:
    """A time for people, in its two largest units: `0.4 s`, `12 s`, `4 min 05 s`, `2 h 30 min`, `3 d 4 h`."""
    if seconds < 1:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"
