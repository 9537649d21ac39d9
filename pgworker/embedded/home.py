"""The folder of one embedded server: whose it is, its locks, its password and its settings.

start.lock        exclusive while a process starts or stops the server; made first, so it marks the folder as ours
owners.lock       shared by each owner; the supervisor waits for it exclusively and keeps it until the server is down
supervisor.lock   exclusive while a supervisor lives
pgpass            the generated password, 0600, in libpq's own format, so that a DSN can point to it
server.conf       our settings, after the server's own postgresql.conf
server.log        and server.log.1
data/             the server's data folder, 0700, of the server's user
run/              its socket, unless the path is too long for one
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from pathlib import Path

from pgworker.embedded.account import Account
from pgworker.embedded.binaries import SYSTEM_CACHE, make_folders
from pgworker.embedded.supervisor import open_lock
from pgworker.errors import ConfigError, PgworkerError

MARK = "start.lock"
SOCKET_PORT = 5432  # only names the socket; nothing listens on it unless TCP was asked for

# macOS has room for 103 bytes and the final NUL, Linux for four more.
_LONGEST_SOCKET_PATH = 103
_LONGEST_SOCKET_NAME = len("/.s.PGSQL.65535")
_TICK = 0.02

_PLACE_AND_LOG = (
    "listen_addresses port unix_socket_directories unix_socket_permissions log_destination logging_collector"
)
_FILES = "config_file data_directory external_pid_file hba_file"
_OURS = frozenset(f"fsync {_PLACE_AND_LOG} {_FILES}".split())
_PLACE = ("port", "unix_socket_directories")


def default_data_dir() -> Path:
    """Name the folder used when none is given: in the user's cache folder, or for root under /var/cache."""
    if os.geteuid() == 0:
        return SYSTEM_CACHE / "embedded"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pgworker" / "embedded"
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "pgworker" / "embedded"


# --- the folder -----------------------------------------------------------------------------------------------------


def prepare_home(home: Path, account: Account) -> None:
    """Make the folder, or adopt an empty one; check that it is ours and that the server's user gets there.

    Only the folder itself is given permissions (0700, or as root 0710 for the server's group); its parents never are.
    Raises ConfigError when it is somebody else's, holds something else, or is out of the server's reach.
    """
    if account.switch:
        _check_reach(home, account)
        make_folders(home.parent)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    empty = not any(home.iterdir())  # asked first: another process may be adopting it, and makes its mark last
    owner = home.stat().st_uid
    if owner != os.geteuid() and not (empty and owner == account.uid):
        raise ConfigError(
            f"{home} belongs to another user (uid {owner}): start as that user or choose another data_dir"
        )
    if not empty and not (home / MARK).exists():
        raise ConfigError(f"{home} is not empty and was not made by pgworker: choose another data_dir")
    _own(home, account, 0o710 if account.switch else 0o700)
    os.close(open_lock(home / MARK))


def _check_reach(home: Path, account: Account) -> None:
    """Refuse a place out of the server's reach before anything is made there."""
    above = next(folder for folder in home.parents if folder.is_dir())
    if not account.can_enter(above):
        raise ConfigError(
            f"the server's user {account.name!r} cannot enter {above}, which is closed to it: "
            f"choose a data_dir elsewhere, such as {SYSTEM_CACHE / home.name}"
        )


def _own(path: Path, account: Account, mode: int) -> None:
    """Give a path of ours its owner and permissions: ours, with the server's group."""
    found = path.stat()
    if account.switch and (found.st_uid, found.st_gid) != (os.geteuid(), account.gid):
        os.chown(path, os.geteuid(), account.gid, follow_symlinks=False)
    if stat.S_IMODE(found.st_mode) != mode:
        path.chmod(mode)


# --- locks ----------------------------------------------------------------------------------------------------------


def try_lock(fd: int, operation: int) -> bool:
    """Take a lock if it is free."""
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(fd: int, operation: int, deadline: float, *, what: str) -> None:
    """Take a lock before the deadline (of the monotonic clock), else raise PgworkerError."""
    while not try_lock(fd, operation):
        if time.monotonic() > deadline:
            raise PgworkerError(f"{what}: given up waiting, try again later or with a larger start_timeout")
        time.sleep(_TICK)


@contextlib.contextmanager
def start_lock(home: Path, deadline: float) -> Generator[None, None, None]:
    """Be the only one who starts or stops this folder's server; a process that is killed loses the lock at once."""
    fd = open_lock(home / MARK)
    try:
        wait_for_lock(fd, fcntl.LOCK_EX, deadline, what=f"another process starts or stops the server of {home}")
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
        os.close(fd)


def is_supervised(home: Path) -> bool:
    """Tell whether a supervisor lives."""
    fd = open_lock(home / "supervisor.lock")
    try:
        return not try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


# --- what the server is started with ----------------------------------------------------------------------------------


def ensure_password(home: Path) -> Path:
    """Make the password file if there is none; raise when only the password of existing data is gone."""
    path = home / "pgpass"
    if path.exists():
        return path
    if (home / "data").exists():
        raise PgworkerError(
            f"{path} is gone, and with it the password of the data beside it: put it back, or remove {home}"
        )
    _write(path, f"*:*:*:postgres:{secrets.token_hex(24)}\n", 0o600)
    return path


