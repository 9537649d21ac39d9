"""Wrap the call of a handler: the first middleware is the outermost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import reduce
from typing import TypeAlias

from pgworker.job import Job
from pgworker.outcome import Result

Next: TypeAlias = Callable[[Sequence[Job[object]]], Awaitable[Sequence[Result]]]
Middleware: TypeAlias = Callable[[str, Sequence[Job[object]], Next], Awaitable[Sequence[Result]]]
"""`async def middleware(kind, jobs, call_next)`: one result a job, in order. It may change results and must await
call_next at most once; cancelling it means stop."""


def compose(kind: str, middleware: Sequence[Middleware], call: Next) -> Next:
    """The call with all middleware around it."""

    def wrap(inner: Next, outer: Middleware) -> Next:
        async def wrapped(jobs: Sequence[Job[object]]) -> Sequence[Result]:
            return await outer(kind, jobs, inner)

        return wrapped

    return reduce(wrap, reversed(middleware), call)
