"""Fixtures: the worker's database, scratch databases, an administrator's connection, an App."""

from __future__ import annotations

import os
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from pgworker import App
    from pgworker.tablemap import TableMap
    from tests.databases import Connection, MakeDsn, WorkerDatabase
    from tests.handles import Hand

# Nothing of ours is imported before a test asks for it: unit tests start fast, and run without a server.


@pytest.fixture(scope="session")
def run_name() -> str:
    """A name for this process of this run, fit for databases and roles; several runs may share one server."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
    return f"pgworker_tests_{run[:10]}_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"


@pytest.fixture(scope="session")
def worker_database(server_dsn: str, run_name: str) -> Iterator[WorkerDatabase]:
    """The migrated database of this process."""
    from tests.databases import WorkerDatabase  # noqa: PLC0415

    database = WorkerDatabase(server_dsn, run_name, hostile_mode=os.environ.get("PGWORKER_TEST_HOSTILE") == "1")
    yield database
    database.close()


@pytest.fixture
def dsn(worker_database: WorkerDatabase) -> Iterator[str]:
    """The DSN of this process's database: our schema is in it, and not a row.

    A test may make tables, triggers and functions in it: they are dropped before the next one. One that alters what is
    ours has the database made anew, which takes 0.3 s. A session of ours that is left in an open transaction fails the
    test.
    """
    worker_database.reset()
    yield worker_database.dsn
    _refuse(worker_database.end_idle_transactions())


@pytest.fixture(scope="session")
def bare_database(server_dsn: str, run_name: str) -> Iterator[WorkerDatabase]:
    """A database of this process without our schema."""
    from tests.databases import WorkerDatabase  # noqa: PLC0415

    database = WorkerDatabase(server_dsn, f"{run_name}_bare", migrated=False)
    yield database
    database.close()


@pytest.fixture
def bare_dsn(bare_database: WorkerDatabase) -> Iterator[str]:
    """An owner's DSN of a database without anything, emptied sooner than `make_dsn` makes one. Never hostile."""
    bare_database.reset()
    yield bare_database.dsn
    idle = bare_database.end_idle_transactions()
    bare_database.end_sessions()
    _refuse(idle)


@pytest.fixture
def make_dsn(server_dsn: str, run_name: str) -> Iterator[MakeDsn]:
    """Make databases that are this test's alone: empty, or migrated. Never hostile."""
    from tests.databases import connect, end_idle_transactions, scratch  # noqa: PLC0415

    names: list[str] = []
    with ExitStack() as stack:

        def make(*, migrated: bool = False) -> str:
            names.append(f"{run_name}_{uuid.uuid4().hex[:8]}")
            return stack.enter_context(scratch(server_dsn, names[-1], migrated=migrated))

        yield make
        with connect(server_dsn) as connection:
            _refuse(end_idle_transactions(connection, names))


@pytest.fixture
def tables() -> TableMap:
    """How the database of `dsn` names our tables."""
    from tests.databases import TABLES  # noqa: PLC0415

    return TABLES


@pytest.fixture
def admin(dsn: str, worker_database: WorkerDatabase) -> Iterator[Connection]:
    """An autocommit connection of the owner to the database of `dsn`, for what only plain SQL can do or see."""
    from tests.databases import connect  # noqa: PLC0415

    assert dsn  # asked for so that the rows are gone before
    with connect(worker_database.admin_dsn) as connection:
        yield connection


@pytest.fixture
def hand(dsn: str) -> Iterator[Hand]:
    """Sends the runtime's statements by hand to the database of `dsn`."""
    from tests.handles import hand  # noqa: PLC0415

    handed = hand(dsn)
    yield handed
    handed.connection.close()


@pytest.fixture
async def app(anyio_backend: str, dsn: str) -> AsyncIterator[App]:
    """An App on the database of `dsn`, closed when the test ends."""
    from pgworker import App  # noqa: PLC0415

    assert anyio_backend  # asked for so that sync tests may use this fixture
    async with App(dsn) as app:
        yield app


def _refuse(idle: list[str]) -> None:
    if idle:
        pytest.fail(f"sessions of ours left idle in transaction: {'; '.join(idle)}")
