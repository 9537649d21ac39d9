"""The kind `index_file`: what its jobs carry, its handler, and the write that joins a completion."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from pgworker.app import App
from pgworker.db import SyncConnection
from pgworker.demo.files import TOO_LARGE, UNREADABLE, Refused, content_revision, from_text, read_file
from pgworker.demo.store import KIND, store_words
from pgworker.demo.text import BINARY, Indexed, decode
from pgworker.job import Job
from pgworker.outcome import Permanent, Retry
from pgworker.policy import Lease, Stop
from pgworker.retry import Backoff

CHANGED: Final = "changed"
"""The file is no longer what was enqueued: the next look at it enqueues what it is now."""
LASTING: Final = (BINARY, TOO_LARGE, UNREADABLE)
"""Codes that stand as long as the revision does: the same file would fail in the same way."""

BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The payload: a file's folder and its path in there, as texts (files.to_text)."""

    root: str
    path: str


def index_file(jobs: list[Job[SourceFile]]) -> list[dict[str, int] | Permanent | Retry]:
    """Read files and count their words. A `def`, as reading blocks: it runs in a thread, and its write does, too.

    The dicts are `Indexed`: what is stored as a result is the plain part, what `store` gets is the whole.
    """
    return [_index(job) for job in jobs]


def _index(job: Job[SourceFile]) -> dict[str, int] | Permanent | Retry:
    if job.cancelled:  # nobody will look at what comes of it
        return Retry()
    try:
        data = read_file(from_text(job.payload.root), from_text(job.payload.path))
    except Refused as refused:
        return Permanent(refused.code)
    if content_revision(data) != job.revision:
        return Retry(code=CHANGED)
    text = decode(data)
    return Permanent(BINARY) if text is None else Indexed(text)


def store(conn: SyncConnection, job: Job[SourceFile], found: Indexed) -> None:
    """Make the file searchable, in the transaction that completes its job."""
    store_words(conn, job.key, job.revision, found)


def make_app(dsn: str, *, schema: str | None = None, listen_dsn: str | None = None) -> App:
    """The demo's app. A claim waits 50 ms for a batch to fill; a killed run's jobs come back after six seconds."""
    app = App(dsn, schema=schema, listen_dsn=listen_dsn)
    app.kind(
        KIND,
        batch=BATCH,
        window=0.05,
        concurrency=4,
        max_attempts=3,
        backoff=Backoff(timedelta(seconds=0.5), timedelta(seconds=2)),
        lease=Lease.renew(timedelta(seconds=6)),
        stop=Stop("release"),
        apply=store,
    )(index_file)
    return app
