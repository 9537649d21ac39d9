"""The other queues: what is installed, and how the database says that a queue has nothing left to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

_OURS: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Peer:
    """One queue; its driver is drive_NAME.py."""

    name: str
    requirements: tuple[str, ...]
    """What pip is asked for, in an environment of its own."""
    left: str
    """A query that is true while there are jobs to do; one that has failed is never done, and stops the run."""
    slow: bool = False
    """Whether it gets a quarter of the jobs, so that a run comes to its end."""


PEERS: Final = (
    # with uvloop, which pgqueuer brings along
    Peer(
        "pgworker",
        ("--editable", f"{_OURS}[fast]"),
        "select exists (select from pgworker.jobs where state <> 'succeeded')",
    ),
    Peer(
        "procrastinate",
        ("procrastinate==3.10.*", "psycopg[binary]"),
        "select exists (select from procrastinate_jobs where status <> 'succeeded')",
        slow=True,
    ),
    Peer("pgqueuer", ("pgqueuer[asyncpg]==1.6.*",), "select exists (select from pgqueuer)"),
    Peer(
        "chancy",
        ("chancy==0.26.*", "psycopg[binary]"),
        "select exists (select from chancy_jobs where state <> 'succeeded')",
    ),
    Peer(
        "oban",
        ("oban==0.7.*", "psycopg[binary]"),
        "select exists (select from oban_jobs where state <> 'completed')",
    ),
)
