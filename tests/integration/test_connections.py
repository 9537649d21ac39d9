"""Jobs in the transactions of every kind of connection that `conn=` takes, and their hints after the commit."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeAlias

import anyio.to_thread
import asyncpg
import psycopg
import psycopg2
import pytest
import sqlalchemy as sa
from django.db import connection as django_connection
from django.db import transaction
from django.db.utils import load_backend
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, declarative_base, scoped_session, sessionmaker

from pgworker import App, ConfigError, Job, NewJob, PgworkerError
from pgworker.events import JobSettled
from pgworker.tablemap import TableMap
from tests.callers import (
    CALLERS,
    Alchemy,
    AlchemyConnection,
    AlchemyConnectionPsycopg2,
    AsyncAlchemyConnection,
    AsyncAlchemyConnectionAsyncpg,
    Asyncpg,
    Caller,
    Django,
    PooledAsyncpg,
    parts,
    run,
)
from tests.handles import Recorder, row, running
from tests.integration.test_hints import Ears

Admin: TypeAlias = psycopg.Connection[Any]
DEEDS = "public.deeds"
"""The app's own table."""


@pytest.fixture
def app(dsn: str) -> Iterator[App]:
    """An app of which only its connections' owners know whether it is in an event loop."""
    app = App(dsn)
    for kind in ("work", "more", "mark"):
        app.declare(kind)
    yield app
    app.sync.close()


@pytest.fixture
def ears(dsn: str, tables: TableMap) -> Iterator[Ears]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield Ears(connection, tables.channel)


@pytest.fixture(params=CALLERS, ids=lambda kind: kind.__name__)
def caller(request: pytest.FixtureRequest, app: App, dsn: str, admin: Admin) -> Iterator[Caller]:
    admin.execute(f"create table {DEEDS} (name text); grant all on {DEEDS} to public")
    yield request.param(app, dsn)
    admin.execute(f"drop table {DEEDS}")  # so that the database need not be made anew


def there(admin: Admin) -> list[str]:
    """What others see: deeds and jobs."""
    found = admin.execute(f"select name from {DEEDS} union all select key from pgworker.jobs order by 1").fetchall()
    return [name for (name,) in found]


async def do(caller: Caller, name: str) -> None:
    """A deed, and the job that it makes necessary."""
    await caller.execute(f"insert into {DEEDS} values ('deed {name}')")
    assert (await caller.enqueue("work", key=f"job {name}")).created


def hints_up_to_now(caller: Caller, ears: Ears) -> list[str]:
    """The hints so far; the sender has turned to all that it was told of before."""
    caller.app._registry.hints.ready("mark")
    heard: list[str] = []
    while (payload := ears.hear_next().payload) != "r:mark":
        heard.append(payload)
    return heard


def last_hints(caller: Caller, ears: Ears) -> list[str]:
    """The hints so far, when no more can come: each transaction has ended, and each hint has been asked for."""
    caller.app._registry.hints.close(10)
    return ears.payloads_so_far()


# --- commit, rollback, savepoint ------------------------------------------------------------------------------------


@pytest.mark.contract("A7")
@pytest.mark.field("L36")
@pytest.mark.ruling("1.4", "1.41")
def test_a_job_and_its_hint_come_with_the_commit(caller: Caller, admin: Admin, ears: Ears) -> None:
    async def work() -> None:
        async with caller.begin():
            await do(caller, "a")
            await caller.notify("more")
            assert there(admin) == []
            assert hints_up_to_now(caller, ears) == []
        assert there(admin) == ["deed a", "job a"]
        assert {ears.hear_next().payload for _ in range(2)} == {"r:work", "r:more"}

    run(caller, work)


@pytest.mark.contract("A7")
@pytest.mark.field("L36")
@pytest.mark.ruling("1.4")
def test_neither_job_nor_hint_outlives_a_rollback(caller: Caller, admin: Admin, ears: Ears) -> None:
    async def work() -> None:
        async with caller.undone(caller.begin):
            await do(caller, "a")
            await caller.notify("more")
        assert there(admin) == []
        assert last_hints(caller, ears) == []
        async with caller.begin():
            await do(caller, "b")
        assert there(admin) == ["deed b", "job b"]

    run(caller, work)


