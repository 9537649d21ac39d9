"""pgworker by the same commands, so that its row is made as the others' are."""

# ruff: noqa: D102, ARG001 - the methods are those of driving.Driver; handlers get what they get
from __future__ import annotations

from driving import PAYLOAD, main, note_noop, note_stamp
from psycopg import connect

from pgworker import App, Job, NewJob
from pgworker.schema import migrate
from pgworker.tablemap import TableMap

_CONCURRENCY = 500
_PREFETCH = 1_000


class PgWorker:
    """An App with the two kinds."""

    def __init__(self, dsn: str) -> None:
        self._app = App(dsn)

        @self._app.kind("noop", concurrency=_CONCURRENCY, prefetch=_PREFETCH, facts="exceptional")
        async def noop(job: Job[str]) -> None:
            note_noop()

        @self._app.kind("stamp")
        async def stamp(job: Job[float]) -> None:
            note_stamp(job.payload)

    async def prepare(self) -> None:
        with connect(self._app.settings.dsn, autocommit=True) as connection:
            migrate(connection, TableMap())

    async def open(self) -> None:
        await self._app.__aenter__()

    async def close(self) -> None:
        await self._app.__aexit__(None, None, None)

    async def put_many(self, jobs: int) -> None:
        await self._app.enqueue_many("noop", [NewJob(PAYLOAD) for _ in range(jobs)])

    async def put(self) -> None:
        await self._app.enqueue("noop", PAYLOAD)

    async def put_stamp(self, now: float) -> None:
        await self._app.enqueue("stamp", now)

    async def work(self) -> None:
        async with self._app:
            await self._app.run()


main(PgWorker)
