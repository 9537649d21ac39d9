"""pgworker by the same commands as the others; its worker is run by its command line."""

# ruff: noqa: D102, ARG001 - the methods are those of driving.Driver; handlers get what they get
from __future__ import annotations

import os

from driving import PAYLOAD, main, note_noop, note_stamp
from psycopg import connect

from pgworker import App, Job, NewJob
from pgworker.cli import app as command
from pgworker.schema import migrate
from pgworker.tablemap import TableMap

_CONCURRENCY = 500
_PREFETCH = 1_000

app = App()


@app.kind("noop", concurrency=_CONCURRENCY, prefetch=_PREFETCH, facts="exceptional")
async def noop(job: Job[str]) -> None:
    """Do nothing."""
    note_noop()


@app.kind("stamp")
async def stamp(job: Job[float]) -> None:
    """Tell when it was enqueued."""
    note_stamp(job.payload)


class PgWorker:
    """An App as the producer."""

    def __init__(self, dsn: str) -> None:
        self._dsn = os.environ["PGWORKER_DSN"] = dsn

    async def prepare(self) -> None:
        with connect(self._dsn, autocommit=True) as connection:
            migrate(connection, TableMap())

    async def open(self) -> None:
        await app.__aenter__()

    async def close(self) -> None:
        await app.__aexit__(None, None, None)

    async def put_many(self, jobs: int) -> None:
        await app.enqueue_many("noop", [NewJob(PAYLOAD) for _ in range(jobs)])

    async def put(self) -> None:
        await app.enqueue("noop", PAYLOAD)

    async def put_stamp(self, now: float) -> None:
        await app.enqueue("stamp", now)

    async def work(self) -> None:
        raise NotImplementedError  # by the command line


def _work(dsn: str) -> None:
    os.environ["PGWORKER_DSN"] = dsn
    command(["run", "drive_pgworker:app", "--log-level", "warning"])


if __name__ == "__main__":
    main(PgWorker, _work)
