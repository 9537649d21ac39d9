"""How the demo looks: the table, the lines, the hits; in any width, whatever the files are called and hold."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from pgworker.cli import demo_view
from pgworker.cli.demo_view import View, print_found, print_report
from pgworker.demo import Failures, Found, Hit, Line, Piece, Progress, Report

FIRST = Report(
    folder="/home/me/notes",
    files=1512,
    looked_at=1512,
    changed=["a.md"],
    gone=0,
    closed=[],
    done=1488,
    unchanged=0,
    elsewhere=0,
    failed=24,
    failures=[Failures("binary", 22, ["img/logo.png", "x" * 150, "img/b.png"]), Failures("too_large", 2, ["a", "b"])],
    waiting=0,
    seconds=4.2,
    jobs_per_second=371.4,
    picked_up=1512,
    pickup_p50=0.042,
    pickup_p99=2.5,
    interrupted=False,
)
AGAIN = replace(
    FIRST,
    done=0,
    failed=0,
    unchanged=1512,
    changed=[],
    jobs_per_second=None,
    picked_up=0,
    pickup_p50=None,
    pickup_p99=None,
)
HINT = "Search it: python -m pgworker demo search WORDS..."


def make_view(*, watch: bool = False, as_json: bool = False, live: bool = False) -> View:
    return View(watch=watch, as_json=as_json, live=live, hint=HINT)


@pytest.fixture(params=[40, 80, 120])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    found: int = request.param
    monkeypatch.setenv("COLUMNS", str(found))
    return found


def rows(text: str) -> dict[str, list[str]]:
    """The table's lines by what they begin with."""
    return {line.split("  ")[0].strip(): line.split() for line in text.strip().splitlines() if line.strip()}


def test_the_table_tells_all_figures_at_any_width(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(FIRST)
    text = capsys.readouterr().out
    assert all(len(line) <= width for line in text.splitlines())
    squeezed = " ".join(text.split())
    for figure in (
        "files 1,512",
        "jobs done 1,488",
        "unchanged 0",
        "failed 24",
        "binary 22",
        "too_large 2",
        "jobs/s 371",
    ):
        assert figure in squeezed, figure
    assert "pickup p50 42 ms" in squeezed
    assert "pickup p99 2.50 s" in squeezed
    assert "of 1,512 enqueued in this run" in squeezed


def test_a_second_run_says_that_nothing_ran_and_what_failed_earlier(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(AGAIN)
    squeezed = " ".join(capsys.readouterr().out.split())
    assert "jobs done 0" in squeezed
    assert "unchanged 1,512 same content as before: no handler ran" in squeezed
    assert "failed 0 and 24 in earlier runs" in squeezed
    assert "jobs/s - pickup p50 - pickup p99 -" in squeezed
    assert "pickup:" not in squeezed


def test_what_is_not_as_it_should_be_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(replace(FIRST, waiting=7, gone=3, elsewhere=2, closed=["private"], interrupted=True))
    squeezed = " ".join(capsys.readouterr().out.split())
    for part in (
        "still waiting 7",
        "removed 3",
        "done elsewhere 2",
        "closed folders 1",
        "Interrupted:",
        "stays: private",
    ):
        assert part in squeezed, part


def test_names_of_files_cannot_steer_the_terminal_and_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "[red]a[/red]\x1b[31m\nb\u202e"
    print_report(replace(FIRST, failures=[Failures("binary", 1, [evil])]))
    view = make_view(watch=True)
    view.note(evil)
    view.report(FIRST)
    view.report(replace(AGAIN, changed=[evil], done=1))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert text.count("[red]a[/red]") == 3


def test_lines_come_now_and_then_and_a_later_round_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    view = make_view(watch=True)
    view.note("starting")
    view.report(FIRST)
    assert capsys.readouterr().out.startswith("starting\n")
    view.report(replace(AGAIN, changed=["a.md", "b.md"], done=1, failed=1, gone=1, seconds=0.05))
    assert capsys.readouterr().out[8:] == "  a.md, b.md: 1 done, 1 failed, 1 gone in 50 ms\n"


def test_an_interrupted_round_is_not_watched_on(capsys: pytest.CaptureFixture[str]) -> None:
    make_view(watch=True).report(replace(FIRST, interrupted=True))
    text = capsys.readouterr().out
    assert HINT not in text
    assert "Watching" not in text


def test_json_is_one_value_or_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    view = make_view(as_json=True)
    view.note("starting")
    view.report(FIRST)
    assert json.loads(capsys.readouterr().out)["failures"][1] == {"code": "too_large", "files": 2, "paths": ["a", "b"]}
    watching = make_view(watch=True, as_json=True)
    watching.report(FIRST)
    watching.report(AGAIN)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["done"] for line in lines] == [1488, 0]


async def test_the_bar_follows_the_run_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(demo_view, "console", lambda: Console(file=shown, force_terminal=True, width=80, markup=False))
    view = make_view(live=True)
    seen = iter([Progress(None, 0, 0), Progress(1512, 756, 3)])

    def progress() -> Progress:
        found = next(seen, None)
        if found is None:
            view.report(FIRST)
        return found or Progress(1512, 1512, 24)

    await view.follow(progress)
    text = shown.getvalue()
    assert "listing files" in text
    assert "756 of 1,512 files, 3 failed" in text
    assert text.rindex("\x1b[?25l") < text.rindex("\x1b[?25h") < text.index("jobs done")  # the cursor is back first


# --- hits -----------------------------------------------------------------------------------------------------------

HIT = Hit(
    "/home/me",
    "notes/[b]a[/b].md",
    0.0607,
    "fresh",
    [Line(12, [Piece("the [red]", match=False), Piece("word", match=True), Piece("[/red] here", match=False)])],
)


def test_a_hit_is_its_path_and_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_found(Found([HIT], 1, 20, 0), ["word"])
    assert capsys.readouterr().out.splitlines() == [
        "1 of 20 indexed files have all of: word",
        "in /home/me",
        "",
        " 1  notes/[b]a[/b].md  0.061",
        "      12  the [red]word[/red] here",
    ]


def test_matches_are_highlighted_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(demo_view, "console", lambda: Console(file=shown, force_terminal=True, width=80, markup=False))
    print_found(Found([HIT], 1, 20, 0), ["word"])
    assert "\x1b[1;33mword\x1b[0m" in shown.getvalue()


def test_a_line_is_moved_until_its_first_match_shows(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    far = Line(1, [Piece("x" * 150, match=False), Piece("word", match=True), Piece("y" * 90, match=False)])
    print_found(Found([replace(HIT, lines=[far])], 1, 20, 0), ["word"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert "word" in last
    assert len(last) <= width


def test_hits_of_several_folders_are_named_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    print_found(Found([HIT, replace(HIT, root="/srv", path="b", freshness="changed")], 40, 50, 3), ["word"])
    text = capsys.readouterr().out
    assert "40 of 50 indexed files have all of: word, the best 2" in text
    assert "/home/me/notes/[b]a[/b].md" in text
    assert "/srv/b  0.061  changed since it was indexed" in text
    assert "3 files are not indexed as they are now" in text


def test_no_hit_is_said_and_among_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    print_found(Found([], 0, 1512, 0), ["\x1b[31m", "word"])
    assert capsys.readouterr().out == "no file of the 1,512 that are indexed has all of: \\x1b[31m word\n"
