"""Which system user runs the server: one's own, or as root (whom Postgres refuses) one that exists already."""

from __future__ import annotations

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pgworker.errors import ConfigError

_ROOT = 0


@dataclass(frozen=True, slots=True)
class Account:
    """The server's user; `switch` tells whether that is another than this process' own."""

    name: str
    uid: int
    gid: int
    switch: bool

    @property
    def user(self) -> int | None:
        """For subprocess: the user to change to."""
        return self.uid if self.switch else None

    @property
    def group(self) -> int | None:
        """For subprocess: the group to change to."""
        return self.gid if self.switch else None

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program as that user, with none of root's further groups; whatever its exit code is, it is told."""
        return subprocess.run(
            command,
            user=self.user,
            group=self.group,
            extra_groups=[] if self.switch else None,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    def can_enter(self, folder: Path) -> bool:
        """Try, as that user, whether a folder and all its parents let it in (permission bits alone do not tell)."""
        return self.run("/bin/sh", "-c", 'cd -- "$1"', "sh", str(folder)).returncode == 0


def server_account(data: Path) -> Account:
    """Find the user to run the server as: for root the owner of existing data, else a known one; never a new one."""
    if os.geteuid() != _ROOT:
        return Account(str(os.geteuid()), os.geteuid(), os.getegid(), switch=False)
    if data.is_dir() and (owner := data.stat()).st_uid != _ROOT:
        return Account(f"uid {owner.st_uid}", owner.st_uid, owner.st_gid, switch=True)
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != _ROOT:
            return Account(name, entry.pw_uid, entry.pw_gid, switch=True)
    raise ConfigError(
        "PostgreSQL does not run as root, and there is neither a user 'postgres' nor 'nobody': run as a plain user"
    )
