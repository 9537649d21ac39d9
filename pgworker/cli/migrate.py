"""`pgworker migrate`: make or upgrade the schema, or show what that would do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from pgworker import schema as migrations
from pgworker.cli.database import connected, settings, tables
from pgworker.cli.errors import reported
from pgworker.cli.logs import log_to_stderr
from pgworker.cli.options import Debug, Dsn, Json, Schema
from pgworker.cli.output import console, print_json, say, table
from pgworker.schema import Migration
from pgworker.tablemap import TableMap


def migrate(
    *,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be applied; change nothing.")] = False,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print it all as a script for psql, which may run twice; needs no database.")
    ] = False,
    role: Annotated[
        str | None,
        typer.Option(
            "--role",
            metavar="NAME",
            help="Print the grants that a worker's role needs, and no more; needs no database.",
        ),
    ] = None,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make our schema in the database, or bring it up to date.

    Run it as the owner of the schema, before the new release's workers start. Waits at most three seconds for a lock,
    ten times over, and names who holds it. Interrupted at any point it has done each migration whole or not at all.
    """
    with reported(debug=debug):
        if plan + sql + (role is not None) > 1 or (as_json and (sql or role is not None)):
            msg = "give one of --plan, --sql and --role; --json goes with none of them, or with --plan"
            raise typer.BadParameter(msg)
        log_to_stderr("warning")
        if sql or role is not None:
            typer.echo(_script(schema, role), nl=False)
        else:
            _migrate(dsn, schema, plan=plan, as_json=as_json)


def _script(schema: str | None, role: str | None) -> str:
    names = tables(schema)
    if role is not None:
        return migrations.grants(names, role)
    return migrations.render(names, migrations.migrations())


def _migrate(dsn: str | None, schema: str | None, *, plan: bool, as_json: bool) -> None:
    found = settings(dsn, schema)
    with connected(found, "migrate") as connection:
        concerned = (migrations.pending if plan else migrations.migrate)(connection, found.tables)
    if as_json:
        print_json(
            {"schema": found.tables.schema, "pending" if plan else "applied": [_facts(each) for each in concerned]}
        )
    elif plan and concerned:
        _print_plan(concerned)
    else:
        _print_applied(concerned, found.tables)


def _facts(migration: Migration) -> dict[str, object]:
    return {
        "number": migration.number,
        "name": migration.name,
        "breaking": migration.breaking,
        "transactional": migration.transactional,
        "note": migration.note,
    }


def _print_applied(applied: Sequence[Migration], tables: TableMap) -> None:
    for each in applied:
        say(f"applied {each.title} to schema {tables.schema}")
    if not applied:
        say(f"schema {tables.schema} is up to date, nothing to apply")


def _print_plan(pending: Sequence[Migration]) -> None:
    shown = table(["migration", "breaking", "in a transaction", "what to know"], texts=["what to know"])
    for each in pending:
        shown.add_row(each.title, "yes" if each.breaking else "no", "yes" if each.transactional else "no", each.note)
    console().print(shown)
