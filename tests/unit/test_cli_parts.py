"""The pieces of the command line that decide something without a database."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
import typer

from pgworker import ConfigError, Stop, UnknownKind
from pgworker.cli.database import check_dsn, describe
from pgworker.cli.errors import report_internal, reported
from pgworker.cli.logs import LogLevel, log_to_stderr
from pgworker.cli.output import age, one_line, plain, print_json
from pgworker.cli.report import make_report
from pgworker.cli.run import has_uvloop
from pgworker.cli.signals import stop_seconds
from pgworker.kind import Kind, declare_kind
from pgworker.operations import KindCount
from pgworker.policy import make_policy
from pgworker.presence import Presence


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-0.1, "0.0 s"),
        (0.44, "0.4 s"),
        (59.9, "59 s"),
        (60, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3600, "1 h 00 min"),
        (86_399, "23 h 59 min"),
        (86_400, "1 d 0 h"),
        (90 * 3600, "3 d 18 h"),
    ],
)
def test_ages(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢", "plain é 漢"),
        ("a\n  b\r\nc", "a; b; c"),
        ("\x1b[31m\x00\x7f", "\\x1b[31m\\x00\\x7f"),
        ("\u202e\u2028\ud800", "\\u202e\\u2028\\ud800"),
    ],
)
def test_texts_from_elsewhere(text: str, shown: str) -> None:
    assert one_line(text) == shown
    assert plain(text).isprintable()


@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        ("postgresql://me:secret@db.example:6432/shop?sslmode=require", "me@db.example:6432/shop"),
        ("host=one,two port=1,2 user=me password=secret", "me@one,two:1,2/me"),
        ("host=/run/pg user=me dbname='a b'", "me@/run/pg:5432/a b"),
        ("service=prod password=secret", "service prod"),
        ("user=me hostaddr=10.0.0.1", "me@10.0.0.1:5432/me"),
        ("user=me", "me@(local):5432/me"),
    ],
)
def test_a_dsn_is_described_without_its_password(monkeypatch: pytest.MonkeyPatch, dsn: str, shown: str) -> None:
    for name in ("PGHOST", "PGPORT", "PGUSER", "PGDATABASE", "PGSERVICE", "PGHOSTADDR"):
        monkeypatch.delenv(name, raising=False)
    check_dsn(dsn)
    assert describe(dsn) == shown


@pytest.mark.parametrize("dsn", ["postgresql://u:a@b@h/d", "postgres://u:a/b@h/d", "nonsense", "postgresql://h:x y/d"])
def test_a_dsn_that_would_be_read_wrongly_is_refused_unseen(dsn: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_dsn(dsn)
    assert "nonsense" not in str(refused.value)


def kind(name: str, **policy: Stop) -> Kind:
    return declare_kind(name, make_policy("standard", policy), payload=object, payload_limit=None, version=1)  # type: ignore[arg-type]


@pytest.mark.ruling("1.17")
def test_how_long_a_stop_may_take() -> None:
    drains = kind("drains", stop=Stop("drain", timedelta(seconds=30)))
    releases = kind("releases", stop=Stop("release"))
    endless = kind("endless", stop=Stop("drain"))
    assert stop_seconds([releases]) == pytest.approx(5.5)
    assert stop_seconds([releases, drains]) == pytest.approx(35.5)
    assert stop_seconds([drains, endless]) == float("inf")


# --- the report of `status` ------------------------------------------------------------------------------------------


def runner(kind_name: str, silent: float, status: str = "{}", name: str = "host:1:aa") -> Presence:
    return Presence(name, kind_name, "0.1", silent, 60.0, status)


def findings(counts: list[KindCount], presences: list[Presence], *kinds: str) -> list[str]:
    return make_report("db", "pgworker", counts, presences, bound=10, kinds=kinds).findings


def test_a_kind_with_work_and_no_live_runner_is_a_finding() -> None:
    ready, scheduled = KindCount("a", "ready", 2, 1.0), KindCount("a", "scheduled", 2, None)
    assert findings([ready], []) == ["kind a has no live runner; 2 of its jobs wait"]
    assert findings([ready], [runner("a", 10.0)]) == []
    assert findings([ready], [runner("a", 10.1), runner("a", 1.0, name="other")]) == []
    assert findings([ready], [runner("b", 1.0)]) == ["kind a has no live runner; 2 of its jobs wait"]
    assert findings([scheduled], []) == []
    assert findings([KindCount("a", "expired", 1, None)], []) == ["kind a has no live runner; 1 of its jobs waits"]
    assert findings([KindCount("a", "succeeded", 1, None), KindCount("a", "failed", 1, None)], []) == []


def test_a_kind_whose_runners_have_all_fallen_silent_is_a_finding() -> None:
    silent = [runner("a", 50.0, name="first"), runner("a", 20.0, name="second")]
    assert findings([], silent) == ["kind a has no live runner, the last was heard of 20 s ago (second)"]
    assert findings([], silent, "b") == ["kind b has no live runner"]


def test_only_counts_at_their_bound_are_lower_bounds() -> None:
    counts = [KindCount("a", "ready", 6, 1.0), KindCount("a", "running", 4, None), KindCount("a", "failed", 9, None)]
    (row,) = make_report("db", "s", counts, [], bound=10, kinds=[]).kinds
    assert row.at_least == ["ready", "running", "scheduled", "expired"]
    (row,) = make_report("db", "s", counts, [], bound=9, kinds=["a"]).kinds
    assert row.at_least == ["ready", "running", "scheduled", "expired", "failed"]
    assert make_report("db", "s", counts, [], bound=11, kinds=[]).kinds[0].at_least == []


@pytest.mark.parametrize("status", ["[]", '"x"', '{"in_flight": "many"}', "{", '{"lifecycle": null}'])
def test_a_status_that_we_cannot_read_still_shows_the_runner(status: str) -> None:
    (row,) = make_report("db", "s", [], [runner("a", 1.0, status)], bound=10, kinds=[]).runners
    assert (row.lifecycle, row.in_flight, row.stale) == ("unknown", 0, False)


# --- errors and logs -------------------------------------------------------------------------------------------------


def test_an_unforeseen_error_is_told_by_its_class_and_place_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        raise ExceptionGroup("outer", [psycopg.DataError("a SECRET row")])
    assert report_internal(raised.value, debug=False) == 1
    told = capsys.readouterr().err
    assert told.startswith("pgworker: internal error: DataError at ")
    assert "SECRET" not in told


def test_a_foreseen_error_is_found_in_the_groups_around_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, reported(debug=False):
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [UnknownKind("no such kind")])])
    assert ended.value.exit_code == 3
    assert capsys.readouterr().err == "pgworker: no such kind\n"


@pytest.fixture
def _levels() -> Iterator[None]:
    yield
    for name in ("pgworker", "psycopg"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def log_as_if_alone(monkeypatch: pytest.MonkeyPatch, level: LogLevel | None) -> None:
    """Set the log up as in a process of its own: here pytest has handlers on the root logger."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for name in ("pgworker", "psycopg"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    log_to_stderr(level)