@pytest.mark.contract("A7")
@pytest.mark.field("L36")
@pytest.mark.ruling("1.4")
def test_a_savepoint_takes_back_its_own_jobs_alone(caller: Caller, admin: Admin, ears: Ears) -> None:
    async def work() -> None:
        async with caller.begin():
            await do(caller, "a")
            async with caller.undone(caller.begin_nested):
                await do(caller, "b")
            async with caller.begin_nested():
                await do(caller, "c")
        assert there(admin) == ["deed a", "deed c", "job a", "job c"]
        assert ears.hear_next().payload == "r:work"

    run(caller, work)


@pytest.mark.ruling("1.4")
def test_work_that_a_savepoint_has_undone_gives_one_hint_at_most(caller: Caller, admin: Admin, ears: Ears) -> None:
    async def work() -> None:
        async with caller.begin():
            await caller.execute(f"insert into {DEEDS} values ('deed a')")
            async with caller.undone(caller.begin_nested):
                await do(caller, "b")
        assert there(admin) == ["deed a"]
        assert last_hints(caller, ears) == ([] if caller.exact else ["r:work"])

    run(caller, work)


@pytest.mark.contract("A9")
@pytest.mark.field("L36")
async def test_nothing_is_lost_with_a_process_that_dies_before_its_hints(dsn: str, admin: Admin, ears: Ears) -> None:
    script = """
        import os, signal, sys
        from pgworker import App
        from pgworker.hints import Hints
        from tests.callers import CALLERS, run

        Hints._tell = lambda *_: None  # as far as it never gets
        app = App(sys.argv[1])
        app.declare("work")
        for kind in CALLERS:
            caller = kind(app, sys.argv[1])

            async def work():
                async with caller.begin():
                    await caller.enqueue("work", key=kind.__name__)

            run(caller, work)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    async with App(dsn) as app:

        @app.kind("work")
        async def work(job: Job[None]) -> str:
            return job.key

        seen = Recorder(app)
        async with running(app.worker()):
            died = await anyio.to_thread.run_sync(run_script, script, dsn)
            await seen.count(JobSettled, len(CALLERS), within=20)
    assert died == -signal.SIGKILL
    assert {each.key for each in seen.of(JobSettled)} == {kind.__name__ for kind in CALLERS}
    assert not [hint for hint in ears.payloads_so_far() if hint.startswith("r:")]


def run_script(script: str, *arguments: str) -> int:
    """Run a script that may say nothing; its exit code."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout + done.stderr == ""
    return done.returncode


@pytest.mark.contract("A7")
@pytest.mark.field("L36")
def test_without_a_connection_the_job_is_there_at_once_and_its_hint_comes(dsn: str, admin: Admin, ears: Ears) -> None:
    async def work() -> None:
        async with App(dsn) as app:
            app.declare("work")
            for put in (await app.enqueue("work"), app.sync.enqueue("work")):
                assert row(admin, put.key)["state"] == "pending"
            app.sync.close()

    asyncio.run(work())
    assert set(ears.payloads_so_far()) == {"r:work"}


# --- what is sent ---------------------------------------------------------------------------------------------------

HOSTILE = "100 % %% %s %(keys)s {} {jobs} $1 ? :x ::text ' \" \\ \\' -- /* é \u2028 NULL {a,b}"


@pytest.mark.field("L36")
def test_every_text_and_option_comes_through(caller: Caller, admin: Admin) -> None:
    at = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    many = [
        NewJob({HOSTILE: [HOSTILE, None, 2**70, 0.1]}, HOSTILE, "r'%s", priority=-7, urgency="catch_up"),
        NewJob("at", "at", ready_at=at, max_attempts=3),
        NewJob(key="later", delay=timedelta(hours=2)),
    ]

    async def work() -> None:
        async with caller.begin():
            assert await caller.enqueue_many("work", []) == []
            put = await caller.enqueue_many("work", many)
            assert [(each.key, each.revision, each.status) for each in put] == [
                (HOSTILE, "r'%s", "created"),
                ("at", None, "created"),
                ("later", None, "created"),
            ]
        async with caller.begin():
            again = await caller.enqueue("work", key=HOSTILE, revision="r'%s", urgency="catch_up")
            kept = await caller.enqueue("work", key="at", if_pending="keep")
            assert (again.status, again.state, kept.status) == ("unchanged", "pending", "kept")

    run(caller, work)
    hostile = row(admin, HOSTILE)
    assert hostile["payload"] == {HOSTILE: [HOSTILE, None, 2**70, 0.1]}
    assert (hostile["revision"], hostile["priority"], hostile["class"]) == ("r'%s", -7, 1)
    assert (row(admin, "at")["ready_at"], row(admin, "at")["max_attempts"]) == (at, 3)
    assert row(admin, "later")["ready_at"] - row(admin, "later")["created_at"] >= timedelta(hours=2)


