"""Where figures were measured: the machine, the versions, and the server's settings that they hang on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from pgworker.bench.app import CONCURRENCY, PAYLOAD
from pgworker.bench.arena import Arena

_SETTINGS: Final = (
    "fsync",
    "synchronous_commit",
    "wal_level",
    "full_page_writes",
    "shared_buffers",
    "max_wal_size",
    "wal_compression",
    "autovacuum",
    "max_connections",
)
_SETTING: Final = "select current_setting(%s, true)"
_FILLFACTOR: Final = "select array_to_string(reloptions, ', ') from pg_class where oid = %s::regclass"


def describe_machine() -> dict[str, object]:
    """The processor, the memory, the system."""
    kib = _field("/proc/meminfo", "MemTotal").split()
    return {
        "cores": cores(),
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "memory": f"{int(kib[0]) / 1024**2:.0f} GiB" if kib else "",
        "system": platform.system(),
    }


def cores() -> int:
    """How many of them this process may use."""
    return os.cpu_count() or 1


def describe_versions(arena: Arena) -> dict[str, str]:
    """Of what took part."""
    return {
        "pgworker": version("pgworker"),
        "python": platform.python_version(),
        "psycopg": version("psycopg"),
        "uvloop": _uvloop(),
        "postgresql": str(arena.value("show server_version")),
    }


def _uvloop() -> str:
    """The event loop of the workers, if it is not asyncio's own."""
    try:
        return version("uvloop")
    except PackageNotFoundError:
        return "none"


def describe_settings(arena: Arena) -> dict[str, str]:
    """Of the server, the table and the jobs: what the figures for WAL and for CPU hang on."""
    found = {name: str(arena.value(_SETTING, name)) for name in _SETTINGS}
    table = str(arena.value(_FILLFACTOR, arena.tables.qualified("jobs")))
    return found | {"jobs table": table, "payload bytes": str(len(PAYLOAD) + 2), "concurrency": str(CONCURRENCY)}


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
