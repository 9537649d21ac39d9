"""`pgworker retry`, `rebuild`, `cancel`, `forget`, `pause` and `resume`: what an operator does about jobs and kinds."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from typing import Annotated, TypeAlias

import typer

from pgworker.cli.errors import reported
from pgworker.cli.front import ready_front
from pgworker.cli.options import Debug, Dsn, Json, Schema, duration, number
from pgworker.cli.output import print_json, say
from pgworker.cli.report import pause_row, tell_pause
from pgworker.verbs import Progress

_SAY_EVERY_SECONDS = 2.0

_Kind: TypeAlias = Annotated[str, typer.Argument(metavar="KIND", help="The kind of job.")]
_Key: TypeAlias = Annotated[str | None, typer.Option("--key", metavar="KEY", help="The job of this key.")]
_All: TypeAlias = Annotated[bool, typer.Option("--all", help="All jobs of the kind that this can be done to.")]
_Limit: TypeAlias = Annotated[
    int | None, typer.Option("--limit", metavar="NUMBER", min=1, help="No more than so many jobs.")
]
_AppName: TypeAlias = Annotated[
    str | None,
    typer.Option("--app", metavar="APP", help="An App, as module:attribute, to check the kind and find the database."),
]


def retry(
    kind: _Kind,
    *,
    key: _Key = None,
    code: Annotated[str | None, typer.Option("--code", metavar="CODE", help="Jobs that ended with this code.")] = None,
    every: _All = False,
    limit: _Limit = None,
    app: _AppName = None,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Put failed and cancelled jobs back to work.

    Give one of --key, --code and --all. The jobs are due at once, with all their attempts before them. Many jobs are
    done in portions: stopped midway, those that were done stay done.
    """
    with reported(debug=debug):
        _exactly_one({"--key": key is not None, "--code": code is not None, "--all": every})
        with ready_front(kind, app, dsn=dsn, schema=schema) as front:
            count = front.sync.retry(kind, key=key, code=code, all=every, limit=limit, progress=_progress())
        _tell_count("retried", kind, count, "none that has failed or was cancelled", as_json=as_json)


def rebuild(
    kind: _Kind,
    *,
    key: _Key = None,
    every: _All = False,
    limit: _Limit = None,
    app: _AppName = None,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run ended jobs again, succeeded ones too.

    Give one of --key and --all. An old result stays until there is a new one. Many jobs are done in portions: stopped
    midway, those that were done stay done.
    """
    with reported(debug=debug):
        _exactly_one({"--key": key is not None, "--all": every})
        with ready_front(kind, app, dsn=dsn, schema=schema) as front:
            count = front.sync.rebuild(kind, key=key, all=every, limit=limit, progress=_progress())
        _tell_count("rebuilt", kind, count, "none that has ended", as_json=as_json)


def cancel(
    kind: _Kind,
    *,
    key: _Key = None,
    every: _All = False,
    limit: _Limit = None,
    app: _AppName = None,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Cancel jobs that have not ended.

    Give one of --key and --all. Jobs that wait end at once; those that run are asked to stop. Many jobs are done in
    portions: stopped midway, those that were done stay done.
    """
    with reported(debug=debug):
        _exactly_one({"--key": key is not None, "--all": every})
        with ready_front(kind, app, dsn=dsn, schema=schema) as front:
            count = front.sync.cancel(kind, key=key, all=every, limit=limit, progress=_progress())
        none = "none that waits, or runs and was not asked to stop before"
        _tell_count("cancelled", kind, count, none, as_json=as_json, after="; any that ran have been asked to stop")


def forget(
    kind: _Kind,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The job's key.")],
    *,
    app: _AppName = None,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete a job and its result.

    In whatever state it is; a run in progress can write nothing any more. Its revision is forgotten, too: enqueued
    again, it runs again.
    """
    with reported(debug=debug), ready_front(kind, app, dsn=dsn, schema=schema) as front:
        forgotten = front.sync.forget(kind, key)
    if as_json:
        print_json({"kind": kind, "key": key, "forgotten": forgotten})
    else:
        say(f"forgot {kind} {key}" if forgotten else f"nothing to forget: kind {kind} has no job of this key")


def pause(
    kind: _Kind,
    *,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="INSTANT", help="Until then, for example 2031-05-01T08:00Z."),
    ] = None,
    for_: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", parser=number, help="For so long from now.")
    ] = None,
    code: Annotated[str, typer.Option("--code", metavar="CODE", help="Why, in one word that status shows.")] = "paused",
    app: _AppName = None,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Let no worker claim jobs of a kind.

    Without --until and --for it lasts until `pgworker resume`. What runs goes on, and jobs may be enqueued. A pause
    that lasts longer already stays as it is.
    """
    with reported(debug=debug):
        if until is not None and for_ is not None:
            raise typer.BadParameter("give --until or --for, not both")
        instant = None if until is None else _instant(until)
        time_ = None if for_ is None else duration(for_, "--for")
        with ready_front(kind, app, dsn=dsn, schema=schema) as front:
            front.sync.pause(kind, until=instant, for_=time_, code=code)
            paused = next((pause_row(each) for each in front.sync.pauses() if each.kind == kind), None)
    if as_json:
        print_json({"kind": kind, "pause": paused})
    else:
        say(f"{kind} is not paused: that instant has passed" if paused is None else tell_pause(paused))


def resume(
    kind: _Kind,
    *,
    app: _AppName = None,
    dsn: Dsn = None,
    schema: Schema = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """End the pause of a kind."""
    with reported(debug=debug), ready_front(kind, app, dsn=dsn, schema=schema) as front:
        resumed = front.sync.resume(kind)
    if as_json:
        print_json({"kind": kind, "resumed": resumed})
    else:
        say(f"resumed {kind}" if resumed else f"nothing to resume: {kind} is not paused")


# --- parts ----------------------------------------------------------------------------------------------------------


def _exactly_one(options: dict[str, bool]) -> None:
    """Raise a usage error unless one of these was given."""
    if sum(options.values()) != 1:
        *first, last = options
        raise typer.BadParameter(f"say which jobs: give exactly one of {', '.join(first)} and {last}")


def _instant(text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        instant = None
    if instant is None or instant.tzinfo is None:
        raise typer.BadParameter("write an instant with its time zone: 2031-05-01T08:00Z", param_hint="--until")
    return instant


def _progress() -> Progress:
    """Tells a terminal now and then how far a verb is."""
    say_at = time.monotonic() + _SAY_EVERY_SECONDS

    def progress(count: int) -> None:
        nonlocal say_at
        if sys.stderr.isatty() and time.monotonic() >= say_at:
            say_at = time.monotonic() + _SAY_EVERY_SECONDS
            typer.echo(f"{count:,} so far", err=True)

    return progress


def _tell_count(verb: str, kind: str, count: int, none: str, *, as_json: bool, after: str = "") -> None:
    if as_json:
        print_json({"kind": kind, verb: count})
    elif count:
        say(f"{verb} {count:,} {'job' if count == 1 else 'jobs'} of kind {kind}{after}")
    else:
        say(f"{verb} no job: of those chosen, kind {kind} has {none}")
