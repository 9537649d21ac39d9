"""Every error that pgworker raises on purpose.

PgworkerError
├── ConfigError            a setting, policy or registration that cannot work (also ValueError)
├── PayloadError           a value that may not be stored; names the path to it (also ValueError)
├── UnknownKind            a kind that this app neither handles nor declares (also LookupError)
├── AppNotFound            `module:attribute` does not lead to an App
├── AlreadyRunning         run() was called on a worker that runs
├── DatabaseUnavailable    no connection within the time allowed
└── SchemaError
    ├── SchemaMissing      `pgworker migrate` has not been run, or not to the end
    └── SchemaTooNew       a breaking migration of a newer pgworker has been applied
"""

from __future__ import annotations


class PgworkerError(Exception):
    """Base of all errors raised on purpose; its text says what to do next."""


class ConfigError(PgworkerError, ValueError):
    """A setting, policy or registration that cannot work."""


class PayloadError(PgworkerError, ValueError):
    """A payload or result that may not be stored; `path` leads to the offending value (`$.rows[3].name`)."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class UnknownKind(PgworkerError, LookupError):
    """A kind that this app neither handles nor declares."""


class AppNotFound(PgworkerError):
    """`module:attribute` does not lead to an App."""


class AlreadyRunning(PgworkerError):
    """run() was called on a worker that runs already."""


class DatabaseUnavailable(PgworkerError):
    """No connection could be had within the time allowed."""


class SchemaError(PgworkerError):
    """The database's schema and this release do not fit together."""


class SchemaMissing(SchemaError):
    """The schema is absent, or lacks a migration that this release needs."""


class SchemaTooNew(SchemaError):
    """A breaking migration of a newer release has been applied."""
