"""What the kernel says of a process: CPU time, memory, and whether it is a Postgres backend. Linux only; else None."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc")
_USER, _SYSTEM = 11, 12  # fields of /proc/PID/stat after the command's name, counted from the state
_PARENT: Final = 1
_KIB: Final = 1024


class Stat(NamedTuple):
    """The part of /proc/PID/stat that is used here."""

    parent: int
    ticks: int
    """Of the processor, user and system, over all threads."""


class Memory(NamedTuple):
    """Resident bytes of a process."""

    now: int
    peak: int


def parse_stat(text: str) -> Stat:
    """Read /proc/PID/stat; a command's name may hold blanks and parentheses, so it ends at the last one."""
    fields = text.rpartition(")")[2].split()
    return Stat(int(fields[_PARENT]), int(fields[_USER]) + int(fields[_SYSTEM]))


def parse_status(text: str) -> Memory:
    """Read the two memory lines of /proc/PID/status."""
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return Memory(*(int(lines[name].split()[0]) * _KIB for name in ("VmRSS", "VmHWM")))


def cpu_seconds(pid: int) -> float | None:
    """The CPU time that a process has used so far; None when it is gone, or there is no /proc."""
    try:
        return parse_stat((_PROC / str(pid) / "stat").read_text()).ticks / os.sysconf("SC_CLK_TCK")
    except OSError:
        return None


def memory(pid: int) -> Memory | None:
    """The memory of a process; None when it is gone, or there is no /proc."""
    try:
        return parse_status((_PROC / str(pid) / "status").read_text())
    except (OSError, KeyError):
        return None


def is_backend(pid: int) -> bool:
    """Whether this is a Postgres process of this machine, seen from here under the number that the server knows."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().startswith(b"postgres:")
    except OSError:
        return False
