"""`pgworker enqueue`: put one job into the table."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import msgspec
import typer

from pgworker import schema as migrations
from pgworker.app import App
from pgworker.cli.database import connected
from pgworker.cli.errors import reported
from pgworker.cli.front import make_front
from pgworker.cli.logs import log_to_stderr
from pgworker.cli.options import Debug, Dsn, Json, Schema, duration, number
from pgworker.cli.output import print_json, say
from pgworker.db import session_settings
from pgworker.job import Enqueued, IfPending, NewJob, Urgency
from pgworker.policy import STORE_TIMEOUT

_MEANINGS = {
    "created": "a new job",
    "replaced": "its pending work has been replaced",
    "superseded": "a run in progress has lost its lease to this",
    "unchanged": "this revision was there already, nothing was written",
    "kept": "it had pending work, nothing was written",
    "requeued": "it had ended and runs again",
}


def enqueue(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="The kind of job.")],
    payload: Annotated[
        str,
        typer.Argument(
            metavar="PAYLOAD", help="JSON, or - to read it from standard input; null if left out.", show_default=False
        ),
    ] = "null",
    *,
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="What the job is about; without it, it is an event.")
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="TEXT", help="Which version of that; one that is known changes nothing."),
    ] = None,
    delay: Annotated[
        float | None,
        typer.Option("--delay", metavar="SECONDS", parser=number, help="Not before so many seconds from now."),
    ] = None,
    priority: Annotated[int, typer.Option("--priority", metavar="NUMBER", help="Smaller runs first.")] = 0,
    urgency: Annotated[Urgency, typer.Option("--urgency", help="catch_up is for backfill.")] = "fresh",
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="TEXT", help="Whose it is; fair kinds give each tenant its share.")
    ] = None,
    if_pending: Annotated[
        IfPending, typer.Option("--if-pending", help="What to do with pending work of the same key.")
    ] = "replace",
    app: Annotated[
        str | None,
        typer.Option("--app", metavar="APP", help="An App, as module:attribute, to check kind and payload against."),
    ] = None,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Enqueue a job and print what that did.

    Without --app any kind and any JSON is taken: the worker will find out whether they fit. With --app the payload
    must be of the kind's type, and the app's own database is used unless --dsn names another.
    """
    with reported(debug=debug):
        log_to_stderr("warning")
        wait = None if delay is None else duration(delay, "--delay")
        text = _text(payload)
        front = make_front(kind, app, dsn=dsn, schema=schema)
        value = _value(front, kind, text, typed=app is not None)
        job = NewJob(value, key, revision, wait, priority=priority, urgency=urgency, tenant=tenant)
        done = _put(front, kind, job, if_pending)
    if as_json:
        print_json(dataclasses.asdict(done))
    else:
        say(f"{done.status} {done.kind} {done.key}: {_MEANINGS[done.status]} ({done.state})")


def _text(payload: str) -> str:
    if payload != "-":
        return payload
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        msg = f"standard input is not UTF-8 (byte {error.start + 1})"
        raise typer.BadParameter(msg, param_hint="PAYLOAD") from error


def _value(front: App, kind: str, text: str, *, typed: bool) -> object:
    """The payload of a JSON text. Raises PayloadError, and a usage error that quotes nothing."""
    known = front.kinds[kind]
    try:
        plain: object = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        msg = f"this is no JSON ({error}); a text needs quotes of its own: '\"like this\"'"
        raise typer.BadParameter(msg, param_hint="PAYLOAD") from error
    return known.payload.decode(text) if typed else plain


def _put(front: App, kind: str, job: NewJob, if_pending: IfPending) -> Enqueued:
    with connected(front.settings, "enqueue") as connection:
        migrations.check(connection, front.settings.tables)
        connection.execute(session_settings(STORE_TIMEOUT))
        (done,) = front.sync.enqueue_many(kind, [job], if_pending=if_pending, conn=connection)
    front.sync.close()  # sends the hint
    return done
