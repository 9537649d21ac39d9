"""`pgworker prune`: delete what is old now, without waiting for a worker to do it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

from pgworker.cli.errors import reported
from pgworker.cli.options import Debug, Dsn, Json, Schema
from pgworker.cli.output import print_json, say
from pgworker.kind import Kind


def prune(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", help="This kind only, and no facts; without it all of the app.")
    ] = None,
    *,
    app: Annotated[
        str,
        typer.Option("--app", metavar="APP", help="The App, as module:attribute, that says how long jobs are kept."),
    ],
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete what has been kept for its time.

    Workers do that by themselves, a little every other minute; this does all of it at once, in short statements, but
    for kinds that a worker is at just then. Events that have ended are deleted with their results, keyed jobs lose
    payload and result, results go that are past their own time, and so do facts.
    """
    from pgworker import schema as migrations
    from pgworker.cli.database import app_settings, connected
    from pgworker.cli.loading import known_kind, load_app
    from pgworker.cli.logs import log_to_stderr
    from pgworker.db import SyncDatabase, drive_sync
    from pgworker.policy import STORE_TIMEOUT
    from pgworker.retention import Retention

    with reported(debug=debug):
        log_to_stderr("warning")
        made = load_app(app)
        kinds = _all_prunable(made.kinds.values()) if kind is None else [_prunable(known_kind(made, kind))]
        settings = app_settings(made, dsn=dsn, schema=schema)
        with connected(settings, "enqueue") as connection:
            migrations.check(connection, settings.tables)
        database = SyncDatabase(settings.dsn, "enqueue", deadline=STORE_TIMEOUT, connections=1)
        database.open()
        try:
            pruned = drive_sync(Retention(settings.tables, kinds, facts=kind is None).prune_all(), database.run)
        finally:
            database.close()
    if as_json:
        print_json(pruned._asdict())
    else:
        jobs, payloads, results, facts = pruned
        say(f"deleted {jobs:,} jobs, the payloads of {payloads:,} keyed ones, {results:,} results, and {facts:,} facts")


def _all_prunable(kinds: Iterable[Kind]) -> list[Kind]:
    """Those that have a handler, which says how long jobs are kept."""
    return [kind for kind in kinds if kind.handler is not None]


def _prunable(kind: Kind) -> Kind:
    """A kind that was named. Raises a usage error if it does not say how long its jobs are kept."""
    if kind.queue is not None:
        raise typer.BadParameter(f"the jobs of kind {kind.name} are rows of the app's own table, and its own to delete")
    if kind.handler is None:
        raise typer.BadParameter(f"kind {kind.name} is only declared there: name the app that has its handler")
    return kind
