"""How a database names our tables: the only place where identifiers are quoted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pgworker.errors import ConfigError

_MAX_IDENTIFIER_BYTES = 63  # Postgres cuts longer identifiers silently, which would make two names one
# Identifiers are put into statements and into literals inside them ('{schema}.job_ids'), where each of these would need
# an escape of its own; nobody names a schema so.
_FORBIDDEN = frozenset("\0\"'\\%{}")


def quote(identifier: str) -> str:
    """Quote an SQL identifier; raises ConfigError for one that Postgres would refuse or cut."""
    if not identifier or _FORBIDDEN & set(identifier) or len(identifier.encode()) > _MAX_IDENTIFIER_BYTES:
        msg = (
            f"not a usable SQL identifier: {identifier!r} "
            f"(1 to {_MAX_IDENTIFIER_BYTES} bytes, without quotes, backslash, percent sign, braces or NUL)"
        )
        raise ConfigError(msg)
    return f'"{identifier}"'


@dataclass(frozen=True, slots=True)
class TableMap:
    """The schema that holds our tables, and the quoted, qualified name of each."""

    schema: str = "pgworker"

    def __post_init__(self) -> None:
        quote(self.schema)

    @property
    def schema_identifier(self) -> str:
        """The schema's own name, quoted."""
        return quote(self.schema)

    def qualified(self, name: str) -> str:
        """The quoted, schema-qualified name of one of our tables, views or functions."""
        return f"{self.schema_identifier}.{quote(name)}"

    @property
    def channel(self) -> str:
        """The NOTIFY channel of this schema: one each, at most 63 bytes."""
        name = f"pgworker_{self.schema}"
        if len(name.encode()) <= _MAX_IDENTIFIER_BYTES:
            return name
        return "pgworker_" + hashlib.sha256(self.schema.encode()).hexdigest()[:32]
