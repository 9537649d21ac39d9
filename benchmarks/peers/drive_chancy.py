"""chancy with its asyncio executor, as many jobs at once as it is quickest with, polling at once after each."""

# ruff: noqa: D102 - the methods are those of driving.Driver; handlers get what they get
from __future__ import annotations

import logging

from chancy import Chancy, Job, Queue, Worker
from chancy_jobs import noop, stamp
from driving import PAYLOAD, main

logging.disable(logging.INFO)

_CONCURRENCY = 500


def _jobs(count: int) -> list[Job]:
    return [noop.job.with_kwargs(payload=PAYLOAD) for _ in range(count)]


class ChancyDriver:
    """Its application and its worker."""

    def __init__(self, dsn: str) -> None:
        self._app = Chancy(dsn, min_connection_pool_size=4, max_connection_pool_size=16)

    async def prepare(self) -> None:
        async with self._app as app:
            await app.migrate()
            queue = Queue(
                "bench",
                concurrency=_CONCURRENCY,
                executor=Chancy.Executor.Async,
                polling_interval=1,
                eager_polling=True,
            )
            await app.declare(queue, upsert=True)
            await app.declare(
                Queue("default", executor=Chancy.Executor.Async)
            )  # else each worker starts processes for it

    async def open(self) -> None:
        await self._app.__aenter__()

    async def close(self) -> None:
        await self._app.__aexit__(None, None, None)

    async def put_many(self, jobs: int) -> None:
        async for _ in self._app.push_many(_jobs(jobs)):
            pass

    async def put(self) -> None:
        await self._app.push(noop.job.with_kwargs(payload=PAYLOAD))

    async def put_stamp(self, now: float) -> None:
        await self._app.push(stamp.job.with_kwargs(now=now))

    async def work(self) -> None:
        async with self._app as app, Worker(app, register_signal_handlers=False) as worker:
            await worker.wait_for_shutdown()


if __name__ == "__main__":
    main(ChancyDriver)
