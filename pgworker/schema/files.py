"""The migrations that this release carries: one SQL file each, whose header says what an operator must know."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path

from pgworker.errors import ConfigError, SchemaError
from pgworker.tablemap import TableMap

_HEADER = re.compile(
    r"-- (?P<number>\d{4}) (?P<name>[a-z0-9_]+)\n"
    r"-- Upgrade: (?P<note>.+\n(?:-- (?!Breaking:).+\n)*)"
    r"-- Breaking: (?P<breaking>yes|no)\n"
    r"-- Transaction: (?P<transaction>yes|no)\n"
)
_TOKEN = re.compile(r"\{[a-z_]+\}")
_DOLLAR_TAG = re.compile(r"\$\w*\$")
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of `migrations/`: what its header says, and its text with the tokens still in it."""

    number: int
    name: str
    note: str
    breaking: bool
    transactional: bool
    sql: str

    @property
    def title(self) -> str:
        """The number and the name, as the file has them."""
        return f"{self.number:04d} {self.name}"

    @property
    def checksum(self) -> str:
        """Of the text before a schema's name is put in: the same in every database."""
        return hashlib.sha256(self.sql.encode()).hexdigest()

    def rendered(self, tables: TableMap) -> str:
        """The text for one schema; raises ConfigError for a schema name that cannot stand in it."""
        return fill(self.sql, tables)


def fill(text: str, tables: TableMap, others: Mapping[str, str] = _NOTHING) -> str:
    """Put names into an SQL text. Only tokens that are known are touched, other braces are the text's own.

    `{schema}` is the quoted identifier, `{schema_name}` and `{channel}` are string literals. Raises ConfigError for
    a schema name that could end a dollar-quoted string, such as a function's body.
    """
    if _DOLLAR_TAG.search(tables.schema):
        msg = f"schema name {tables.schema!r} looks like a dollar quote: choose another"
        raise ConfigError(msg)
    tokens = {
        "{schema}": tables.schema_identifier,
        "{schema_name}": literal(tables.schema),
        "{channel}": literal(tables.channel),
        **others,
    }
    return _TOKEN.sub(lambda match: tokens.get(match[0], match[0]), text)


def literal(text: str) -> str:
    """An SQL string literal of a text without backslashes, as all names here are."""
    return "'" + text.replace("'", "''") + "'"


def parse(file_name: str, text: str) -> Migration:
    """Read a migration file; raises SchemaError unless its header is as CONTRIBUTING.md says."""
    header = _HEADER.match(text)
    if header is None or file_name != f"{header['number']}_{header['name']}.sql":
        msg = f"migration {file_name}: header and file name must be as CONTRIBUTING.md says"
        raise SchemaError(msg)
    return Migration(
        number=int(header["number"]),
        name=header["name"],
        note=" ".join(line.removeprefix("--").strip() for line in header["note"].splitlines()),
        breaking=header["breaking"] == "yes",
        transactional=header["transaction"] == "yes",
        sql=text,
    )


@cache
def migrations() -> tuple[Migration, ...]:
    """All migrations of this release, in order; raises SchemaError when the installation lacks some or all."""
    folder = resources.files("pgworker") / "migrations"  # as installed from a wheel
    if not folder.is_dir():
        folder = Path(__file__).resolve().parents[2] / "migrations"  # in a source tree
    files = [file for file in folder.iterdir() if file.name.endswith(".sql")] if folder.is_dir() else []
    found = sorted((parse(file.name, file.read_text("utf-8")) for file in files), key=lambda each: each.number)
    if not found or [each.number for each in found] != list(range(1, len(found) + 1)):
        msg = f"the migrations of this pgworker are damaged ({[each.title for each in found]}): install it again"
        raise SchemaError(msg)
    return tuple(found)


def release() -> str:
    """The version of this pgworker, as the bookkeeping table and the messages name it."""
    try:
        return metadata.version("pgworker")
    except metadata.PackageNotFoundError:  # a source tree on sys.path, never installed
        return "unreleased"
