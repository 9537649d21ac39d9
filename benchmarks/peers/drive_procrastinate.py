"""procrastinate: one query a job at each end, so the concurrency is what counts: of 10, 30 and 100 at once."""

# ruff: noqa: D102, ARG001 - the methods are those of driving.Driver; handlers get what they get
from __future__ import annotations

import logging

import procrastinate
from driving import PAYLOAD, main, note_noop, note_stamp

logging.disable(logging.INFO)

_CONCURRENCY = 30


class Procrastinate:
    """Its App, with the asynchronous connector."""

    def __init__(self, dsn: str) -> None:
        connector = procrastinate.PsycopgConnector(conninfo=dsn, min_size=16, max_size=20)
        self.app = procrastinate.App(connector=connector)

        @self.app.task(name="noop")
        async def noop(payload: str) -> None:
            note_noop()

        @self.app.task(name="stamp")
        async def stamp(now: float) -> None:
            note_stamp(now)

        self._noop, self._stamp = noop, stamp

    async def prepare(self) -> None:
        async with self.app.open_async():
            await self.app.schema_manager.apply_schema_async()

    async def open(self) -> None:
        await self.app.open_async()

    async def close(self) -> None:
        await self.app.close_async()

    async def put_many(self, jobs: int) -> None:
        await self._noop.batch_defer_async(*({"payload": PAYLOAD} for _ in range(jobs)))

    async def put(self) -> None:
        await self._noop.defer_async(payload=PAYLOAD)

    async def put_stamp(self, now: float) -> None:
        await self._stamp.defer_async(now=now)

    async def work(self) -> None:
        async with self.app.open_async():
            await self.app.run_worker_async(concurrency=_CONCURRENCY, install_signal_handlers=False)


main(Procrastinate)
