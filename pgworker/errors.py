"""Every error that pgworker raises on purpose, and the name of any other.

PgworkerError
├── ConfigError            a setting, policy or registration that cannot work (also ValueError)
├── PayloadError           a value that may not be stored; names the path to it (also ValueError)
├── UnknownKind            a kind that this app neither handles nor declares (also LookupError)
├── AppNotFound            `module:attribute` does not lead to an App
├── AlreadyRunning         run() was called on a worker that runs
├── DatabaseUnavailable    no connection within the time allowed
├── AboutJob
│   ├── UnknownJob         there is no job of this kind and key (also LookupError)
│   ├── Superseded         other work has taken the place of the job that was waited for
│   ├── JobFailed          the job that was waited for has failed
│   ├── JobCancelled       the job that was waited for has been cancelled
│   └── ResultGone         the job has succeeded, but its value is no longer kept
├── PayloadPruned          a job cannot run again: what it was to work on is no longer kept
└── SchemaError
    ├── SchemaMissing      `pgworker migrate` has not been run, or not to the end
    └── SchemaTooNew       a breaking migration of a newer pgworker has been applied
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast

_CLASS_NAME: Final = cast("Callable[[type], str]", type.__dict__["__name__"].__get__)


def class_name(value: object) -> str:
    """The name that its class was defined with: what a metaclass says instead may raise, or be no text at all."""
    return _CLASS_NAME(type(value))


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


class AboutJob(PgworkerError):
    """Says what became of one job: its names and its code, never more. Can be pickled."""

    def __init__(self, kind: str, key: str, *details: str | None) -> None:
        super().__init__(kind, key, *details)
        self.kind = kind
        self.key = key

    def __str__(self) -> str:
        return f"job {self.key!r} of kind {self.kind!r} {self._news()}"

    def _news(self) -> str:
        raise NotImplementedError  # each error below has its own


class UnknownJob(AboutJob, LookupError):
    """There is no job of this kind and key, or no longer."""

    def _news(self) -> str:
        return "does not exist: it was not enqueued, is not committed yet, or has been deleted"


class Superseded(AboutJob):
    """Other work has taken the place of the job that was waited for; `revision` is that work's, if it has one."""

    def __init__(self, kind: str, key: str, revision: str | None) -> None:
        super().__init__(kind, key, revision)
        self.revision = revision

    def _news(self) -> str:
        return "is other work now" + (f": revision {self.revision!r}" if self.revision else "")


class JobFailed(AboutJob):
    """The job has failed: `code` says why, `error_class` names the exception's class if there was one."""

    def __init__(self, kind: str, key: str, code: str | None, error_class: str | None = None) -> None:
        super().__init__(kind, key, code, error_class)
        self.code = code
        self.error_class = error_class

    def _news(self) -> str:
        return f"has failed: {self.code}" + (f" ({self.error_class})" if self.error_class else "")


class JobCancelled(AboutJob):
    """The job has been cancelled, by an operator or by its handler, whose reason is `code`."""

    def __init__(self, kind: str, key: str, code: str | None) -> None:
        super().__init__(kind, key, code)
        self.code = code

    def _news(self) -> str:
        return "has been cancelled" + (f": {self.code}" if self.code else "")


class ResultGone(AboutJob):
    """The job has succeeded with a value, which is no longer kept."""

    def _news(self) -> str:
        return "has succeeded, but its value is no longer kept"


class PayloadPruned(PgworkerError):
    """A job cannot run again: its payload is no longer kept. What else was asked for has been done."""


class SchemaError(PgworkerError):
    """The database's schema and this release do not fit together."""


class SchemaMissing(SchemaError):
    """The schema is absent, or lacks a migration that this release needs."""


class SchemaTooNew(SchemaError):
    """A breaking migration of a newer release has been applied."""
