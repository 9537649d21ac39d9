"""The parent of one Postgres server: makes its data folder, runs it, and stops it once nobody owns it.

Runs by path with the standard library alone (it is a program as well as a module), so it starts in a few milliseconds
and does not depend on how its starter found pgworker. It stands in a session of its own, is single-minded and never
asks: an owner is a shared lock on `owners.lock`, its own life is an exclusive lock on `supervisor.lock`, and the kernel
drops both with the processes that hold them, `kill -9` included.

It tells its starter "ready", or why not, through standard error. If it is killed itself, Linux sends the server SIGINT
(fast shutdown); elsewhere the next start ends what was left.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import locale
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

READY = "ready"
SUPERUSER = "postgres"
LOG_LIMIT = 4 * 1024 * 1024  # two files of this size at most

# Fast shutdown writes a checkpoint, which a slow disk may stretch; immediate shutdown needs crash recovery afterwards.
STOP_LADDER = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 5.0))
LONGEST_STOP = sum(patience for _, patience in STOP_LADDER) + 5.0

# The first such line says why a start failed; the last line is often only a farewell.
_TELLING = re.compile(rb"FATAL:|PANIC:|error:|could not bind|configuration parameter|for parameter")
_TICK = 0.01
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_HAS_PROC = Path("/proc/self").is_dir()


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run and as whom; `uid` and `gid` are None when the supervisor's own user runs the server."""

    home: str
    bin_dir: str
    socket_dir: str
    major: int
    uid: int | None
    gid: int | None
    fsync: bool


@dataclass(frozen=True, slots=True)
class Postmaster:
    """What a running server says of itself in `postmaster.pid`."""

    pid: int
    port: int
    socket_dir: str
    ready: bool


class ServerFailed(Exception):
    """The server or initdb ended by itself before it was of use."""


def read_postmaster(data: Path) -> Postmaster | None:
    """Read `postmaster.pid`; None when it is absent, or of a server that has not got as far as its status."""
    try:
        lines = (data / "postmaster.pid").read_text(errors="surrogateescape").splitlines()
        return Postmaster(int(lines[0]), int(lines[3]), lines[4], lines[7].strip() == READY)
    except (FileNotFoundError, NotADirectoryError, IndexError, ValueError):
        return None


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie that nobody has waited for yet does not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_bytes() if _HAS_PROC else b""
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:
        return True
    return not stat.rpartition(b")")[2].startswith(b" Z")


