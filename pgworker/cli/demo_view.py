"""How the demo looks: a live bar or plain lines, the table at the end, hits with their lines; or JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec
import typer

from pgworker.cli.output import console, one_line, print_json, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.table import Table
    from rich.text import Text

    from pgworker.demo import Found, Hit, Line, Progress, Report

_BAR_SECONDS = 0.1
_LINE_SECONDS = 2.0
_NAMED = 3


class View:
    """What a run tells: a table for the first round, a line for each later one; or each round's report as JSON.

    While the first round goes on: a bar where there is a terminal (`live`), else a line every two seconds. The hint is
    what to do next.
    """

    def __init__(self, *, watch: bool, as_json: bool, live: bool, hint: str) -> None:
        self._watch = watch
        self._as_json = as_json
        self._live = live
        self._hint = hint
        self._rounds = 0
        self._bar: Bar | None = None

    def note(self, text: str) -> None:
        """Say what begins now."""
        if not self._as_json:
            say(text)

    async def follow(self, progress: Callable[[], Progress]) -> None:
        """Show how far the first round is, until it is over."""
        if not self._as_json:
            await (self._move_bar if self._live else self._print_lines)(progress)

    async def _print_lines(self, progress: Callable[[], Progress]) -> None:
        while True:
            await anyio.sleep(_LINE_SECONDS)
            if self._rounds:
                return
            say(_told(progress()))

    async def _move_bar(self, progress: Callable[[], Progress]) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (BarColumn(), TextColumn("{task.fields[told]}", markup=False), TimeElapsedColumn())
        # (refreshed from here, so there is no thread to be stopped)
        with Bar(*columns, console=console(), transient=True, auto_refresh=False) as self._bar:
            task = self._bar.add_task("", total=None, told="")
            while not self._rounds:
                now = progress()
                self._bar.update(task, total=now.files, completed=now.settled, told=_told(now))
                self._bar.refresh()
                await anyio.sleep(_BAR_SECONDS)

    def report(self, report: Report) -> None:
        """Tell of a round."""
        self._rounds += 1
        if self._bar is not None:
            self._bar.stop()
        if self._as_json and self._watch:
            typer.echo(msgspec.json.encode(report).decode())
        elif self._as_json:
            print_json(report)
        elif self._rounds > 1:
            say(_round(report))
        else:
            print_report(report)
            if not report.interrupted:
                say(self._hint)
                if self._watch:
                    say("Watching: an edit is a job. Ctrl-C ends it.")


def _told(progress: Progress) -> str:
    if progress.files is None:
        return "listing files"
    failed = f", {progress.failed:,} failed" if progress.failed else ""
    return f"{progress.settled:,} of {progress.files:,} files{failed}"


def _round(report: Report) -> str:
    """A later round: `12:03:04  docs/a.md: 1 done in 0.12 s`."""
    counts = (
        (report.done, "done"),
        (report.failed, "failed"),
        (report.elsewhere, "done elsewhere"),
        (report.gone, "gone"),
    )
    told = ", ".join(f"{count:,} {what}" for count, what in counts if count) or "unchanged"
    names = _names(report.changed)
    return f"{time.strftime('%H:%M:%S')}  {names}{': ' if names else ''}{told} in {_seconds(report.seconds)}"


# --- the table ------------------------------------------------------------------------------------------------------


def print_report(report: Report) -> None:
    """The table of a run."""
    out = console()
    out.print(_table(report), soft_wrap=False)
    for line in _remarks(report):
        out.print(line, style="dim")


def _table(report: Report) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    table.add_row("files", f"{report.files:,}", f"in {_seconds(report.seconds)}")
    table.add_row("jobs done", f"{report.done:,}")
    table.add_row("unchanged", f"{report.unchanged:,}", _unchanged(report))
    table.add_row("failed", f"{report.failed:,}", _earlier(report))
    for each in report.failures:
        paths = _names(each.paths) + (", …" if each.files > len(each.paths) else "")
        cut = Text(paths, no_wrap=True, overflow="ellipsis")
        table.add_row(f"  {one_line(each.code)}", f"{each.files:,}", cut)
    for count, label in (
        (report.elsewhere, "done elsewhere"),
        (report.gone, "removed"),
        (report.waiting, "still waiting"),
        (len(report.closed), "closed folders"),
    ):
        if count:
            table.add_row(label, f"{count:,}")
    table.add_row("jobs/s", "-" if report.jobs_per_second is None else f"{report.jobs_per_second:,.0f}")
    table.add_row("pickup p50", _seconds(report.pickup_p50))
    table.add_row("pickup p99", _seconds(report.pickup_p99))
    return table


def _unchanged(report: Report) -> str:
    return "same content as before: no handler ran" if report.unchanged else ""


def _earlier(report: Report) -> str:
    earlier = sum(each.files for each in report.failures) - report.failed
    return f"and {earlier:,} in earlier runs" if earlier > 0 else ""


def _remarks(report: Report) -> list[str]:
    """What the figures mean, and what is not as it should be."""
    remarks: list[str] = []
    if report.interrupted:
        remarks.append("Interrupted: what still waits is where the next run goes on.")
    if report.closed:
        remarks.append(f"Could not be listed, so what is known of them stays: {_names(report.closed)}")
    if report.jobs_per_second is not None:
        remarks.append("jobs/s: done and failed, from the first enqueue to the last end.")
    if report.picked_up:
        remarks.append(
            f"pickup: from enqueue to claim, by the database's clock, of {report.picked_up:,} enqueued in this run; "
            "where many come at once, it is mostly the wait for those before."
        )
    return remarks


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(one_line, names[:_NAMED])) + (", …" if len(names) > _NAMED else "")


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


# --- hits -----------------------------------------------------------------------------------------------------------

_FRESHNESS = {"fresh": "", "changed": "  changed since it was indexed", "gone": "  cannot be read any more"}


def print_found(found: Found, words: Sequence[str]) -> None:
    """The hits, each with its lines; or that there is none, and among how many."""
    asked = one_line(" ".join(words))
    if not found.hits:
        say(f"no file of the {found.documents:,} that are indexed has all of: {asked}")
    else:
        best = f", the best {len(found.hits)}" if found.total > len(found.hits) else ""
        say(f"{found.total:,} of {found.documents:,} indexed files have all of: {asked}{best}")
        roots = {hit.root for hit in found.hits}
        if len(roots) == 1:
            say(f"in {roots.pop()}")
        out = console()
        for place, hit in enumerate(found.hits, 1):
            _print_hit(out, place, hit, whole=bool(roots))
    if found.waiting:
        say(f"{found.waiting:,} files are not indexed as they are now: their jobs wait for the next `pgworker demo`")


def _print_hit(out: Console, place: int, hit: Hit, *, whole: bool) -> None:
    from rich.text import Text

    path = f"{hit.root}/{hit.path}" if whole else hit.path
    heading = Text.assemble(
        f"\n{place:>2}  ", (one_line(path), "bold"), (f"  {hit.rank:.3f}", "dim"), (_FRESHNESS[hit.freshness], "yellow")
    )
    out.print(heading, overflow="fold")
    for line in hit.lines:
        out.print(_line(line, out.width), no_wrap=True, overflow="ellipsis")


def _line(line: Line, width: int) -> Text:
    """A line with its number, moved to the left as far as its first match needs it."""
    from rich.text import Text

    number = Text.assemble((f"{line.number:>8}  ", "dim"))
    text = Text.assemble(*((piece.text, "bold yellow" if piece.match else "") for piece in line.pieces))
    room = width - len(number) - 1
    match = min((span.end for span in text.spans), default=0)
    if match > room:
        text = Text("…") + text[match - room // 2 :]
    return number + text
