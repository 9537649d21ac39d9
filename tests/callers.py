"""Callers with a connection of each package that `conn=` takes, all spoken to in one way.

Their methods are coroutines. Those of synchronous callers never wait for anything, so `run` needs no event loop for
them: Django refuses to work in one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import cache
from typing import Any, ClassVar, Final, Self, TypeVar

import asyncpg
import django
import psycopg
import sqlalchemy as sa
from django.conf import settings as django_settings
from django.db import connections, transaction
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pgworker import App, Enqueued

T = TypeVar("T")


class Undo(Exception):
    """Ends a transaction or a savepoint with a rollback."""


@cache
def parts(dsn: str, *, database: str = "dbname") -> dict[str, Any]:
    """The DSN as keywords for drivers that read no password files; asyncpg calls the database otherwise."""
    with psycopg.connect(dsn) as connection:
        info = connection.info
        found = {"host": info.host, "port": info.port, "user": info.user, "password": info.password}
        return {**found, database: info.dbname}


class Caller(ABC):
    """Somebody with a connection; `async with` opens and closes it."""

    asynchronous: ClassVar[bool] = True
    package: ClassVar[str]
    """Whose errors it gets."""
    exact: ClassVar[bool] = False
    """Whether no hint is sent for what a savepoint has undone."""

    def __init__(self, app: App, dsn: str) -> None:
        self.app = app
        self.dsn = dsn
        self.conn: Any = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        self.conn = await self.open(self._stack)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @abstractmethod
    async def open(self, stack: AsyncExitStack) -> Any:
        """Connect; the stack closes it."""

    @abstractmethod
    async def execute(self, sql: str) -> None: ...

    @abstractmethod
    def begin(self) -> AbstractAsyncContextManager[None]:
        """A transaction, as the package has it."""

    @abstractmethod
    def begin_nested(self) -> AbstractAsyncContextManager[None]:
        """A savepoint, as the package has it."""

    async def enqueue(self, *args: Any, **options: Any) -> Enqueued:
        done: Any = self._door.enqueue(*args, **options, conn=self.conn)
        return (await done) if self.asynchronous else done  # type: ignore[no-any-return]

    async def enqueue_many(self, *args: Any, **options: Any) -> list[Enqueued]:
        done: Any = self._door.enqueue_many(*args, **options, conn=self.conn)
        return (await done) if self.asynchronous else done  # type: ignore[no-any-return]

    async def notify(self, kind: str) -> None:
        done: Any = self._door.notify(kind, conn=self.conn)
        if self.asynchronous:
            await done

    @property
    def _door(self) -> Any:
        return self.app if self.asynchronous else self.app.sync

    # --- what each test says ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def undone(self, block: Callable[[], AbstractAsyncContextManager[None]]) -> AsyncGenerator[None, None]:
        """A transaction or savepoint that is rolled back."""
        with suppress(Undo):
            async with block():
                yield
                raise Undo


def run(caller: Caller, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Open the caller, do the work, close; in an event loop if there is something to be awaited."""

    async def opened() -> T:
        async with caller:
            return await work()

    if caller.asynchronous:
        return asyncio.run(opened())
    try:
        opened().send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError(f"{type(caller).__name__} waited for something")


# --- psycopg --------------------------------------------------------------------------------------------------------


class Psycopg(Caller):
    package = "psycopg"

    async def open(self, stack: AsyncExitStack) -> Any:
        return await stack.enter_async_context(await psycopg.AsyncConnection.connect(self.dsn))

    async def execute(self, sql: str) -> None:
        await self.conn.execute(sql)

    @asynccontextmanager
    async def begin(self) -> AsyncGenerator[None, None]:
        async with self.conn.transaction():
            yield

    begin_nested = begin


class SyncPsycopg(Caller):
    asynchronous = False
    package = "psycopg"

    async def open(self, stack: AsyncExitStack) -> Any:
        return stack.enter_context(psycopg.connect(self.dsn))

    async def execute(self, sql: str) -> None:
        self.conn.execute(sql)

    @asynccontextmanager
    async def begin(self) -> AsyncGenerator[None, None]:
        with self.conn.transaction():
            yield

    begin_nested = begin


# --- asyncpg --------------------------------------------------------------------------------------------------------


class Asyncpg(Caller):
    package = "asyncpg"

    async def open(self, stack: AsyncExitStack) -> Any:
        connection: Any = await asyncpg.connect(**parts(self.dsn, database="database"), ssl=False)
        stack.push_async_callback(connection.close)
        return connection

    async def execute(self, sql: str) -> None:
        await self.conn.execute(sql)

    @asynccontextmanager
    async def begin(self) -> AsyncGenerator[None, None]:
        async with self.conn.transaction():
            yield

    begin_nested = begin


class PooledAsyncpg(Asyncpg):
    async def open(self, stack: AsyncExitStack) -> Any:
        self.pool = await stack.enter_async_context(
            asyncpg.create_pool(**parts(self.dsn, database="database"), ssl=False, min_size=1, max_size=1)
        )
        return await stack.enter_async_context(self.pool.acquire())


