"""What a type checker lets through as `conn=`; read, never called, as tests/typing/test_front_door.py.

asyncpg and Django are not annotated: mypy takes their connections for anything, pyright for what their source says.
"""

from __future__ import annotations

import psycopg
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from pgworker import App

app = App("postgresql://localhost/app")


async def asynchronous(
    *,
    session: AsyncSession,
    scoped: async_scoped_session[AsyncSession],
    connection: AsyncConnection,
    engine: AsyncEngine,
    sync_session: Session,
    sync_connection: sqlalchemy.Connection,
) -> None:
    await app.enqueue("single", conn=session)
    await app.enqueue("single", conn=scoped)
    await app.enqueue_many("single", [], conn=connection)
    await app.notify("single", conn=session)

    await app.enqueue("single", conn=engine)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await app.enqueue("single", conn=sync_session)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await app.enqueue("single", conn=sync_connection)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def synchronous(
    *,
    session: Session,
    scoped: scoped_session[Session],
    connection: sqlalchemy.Connection,
    engine: sqlalchemy.Engine,
    async_session: AsyncSession,
    async_connection: AsyncConnection,
    async_psycopg: psycopg.AsyncConnection,
) -> None:
    app.sync.enqueue("single", conn=session)
    app.sync.enqueue("single", conn=scoped)
    app.sync.enqueue_many("single", [], conn=connection)
    app.sync.notify("single", conn=session)

    app.sync.enqueue("single", conn=engine)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    app.sync.enqueue("single", conn=async_session)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    app.sync.enqueue("single", conn=async_connection)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    app.sync.notify("single", conn=async_psycopg)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