def check_major(home: Path, major: int) -> None:
    """Refuse data of another major release."""
    try:
        made_by = (home / "data" / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        return
    if made_by != str(major):
        raise ConfigError(
            f"the data in {home} was made by PostgreSQL {made_by}, these binaries are {major}: give bin_dir= the "
            f"binaries of {made_by} (and pg_dump there what you want to keep), or choose another data_dir"
        )


def socket_folder(home: Path, account: Account) -> Path:
    """Make the socket's folder, private to the server's user: inside the home, or a short one in /tmp.

    The place stays the same from one start to the next, so that a connection string outlives a killed server.
    """
    inside = home / "run"
    folder = inside if _fits_socket(inside) else Path(_last_value(home, "unix_socket_directories").strip('"'))
    if not _is_private(folder, account):
        folder = Path(tempfile.mkdtemp(prefix="pgworker-", dir="/tmp"))  # short everywhere
    if account.switch:
        os.chown(folder, account.uid, account.gid, follow_symlinks=False)
    return folder


def _fits_socket(folder: Path) -> bool:
    """Tell whether a socket there has a legal name; a comma would part it in two, for the server as for clients."""
    return len(os.fsencode(folder)) + _LONGEST_SOCKET_NAME <= _LONGEST_SOCKET_PATH and not set(',"') & set(str(folder))


def _is_private(folder: Path, account: Account) -> bool:
    """Make a folder, or see that it is the server's own and closed to others."""
    if not folder.is_absolute():
        return False
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        private = stat.S_IMODE(found.st_mode) == 0o700  # noqa: PLR2004 - a mode is best read as it is written
        return stat.S_ISDIR(found.st_mode) and private and found.st_uid == account.uid
    except OSError:
        return False
    return True


def pick_port(home: Path) -> int:
    """Name the last TCP port if it is free now, else any that is."""
    last = _last_value(home, "port")
    for wanted in (int(last) if last.isdigit() and last != str(SOCKET_PORT) else 0, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Postgres does: old connections may linger
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
            return port
    raise PgworkerError("there is no free TCP port on 127.0.0.1")


def _last_value(home: Path, name: str) -> str:
    """Read a setting of the last start; empty when there was none."""
    try:
        text = (home / "server.conf").read_text()
    except FileNotFoundError:
        return ""
    found = re.search(rf"^{name} = '(.*)'$", text, re.MULTILINE)
    return found[1] if found else ""


def check_settings(settings: Mapping[str, str]) -> None:
    """Refuse settings that are not ours to pass on."""
    for name, value in settings.items():
        if name.lower() in _OURS:
            raise ConfigError(f"settings: {name} is set by EmbeddedPostgres itself (fsync= and tcp= are its options)")
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name) or re.search(r"[\n\r\0]", value):
            raise ConfigError(f"settings: {name!r} must be a setting's name, and its value a single line")


def server_settings(settings: Mapping[str, str], *, fsync: bool, tcp: bool) -> dict[str, str]:
    """A small server on one machine, then the caller's own settings; the place (port, socket) is not among them."""
    base = {
        "listen_addresses": "127.0.0.1" if tcp else "",
        "unix_socket_permissions": "0700",
        "shared_buffers": "32MB",
        "wal_level": "minimal",
        "max_wal_senders": "0",
        "min_wal_size": "32MB",
        "max_wal_size": "256MB",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_line_prefix": "%m [%p] ",
        "log_destination": "stderr",
        "logging_collector": "off",
        "fsync": "on" if fsync else "off",
    }
    unsafe = {} if fsync else {"synchronous_commit": "off", "full_page_writes": "off"}
    return base | unsafe | {name.lower(): value for name, value in settings.items()}


def write_settings(home: Path, account: Account, settings: Mapping[str, str]) -> None:
    """Write the file that the next server reads; only while none runs."""
    lines = [f"{name} = {_quoted(value)}" for name, value in settings.items()]
    text = "\n".join(("# Written at each start.", "include_if_exists = 'data/postgresql.conf'", *lines, ""))
    _write(home / "server.conf", text, 0o640 if account.switch else 0o600, group=account.group)


def differing_settings(home: Path, settings: Mapping[str, str]) -> list[str]:
    """Name the settings in which the running server differs from those wanted."""
    wanted = {f"{name} = {_quoted(value)}" for name, value in settings.items()}
    running = {
        line for line in (home / "server.conf").read_text().splitlines() if not line.startswith(("#", "include"))
    }
    names = {line.partition(" ")[0] for line in wanted ^ running}
    return sorted(names.difference(_PLACE))


def _quoted(value: str) -> str:
    """Quote a value the way both a settings file and a connection string understand it."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def connection_string(**parts: str) -> str:
    """Build libpq's keyword/value string."""
    return " ".join(f"{name}={_quoted(value)}" for name, value in parts.items())


def _write(path: Path, text: str, mode: int, *, group: int | None = None) -> None:
    """Write a whole file or none: under another name, to the disk, then renamed."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w") as file:
        if group is not None:
            os.fchown(fd, -1, group)
        os.fchmod(fd, mode)
        file.write(text)
        file.flush()
        os.fsync(fd)
    new.replace(path)
