"""Async tests run without a mark, and a test that leaves a thread running has failed."""

from __future__ import annotations

import threading
import time
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_GRACE_SECONDS: Final = 2.0  # for a thread that has been told to end and is at it


@pytest.hookimpl(tryfirst=True)  # before anyio's own hook, which looks for the mark
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Mark async tests for anyio, also those under hypothesis' @given."""
    if collector.istestfunction(obj, name):
        inner = getattr(getattr(obj, "hypothesis", None), "inner_test", obj)
        if iscoroutinefunction(inner):
            pytest.mark.anyio(obj)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asyncio: psycopg's async connections have no other."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _GRACE_SECONDS
    leaked = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in leaked:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = [thread.name for thread in leaked if thread.is_alive()]
    if alive:
        pytest.fail(f"threads left running: {', '.join(alive)}")
