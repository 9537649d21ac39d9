"""oban (Python) with one wide queue; what it does in its event loop is batched by itself."""

# ruff: noqa: D102 - the methods are those of driving.Driver; handlers get what they get
from __future__ import annotations

import asyncio
import logging

from driving import PAYLOAD, main, note_noop, note_stamp
from oban import Job, Oban, worker
from oban.schema import install
from psycopg_pool import AsyncConnectionPool

logging.disable(logging.INFO)

_CONCURRENCY = 500
_CHUNK = 1_000


@worker(queue="bench")
class Noop:
    """Do nothing."""

    async def process(self, _job: Job) -> None:
        """Note that it has begun."""
        note_noop()


@worker(queue="bench")
class Stamp:
    """Tell how long it took."""

    async def process(self, job: Job) -> None:
        """Tell it."""
        note_stamp(job.args["now"])


class ObanDriver:
    """An instance without queues as the producer, one with a queue as the worker."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def _make_pool(self) -> AsyncConnectionPool:
        return AsyncConnectionPool(self._dsn, min_size=16, max_size=16, open=False)

    async def prepare(self) -> None:
        async with self._make_pool() as pool:
            await install(pool)

    async def open(self) -> None:
        self._pool = self._make_pool()
        await self._pool.open(wait=True)
        self._oban = Oban(pool=self._pool)
        await self._oban.start()

    async def close(self) -> None:
        await self._oban.stop()
        await self._pool.close()

    async def put_many(self, jobs: int) -> None:
        for first in range(0, jobs, _CHUNK):
            await self._oban.enqueue_many(Noop.new({"payload": PAYLOAD}) for _ in range(min(_CHUNK, jobs - first)))

    async def put(self) -> None:
        await self._oban.enqueue(Noop.new({"payload": PAYLOAD}))

    async def put_stamp(self, now: float) -> None:
        await self._oban.enqueue(Stamp.new({"now": now}))

    async def work(self) -> None:
        async with self._make_pool() as pool, Oban(pool=pool, queues={"bench": _CONCURRENCY}):
            await asyncio.Event().wait()


main(ObanDriver)