@pytest.mark.contract("A46")
def test_an_error_is_that_of_the_connection_and_quotes_no_payload(caller: Caller, dsn: str, admin: Admin) -> None:
    caller.app = App(dsn, schema="nowhere")
    caller.app.declare("work")

    async def work() -> None:
        async with caller.undone(caller.begin):
            with pytest.raises(Exception, match=r'relation "nowhere\.jobs" does not exist') as caught:
                await caller.enqueue("work", "sesame", key="k")
        assert type(caught.value).__module__.partition(".")[0] == caller.package
        assert "sesame" not in f"{caught.value} {caught.value!r}"
        async with caller.begin():
            await caller.execute(f"insert into {DEEDS} values ('deed a')")
        assert there(admin) == ["deed a"]

    run(caller, work)


# --- what cannot carry a statement ----------------------------------------------------------------------------------


@pytest.mark.ruling("2.23")
def test_a_failed_transaction_carries_nothing_until_it_is_rolled_back(caller: Caller, admin: Admin) -> None:
    async def work() -> None:
        async with caller.undone(caller.begin):
            with pytest.raises(Exception, match="division by zero"):
                await caller.execute("select 1/0")
            for _ in range(2):
                with pytest.raises(PgworkerError, match="has failed: roll it back"):
                    await caller.enqueue("work", key="never")
        async with caller.begin():
            await do(caller, "a")
        assert there(admin) == ["deed a", "job a"]

    run(caller, work)


@pytest.mark.ruling("2.23")
def test_nor_does_a_block_of_django_that_has_to_be_rolled_back(app: App, dsn: str) -> None:
    caller = Django(app, dsn)

    async def work() -> None:
        async with caller.undone(caller.begin):
            with suppress(KeyError), transaction.atomic(savepoint=False):
                raise KeyError
            with pytest.raises(PgworkerError, match="has failed: roll it back"):
                await caller.enqueue("work", key="never")
        assert (await caller.enqueue("work")).created

    run(caller, work)


@pytest.mark.ruling("2.23")
@pytest.mark.parametrize("kind", [Asyncpg, AlchemyConnection, AsyncAlchemyConnection])
def test_a_closed_connection_carries_nothing(kind: type[Caller], app: App, dsn: str) -> None:
    caller = kind(app, dsn)

    async def work() -> None:
        closing = caller.conn.close()
        if closing is not None:
            await closing
        with pytest.raises(PgworkerError, match="closed"):
            await caller.enqueue("work")

    run(caller, work)


@pytest.mark.ruling("2.23")
def test_nor_does_one_that_was_given_back_to_its_pool(app: App, dsn: str) -> None:
    caller = PooledAsyncpg(app, dsn)

    async def work() -> None:
        await caller.pool.release(caller.conn)
        with pytest.raises(PgworkerError, match="closed"):
            await caller.enqueue("work")

    run(caller, work)


@pytest.mark.ruling("2.23")
def test_a_session_whose_flush_has_failed_carries_nothing(app: App, dsn: str) -> None:
    base: Any = declarative_base()
    thing = type("Thing", (base,), {"__tablename__": "nowhere", "id": sa.Column(sa.Integer, primary_key=True)})
    engine = sa.create_engine("postgresql+psycopg://", connect_args=parts(dsn), poolclass=sa.NullPool)
    with Session(engine) as session:
        session.add(thing(id=1))
        with pytest.raises(sa.exc.ProgrammingError):
            session.flush()
        with pytest.raises(PgworkerError, match="has failed: roll it back"):
            app.sync.enqueue("work", conn=session)
        session.rollback()
        assert app.sync.enqueue("work", conn=session).created


