"""EmbeddedPostgres: own a folder's server, start it if nobody has, give it back."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from pgworker.embedded import home as homes
from pgworker.embedded import supervisor
from pgworker.embedded.account import Account, server_account
from pgworker.embedded.binaries import Binaries, find_binaries
from pgworker.embedded.supervisor import Plan, Postmaster
from pgworker.errors import ConfigError, PgworkerError

_TICK = 0.02

_REMEDIES = (  # the first that fits
    ("shared memory segment", "shared memory is short: end other servers, or allow the container more (--shm-size)"),
    ("No space left on device", "the disk is full: make room (a new folder takes about 60 MB) and start again"),
    ("could not bind", "the TCP port was taken meanwhile: start again"),
    ("parameter", "mend settings= and start again"),
    ("Permission denied", "choose a data_dir where this user may write"),
)


class EmbeddedPostgres:
    """A Postgres server in `data_dir` (default: `default_data_dir()`), shared by all who start the same folder.

    It runs from start() to stop() and at most as long as this process; other processes and other objects that started
    the same folder keep it running, and a process forked meanwhile counts as one of them. A server that is killed is
    started again by itself, on the same data and under the same DSN.

    As root, who may not run Postgres, the user `postgres` or else `nobody` runs it. Clients authenticate with a
    generated password, which the DSN names by its file. `fsync=False` is for tests: a crash of the machine may then
    cost the data. `settings` are lines of postgresql.conf. All who share a server must ask for the same.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        bin_dir: Path | None = None,
        fsync: bool = True,
        tcp: bool = False,
        settings: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
    ) -> None:
        homes.check_settings(settings or {})
        chosen = homes.default_data_dir() if data_dir is None else Path(data_dir).expanduser()
        self._home = Path(os.path.abspath(chosen))  # noqa: PTH100 - Path.absolute keeps `..`, resolve() would follow links
        self._bin_dir = bin_dir
        self._fsync = fsync
        self._tcp = tcp
        self._settings = homes.server_settings(settings or {}, fsync=fsync, tcp=tcp)
        self._start_timeout = start_timeout
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._owner_pid = 0
        self._dsn = ""

    @property
    def dsn(self) -> str:
        """The connection string; raises PgworkerError before start()."""
        if self._owner is None:
            raise PgworkerError("the embedded server is not started: call start() first")
        return self._dsn

    @property
    def log_file(self) -> Path:
        """The server's log; at 4 MiB it is moved to `server.log.1`."""
        return self._home / "server.log"

    def start(self) -> str:
        """Own the server, start it if it does not run, and give its DSN once it takes connections.

        Called again it makes sure that the server runs. Raises ConfigError when the folder, the binaries or the
        settings cannot work and PgworkerError when the server does not come up in time; nothing is owned then. Blocks:
        `start_timeout` bounds it.
        """
        with self._mutex:
            try:
                return self._start(time.monotonic() + self._start_timeout)
            except OSError as error:
                raise PgworkerError(f"no embedded server in {self._home}: {_with_remedy(str(error))}") from error

    def stop(self) -> None:
        """Give the server back; the last owner waits until it is down. Does nothing when not started or in a fork.

        Raises PgworkerError when the server does not end in time (it is being killed, a disk does not answer).
        """
        with self._mutex:
            owner, self._owner = self._owner, None
            if owner is None:
                return
            if self._owner_pid != os.getpid():
                os.close(owner)  # a forked child's copy: the lock is the parent's to give up
                return
            deadline = time.monotonic() + supervisor.LONGEST_STOP
            try:
                with homes.start_lock(self._home, deadline):
                    fcntl.flock(owner, fcntl.LOCK_UN)
                    self._wait_for_end(owner, deadline)
            finally:
                os.close(owner)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.stop()

    # --- starting ---------------------------------------------------------------------------------------------------

    def _start(self, deadline: float) -> str:
        account = server_account(self._home / "data")
        binaries = find_binaries(self._bin_dir, account)
        homes.prepare_home(self._home, account)
        with homes.start_lock(self._home, deadline):
            homes.check_major(self._home, binaries.major)
            owner = self._owner if self._owner is not None else self._become_owner(deadline)
            try:
                self._dsn = self._ensure_server(account, binaries, deadline)
            except BaseException:
                self._owner = None
                fcntl.flock(owner, fcntl.LOCK_UN)
                os.close(owner)
                raise
            self._owner, self._owner_pid = owner, os.getpid()
            return self._dsn

    def _become_owner(self, deadline: float) -> int:
        """Take a share; while a supervisor is on its way down it holds them all, so wait for its end."""
        owner = supervisor.open_lock(self._home / "owners.lock")
        try:
            homes.wait_for_lock(owner, fcntl.LOCK_SH, deadline, what=f"the server of {self._home} is still stopping")
        except BaseException:
            os.close(owner)
            raise
        return owner

    def _ensure_server(self, account: Account, binaries: Binaries, deadline: float) -> str:
        """Join the server that runs, or start one; from here on no supervisor can decide to stop, as we own a share."""
        while True:
            if homes.is_supervised(self._home):
                running = self._join(deadline)
                if running is not None:
                    return self._connection_string(running)
            else:
                self._launch(account, binaries, deadline)

    def _join(self, deadline: float) -> Postmaster | None:
        """Wait until the supervised server is ready; None when its supervisor ended instead."""
        while homes.is_supervised(self._home):
            found = supervisor.read_postmaster(self._home / "data")
            if found is not None and found.ready and supervisor.is_alive(found.pid):
                self._check_same_settings()
                return found
            if time.monotonic() > deadline:
                raise self._too_late()
            time.sleep(_TICK)
        return None

    def _check_same_settings(self) -> None:
        differing = homes.differing_settings(self._home, self._settings)
        if differing:
            raise ConfigError(
                f"the server of {self._home} runs already with other settings ({', '.join(differing)}): "
                "ask for the same, or stop its owners first"
            )

    def _launch(self, account: Account, binaries: Binaries, deadline: float) -> None:
        """Start a supervisor and wait for its answer."""
        homes.ensure_password(self._home)
        socket_dir = homes.socket_folder(self._home, account)
        plan = Plan(
            home=str(self._home),
            bin_dir=str(binaries.bin_dir),
            socket_dir=str(socket_dir),
            major=binaries.major,
            uid=account.user,
            gid=account.group,
            fsync=self._fsync,
        )
        port = homes.pick_port(self._home) if self._tcp else homes.SOCKET_PORT
        place = {"port": str(port), "unix_socket_directories": f'"{socket_dir}"'}
        homes.write_settings(self._home, account, self._settings | place)
        answer = self._run_supervisor(plan, deadline)
        if answer != supervisor.READY:
            raise PgworkerError(f"no embedded server in {self._home}: {_with_remedy(answer)}")

    def _run_supervisor(self, plan: Plan, deadline: float) -> str:
        """Start the program, which detaches itself, and read what it says until it hangs up."""
        command = [sys.executable, "-I", "-S", "-W", "ignore", str(Path(supervisor.__file__)), json.dumps(asdict(plan))]
        starter = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
            text=True,
            errors="replace",
        )
        with starter:
            try:
                answer = starter.communicate(timeout=max(0.0, deadline - time.monotonic()))[1]
            except subprocess.TimeoutExpired:
                raise self._too_late() from None
        return answer.strip().rpartition("\n")[2] or "its supervisor ended without a word"

    def _too_late(self) -> PgworkerError:
        return PgworkerError(
            f"the server of {self._home} was not ready within {self._start_timeout:g} s (crash recovery may take "
            f"longer: give a larger start_timeout): {last_line(self.log_file)}"
        )

    def _connection_string(self, running: Postmaster) -> str:
        return homes.connection_string(
            host="127.0.0.1" if self._tcp else running.socket_dir,
            port=str(running.port),
            user=supervisor.SUPERUSER,
            dbname="postgres",
            passfile=str(self._home / "pgpass"),
        )

    # --- stopping ---------------------------------------------------------------------------------------------------

    def _wait_for_end(self, share: int, deadline: float) -> None:
        """Wait until the supervisor is gone, unless others own the server too.

        The lock tells which: if all of it is free, the supervisor has not looked yet; if only a share is, another owner
        has one; if nothing is, the supervisor has begun to stop.
        """
        while homes.is_supervised(self._home):
            if not homes.try_lock(share, fcntl.LOCK_EX) and homes.try_lock(share, fcntl.LOCK_SH):
                return
            fcntl.flock(share, fcntl.LOCK_UN)
            if time.monotonic() > deadline:
                raise PgworkerError(f"the server of {self._home} does not end: {last_line(self.log_file)}")
            time.sleep(_TICK)


def last_line(log_file: Path) -> str:
    """Read the last line of a log; empty when there is none."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, log_file.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip()
    except OSError:
        return ""
    return lines.rpartition("\n")[2]


def _with_remedy(failure: str) -> str:
    """Put what to do before the server's own words, which end the message."""
    remedies = [remedy for sign, remedy in _REMEDIES if sign in failure]
    return f"{remedies[0]}: {failure}" if remedies else failure
