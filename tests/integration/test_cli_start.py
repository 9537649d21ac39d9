"""What a command does when it cannot begin: one line that says what to do, an exit code, no traceback, no password."""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.commandline import Command, Ended, invoke
from tests.databases import MakeDsn

Start: TypeAlias = Callable[..., Command]

PASSWORD = "hunter2-which-nobody-may-see"
JOBS = """
from pgworker import App, Job
app = App()
other = 7

@app.kind("work")
async def work(job: Job[int]) -> None: ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the app jobs:app in it; what is imported from it is forgotten at the end."""
    (tmp_path / "jobs.py").write_text(JOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start a command in a process of its own."""
    started: list[Command] = []

    def begin(*words: str, dsn: str | None = None, env: dict[str, str] | None = None) -> Command:
        started.append(Command(*words, cwd=folder, dsn=dsn, env=env))
        return started[-1]

    yield begin
    for command in started:
        command.end()


@pytest.fixture
def nowhere() -> Iterator[str]:
    """A DSN, with a password, to a port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"postgresql://me:{PASSWORD}@127.0.0.1:{taken.getsockname()[1]}/db"


def told(ended: Ended, code: int) -> str:
    """The one line that a command said before it ended with this code."""
    assert (ended.code, ended.out) == (code, "")
    (line,) = ended.err.splitlines()
    return line


COMMANDS = [["run", "jobs:app"], ["enqueue", "work"], ["status"], ["migrate"], ["migrate", "--plan"]]
every_command = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


@every_command
@pytest.mark.ruling("2.27")
def test_no_dsn(folder: Path, words: list[str]) -> None:
    assert told(invoke(*words), 2) == (
        "pgworker: no database: set PGWORKER_DSN or pass --dsn (for example postgresql://user@host/database)"
    )


@every_command
@pytest.mark.ruling("2.27")
@pytest.mark.parametrize("debug", [False, True])
def test_no_server(folder: Path, nowhere: str, words: list[str], *, debug: bool) -> None:
    waiting = ["--startup-timeout", "0"] if words[0] == "run" else []
    ended = invoke(*words, *waiting, *(["--debug"] if debug else []), dsn=nowhere)
    assert ended.code == 4
    *before, last = ended.err.splitlines()
    assert "Connection refused" in last
    assert ("Traceback (most recent call last):" in before) is debug
    assert debug or not before
    assert PASSWORD not in ended.out + ended.err


@pytest.mark.ruling("2.27")
@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://me:{PASSWORD}@more@host/db",
        f"postgresql://me:{PASSWORD}/more@host/db",
        f"postgresql://me:{PASSWORD}@host/db?sslmode",
        f"mysql://me:{PASSWORD}@host/db",
        f"me:{PASSWORD}",
    ],
)
@pytest.mark.parametrize("words", [["run", "jobs:app"], ["status", "--debug"]], ids=" ".join)
def test_a_dsn_that_cannot_be_read_is_not_shown(folder: Path, words: list[str], dsn: str) -> None:
    ended = invoke(*words, dsn=dsn)
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("pgworker: the DSN ")
    assert "hunter2" not in ended.out + ended.err
    assert "more@" not in ended.err


@pytest.mark.ruling("2.26", "2.27")
@pytest.mark.parametrize("words", COMMANDS[:3], ids=" ".join)
def test_no_schema_ends_at_once(folder: Path, make_dsn: MakeDsn, words: list[str]) -> None:
    before = time.monotonic()
    line = told(invoke(*words, dsn=make_dsn()), 5)
    assert time.monotonic() - before < 10.0  # not after the minute that a missing database is given
    assert line.endswith("has no pgworker schema 'pgworker': run `pgworker migrate`")


@every_command
@pytest.mark.ruling("2.27")
def test_a_schema_that_is_too_new(folder: Path, make_dsn: MakeDsn, words: list[str]) -> None:
    dsn = make_dsn(migrated=True)
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "insert into pgworker.migrations (number, name, breaking, checksum, release) "
            "values (9000, 'brave_new', true, 'x', '99.0')"
        )
    assert told(invoke(*words, dsn=dsn), 5).endswith("upgrade this pgworker to 99.0 or later")


@pytest.mark.ruling("2.27")
def test_a_database_that_does_not_exist(server_dsn: str) -> None:
    line = told(invoke("status", dsn=make_conninfo(server_dsn, dbname="pgworker_tests_nowhere")), 4)
    assert 'database "pgworker_tests_nowhere" does not exist' in line


