"""pgworker: a Postgres-native job runtime for Python. Transactional enqueue, fenced leases, no broker."""

from __future__ import annotations

from pgworker.app import App
from pgworker.errors import (
    AlreadyRunning,
    AppNotFound,
    ConfigError,
    DatabaseUnavailable,
    PayloadError,
    PgworkerError,
    SchemaError,
    SchemaMissing,
    SchemaTooNew,
    UnknownKind,
)
from pgworker.job import Enqueued, Job, NewJob
from pgworker.outcome import Cancel, Park, Pause, Permanent, Retry
from pgworker.policy import Lease, Stop
from pgworker.retry import Backoff

__all__ = [
    "AlreadyRunning",
    "App",
    "AppNotFound",
    "Backoff",
    "Cancel",
    "ConfigError",
    "DatabaseUnavailable",
    "Enqueued",
    "Job",
    "Lease",
    "NewJob",
    "Park",
    "Pause",
    "PayloadError",
    "Permanent",
    "PgworkerError",
    "Retry",
    "SchemaError",
    "SchemaMissing",
    "SchemaTooNew",
    "Stop",
    "UnknownKind",
]
