"""Ask the index: ranked hits, each with the lines of its file that match."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

import psycopg
from psycopg import sql

from pgworker.config import Settings, conninfo
from pgworker.db import SyncConnection
from pgworker.demo.files import Refused, content_revision, from_text, read_file, to_text
from pgworker.demo.store import KIND
from pgworker.demo.text import MARK_OFF, MARK_ON, apart, decode, together, words_of
from pgworker.errors import ConfigError, SchemaMissing
from pgworker.tablemap import TableMap

_LINES: Final = 3  # shown of a file
_LINE_BEFORE, _LINE_LENGTH = 40, 240  # characters of a line: before its first match, and in all
_TIMEOUT_MS: Final = 30_000

_INDEXED: Final = """
select count(*) filter (where d.search is not null), count(*) filter (where j.state = 'pending'), count(distinct f.id)
from pgworker_demo.folders f left join pgworker_demo.documents d on d.folder = f.id
left join {jobs} j on j.kind = %(kind)s and j.key = d.key
where %(root)s::text is null or f.root = %(root)s"""
_HITS: Final = """
select f.root, d.path, d.indexed_revision, ts_rank(d.search, q.query, 1) as rank, count(*) over () as total
from plainto_tsquery('pg_catalog.english', %(words)s::text) as q(query), pgworker_demo.documents d
join pgworker_demo.folders f on f.id = d.folder
where d.search @@ q.query and (%(root)s::text is null or f.root = %(root)s)
order by rank desc, f.root collate "C", d.path collate "C"
limit %(limit)s"""
_MARKED: Final = """
select ts_headline('pg_catalog.english', t.text, plainto_tsquery('pg_catalog.english', %(words)s), %(options)s)
from unnest(%(texts)s::text[]) with ordinality as t(text, place) order by t.place"""
_OPTIONS: Final = f'HighlightAll=true, StartSel="{MARK_ON}", StopSel="{MARK_OFF}"'
_IS_EMPTY: Final = "select numnode(plainto_tsquery('pg_catalog.english', %(words)s::text)) = 0"
_MARK: Final = re.compile(f"{MARK_ON}(.*?){MARK_OFF}", re.DOTALL)

Freshness: TypeAlias = Literal["fresh", "changed", "gone"]
"""Of a hit's file against the index: as it was indexed, changed since, or not to be read any more."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a line, free of control characters; `match` if it is a word that was asked for."""

    text: str
    match: bool


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file."""

    number: int
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class Hit:
    """A file in which all the words are."""

    root: str
    path: str
    rank: float
    freshness: Freshness
    lines: list[Line]


@dataclass(frozen=True, slots=True)
class Found:
    """The best hits, how many there are in all, and how much there was to search."""

    hits: list[Hit]
    total: int
    documents: int
    waiting: int
    """Files whose present content is not in the index yet: their jobs have not ended."""


def search(
    dsn: str, words: Sequence[str], *, schema: str | None = None, folder: Path | None = None, limit: int = 10
) -> Found:
    """The files that have all the words, in one folder or in all that are indexed.

    Raises ConfigError when there is no word to look for, SchemaMissing when nothing is indexed yet, psycopg.Error.
    """
    asked = words_of(" ".join(words))
    root = None if folder is None else to_text(str(folder.resolve()))
    tables = Settings.load(dsn, schema=schema).tables
    with psycopg.connect(conninfo(dsn, "demo search"), autocommit=True) as connection:
        connection.execute("select set_config('statement_timeout', %s, false)", [str(_TIMEOUT_MS)])
        documents, waiting = _indexed(connection, tables, root)
        _refuse_empty(connection, asked, words)
        rows = connection.execute(_HITS, {"words": asked, "root": root, "limit": limit}).fetchall()
        texts = [_present(str(root), str(path), str(revision)) for root, path, revision, *_ in rows]
        marked = _marked(connection, asked, [text for text, _ in texts])
    hits = [
        Hit(str(row[0]), str(row[1]), float(row[3]), freshness, best_lines(text))
        for row, (_, freshness), text in zip(rows, texts, marked, strict=True)
    ]
    return Found(hits, int(rows[0][4]) if rows else 0, documents, waiting)


def _indexed(connection: SyncConnection, tables: TableMap, root: str | None) -> tuple[int, int]:
    statement = sql.SQL(_INDEXED).format(jobs=sql.Identifier(tables.schema, "jobs"))
    try:
        row = connection.execute(statement, {"kind": KIND, "root": root}).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        row = None
    indexed, waiting, folders = cast("tuple[int, int, int]", row or (0, 0, 0))
    if not folders:
        where = "" if root is None else f" of {root}"
        raise SchemaMissing(f"nothing{where} is indexed yet: run `python -m pgworker demo` first")
    return indexed, waiting


def _refuse_empty(connection: SyncConnection, asked: str, words: Sequence[str]) -> None:
    row = connection.execute(_IS_EMPTY, {"words": asked}).fetchone()
    if not asked or row == (True,):
        raise ConfigError(f"{' '.join(words)!r} holds no word to look for (words such as `the` are in every text)")


def _present(root: str, path: str, indexed: str) -> tuple[str, Freshness]:
    """The text of a hit's file as it is now."""
    try:
        data = read_file(from_text(root), from_text(path))
    except Refused:
        return "", "gone"
    return decode(data) or "", "fresh" if content_revision(data) == indexed else "changed"


def _marked(connection: SyncConnection, asked: str, texts: Sequence[str]) -> list[str]:
    given = {"words": asked, "options": _OPTIONS, "texts": [apart(text) for text in texts]}
    return [str(text) for (text,) in connection.execute(_MARKED, given).fetchall()]


def best_lines(marked: str) -> list[Line]:
    """A few lines that show as many different matches as they can; without any, the first that is not blank."""
    lines = [(number, line) for number, line in enumerate(marked.split("\n"), 1) if line.strip()]
    left = {number: _matches(line) for number, line in lines if MARK_ON in line}
    chosen: list[int] = []
    shown: set[str] = set()
    while left and len(chosen) < _LINES:
        best = max(left, key=lambda number: (len(left[number] - shown), len(left[number]), -number))
        chosen.append(best)
        shown |= left.pop(best)
    chosen = chosen or [number for number, _ in lines[:1]]
    return [Line(number, list(_pieces(_cut(line)))) for number, line in lines if number in chosen]


def _matches(line: str) -> set[str]:
    return {match.lower() for match in _MARK.findall(line)}


def _cut(line: str) -> str:
    """A part of a long line that shows its first match."""
    line = line.strip()
    first = line.find(MARK_ON)
    start = max(0, first - _LINE_BEFORE) if first > _LINE_LENGTH // 2 else 0
    cut = line[start : start + _LINE_LENGTH]
    if cut.rfind(MARK_ON) > cut.rfind(MARK_OFF):
        cut += MARK_OFF
    return ("…" if start else "") + cut + ("…" if start + _LINE_LENGTH < len(line) else "")


def _pieces(line: str) -> Iterator[Piece]:
    """Split at the marks. What is not printable (directions and joiners, say) would be acted on by a terminal."""
    for place, piece in enumerate(_MARK.split(line)):
        plain = "".join(each if each.isprintable() else "·" for each in together(piece))
        if plain:
            yield Piece(plain, match=place % 2 == 1)