@pytest.mark.ruling("2.23")
async def test_what_belongs_to_the_other_door_is_told_so(app: App, dsn: str) -> None:
    wrong: Any
    django = await Django(app, dsn).open(AsyncExitStack())
    engine = sa.create_engine("postgresql+psycopg://", connect_args=parts(dsn), poolclass=sa.NullPool)
    with engine.connect() as connection:
        for wrong in (Session(), scoped_session(sessionmaker()), connection, django, django_connection):
            with pytest.raises(TypeError, match=r"got (sqlalchemy|django)\..*; use app\.sync\.enqueue or \.notify for"):
                await app.enqueue("work", conn=wrong)
    pooled = PooledAsyncpg(app, dsn)
    async with pooled:
        session: Any = async_scoped_session(async_sessionmaker(), asyncio.current_task)
        for wrong in (AsyncSession(), session, pooled.conn):
            with pytest.raises(TypeError, match=r"got (sqlalchemy|asyncpg)\..*; use app\.enqueue or \.notify for it"):
                app.sync.notify("work", conn=wrong)
        await session.remove()


@pytest.mark.ruling("2.23")
async def test_what_only_has_connections_to_give_is_told_how(app: App, dsn: str) -> None:
    engine = sa.create_engine("postgresql+psycopg://")
    async_engine = create_async_engine("postgresql+asyncpg://")
    wrong: Any
    for wrong in (engine, sessionmaker(engine)):
        with pytest.raises(TypeError, match=r"got SQLAlchemy's .*: with \w+\.begin\(\) as "):
            app.sync.enqueue("work", conn=wrong)
    for wrong in (async_engine, async_sessionmaker(async_engine)):
        with pytest.raises(TypeError, match=r"got SQLAlchemy's .*: async with \w+\.begin\(\) as "):
            await app.enqueue("work", conn=wrong)
    with pytest.raises(TypeError, match=r"got asyncpg's pool of them: async with pool\.acquire\(\) as conn"):
        await app.enqueue("work", conn=asyncpg.create_pool())


@pytest.mark.ruling("2.23")
async def test_what_is_no_connection_at_all_is_refused(app: App, dsn: str) -> None:
    wrong: Any
    alone = psycopg2.connect(**parts(dsn))
    for wrong in (sa.text("select 1"), transaction.atomic(), asyncpg.Record, AsyncSession, alone):
        with pytest.raises(TypeError, match=r"psycopg\.Connection here, got .*SQLAlchemy's synchronous ones will do"):
            app.sync.enqueue("work", conn=wrong)
        with pytest.raises(
            TypeError, match=r"psycopg\.AsyncConnection here, got .*SQLAlchemy's asynchronous ones will"
        ):
            await app.enqueue("work", conn=wrong)
    alone.close()


def test_another_database_or_an_unknown_driver_is_refused(app: App) -> None:
    with (
        sa.create_engine("sqlite://").connect() as connection,
        pytest.raises(ConfigError, match=r"sqlite\+pysqlite: use"),
    ):
        app.sync.enqueue("work", conn=connection)
    with pytest.raises(ConfigError, match=r"Django's 'x', a sqlite database: jobs live in Postgres"):
        app.sync.enqueue("work", conn=load_backend("django.db.backends.sqlite3").DatabaseWrapper({}, "x"))


# --- ways of using them ---------------------------------------------------------------------------------------------


@pytest.mark.ruling("2.23")
def test_what_commits_by_itself_does_so(app: App, dsn: str, admin: Admin, ears: Ears) -> None:
    async def work(caller: Caller) -> None:
        put = await caller.enqueue("work")
        assert row(admin, put.key)["state"] == "pending"
        assert ears.hear_next().payload == "r:work"

    class Committing(Alchemy):
        def engine(self, stack: AsyncExitStack) -> sa.Engine:
            return super().engine(stack).execution_options(isolation_level="AUTOCOMMIT")

    for kind in (Asyncpg, Committing, Django):
        caller = kind(app, dsn)
        run(caller, partial(work, caller))


