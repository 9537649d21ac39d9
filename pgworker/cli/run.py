"""`pgworker run`: a worker in this process, until a signal stops it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated

import anyio
import typer

from pgworker.app import App
from pgworker.cli.database import app_settings, describe
from pgworker.cli.errors import reported
from pgworker.cli.loading import known_kind, load_app
from pgworker.cli.logs import LogLevel, log_to_stderr
from pgworker.cli.options import Debug, Dsn, Schema, duration, number
from pgworker.cli.signals import StoppedEarlyError, StopSignals
from pgworker.kind import Kind
from pgworker.worker import Worker

_log = logging.getLogger("pgworker")

_ALWAYS = ("claimed", "succeeded")
_COUNTED = (*_ALWAYS, "retried", "failed", "parked", "cancelled", "released", "superseded")


def run(
    app: Annotated[
        str, typer.Argument(metavar="APP", help="The App, as module:attribute; for example myapp.jobs:app.")
    ],
    *,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="Work on this kind only; may be given several times."),
    ] = None,
    dsn: Dsn = None,
    schema: Schema = None,
    listen_dsn: Annotated[
        str | None,
        typer.Option(
            "--listen-dsn", metavar="DSN", help="A direct way to the database, for LISTEN, where --dsn is a pooler."
        ),
    ] = None,
    startup_timeout: Annotated[
        float,
        typer.Option(
            "--startup-timeout",
            metavar="SECONDS",
            parser=number,
            help="How long to wait for a database that is not up.",
        ),
    ] = 60,
    log_level: Annotated[
        LogLevel | None, typer.Option("--log-level", help="What to log to standard error; info, unless the app says.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Work on the jobs of an app, until it is stopped.

    The first SIGTERM or Ctrl-C claims nothing more and lets running jobs end, as the kinds' policies say. The second
    gives them back within five seconds. The third, or a job that will not stop, ends the process; such jobs run again
    when their leases have run out.
    """
    with reported(debug=debug), contextlib.suppress(StoppedEarlyError), StopSignals() as signals:
        waiting = duration(startup_timeout, "--startup-timeout")
        loaded = load_app(app)
        log_to_stderr(log_level)
        settings = app_settings(loaded, dsn=dsn, schema=schema, listen_dsn=listen_dsn)
        kinds = _chosen(loaded, kind)
        worker = loaded.worker([each.name for each in kinds])
        _log.info(
            "worker starts kinds=%s database=%s schema=%s runner=%s",
            ",".join(each.name for each in kinds), describe(settings.dsn), settings.tables.schema, worker.name,
        )  # fmt: skip
        _work(loaded, worker, lambda: signals.serve(worker, kinds), waiting)
        _log.info("worker stopped %s", _counts(worker))


def _chosen(app: App, names: list[str] | None) -> list[Kind]:
    """The kinds to work on, each once. Raises UnknownKind."""
    if names:
        return [known_kind(app, name) for name in dict.fromkeys(names)]
    return [kind for kind in app.kinds.values() if kind.handler is not None]


def _work(app: App, worker: Worker, started: Callable[[], None], waiting: timedelta) -> None:
    async def main() -> None:
        async with app:
            started()
            await worker.run(startup_timeout=waiting)

    # Each job makes a dozen objects that live until it is written: most collections at the default rate free nothing.
    gc.set_threshold(10_000)
    gc.freeze()  # what is there now stays to the end: a tenth of a short job's cost was to look through it again
    anyio.run(main, backend_options={"use_uvloop": has_uvloop()})


def has_uvloop() -> bool:
    """Whether the faster event loop of the extra `fast` is there to be used."""
    return importlib.util.find_spec("uvloop") is not None


def _counts(worker: Worker) -> str:
    """What became of the jobs of all kinds, as in `claimed=12 succeeded=11 retried=1`."""
    sums: Counter[str] = Counter()
    for runner in worker.status().values():
        sums.update({name: count for name, count in dataclasses.asdict(runner).items() if name in _COUNTED})
    return " ".join(f"{name}={sums[name]}" for name in _COUNTED if sums[name] or name in _ALWAYS)
