"""The SQL around the migrations, as texts: bookkeeping, the script for psql, the grants of a role."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from pgworker.schema.files import Migration, fill, literal, release
from pgworker.tablemap import TableMap, quote

# What the runtime's statements do with each relation, and nothing more: no TRUNCATE, no REFERENCES, no TRIGGER, no DDL.
_TABLE_RIGHTS = {
    "jobs": "select, insert, update, delete",
    "results": "select, insert, update, delete",
    "runners": "select, insert, update, delete",
    "kinds": "select, insert, update, delete",
    "facts": "select, insert, delete",
    "job_states": "select",
    "migrations": "select",
}
_SEQUENCES = ("job_ids", "fact_ids")
_FUNCTIONS = ("enqueue",)

# The schema is looked for first: CREATE SCHEMA IF NOT EXISTS wants the right to create one even where it exists.
_BOOKKEEPING = """
    if not exists (select from pg_namespace where nspname = {schema_name}) then
        create schema {schema};
    end if;
    create table if not exists {schema}.migrations (
        number     integer     not null primary key,
        name       text        not null,
        breaking   boolean     not null,
        checksum   text        not null,
        release    text        not null,
        applied_at timestamptz not null default clock_timestamp()
    );
"""
_RECORD = """insert into {schema}.migrations (number, name, breaking, checksum, release)
    values ({number}, {name}, {breaking}, {checksum}, {release})"""

_BLOCK = """
begin
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true),
            pg_catalog.set_config('standard_conforming_strings', 'on', true),
            pg_catalog.set_config('client_min_messages', 'warning', true),
            pg_catalog.set_config('lock_timeout', '3s', true);
    perform pg_advisory_xact_lock({key});{bookkeeping}
    if exists (select from {schema}.migrations where number = {number} and checksum = {checksum}) then
        return;
    elsif (select count(*) from {schema}.migrations where number < {number}) < {number} - 1 then
        raise exception 'pgworker: the migrations before {title} are to be applied first';
    end if;
{execute}
    {record};
end
"""


def lock_key(tables: TableMap) -> int:
    """The advisory lock that serialises the migrations of one schema."""
    digest = hashlib.sha256(f"pgworker migrate {tables.schema}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def bookkeeping(tables: TableMap) -> str:
    """Make the schema and the list of applied migrations, where they are missing."""
    return "do " + _dollar_quoted(f"begin {fill(_BOOKKEEPING, tables)} end")


def record(tables: TableMap, migration: Migration) -> str:
    """Enter a migration in the list."""
    return fill(_RECORD, tables, _row(migration))


def render(tables: TableMap, wanted: Iterable[Migration]) -> str:
    """What `migrate` does as a script for psql; it passes over what is applied already, so it may run again.

    Each migration is one DO block: atomic under plain psql, and `psql -1` makes the whole one transaction.
    """
    lines = [f"-- pgworker {release()}, schema {tables.schema!a}. Run it with psql, or psql -1; twice does no harm."]
    for migration in wanted:
        lines.append(f"\n-- {migration.title}: {migration.note}")
        if migration.transactional:
            lines.append(_block(tables, migration, f"    execute {_dollar_quoted(migration.rendered(tables))};"))
        else:
            lines += ["-- This one must not be in a transaction: not with psql -1.", "\\set ON_ERROR_STOP on"]
            lines += [migration.rendered(tables), _block(tables, migration, "")]
    return "\n".join([*lines, ""])


def grants(tables: TableMap, role: str) -> str:
    """The rights that a role needs to enqueue and to work, for the schema's owner to run after each upgrade."""
    grantee = quote(role)
    lines = [f"grant usage on schema {tables.schema_identifier} to {grantee};"]
    lines += [f"grant {rights} on {tables.qualified(name)} to {grantee};" for name, rights in _TABLE_RIGHTS.items()]
    lines += [f"grant usage on sequence {tables.qualified(name)} to {grantee};" for name in _SEQUENCES]
    lines += [f"grant execute on function {tables.qualified(name)} to {grantee};" for name in _FUNCTIONS]
    return "\n".join([*lines, ""])


def _block(tables: TableMap, migration: Migration, execute: str) -> str:
    """A DO block that takes the lock, looks whether there is anything to do, does it and records it."""
    parts = {
        "{key}": str(lock_key(tables)),
        "{bookkeeping}": fill(_BOOKKEEPING, tables).rstrip(),
        "{title}": migration.title,
        "{execute}": execute,
        "{record}": record(tables, migration),
    }
    return "do " + _dollar_quoted(fill(_BLOCK, tables, {**parts, **_row(migration)})) + ";"


def _row(migration: Migration) -> dict[str, str]:
    return {
        "{number}": str(migration.number),
        "{name}": literal(migration.name),
        "{breaking}": str(migration.breaking).lower(),
        "{checksum}": literal(migration.checksum),
        "{release}": literal(release()),
    }


def _dollar_quoted(text: str) -> str:
    """An SQL string that leaves a long text readable, in the first tag that the text itself does not use."""
    tags = ("$pgworker$", *(f"$pgworker{number}$" for number in range(2, 100)))
    tag = next(tag for tag in tags if tag not in text)
    return f"{tag}{text}{tag}"
