"""pgqueuer over asyncpg, with batches of 500 at both ends."""

# ruff: noqa: D102, ARG001 - the methods are those of driving.Driver; handlers get what they get
from __future__ import annotations

import json
import logging
import shlex

import asyncpg
from driving import PAYLOAD, main, note_noop, note_stamp
from pgqueuer.db import AsyncpgDriver, AsyncpgPoolDriver
from pgqueuer.models import Job
from pgqueuer.qm import QueueManager
from pgqueuer.queries import Queries

logging.disable(logging.INFO)

_BATCH = 500
_JSON = json.dumps(PAYLOAD).encode()


class PgQueuer:
    """Its Queries over a pool as the producer, its QueueManager over a connection as the worker."""

    def __init__(self, dsn: str) -> None:
        given = dict(part.split("=", 1) for part in shlex.split(dsn))
        given["database"] = given.pop("dbname")
        self._place = given  # asyncpg reads no DSN but a URL, which a socket's folder does not fit into

    async def prepare(self) -> None:
        connection = await asyncpg.connect(**self._place)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    async def open(self) -> None:
        self._pool = await asyncpg.create_pool(**self._place, min_size=16, max_size=16)
        self._queries = Queries(AsyncpgPoolDriver(self._pool))

    async def close(self) -> None:
        await self._pool.close()

    async def put_many(self, jobs: int) -> None:
        await self._queries.enqueue(["noop"] * jobs, [_JSON] * jobs, [0] * jobs)

    async def put(self) -> None:
        await self._queries.enqueue("noop", _JSON)

    async def put_stamp(self, now: float) -> None:
        await self._queries.enqueue("stamp", str(now).encode())

    async def work(self) -> None:
        pool = await asyncpg.create_pool(**self._place, min_size=4, max_size=4)
        manager = QueueManager(Queries(AsyncpgPoolDriver(pool)))

        @manager.entrypoint("noop")
        async def noop(job: Job) -> None:
            note_noop()

        @manager.entrypoint("stamp")
        async def stamp(job: Job) -> None:
            note_stamp(float(job.payload or b"0"))

        await manager.run(batch_size=_BATCH)


main(PgQueuer)
