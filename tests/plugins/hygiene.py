"""Async tests run without a mark; a test that leaves a thread running or a connection open has failed."""

from __future__ import annotations

import threading
import time
import weakref
from inspect import currentframe, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_GRACE_SECONDS: Final = 2.0  # for a thread that has been told to end and is at it
_STACK_DEPTH: Final = 12

made: weakref.WeakKeyDictionary[psycopg.BaseConnection[Any], str] = weakref.WeakKeyDictionary()
"""Every connection of this process that is still referred to, and where it was made."""


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


def let_stay(connection: psycopg.BaseConnection[Any]) -> None:
    """This connection outlives the test that made it, and is meant to."""
    made.pop(connection, None)


def _note_where_made(init: Callable[..., None]) -> Callable[..., None]:
    def noting(self: psycopg.BaseConnection[Any], *arguments: object) -> None:
        init(self, *arguments)
        caller = currentframe()
        made[self] = _stack(caller.f_back if caller else None)

    return noting


def _stack(frame: FrameType | None) -> str:
    """The callers, outermost last, but for what is installed."""
    lines: list[str] = []
    while frame is not None and len(lines) < _STACK_DEPTH:
        if "site-packages" not in frame.f_code.co_filename:
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return "\n  ".join(lines)


psycopg.BaseConnection.__init__ = _note_where_made(psycopg.BaseConnection.__init__)  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _no_leaked_connections() -> Iterator[None]:
    """Those of pools are left out: a pool closes them, or says that it cannot."""
    before = set(made)
    yield
    open_ = [each for each in list(made) if each not in before and not each.closed and not hasattr(each, "_pool")]
    if open_:
        pytest.fail("connections left open, made at:\n  " + "\n".join(f"{each!r}\n  {made[each]}" for each in open_))