@pytest.mark.ruling("2.26")
def test_a_worker_waits_for_its_database_and_says_so(start: Start, nowhere: str) -> None:
    worker = start("run", "jobs:app", dsn=nowhere)
    assert "Connection refused" in worker.log.expect("waiting for the database")
    worker.signal()
    assert worker.wait() == 0
    assert worker.log.text.count("waiting for the database") == 1
    worker.log.expect("worker stopped claimed=0 succeeded=0")


@pytest.mark.ruling("2.27")
def test_a_signal_while_the_app_is_being_imported(start: Start, folder: Path) -> None:
    (folder / "slow.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(30)\n")
    worker = start("run", "slow:app")
    worker.out.expect("importing")
    worker.signal(signal.SIGINT)
    assert worker.wait() == 0
    assert worker.log.text == ""


@pytest.mark.ruling("2.27")
@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("nothing:app", "there is no module 'nothing', neither in {cwd} nor installed: start in the folder"),
        ("jobs.deeper:app", "there is no module 'jobs.deeper'"),
        ("jobs:ap", "module 'jobs' has no attribute 'ap'; did you mean jobs:app?"),
        ("jobs:other", "jobs:other is of type int, not a pgworker.App"),
        ("jobs", "'jobs' names no app: write module:attribute, for example myapp.jobs:app"),
        ("./some/jobs.py:app", "for that file: some.jobs:app"),
        ("raises:app", "module 'raises' does not import: KeyError: 'nope' ({cwd}/raises.py:2); --debug shows the"),
        ("broken:app", "module 'broken' does not import: SyntaxError: "),
        ("lacking:app", "module 'lacking' does not import: ModuleNotFoundError: No module named 'not_there' ({cwd}/"),
        ("leaving:app", "module 'leaving' does not import: SystemExit: 3 ("),
        (
            "refused:app",
            "ConfigError: kind 'work': facts is one of all, exceptional, none, got 'no' ({cwd}/refused.py:3)",
        ),
    ],
)
def test_an_app_that_is_not_to_be_had(folder: Path, target: str, line: str) -> None:
    (folder / "raises.py").write_text("\n{}['nope']\n")
    (folder / "broken.py").write_text("def\n")
    (folder / "lacking.py").write_text("import not_there\n")
    (folder / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "refused.py").write_text("from pgworker import App\napp = App()\napp.declare('work', facts='no')\n")
    assert line.format(cwd=folder) in told(invoke("run", target, dsn="host=unused"), 3)


def test_debug_shows_where_an_app_fails(folder: Path) -> None:
    (folder / "raises.py").write_text("\n{}['nope']\n")
    ended = invoke("run", "raises:app", "--debug")
    first, *_, last = ended.err.splitlines()
    assert (ended.code, first) == (3, "Traceback (most recent call last):")
    assert f'File "{folder}/raises.py", line 2, in <module>' in ended.err
    assert last.startswith("pgworker: module 'raises' does not import")


@pytest.mark.ruling("2.27")
@pytest.mark.parametrize("words", [["run", "jobs:app", "--kind", "other"], ["enqueue", "other", "--app", "jobs:app"]])
def test_an_unknown_kind(folder: Path, words: list[str]) -> None:
    assert told(invoke(*words, dsn="host=unused"), 3) == "pgworker: the app has no kind 'other'; it has work"


@pytest.mark.ruling("2.27")
def test_a_bug_of_ours_is_one_line_too(start: Start, folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(
        "import pgworker.cli.run\n"
        "def fail(*_: object) -> None:\n"
        f"    raise ZeroDivisionError('{PASSWORD}')\n"
        "pgworker.cli.run.load_app = fail\n"
    )
    command = start("run", "jobs:app", dsn="host=unused", env={"PYTHONPATH": str(folder)})
    assert command.wait() == 1
    (line,) = command.log.text.splitlines()
    assert line.startswith("pgworker: internal error: ZeroDivisionError at ")
    assert PASSWORD not in line


def test_the_program_runs_from_a_process_of_its_own(start: Start, nowhere: str) -> None:
    command = start("status", dsn=nowhere)
    assert command.wait() == 4
    (line,) = command.log.text.splitlines()
    assert line.startswith("pgworker: no database: ")
    assert command.out.text == ""