@pytest.mark.ruling("1.4")
def test_djangos_transactions_by_hand_have_their_hints_as_well(app: App, dsn: str, admin: Admin, ears: Ears) -> None:
    caller = Django(app, dsn)

    async def work() -> None:
        caller.conn.set_autocommit(False)
        undone = await caller.enqueue("work")
        caller.conn.rollback()
        kept = await caller.enqueue("work")
        assert hints_up_to_now(caller, ears) == []
        caller.conn.commit()
        assert [row(admin, kept.key)["state"]] == ["pending"]
        assert ears.hear_next().payload == "r:work"
        with pytest.raises(AssertionError, match="no job"):
            row(admin, undone.key)

    run(caller, work)


@pytest.mark.ruling("2.23")
@pytest.mark.parametrize(
    "kind",
    [AlchemyConnection, AlchemyConnectionPsycopg2, AsyncAlchemyConnection, AsyncAlchemyConnectionAsyncpg],
)
def test_a_connection_that_streams_its_reads_will_do(kind: type[Caller], app: App, dsn: str, admin: Admin) -> None:
    caller = kind(app, dsn)

    async def work() -> None:
        changed = caller.conn.execution_options(stream_results=True, yield_per=1, max_row_buffer=1)
        if caller.asynchronous:
            await changed
        async with caller.begin():
            put = await caller.enqueue_many("work", [NewJob(key=f"k{number}") for number in range(5)])
        assert [each.key for each in put] == ["k0", "k1", "k2", "k3", "k4"]

    run(caller, work)
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (5,)


def test_a_class_of_the_apps_own_is_known_by_its_bases(app: App, dsn: str) -> None:
    class OwnSession(Session):
        """As many apps have one."""

    engine = sa.create_engine("postgresql+psycopg://", connect_args=parts(dsn), poolclass=sa.NullPool)
    with OwnSession(engine) as session:
        assert app.sync.enqueue("work", conn=session).created
        session.rollback()


@pytest.mark.field("L36")
def test_djangos_psycopg2_and_sqlalchemy_without_greenlet(dsn: str, admin: Admin, ears: Ears) -> None:
    script = """
        import sys
        sys.modules["greenlet"] = None
        kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "psycopg"}
        sys.modules["psycopg"] = None  # else Django takes that, where it is installed
        import django.db.backends.postgresql.psycopg_any as chosen
        assert not chosen.is_psycopg3
        import django.db.backends.postgresql.base
        del sys.modules["psycopg"]

        import os
        import django, sqlalchemy
        from django.conf import settings
        from django.db import connection, transaction
        from sqlalchemy.orm import Session
        from pgworker import App

        host, port, user, password, name, dsn = sys.argv[1:]
        there = dict(HOST=host, PORT=port, USER=user, PASSWORD=password, NAME=name)
        database = dict(ENGINE="django.db.backends.postgresql", **there)
        settings.configure(USE_TZ=True, LOGGING_CONFIG=None, DATABASES={"default": database})
        django.setup()
        app = App(dsn)
        app.declare("work")
        with transaction.atomic():
            app.sync.enqueue("work", {"a": "100 % $1"}, key="django", conn=connection)
            try:
                with transaction.atomic():
                    app.sync.enqueue("work", key="undone", conn=connection)
                    raise KeyError
            except KeyError:
                pass
        assert "psycopg2" in type(connection.connection).__module__
        connection.close()
        arguments = dict(host=host, port=port, user=user, password=password, dbname=name)
        with Session(sqlalchemy.create_engine("postgresql+psycopg2://", connect_args=arguments)) as session:
            app.sync.enqueue("work", {"a": "100 % $1"}, key="alchemy", conn=session)
            session.commit()
        app.sync.close()
    """
    assert run_script(script, *map(str, parts(dsn).values()), dsn) == 0
    assert row(admin, "django")["payload"] == row(admin, "alchemy")["payload"] == {"a": "100 % $1"}
    assert admin.execute("select count(*) from pgworker.jobs").fetchone() == (2,)
    assert ears.hear_next().payload == "r:work"
