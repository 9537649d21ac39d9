"""Whether mutants are still SQL or Python: one that cannot even be planned or compiled would prove nothing."""

from __future__ import annotations

import re
import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import psycopg

from pgworker.tablemap import TableMap
from tests.databases import connect, scratch
from tests.mutants.catalogue import CODE, Mutant

_TABLES = TableMap()


def plannable(text: str) -> str:
    """The statement with its tables' names, and null for each parameter."""
    named = re.sub(r"\{(\w+)\}", lambda match: _TABLES.qualified(match[1]), text)
    return re.sub(r"%\(\w+\)s", "null", named).replace("%%", "%")


def refused(server_dsn: str, mutants: Iterable[Mutant]) -> dict[str, str]:
    """What the server, or Python, says of the mutants that it cannot read, by id."""
    found: dict[str, str] = {}
    with _database(server_dsn) as connection:
        for mutant in mutants:
            try:
                if mutant.group in CODE:
                    compile(mutant.text, mutant.path, "exec")
                elif not _of_own_tables(mutant):
                    connection.execute(f"explain {plannable(mutant.text)}".encode())
            except (SyntaxError, psycopg.Error) as error:
                found[mutant.id] = str(error).splitlines()[0]
    return found


def _of_own_tables(mutant: Mutant) -> bool:
    """Whether it is a template for tables of an app's own: only a test has such a table. See trial._status."""
    return mutant.group.startswith("table_")


@contextmanager
def _database(server_dsn: str) -> Generator[psycopg.Connection[tuple[object, ...]]]:
    name = f"pgworker_mutants_{uuid.uuid4().hex[:10]}"
    with scratch(server_dsn, name, migrated=True) as dsn, connect(dsn) as connection:
        yield connection
