"""What the tests read out of our Markdown: fenced blocks, tables, headings, links; no more of it than we use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")))
"""Whose code blocks are run."""

_FENCE: Final = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING: Final = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE: Final = re.compile(r"`([^`\n]+)`")
_CELL: Final = re.compile(r"(?<!\\)\|")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and where it stands."""

    page: str
    line: int
    language: str
    text: str

    @property
    def first_line(self) -> str:
        return self.text.partition("\n")[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.first_line})"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    text = read(page)
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2].rstrip("\n"))
        for found in _FENCE.finditer(text)
    ]


def prose(page: str) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", read(page))


def anchors(page: str) -> set[str]:
    """The fragments that lead to the page's headings, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(prose(page)))
    return {heading.replace(" ", "-") for heading in plain}


def links(page: str) -> list[str]:
    return _LINK.findall(prose(page))


def codes(text: str) -> list[str]:
    """What stands in backticks."""
    return _CODE.findall(text)


def table(page: str, heading: str) -> list[list[str]]:
    """The first table below a heading: its rows, that of the columns' names first, as Markdown text."""
    found = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", prose(page), re.MULTILINE | re.DOTALL)
    assert found, f"{page}: no heading {heading!r}"
    lines = [line for line in found[1].splitlines() if line.startswith("|")]
    assert lines, f"{page}: no table below {heading!r}"
    end = next((at for at, line in enumerate(lines) if at > 1 and set(lines[at]) <= set("|-: ")), None)
    rows = lines if end is None else lines[: end - 1]  # a second table below the same heading begins there
    return [[cell.strip().replace(r"\|", "|") for cell in _CELL.split(row)[1:-1]] for row in (rows[0], *rows[2:])]