def open_lock(path: Path) -> int:
    """Open a lock file; each opening locks for itself, so the locks hold between threads as well as processes."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


class BoundedLog:
    """A log file that is moved aside once when it is full; remembers the line that tells why a start failed.

    A full disk loses lines but never stops the reading: a server whose standard error is not read blocks.
    """

    def __init__(self, path: Path, *, limit: int = LOG_LIMIT) -> None:
        self._path = path
        self._limit = limit
        self._telling = self._last = b""

    @property
    def reason(self) -> str:
        """The first line that tells why, else the last one."""
        return (self._telling or self._last).decode(errors="replace").strip()

    def write(self, line: bytes) -> None:
        """Append one line."""
        if not self._telling and _TELLING.search(line):
            self._telling = line
        self._last = line if line.strip() else self._last
        with contextlib.suppress(OSError):
            self._append(line)

    def _append(self, line: bytes) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "ab", buffering=0) as file:
            file.write(line)
            full = file.tell() > self._limit
        if full:
            self._path.replace(self._path.with_name(self._path.name + ".1"))


class Supervisor:
    """Carries out one plan; `run` returns when the server has been stopped because nobody owned it any more."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._home = Path(plan.home)
        self._data = self._home / "data"
        self.log = BoundedLog(self._home / "server.log")
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._log_in, self._log_out = os.pipe()
        self._parent = os.getpid()

    def run(self) -> None:
        """Make the data folder if there is none, run the server, start it again if it is killed.

        Raises ServerFailed or OSError when initdb or a start fails; the server is gone then too.
        """
        pump = threading.Thread(target=self._pump, daemon=True)
        pump.start()
        threading.Thread(target=self._watch_owners, daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            end_leftovers(self._home)
            if not self._data.exists():
                self._make_data()
            self._serve()
        finally:
            os.close(self._log_out)
            pump.join(1.0)  # a backend that outlived its server may hold the other end
            if Path(self._plan.socket_dir).parent != self._home:
                with contextlib.suppress(OSError):  # a leftover in it is looked at by the next start
                    Path(self._plan.socket_dir).rmdir()

    def stop(self) -> None:
        """Stop whatever runs, politely first; safe to call from any thread and more than once."""
        self._stopping.set()
        child = self._child
        if child is not None:
            _end(child)

    # --- the server -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        announced, pause = False, 0.1
        while not self._stopping.is_set():
            self._drop_stale_files()
            child = self._spawn("postgres", "-D", str(self._data), "-c", f"config_file={self._home / 'server.conf'}")
            ready = self._wait_until_ready(child)
            if ready and not announced:
                _tell(READY)
                announced = True
            code = child.wait()
            end_leftovers(self._home)
            if self._stopping.is_set():
                return
            if not ready:
                raise ServerFailed(f"PostgreSQL did not start (exit {code})")
            self._note(f"the server ended by itself (exit {code}); starting it again")
            self._stopping.wait(pause)
            pause = min(pause * 2, 5.0)  # one that dies again and again must not spend the machine on recovery

    def _wait_until_ready(self, child: subprocess.Popen[bytes]) -> bool:
        """Watch `postmaster.pid`; crash recovery may take long, so patience is the starter's business, not ours."""
        while child.poll() is None:
            found = read_postmaster(self._data)
            if found is not None and found.pid == child.pid and found.ready:
                return True
            time.sleep(_TICK)
        return False

    def _drop_stale_files(self) -> None:
        """Remove the pid files of a killed server: the number may be a zombie's or a stranger's, which stops a start.

        Safe here: we hold the folder's lock, `end_leftovers` found no process of it, and Postgres has a second guard in
        its shared memory.
        """
        for path in (self._data / "postmaster.pid", *Path(self._plan.socket_dir).glob(".s.PGSQL.*")):
            path.unlink(missing_ok=True)

    # --- initdb -----------------------------------------------------------------------------------------------------

    def _make_data(self) -> None:
        """Run initdb in a temporary folder, so that `data` is whole whenever it exists."""
        for leftover in self._home.glob("initdb-*"):
            shutil.rmtree(leftover, ignore_errors=True)  # what is still written to is for the next start
        stage = Path(tempfile.mkdtemp(prefix="initdb-", dir=self._home))
        try:
            secret = stage / "password"
            secret.write_text((self._home / "pgpass").read_text().strip().rpartition(":")[2])
            for path in (secret, stage):
                os.chown(path, -1 if self._plan.uid is None else self._plan.uid, -1)
            code = self._spawn("initdb", *self._initdb_options(stage / "data", secret)).wait()
            if self._stopping.is_set():
                return
            if code != 0:
                raise ServerFailed(f"initdb failed (exit {code})")
            (stage / "data").rename(self._data)
            folder = os.open(self._home, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def _initdb_options(self, data: Path, secret: Path) -> list[str]:
        options = ["-D", str(data), "-U", SUPERUSER, "--auth=scram-sha-256", f"--pwfile={secret}", "--encoding=UTF8"]
        options += [f"--locale={_libc_locale()}", "--lc-messages=C", "--data-checksums", "--no-instructions"]
        if self._plan.major >= 17:  # noqa: PLR2004 - the first release whose own provider sorts alike on every host
            options += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        return options if self._plan.fsync else [*options, "--no-sync"]

    # --- processes --------------------------------------------------------------------------------------------------

    def _spawn(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        self._note(f"starting {program}")
        child = subprocess.Popen(
            [str(Path(self._plan.bin_dir) / program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log_out,
            stderr=self._log_out,
            cwd=self._home,  # by which `end_leftovers` knows it again
            env=_environment(),
            user=self._plan.uid,
            group=self._plan.gid,
            extra_groups=None if self._plan.uid is None else [],
            umask=0o077,
            start_new_session=True,
            preexec_fn=self._die_with_us,  # noqa: PLW1509 - calls two prepared C functions, no Python state is touched
        )
        self._child = child
        if self._stopping.is_set():
            _end(child)
        return child

    def _die_with_us(self) -> None:
        """Ask the kernel, before exec but after the change of user, which clears it, for SIGINT at the parent's death.

        The kernel means the parent *thread*: this runs in the main one, which is the last to go.
        """
        if sys.platform == "linux":
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)
        if os.getppid() != self._parent:
            os._exit(1)

    def _watch_owners(self) -> None:
        """Wait until the last owner is gone, then stop; the lock is kept to the end, and a new owner waits for it."""
        fcntl.flock(open_lock(self._home / "owners.lock"), fcntl.LOCK_EX)
        self.stop()

    def _on_signal(self, *_: object) -> None:
        threading.Thread(target=self.stop, daemon=True).start()

    def _pump(self) -> None:
        with os.fdopen(self._log_in, "rb") as lines:
            while line := lines.readline(65536):
                self.log.write(line)

    def _note(self, text: str) -> None:
        """Log a line of our own, by the pipe, so that it stands in order with the server's."""
        os.write(self._log_out, f"pgworker: {text}\n".encode())


def end_leftovers(home: Path) -> None:
    """End the server processes that outlived their parent: a shutdown under way may finish, orphans may not stay.

    Raises ServerFailed when they do not even end by SIGKILL (a disk that does not answer).
    """
    for number, patience in ((signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0)):
        leftovers = _server_pids(home)
        if not leftovers:
            return
        if number == signal.SIGINT:  # to its children this signal means something else
            postmaster = read_postmaster(home / "data")
            leftovers = [pid for pid in leftovers if postmaster is not None and pid == postmaster.pid]
        for pid in leftovers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience
        while any(map(is_alive, leftovers)) and time.monotonic() < deadline:
            time.sleep(_TICK)
    if remaining := _server_pids(home):
        raise ServerFailed(f"processes of an earlier server do not end: {remaining}")


def _server_pids(home: Path) -> list[int]:
    """Find the servers and initdbs that run inside the folder: by their own entries, never by a number in a file."""
    if not _HAS_PROC:
        return _server_pid_by_ps(home)
    inside, found = home.resolve(), list[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, a zombie, or another user's
            program = (process / "exe").readlink().name.removesuffix(" (deleted)")
            if program in {"postgres", "initdb"} and (process / "cwd").readlink().is_relative_to(inside):
                found.append(int(process.name))
    return found


def _server_pid_by_ps(home: Path) -> list[int]:
    found = read_postmaster(home / "data")
    if found is None:
        return []
    command = ["/bin/ps", "-o", "args=", "-p", str(found.pid)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    return [found.pid] if str(home / "data") in shown.stdout else []


def _end(child: subprocess.Popen[bytes]) -> None:
    for number, patience in STOP_LADDER:
        child.send_signal(number)
        try:
            child.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        return


def _environment() -> dict[str, str]:
    """Pass on only what finds programs and libraries: PG* variables would change the server's settings."""
    kept = ("PATH", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
    return {"LC_ALL": "C", "TZ": "UTC"} | {name: os.environ[name] for name in kept if name in os.environ}


def _libc_locale() -> str:
    try:
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    except locale.Error:
        return "C"
    return "C.UTF-8"


def _tell(text: str) -> None:
    """Answer the starter and hang up; what goes wrong from here on is told by the log alone."""
    with contextlib.suppress(OSError):  # it may have lost patience and gone
        os.write(2, text.encode())
    os.dup2(1, 2)


def main() -> None:
    """Run the plan given as JSON; the process that was started returns at once, its child goes on."""
    plan = Plan(**json.loads(sys.argv[1]))
    fcntl.flock(open_lock(Path(plan.home, "supervisor.lock")), fcntl.LOCK_EX)  # free, but for a look by another process
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    supervisor = Supervisor(plan)
    try:
        supervisor.run()
    except (ServerFailed, OSError) as failure:
        why = f": {supervisor.log.reason}" if isinstance(failure, ServerFailed) else ""
        supervisor.log.write(f"pgworker: {failure}\n".encode())
        _tell(f"{failure}{why}")
        sys.exit(1)


if __name__ == "__main__":
    main()
