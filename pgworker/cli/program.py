"""The commands, put together."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from pgworker.cli.bench import bench
from pgworker.cli.demo import register as register_demo
from pgworker.cli.enqueue import enqueue
from pgworker.cli.errors import EXIT_CODES
from pgworker.cli.migrate import migrate
from pgworker.cli.operate import cancel, forget, pause, rebuild, resume, retry
from pgworker.cli.prune import prune
from pgworker.cli.run import run
from pgworker.cli.status import status

app = typer.Typer(
    name="pgworker",
    help="Jobs in your own Postgres: enqueue in your transaction, work with fenced leases, no broker.",
    epilog=EXIT_CODES,
    rich_markup_mode=None,  # plain help: narrower, and `run` need not load rich
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they show local variables' neighbourhood, and cost the import of rich
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"pgworker {version('pgworker')}")
        raise typer.Exit


def _misplaced(value: str | None, param: typer.CallbackParam) -> None:
    if value is not None:
        raise typer.BadParameter(f"it belongs after the command, as in: pgworker status {param.opts[0]} ...")


_Misplaced: TypeAlias = Annotated[str | None, typer.Option(hidden=True, is_eager=True, callback=_misplaced)]


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    dsn: _Misplaced = None,
    schema: _Misplaced = None,
) -> None:
    pass


for command in (run, migrate, enqueue, status, retry, rebuild, cancel, forget, pause, resume, prune, bench):
    app.command(epilog=EXIT_CODES)(command)
register_demo(app)