@pytest.mark.usefixtures("_levels")
def test_an_event_is_one_line_with_a_time_in_utc(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log_as_if_alone(monkeypatch, None)
    logging.getLogger("pgworker.hints").info("key=%s", "a\nb\x1b")
    logging.getLogger("pgworker").debug("not shown")
    logging.getLogger("psycopg.pool").warning("one\n\ttwo")
    logging.getLogger("psycopg.pool").info("not shown")
    first, second = capsys.readouterr().err.splitlines()
    assert first[10] + first[19] + first[23] == "T.Z"
    assert first.endswith(" INFO    key=a; b\\x1b")
    assert second.endswith(" WARNING one; two")


@pytest.mark.usefixtures("_levels")
def test_the_log_level_that_was_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    log_as_if_alone(monkeypatch, "error")
    logging.getLogger("pgworker").warning("not shown")
    logging.getLogger("pgworker").error("shown")
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_json_is_readable_and_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hurtful = {"key": "caf\u00e9 \u9b31 \x1b[2J \x9b2J \u202e \u2066 \x7f \ufeff \n"}
    print_json(hurtful)
    printed = capsys.readouterr().out
    assert all(letter.isprintable() for line in printed.split("\n") for letter in line)
    assert "caf\u00e9 \u9b31" in printed
    assert json.loads(printed) == hurtful


def test_uvloop_is_used_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "uvloop", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert not has_uvloop()
    (tmp_path / "uvloop.py").touch()
    importlib.invalidate_caches()
    assert has_uvloop()
