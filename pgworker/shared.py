"""What the runners of one process have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pgworker.db import Database, SyncDatabase
from pgworker.events import Events
from pgworker.leases import LeaseKeeper
from pgworker.middleware import Middleware
from pgworker.polls import Polls
from pgworker.surveys import Surveys
from pgworker.tablemap import TableMap


@dataclass(frozen=True, slots=True)
class Shared:
    """One process's name, its databases, and those who want to know what happens."""

    name: str
    tables: TableMap
    database: Database
    apply_database: Database
    """For the app's own writes, which may take their time: they must not hold up the runtime's statements."""
    sync_apply_database: SyncDatabase
    surveys: Surveys
    polls: Polls
    leases: LeaseKeeper
    events: Events
    done: Callable[[str], None]
    """Tells other processes that jobs of a kind have ended, for those who wait for results; never waits itself."""
    middleware: Sequence[Middleware] = ()
