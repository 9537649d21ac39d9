"""pgworker: a Postgres-native job runtime for Python. Transactional enqueue, fenced leases, no broker."""

from __future__ import annotations

from pgworker.app import App
from pgworker.errors import (
    AlreadyRunning,
    AppNotFound,
    ConfigError,
    DatabaseUnavailable,
    JobCancelled,
    JobFailed,
    PayloadError,
    PayloadPruned,
    PgworkerError,
    ResultGone,
    SchemaError,
    SchemaMissing,
    SchemaTooNew,
    Superseded,
    UnknownJob,
    UnknownKind,
)
from pgworker.job import Enqueued, Job, NewJob
from pgworker.operations import KindPause, Lag
from pgworker.outcome import Cancel, Park, Pause, Permanent, Retry
from pgworker.policy import Lease, Stop
from pgworker.retry import Backoff
from pgworker.tablequeue import TableQueue

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
    "JobCancelled",
    "JobFailed",
    "KindPause",
    "Lag",
    "Lease",
    "NewJob",
    "Park",
    "Pause",
    "PayloadError",
    "PayloadPruned",
    "Permanent",
    "PgworkerError",
    "ResultGone",
    "Retry",
    "SchemaError",
    "SchemaMissing",
    "SchemaTooNew",
    "Stop",
    "Superseded",
    "TableQueue",
    "UnknownJob",
    "UnknownKind",
]
