"""Run an `async def` handler in the worker's own event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from pgworker.executors.guest import Contained, is_stopping
from pgworker.executors.results import raised, returned
from pgworker.job import Job
from pgworker.kind import Kind
from pgworker.outcome import Released, Result


class InlineExecutor:
    """Awaits the handler here. Cancelling cancels the handler; one that goes on regardless keeps its slot."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def execute(self, kind: Kind, jobs: Sequence[Job[object]]) -> Sequence[Result]:
        """See Executor."""
        assert kind.handler is not None  # noqa: S101 - the runner refuses kinds without one
        contained = Contained(self._loop)
        try:
            try:
                answer = await kind.handler(list(jobs) if kind.batch else jobs[0])
            finally:
                if contained.is_struck:
                    await contained.mend()
            return returned(kind, answer, len(jobs))
        except asyncio.CancelledError as error:
            if is_stopping():
                raise
            return raised(kind, error, len(jobs))  # the handler's own doing, nobody asked it to stop
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)  # a Ctrl-C speaks to the process, whatever it struck: the worker stops
            return [Released()] * len(jobs)
        except BaseException as error:  # noqa: BLE001 - handlers may raise anything, SystemExit included
            return raised(kind, error, len(jobs))
