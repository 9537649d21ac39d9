"""Run a `def` handler in a thread."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.to_thread

from pgworker.executors.results import raised, returned
from pgworker.job import Job
from pgworker.kind import Kind
from pgworker.outcome import Result


class ThreadExecutor:
    """Runs the handler in one of as many threads as the kind has slots.

    A thread cannot be killed: cancelling sets each job's signal (`job.cancelled`), and the call keeps its slot until
    the handler returns.
    """

    def __init__(self, threads: int) -> None:
        self._limiter = anyio.CapacityLimiter(threads)

    async def execute(self, kind: Kind, jobs: Sequence[Job[object]]) -> Sequence[Result]:
        """See Executor."""
        results: Sequence[Result] = []

        async def run() -> None:
            nonlocal results
            results = await anyio.to_thread.run_sync(_call, kind, jobs, limiter=self._limiter)
            watch.cancel()

        async def tell_when_cancelled() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                if not results:
                    for job in jobs:
                        job.signal.set("timeout")  # unless the runner has named another cause already

        async with anyio.create_task_group() as group:
            watch = group.cancel_scope
            group.start_soon(tell_when_cancelled)
            group.start_soon(run)
        return results


def _call(kind: Kind, jobs: Sequence[Job[object]]) -> Sequence[Result]:
    assert kind.handler is not None  # noqa: S101 - the runner refuses kinds without one
    try:
        return returned(kind, kind.handler(list(jobs) if kind.batch else jobs[0]), len(jobs))
    except BaseException as error:  # noqa: BLE001 - handlers may raise anything, SystemExit included
        return raised(kind, error, len(jobs))
