"""Where a handler runs: one coroutine for each place, one contract. Executors decide nothing and use no database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pgworker.job import Job
from pgworker.kind import Kind
from pgworker.outcome import Result


class Executor(Protocol):
    """Calls a kind's handler."""

    async def execute(self, kind: Kind, jobs: Sequence[Job[object]]) -> Sequence[Result]:
        """One result a job, in order; whatever the handler raises becomes results. Cancelling it means stop."""
        ...