# --- SQLAlchemy -----------------------------------------------------------------------------------------------------


class Alchemy(Caller):
    """A session."""

    asynchronous = False
    package = "sqlalchemy"
    driver: ClassVar[str] = "psycopg"

    def engine(self, stack: AsyncExitStack) -> sa.Engine:
        engine = sa.create_engine(f"postgresql+{self.driver}://", connect_args=parts(self.dsn), poolclass=sa.NullPool)
        stack.callback(engine.dispose)
        return engine

    async def open(self, stack: AsyncExitStack) -> Any:
        return stack.enter_context(Session(self.engine(stack)))

    async def execute(self, sql: str) -> None:
        self.conn.execute(sa.text(sql))

    @asynccontextmanager
    async def begin(self) -> AsyncGenerator[None, None]:
        with self.conn.begin():
            yield

    @asynccontextmanager
    async def begin_nested(self) -> AsyncGenerator[None, None]:
        with self.conn.begin_nested():
            yield


class AlchemyPsycopg2(Alchemy):
    driver = "psycopg2"


class AlchemyScoped(Alchemy):
    async def open(self, stack: AsyncExitStack) -> Any:
        scoped = scoped_session(sessionmaker(self.engine(stack)))
        stack.callback(scoped.remove)
        return scoped


class AlchemyConnection(Alchemy):
    async def open(self, stack: AsyncExitStack) -> Any:
        return stack.enter_context(self.engine(stack).connect())


class AlchemyConnectionPsycopg2(AlchemyConnection):
    driver = "psycopg2"


class AsyncAlchemy(Caller):
    """An asynchronous session."""

    package = "sqlalchemy"
    driver: ClassVar[str] = "psycopg"

    def engine(self, stack: AsyncExitStack) -> Any:
        options = (
            parts(self.dsn) if self.driver == "psycopg" else {**parts(self.dsn, database="database"), "ssl": False}
        )
        engine = create_async_engine(f"postgresql+{self.driver}://", connect_args=options, poolclass=sa.NullPool)
        stack.push_async_callback(engine.dispose)
        return engine

    async def open(self, stack: AsyncExitStack) -> Any:
        return await stack.enter_async_context(AsyncSession(self.engine(stack)))

    async def execute(self, sql: str) -> None:
        await self.conn.execute(sa.text(sql))

    @asynccontextmanager
    async def begin(self) -> AsyncGenerator[None, None]:
        async with self.conn.begin():
            yield

    @asynccontextmanager
    async def begin_nested(self) -> AsyncGenerator[None, None]:
        async with self.conn.begin_nested():
            yield


class AsyncAlchemyAsyncpg(AsyncAlchemy):
    driver = "asyncpg"


class AsyncAlchemyScoped(AsyncAlchemy):
    async def open(self, stack: AsyncExitStack) -> Any:
        scoped = async_scoped_session(async_sessionmaker(self.engine(stack)), asyncio.current_task)
        stack.push_async_callback(scoped.remove)
        return scoped


class AsyncAlchemyConnection(AsyncAlchemy):
    async def open(self, stack: AsyncExitStack) -> Any:
        connection: AsyncConnection = await stack.enter_async_context(self.engine(stack).connect())
        return connection


class AsyncAlchemyConnectionAsyncpg(AsyncAlchemyConnection):
    driver = "asyncpg"


# --- Django ---------------------------------------------------------------------------------------------------------


class Django(Caller):
    """What `django.db.connection` stands for."""

    asynchronous = False
    package = "django"
    exact = True
    alias: ClassVar[str] = "default"
    engine: ClassVar[str] = "django.db.backends.postgresql"

    async def open(self, stack: AsyncExitStack) -> Any:
        if not django_settings.configured:
            django_settings.configure(USE_TZ=True, LOGGING_CONFIG=None)
            django.setup()
        names = {name.upper(): value for name, value in parts(self.dsn, database="name").items()}
        connections.settings[self.alias] = connections.configure_settings(
            {self.alias: {"ENGINE": self.engine, **names}}
        )[self.alias]
        connection: Any = connections[self.alias]
        stack.callback(connections.__delitem__, self.alias)
        stack.callback(connection.close)
        return connection

    async def execute(self, sql: str) -> None:
        with self.conn.cursor() as cursor:
            cursor.execute(sql)

    @asynccontextmanager
    async def begin(self) -> AsyncGenerator[None, None]:
        with transaction.atomic(using=self.alias):
            yield

    begin_nested = begin


CALLERS: Final[tuple[type[Caller], ...]] = (
    Psycopg,
    SyncPsycopg,
    Asyncpg,
    PooledAsyncpg,
    Alchemy,
    AlchemyPsycopg2,
    AlchemyScoped,
    AlchemyConnection,
    AlchemyConnectionPsycopg2,
    AsyncAlchemy,
    AsyncAlchemyAsyncpg,
    AsyncAlchemyScoped,
    AsyncAlchemyConnection,
    AsyncAlchemyConnectionAsyncpg,
    Django,
)
