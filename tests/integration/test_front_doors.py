"""The front door's rules: which connections, options and names it takes, and how an app lives and ends."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Self, TypeAlias

import anyio
import anyio.to_thread
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row, namedtuple_row, scalar_row

from pgworker import App, ConfigError, Enqueued, Job, NewJob, PayloadError, PgworkerError, UnknownKind
from pgworker.config import conninfo
from pgworker.events import JobSettled
from tests.handles import Hand, Recorder, row, running

Admin: TypeAlias = psycopg.Connection[Any]
Door: TypeAlias = Callable[..., Any]
NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


@pytest.fixture
async def work(app: App) -> AsyncIterator[App]:
    """The app with the kind `work` declared; its synchronous door is closed as well."""
    app.declare("work")
    yield app
    app.sync.close()


def jobs(admin: Admin) -> int:
    found = admin.execute("select count(*) from pgworker.jobs").fetchone()
    assert found is not None
    return int(found[0])


# --- the caller's connection ----------------------------------------------------------------------------------------


@pytest.mark.ruling("2.23")
async def test_a_connection_at_the_wrong_door_is_told_the_right_one(work: App, dsn: str, admin: Admin) -> None:
    wrong: Any
    async with await psycopg.AsyncConnection.connect(dsn) as wrong:
        with pytest.raises(TypeError, match=r"psycopg\.Connection here.*AsyncConnection; use app\.enqueue "):
            work.sync.enqueue("work", conn=wrong)
    with psycopg.connect(dsn) as wrong, pytest.raises(TypeError, match=r"AsyncConnection here.*use app\.sync\.enqueue"):
        await work.enqueue("work", conn=wrong)
    for wrong in ("dsn", object(), work):
        with pytest.raises(TypeError, match=r"must be a psycopg\.AsyncConnection here, got (?!.*use app)"):
            await work.enqueue("work", conn=wrong)
        with pytest.raises(TypeError, match=r"must be a psycopg\.Connection here, got (?!.*use app)"):
            work.sync.enqueue("work", conn=wrong)
    assert jobs(admin) == 0


@pytest.mark.ruling("2.23")
async def test_a_closed_connection_is_refused(work: App, dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        pass
    with pytest.raises(PgworkerError, match="closed"):
        await work.enqueue("work", conn=conn)
    with psycopg.connect(dsn) as sync_conn:
        pass
    with pytest.raises(PgworkerError, match="closed"):
        work.sync.enqueue("work", conn=sync_conn)


@pytest.mark.ruling("2.23")
async def test_a_failed_transaction_is_refused_before_anything_is_sent(work: App, dsn: str, admin: Admin) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await conn.execute("select 1/0")
        with pytest.raises(PgworkerError, match="roll it back"):
            await work.enqueue("work", conn=conn)
        await conn.rollback()
        await work.enqueue("work", key="after", conn=conn)
    with psycopg.connect(dsn) as sync_conn:
        with pytest.raises(psycopg.errors.DivisionByZero):
            sync_conn.execute("select 1/0")
        with pytest.raises(PgworkerError, match="roll it back"):
            work.sync.enqueue("work", conn=sync_conn)
    assert jobs(admin) == 1


@pytest.mark.ruling("2.23")
async def test_an_autocommit_connection_commits_by_itself(work: App, dsn: str, admin: Admin) -> None:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await work.enqueue("work", conn=conn)
        assert jobs(admin) == 1
        async with conn.transaction(force_rollback=True):
            await work.enqueue("work", conn=conn)
        assert jobs(admin) == 1
    with psycopg.connect(dsn, autocommit=True) as sync_conn:
        work.sync.enqueue("work", conn=sync_conn)
        assert jobs(admin) == 2


@pytest.mark.field("L36")
@pytest.mark.ruling("2.23")
@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("row_factory", [dict_row, scalar_row, namedtuple_row])
@pytest.mark.parametrize(
    ("cursor", "sync_cursor"),
    [
        (psycopg.AsyncCursor, psycopg.Cursor),
        (psycopg.AsyncClientCursor, psycopg.ClientCursor),
        (psycopg.AsyncRawCursor, psycopg.RawCursor),
    ],
)
async def test_how_the_caller_uses_the_connection_does_not_matter(
    work: App, dsn: str, admin: Admin, *, cursor: Any, sync_cursor: Any, row_factory: Any, pipeline: bool
) -> None:
    payload = {"text": "100 % {} \\ ' $1 é"}
    async with await psycopg.AsyncConnection.connect(dsn, row_factory=row_factory, cursor_factory=cursor) as conn:
        put = await _enqueue_twice(work, conn, payload, pipeline=pipeline)
        assert (conn.row_factory, conn.cursor_factory) == (row_factory, cursor)
    made: Any = psycopg.connect(dsn, row_factory=row_factory, cursor_factory=sync_cursor)
    with made as sync_conn:
        if pipeline:
            with sync_conn.pipeline():
                put.append(work.sync.enqueue("work", payload, key="sync", conn=sync_conn))
        else:
            put.append(work.sync.enqueue("work", payload, key="sync", conn=sync_conn))
    assert [each.status for each in put] == ["created", "replaced", "created"]
    assert [row(admin, key)["payload"] for key in ("k", "sync")] == [payload] * 2


async def _enqueue_twice(app: App, conn: Any, payload: object, *, pipeline: bool) -> list[Enqueued]:
    if not pipeline:
        return [await app.enqueue("work", payload, key="k", conn=conn) for _ in range(2)]
    async with conn.pipeline():
        return [await app.enqueue("work", payload, key="k", conn=conn) for _ in range(2)]


@pytest.mark.ruling("2.23")
async def test_a_callers_isolation_level_is_its_own(work: App, dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        for level in ("serializable", "repeatable read", "read committed"):
            await conn.execute(f"set transaction isolation level {level}".encode())
            assert (await work.enqueue("work", key=level, conn=conn)).created
            found = await (await conn.execute("show transaction_isolation")).fetchone()
            assert found == (level,)
            await conn.execute("commit")


# --- kinds and options ----------------------------------------------------------------------------------------------


@pytest.mark.ruling("2.20")
async def test_a_kind_must_be_known_and_declaring_it_is_enough(dsn: str, admin: Admin) -> None:
    async with App(dsn) as app:
        for door in (app.sync.enqueue, app.sync.enqueue_many):
            with pytest.raises(UnknownKind, match=r"unknown kind 'other' .*app\.declare"):
                door("other", [])
        with pytest.raises(UnknownKind, match="known: none yet"):
            await app.enqueue("other")
        app.declare("work", payload=int)
        with pytest.raises(UnknownKind, match="known: work"):
            await app.enqueue_many("other", [])
        with pytest.raises(ConfigError, match="registered already"):
            app.declare("work")
        with pytest.raises(ConfigError, match="only declared here"):
            app.worker(["work"])
        with pytest.raises(PayloadError):
            await app.enqueue("work", "no int")
        assert jobs(admin) == 0
        await app.enqueue("work", 1, key="k")
    assert row(admin, "k")["payload"] == 1


async def test_many_are_answered_in_the_order_of_the_call(work: App, admin: Admin) -> None:
    await work.enqueue("work", 0, key="old", revision="r1")
    many = [NewJob(1, "z"), NewJob(2, "old", "r1"), NewJob(3), NewJob(4, "a"), NewJob(5, "old", "r2"), NewJob(6, "z")]
    put = await work.enqueue_many("work", many)
    assert [each.status for each in put] == ["replaced", "replaced", "created", "created", "replaced", "created"]
    assert [each.key for each in put] == ["z", "old", put[2].key, "a", "old", "z"]
    assert [each.revision for each in put] == [None, "r2", None, None, "r2", None]
    assert {each.state for each in put} == {"pending"}
    assert {each.kind for each in put} == {"work"}
    assert [each.created for each in put] == [False, False, True, True, False, True]
    assert jobs(admin) == 4


async def test_no_jobs_are_no_statement() -> None:
    app = App(NOWHERE)
    app.declare("work")
    assert await app.enqueue_many("work", []) == []
    assert app.sync.enqueue_many("work", []) == []
    await app.close()
    app.sync.close()


async def test_twenty_thousand_jobs_in_one_call(work: App, admin: Admin) -> None:
    put = await work.enqueue_many("work", [NewJob(index, f"k{index % 19_999}") for index in range(20_000)])
    assert [each.status for each in put] == ["replaced"] + ["created"] * 19_999
    assert [each.key for each in put[-2:]] == ["k19998", "k0"]
    assert jobs(admin) == 19_999
    assert row(admin, "k0")["payload"] == 19_999


async def test_all_jobs_of_a_call_are_put_or_none(app: App, admin: Admin) -> None:
    app.declare("work", payload=int)
    with pytest.raises(PayloadError, match=r"job 3 of 3"):
        await app.enqueue_many("work", [NewJob(1), NewJob(2), NewJob("three")])
    with pytest.raises(ConfigError, match=r"delay or ready_at, not both \(job 2 of 2\)"):
        await app.enqueue_many("work", [NewJob(1), NewJob(2, delay=timedelta(1), ready_at=datetime.now(UTC))])
    assert jobs(admin) == 0


AWARE = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.ruling("2.22")
@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"revision": "r"}, ConfigError, "give the key"),
        ({"delay": timedelta(1), "ready_at": AWARE}, ConfigError, "not both"),
        ({"delay": timedelta(seconds=-1)}, ConfigError, "not negative"),
        ({"ready_at": AWARE.replace(tzinfo=None)}, ConfigError, r"time zone.*datetime\.now\(UTC\)"),
        ({"urgency": "soon"}, ConfigError, "'fresh' or 'catch_up', got 'soon'"),
        ({"priority": 32_768}, ConfigError, "-32767 to 32767, got 32768"),
        ({"priority": -32_768}, ConfigError, "-32767 to 32767"),
        ({"max_attempts": 0}, ConfigError, "at least 1"),
        ({"if_pending": "drop"}, ConfigError, "'replace' or 'keep', got 'drop'"),
        ({"key": ""}, PayloadError, "key: takes 0 bytes, must take 1 to 512"),
        ({"key": "k" * 513}, PayloadError, "key: takes 513 bytes"),
        ({"key": "é" * 257}, PayloadError, "key: takes 514 bytes"),
        ({"key": "a\0b"}, PayloadError, r"key: contains U\+0000"),
        ({"key": "a\ud800"}, PayloadError, "key: contains a lone surrogate"),
        ({"key": 7}, PayloadError, "key: must be a str, is `int`"),
        ({"key": "k", "revision": ""}, PayloadError, "revision: takes 0 bytes"),
        ({"key": "k", "revision": "r" * 129}, PayloadError, "revision: takes 129 bytes, must take 1 to 128"),
        ({"key": "k", "revision": "\0"}, PayloadError, r"revision: contains U\+0000"),
    ],
    ids=repr,
)
async def test_options_that_cannot_be_are_refused_before_a_connection_is_made(
    options: dict[str, Any], error: type[Exception], says: str
) -> None:
    app = App(NOWHERE)
    app.declare("work")
    for _ in range(2):  # a wrong try leaves nothing behind that a second one would meet
        with pytest.raises(error, match=says):
            await app.enqueue("work", **options)
        with pytest.raises(error, match=says):
            app.sync.enqueue("work", **options)
    assert not app._doors
    assert not app.sync._databases


@pytest.mark.ruling("2.22")
async def test_the_longest_names_are_stored(work: App, admin: Admin) -> None:
    kind = "Kind_1.a:b-" + "k" * 52
    work.declare(kind)
    key, revision = "é" * 256, "é" * 64
    put = await work.enqueue(kind, key=key, revision=revision)
    assert (put.kind, put.key, put.revision) == (kind, key, revision)
    assert row(admin, key, kind=kind)["revision"] == revision


@pytest.mark.ruling("2.22")
@pytest.mark.parametrize("name", ["", "k" * 64, "with space", "ümlaut", "a/b", "a\n", "a\0"])
def test_a_kinds_name_is_of_a_small_alphabet(name: str) -> None:
    app = App(NOWHERE)
    with pytest.raises(ConfigError, match="not a usable name for a kind"):
        app.declare(name)
    with pytest.raises(ConfigError, match="not a usable name for a kind"):
        app.kind(name)(lambda job: None)


async def test_a_delay_counts_from_the_databases_clock_and_an_instant_is_kept(
    work: App, admin: Admin, hand: Hand
) -> None:
    instant = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    await work.enqueue("work", key="at", ready_at=instant.astimezone())
    await work.enqueue("work", key="past", ready_at=datetime(2001, 1, 1, tzinfo=UTC))
    await work.enqueue("work", key="later", delay=timedelta(hours=2), max_attempts=3)
    assert row(admin, "at")["ready_at"] == instant
    assert row(admin, "later")["max_attempts"] == 3
    waits = admin.execute(
        "select ready_at - created_at, clock_timestamp() - created_at < interval '1 minute'"
        " from pgworker.jobs where key = 'later'"
    ).fetchone()
    assert waits == (timedelta(hours=2, microseconds=1), True)
    assert [claim.key for claim in hand.claim(10)] == ["past"]


# --- the life of an app ---------------------------------------------------------------------------------------------


def run_script(dsn: str, script: str) -> str:
    """Run a script with the app made; it must end well and complain of nothing."""
    source = "import asyncio\nfrom pgworker import App\napp = App()\napp.declare('work')\n" + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        env={**os.environ, "PGWORKER_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.ruling("2.24")
@pytest.mark.parametrize(
    "script",
    [
        "asyncio.run(app.enqueue('work', key='a'))",
        "app.sync.enqueue('work', key='a')",
        "asyncio.run(app.enqueue('work'))\napp.sync.enqueue('work')\nasyncio.run(app.enqueue('work', key='a'))",
        "app.sync.enqueue('work', key='a')\ndel app",
        """
        async def main():
            await app.enqueue('work')
            async with app:
                await app.enqueue('work', key='a')
            await app.enqueue('work')
        asyncio.run(main())
        """,
        """
        import psycopg
        with psycopg.connect(app.settings.dsn) as conn:
            app.sync.enqueue('work', key='a', conn=conn)
        """,
    ],
    ids=["async", "sync", "both", "forgotten", "used after close", "only the caller's connection"],
)
def test_an_app_that_nobody_closed_ends_in_silence(dsn: str, admin: Admin, script: str) -> None:
    assert run_script(dsn, script) == ""
    assert row(admin, "a")["state"] == "pending"


@pytest.mark.ruling("2.24")
def test_one_loop_after_the_other_and_two_at_once(dsn: str, admin: Admin) -> None:
    script = """
    import threading
    async def main(key):
        for _ in range(3):
            await app.enqueue('work', key=key)
        await app.close()
    asyncio.run(main('first'))
    asyncio.run(main('second'))
    threads = [threading.Thread(target=asyncio.run, args=(main(f'thread {n}'),)) for n in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    """
    run_script(dsn, script)
    keys = admin.execute("select key from pgworker.jobs order by key").fetchall()
    assert keys == [("first",), ("second",), ("thread 0",), ("thread 1",)]


@pytest.mark.ruling("2.24")
def test_after_a_fork_parent_and_child_each_have_connections_of_their_own(dsn: str, admin: Admin) -> None:
    script = """
    import os, gc, psycopg, sys, warnings
    def backends():
        with psycopg.connect(app.settings.dsn) as conn:
            return {pid for pid, in conn.execute(
                "select pid from pg_stat_activity where application_name = 'pgworker enqueue'"
                " and datname = current_database()")} - others
    others = set()
    others = backends()  # of the tests before, whose sessions the server has not ended yet
    async def main():
        await app.enqueue('work', key='parent async')
        app.sync.enqueue('work', key='parent sync')
        before = backends()
        assert len(before) == 2, before
        warnings.simplefilter('ignore', DeprecationWarning)  # of forking beside threads, from Python 3.12 on
        child = os.fork()
        if child == 0:
            try:
                app.sync.enqueue('work', key='child sync')
                gc.collect()
                assert len(backends() - before) == 1
            except BaseException as error:
                print(f'child: {error!r}', file=sys.stderr)
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        await app.enqueue('work', key='parent async again')
        app.sync.enqueue('work', key='parent sync again')
        assert before <= backends(), 'the child has closed what was not its own'
        await app.close()
    asyncio.run(main())
    """
    run_script(dsn, script)
    keys = {key for (key,) in admin.execute("select key from pgworker.jobs")}
    assert keys == {"parent async", "parent sync", "child sync", "parent async again", "parent sync again"}


@pytest.mark.ruling("2.24")
def test_a_forked_child_may_run_a_loop_and_end_as_usual(dsn: str, admin: Admin) -> None:
    script = """
    import os, sys, warnings
    app.sync.enqueue('work', key='parent')
    asyncio.run(app.enqueue('work', key='parent async'))
    warnings.simplefilter('ignore', DeprecationWarning)
    child = os.fork()
    if child == 0:
        asyncio.run(app.enqueue('work', key='child'))
        app.sync.enqueue('work', key='child sync')
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    app.sync.enqueue('work', key='parent again')
    """
    run_script(dsn, script)
    assert jobs(admin) == 5


ENQUEUERS = """
select pid from pg_stat_activity
where application_name = 'pgworker enqueue' and datname = current_database() and pid <> all(%s)"""


@pytest.mark.ruling("2.24")
async def test_any_thread_may_use_the_synchronous_door(work: App, admin: Admin) -> None:
    start = threading.Barrier(8)
    put: list[Enqueued] = []
    sessions: list[int] = []
    others = [pid for (pid,) in admin.execute(ENQUEUERS, [[]])]  # a test before this one's, on their way out

    def enqueue(number: int) -> None:
        start.wait(10)
        put.extend(work.sync.enqueue("work", index, key=f"{number}/{index}") for index in range(20))
        sessions.append(len(admin.execute(ENQUEUERS, [others]).fetchall()))

    async with anyio.create_task_group() as group:
        limiter = anyio.CapacityLimiter(8)
        for number in range(8):
            group.start_soon(partial(anyio.to_thread.run_sync, enqueue, number, limiter=limiter))
    assert {each.key for each in put} == {f"{number}/{index}" for number in range(8) for index in range(20)}
    assert jobs(admin) == 160
    assert max(sessions) <= 4  # one pool, however many threads came first


@pytest.mark.ruling("2.24")
async def test_many_coroutines_may_come_first_at_once(work: App, admin: Admin) -> None:
    others = [pid for (pid,) in admin.execute(ENQUEUERS, [[]])]
    async with anyio.create_task_group() as group:
        for index in range(50):
            group.start_soon(partial(work.enqueue, "work", index))
    assert jobs(admin) == 50
    assert len(admin.execute(ENQUEUERS, [others]).fetchall()) <= 4


@pytest.mark.ruling("2.24")
async def test_a_closed_app_may_be_used_again(work: App, admin: Admin) -> None:
    for _ in range(2):
        await work.enqueue("work")
        work.sync.enqueue("work")
        await work.close()
        work.sync.close()
    assert jobs(admin) == 4
    left = admin.execute(
        "select count(*) from pg_stat_activity where application_name like 'pgworker%' and datname = current_database()"
        " and backend_type = 'client backend' and wait_event <> 'ClientRead'"
    ).fetchone()
    assert left == (0,)


async def test_the_dsn_is_looked_up_at_first_use(dsn: str, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGWORKER_DSN", raising=False)
    async with App() as app:
        app.declare("work")
        with pytest.raises(ConfigError, match="set PGWORKER_DSN"):
            await app.enqueue("work")
        monkeypatch.setenv("PGWORKER_DSN", dsn)
        await app.enqueue("work")
        with pytest.raises(ConfigError, match="in use already"):
            app.configure(dsn=NOWHERE)
    assert jobs(admin) == 1


# --- behind a pooler ------------------------------------------------------------------------------------------------

# What PgBouncer takes or ignores by default; anything else ends the connection with an error.
WELCOME = {
    "user",
    "database",
    "client_encoding",
    "application_name",
    "datestyle",
    "timezone",
    "standard_conforming_strings",
}


class StrictPooler:
    """A proxy that refuses connections with startup parameters that it does not know, as a pooler does."""

    def __init__(self, dsn: str) -> None:
        self.refused: list[str] = []
        self._target = conninfo_to_dict(dsn)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        port = self._listener.getsockname()[1]
        self.dsn = make_conninfo(
            dsn, host="127.0.0.1", hostaddr="127.0.0.1", port=port, sslmode="disable", gssencmode="disable"
        )

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _start(self, function: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._start(self._serve, self._listener.accept()[0])

    def _serve(self, client: socket.socket) -> None:
        startup = client.recv(65536)
        is_start = startup[4:8] == bytes([0, 3, 0, 0])  # else it asks to cancel a statement
        names = {name.decode().lower() for name in startup[8:].rstrip(b"\0").split(b"\0")[::2]} if is_start else set()
        if names - WELCOME:
            self.refused += sorted(names - WELCOME)
            client.close()
            return
        with client, self._upstream() as server:
            server.sendall(startup)
            self._start(_pump, server, client)
            _pump(client, server)

    def _upstream(self) -> socket.socket:
        host, port = str(self._target.get("host") or "127.0.0.1"), int(self._target.get("port") or 5432)
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        local = socket.socket(socket.AF_UNIX)
        local.connect(f"{host}/.s.PGSQL.{port}")
        return local


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.mark.field("L13")
async def test_a_pooler_that_refuses_startup_parameters_is_no_obstacle(dsn: str, admin: Admin) -> None:
    with StrictPooler(dsn) as pooler:
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(pooler.dsn, options="-c statement_timeout=5000")
        assert pooler.refused == ["options"]
        async with App(pooler.dsn) as app:

            @app.kind("work")
            async def work(job: Job[int]) -> int:
                return job.payload

            seen = Recorder(app)
            await app.enqueue("work", 1)
            app.sync.enqueue("work", 2)
            async with await psycopg.AsyncConnection.connect(conninfo(pooler.dsn, "caller")) as conn:
                await app.enqueue("work", 3, conn=conn)
            async with running(app.worker()):
                await seen.wait(lambda: len(seen.of(JobSettled)) == 3)
            app.sync.close()
    assert pooler.refused == ["options"]
    assert admin.execute("select distinct state from pgworker.jobs").fetchall() == [("succeeded",)]
