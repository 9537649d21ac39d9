"""Which files a folder has, and reading one of them. Links are never followed: nothing outside the folder is read."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from pgworker.errors import ConfigError

LARGEST: Final = 1024 * 1024
"""Bytes of the largest file that is indexed."""

VANISHED: Final = "vanished"
UNREADABLE: Final = "unreadable"
TOO_LARGE: Final = "too_large"

# What tools make and fetch, by the names that everybody uses for it.
_JUNK_FOLDERS: Final = frozenset(
    {
        ".git", ".hg", ".svn", ".jj", "node_modules", "site-packages", "dist-packages", "__pycache__", ".venv",
        ".cache", ".tox", ".nox", ".eggs", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".import_linter_cache",
        ".hypothesis", ".gradle", ".terraform",
    }
)  # fmt: skip
_JUNK_FILES: Final = frozenset({".DS_Store", "Thumbs.db"})
# And what says of itself that it is a cache, a virtual environment or a Postgres server's data.
_JUNK_MARKS: Final = frozenset({"CACHEDIR.TAG", "pyvenv.cfg", "PG_VERSION"})

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE: Final = (
    os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
)  # opening a FIFO or a terminal waits for nobody
_NO_FILE_NOW: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR})
_ESCAPE: Final = re.compile(rb"\\(?:\\|x([0-9a-f]{2}))")


class Refused(Exception):
    """A file that cannot be read, with a code that is safe to store."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Stamp(NamedTuple):
    """What changes when a file does, without a look inside."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder by their path in it, and the folders in it that could not be listed."""

    files: dict[str, Stamp] = field(default_factory=dict[str, Stamp])
    closed: list[str] = field(default_factory=list[str])

    def may_hold(self, path: str) -> bool:
        """Whether a file could be there unseen, in a folder that could not be listed."""
        return any(path.startswith(f"{folder}/") for folder in self.closed)


def default_folder() -> Path:
    """The source tree that this package is run from; else, as from a wheel, the current folder."""
    tree = Path(__file__).resolve().parents[2]
    return tree if (tree / "pyproject.toml").is_file() and (tree / "migrations").is_dir() else Path.cwd()


def real_folder(folder: Path) -> Path:
    """The path by which an index knows a folder. Raises ConfigError for what is none."""
    try:
        found = folder.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"there is no folder {folder}: name one that is there") from error
    if not found.is_dir():
        raise ConfigError(f"{folder} is not a folder: name the one that holds it")
    return found


def list_files(root: str) -> Listing:
    """The regular files in a folder and below, without what tools leave there. Raises OSError for the folder itself."""
    found = Listing()
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as listed:  # noqa: PTH118 - an empty second part is meant
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            if not folder:
                raise
            if error.errno not in _NO_FILE_NOW:
                found.closed.append(folder)
            continue
        if folder and not _JUNK_MARKS.isdisjoint(entry.name for entry in entries):
            continue
        prefix = f"{folder}/" if folder else ""
        waiting += [prefix + entry.name for entry in entries if _is_folder(entry)]
        found.files.update((prefix + entry.name, stamp) for entry in entries if (stamp := _stamp(entry)) is not None)
    return found


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.name not in _JUNK_FOLDERS and entry.is_dir(follow_symlinks=False)


def _stamp(entry: os.DirEntry[str]) -> Stamp | None:
    """None for what is no regular file, or is gone again."""
    if entry.name in _JUNK_FILES or not entry.is_file(follow_symlinks=False):
        return None
    try:
        return _stamped(entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return None


def stamp_of(root: str, path: str) -> Stamp | None:
    """The stamp of one file as it is now; None if it is there no more."""
    try:
        found = os.lstat(os.path.join(root, path))  # noqa: PTH118 - as in list_files
    except OSError:
        return None
    return _stamped(found) if stat.S_ISREG(found.st_mode) else None


def _stamped(found: os.stat_result) -> Stamp:
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def read_file(root: str, path: str) -> bytes:
    """The content of a file; raises Refused."""
    try:
        file = _open(root, path)
        with os.fdopen(file, "rb", buffering=0) as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise Refused(VANISHED)
            parts: list[bytes] = []
            left = LARGEST + 1
            while left > 0 and (part := opened.read(left)):
                parts.append(part)
                left -= len(part)
    except OSError as error:
        raise Refused(VANISHED if error.errno in _NO_FILE_NOW else UNREADABLE) from error
    if left <= 0:
        raise Refused(TOO_LARGE)
    return b"".join(parts)


def _open(root: str, path: str) -> int:
    """Open a file step by step, so that no part of its path can be a link by now."""
    *folders, name = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in (*folders, name)):
        raise Refused(UNREADABLE)
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in folders:
            below = os.open(folder, _FOLDER, dir_fd=at)
            os.close(at)
            at = below
        return os.open(name, _FILE, dir_fd=at)
    finally:
        os.close(at)


def content_revision(data: bytes) -> str:
    """The revision of a file with this content."""
    return hashlib.sha256(data).hexdigest()


def revision(root: str, path: str, stamp: Stamp) -> str | None:
    """The revision of a file as it is now; None if it is there no more.

    Of a file that cannot be read, it is what can be seen from outside: giving the permission changes that, too.
    """
    if stamp.size <= LARGEST:
        try:
            return content_revision(read_file(root, path))
        except Refused as refused:
            if refused.code == VANISHED:
                return None
    return f"outside:{stamp.size}:{stamp.mtime_ns}:{stamp.ctime_ns}"


def to_text(path: str) -> str:
    r"""A path as a text that any database takes: a byte that is no UTF-8 becomes `\xff`, and a backslash two."""
    return os.fsencode(path).replace(b"\\", rb"\\").decode("utf-8", "backslashreplace")


def from_text(text: str) -> str:
    """The path that to_text was given."""
    return os.fsdecode(
        _ESCAPE.sub(lambda found: bytes.fromhex(found[1].decode()) if found[1] else b"\\", text.encode())
    )
