"""The benchmarks' own Postgres: the embedded one in a temporary folder, with the settings of all figures."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pgworker.embedded import EmbeddedPostgres

# fsync and synchronous_commit stay on: a durable queue is what is measured.
SETTINGS: Final = {
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "max_connections": "100",
    "synchronous_commit": "on",
    "wal_level": "replica",
}


@contextmanager
def own_server() -> Generator[str, None, None]:
    """Run the server for as long as the context lasts, and give its DSN; nothing is left of it afterwards."""
    with tempfile.TemporaryDirectory(prefix="pgworker-bench-") as folder:
        # As root the server runs as another user, who must get through; what lies inside has permissions of its own.
        Path(folder).chmod(0o711)
        with EmbeddedPostgres(Path(folder) / "server", settings=SETTINGS) as server:
            yield server.dsn
