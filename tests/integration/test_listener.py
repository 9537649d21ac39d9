"""The LISTEN connection against a real server: what it hears, and how it comes through what happens to connections.

What lies between client and server (a pooler, a dead link, a restart, a standby) is played by a proxy that reads the
server's messages and holds back or changes some.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import anyio
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow

from pgworker import App, Job
from pgworker.events import JobSettled
from pgworker.listener import Listener, Wake
from pgworker.tablemap import TableMap
from tests.handles import Hand, Recorder
from tests.handles import running as running_worker
from tests.integration.test_control import eventually, until_listening

Message: TypeAlias = tuple[bytes, bytes]
MakeListener: TypeAlias = Callable[..., "Watched"]
SendNotify: TypeAlias = Callable[[str], None]
OTHER_PID = struct.pack("!i", 1)


class Signal:
    """Something that happens again and again, and that a test waits for."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = anyio.Event()

    def __call__(self, *_: object) -> None:
        self.count += 1
        self._changed.set()
        self._changed = anyio.Event()

    async def reaches(self, count: int) -> None:
        with anyio.fail_after(20):
            while self.count < count:
                await self._changed.wait()


class Watched(Listener):
    """A listener that says when it was heard and when its connection came to an end."""

    def __init__(self, conninfo: str, *, channel: str, probe_interval: float, probe_timeout: float) -> None:
        self.application_name = f"ears {uuid.uuid4().hex[:8]}"
        super().__init__(
            make_conninfo(conninfo, application_name=self.application_name),
            channel=channel,
            probe_interval=probe_interval,
            probe_timeout=probe_timeout,
            first_delay=0.01,
            max_delay=0.02,
        )
        self.proved = Signal()
        self.lost = Signal()

    def _hear_probe(self, payload: str) -> None:
        awaited = self._probe
        super()._hear_probe(payload)
        if payload == awaited:
            self.proved()

    async def _session(self) -> None:
        try:
            await super()._session()
        except Exception:
            self.lost()
            raise


class Proxy:
    """Passes bytes between clients and the server, message by message from the server's side."""

    def __init__(self, dsn: str) -> None:
        self._target = conninfo_to_dict(dsn)
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.StreamWriter] = set()
        self._port = 0
        self.frozen = False
        self.listens = Signal()
        self.connected = Signal()
        self.ended = Signal()
        self.unlistened = Signal()
        self.conninfo = ""

    async def up(self, dsn: str) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.conninfo = make_conninfo(
            dsn, host="127.0.0.1", hostaddr="127.0.0.1", port=self._port, sslmode="disable", gssencmode="disable"
        )

    async def down(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._pipes):
            writer.close()
        await self.ended.reaches(self.connected.count)

    def change(self, message: Message, *, busy: bool) -> Message | None:
        """What becomes of a message from the server; `busy` while a statement of the client runs."""
        return message

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected()
        host, port = str(self._target.get("host") or "127.0.0.1"), str(self._target.get("port") or "5432")
        if host.startswith("/"):
            upstream, server = await asyncio.open_unix_connection(Path(host) / f".s.PGSQL.{port}")
        else:
            upstream, server = await asyncio.open_connection(host, int(port))
        link = _Link(self, reader, writer, upstream, server)
        self._pipes |= {writer, server}
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(link.pump, link.from_client, group.cancel_scope)
                group.start_soon(link.pump, link.from_server, group.cancel_scope)
        finally:
            writer.close()
            server.close()
            self._pipes -= {writer, server}
            self.ended()


class _Link:
    """One client's connection through the proxy."""

    def __init__(
        self,
        proxy: Proxy,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writer = writer
        self._upstream = upstream
        self._server = server
        self._busy = True

    async def pump(self, step: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
        try:
            while True:
                await step()
        except (OSError, EOFError):
            scope.cancel()

    async def from_client(self) -> None:
        data = await self._reader.read(65_536)
        if not data:
            raise EOFError
        if self._proxy.frozen:
            return
        self._busy = True
        if b"unlisten" in data:
            self._proxy.unlistened()
        elif b'listen "' in data:
            self._proxy.listens()
        self._server.write(data)

    async def from_server(self) -> None:
        kind = await self._upstream.readexactly(1)
        length = await self._upstream.readexactly(4)
        body = await self._upstream.readexactly(struct.unpack("!i", length)[0] - 4)
        message = self._proxy.change((kind, body), busy=self._busy)
        if kind == b"Z":
            self._busy = False
        if message is not None and not self._proxy.frozen:
            kind, body = message
            self._writer.write(kind + struct.pack("!i", len(body) + 4) + body)


class SessionPooler(Proxy):
    """Each client has a server connection to itself, but not that connection's process id."""

    def change(self, message: Message, *, busy: bool) -> Message | None:
        kind, body = message
        return (kind, OTHER_PID + body[4:]) if kind == b"K" else message


class TransactionPooler(SessionPooler):
    """Between statements a client has no server connection, so what comes then reaches nobody."""

    def change(self, message: Message, *, busy: bool) -> Message | None:
        return super().change(message, busy=busy) if busy or message[0] != b"A" else None


class Deaf(Proxy):
    """Loses every notification, and says nothing about it."""

    deaf = True

    def change(self, message: Message, *, busy: bool) -> Message | None:
        return None if self.deaf and message[0] == b"A" else message


class Standby(Proxy):
    """The server says that it is in recovery, until it is promoted."""

    promoted = False

    def change(self, message: Message, *, busy: bool) -> Message | None:
        if message[1] == b"in_hot_standby\0off\0" and not self.promoted:
            return b"S", b"in_hot_standby\0on\0"
        return message


@pytest.fixture
async def open_proxy(dsn: str, anyio_backend: str) -> AsyncIterator[Callable[[Proxy], Awaitable[None]]]:
    async with AsyncExitStack() as stack:

        async def open_proxy(proxy: Proxy) -> None:
            await proxy.up(dsn)
            stack.push_async_callback(proxy.down)

        yield open_proxy


@pytest.fixture
def make_listener(dsn: str, tables: TableMap) -> MakeListener:
    def make(to: str = dsn, *, probe_interval: float = 600, probe_timeout: float = 10) -> Watched:
        return Watched(to, channel=tables.channel, probe_interval=probe_interval, probe_timeout=probe_timeout)

    return make


@pytest.fixture
def send(admin: psycopg.Connection[TupleRow], tables: TableMap) -> SendNotify:
    def send(payload: str) -> None:
        admin.execute("select pg_catalog.pg_notify(%s, %s)", (tables.channel, payload))

    return send


@asynccontextmanager
async def running(listener: Listener) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        group.start_soon(listener.run)
        yield
        assert not group.cancel_scope.cancel_called, "run() must not end by itself"
        group.cancel_scope.cancel()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Ours; psycopg has its own for a statement that it could not cancel."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("pgworker")
    ]


def kill_connection_of(listener: Watched, admin: psycopg.Connection[TupleRow]) -> None:
    admin.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s",
        (listener.application_name,),
    )


def connections_of(listener: Watched, admin: psycopg.Connection[TupleRow]) -> int:
    row = admin.execute(
        "select count(*) from pg_stat_activity where application_name = %s", (listener.application_name,)
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.contract("D86", "X19")
@pytest.mark.ruling("2.18")
async def test_one_connection_wakes_the_runners_of_each_kind(
    make_listener: MakeListener, send: SendNotify, admin: psycopg.Connection[TupleRow]
) -> None:
    listener = make_listener()
    mail, index = Signal(), Signal()
    listener.subscribe("mail", mail)
    listener.subscribe("index", index)
    async with running(listener):
        await listener.proved.reaches(1)
        assert (mail.count, index.count) == (1, 1)  # poked when it began to listen
        send("r:mail")
        await mail.reaches(2)
        send("p:of another process")
        send("c:mail")
        send("what is this?")
        await index.reaches(2)
        assert (mail.count, index.count) == (3, 2)
        assert connections_of(listener, admin) == 1
    assert listener.lost.count == 0


@pytest.mark.contract("A8")
@pytest.mark.race(7)
async def test_a_burst_is_one_wake_up_and_one_between_claim_and_wait_is_kept(
    make_listener: MakeListener, send: SendNotify
) -> None:
    listener = make_listener()
    wake, after = Wake(), Signal()
    listener.subscribe("mail", wake.set)
    listener.subscribe("after", after)
    async with running(listener):
        await listener.proved.reaches(1)
        wake.clear()
        for _ in range(100):
            send("r:mail")
        send("r:after")
        await after.reaches(2)  # all hundred have been heard
        assert await wake.wait(0)
        wake.clear()
        assert not await wake.wait(0)


@pytest.mark.race(8)
async def test_whoever_is_poked_can_count_on_hearing_what_comes_next(
    make_listener: MakeListener, send: SendNotify
) -> None:
    """LISTEN first, then the poke: a job committed before is found by the poke, one committed after it is heard."""
    listener = make_listener()
    heard = Signal()

    def poked() -> None:
        heard()
        if heard.count == 1:
            send("r:mail")  # committed before this callback returns

    listener.subscribe("mail", poked)
    send("r:mail")  # before anybody listens: covered by the poke
    async with running(listener):
        await heard.reaches(2)
        await listener.proved.reaches(1)
    assert heard.count == 2


@pytest.mark.race(8)
@pytest.mark.field("L10")
@pytest.mark.contract("D86")
async def test_a_killed_listener_listens_again_pokes_and_wakes(
    make_listener: MakeListener,
    send: SendNotify,
    admin: psycopg.Connection[TupleRow],
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = make_listener()
    mail = Signal()
    listener.subscribe("mail", mail)
    with caplog.at_level(logging.INFO, logger="pgworker"):
        async with running(listener):
            await listener.proved.reaches(1)
            kill_connection_of(listener, admin)
            await listener.proved.reaches(2)
            assert mail.count == 2  # poked after LISTEN: hints may have been missed
            send("r:mail")
            await mail.reaches(3)
            assert len(warnings_of(caplog)) == 1
            assert caplog.records[-1].getMessage().startswith("notifications arrive again")
            kill_connection_of(listener, admin)
            await listener.proved.reaches(3)
    assert len(warnings_of(caplog)) == 2  # another trouble is told anew
    assert listener.lost.count == 2


@pytest.mark.race(8)
@pytest.mark.field("L10")
@pytest.mark.contract("D86")
async def test_a_job_that_comes_while_a_workers_listener_is_away_runs_once_it_is_back(
    app: App, hand: Hand, admin: psycopg.Connection[TupleRow]
) -> None:
    @app.kind("work", poll=600)
    async def work(job: Job[object]) -> None: ...

    seen = Recorder(app)
    async with running_worker(app.worker()):
        await until_listening(admin)
        quiet = (  # its looks at the start, one of them for the listener's poke, are over
            "select max(state_change) < clock_timestamp() - interval '0.5 seconds' from pg_stat_activity"
            " where application_name = 'pgworker worker' and datname = current_database()"
        )
        await eventually(lambda: admin.execute(quiet).fetchone() == (True,))
        kill = (
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where application_name = 'pgworker listen' and datname = current_database()"
        )
        assert admin.execute(kill).fetchall() == [(True,)]
        hand.enqueue("k")  # without a hint; and no listener comes back meanwhile, whose thread is this one
        await seen.count(JobSettled, 1, within=5)  # promised is about a second


@pytest.mark.field("L09", "L16")
async def test_an_outage_is_outwaited_and_told_once(
    make_listener: MakeListener,
    open_proxy: Callable[[Proxy], Awaitable[None]],
    dsn: str,
    send: SendNotify,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = Proxy(dsn)
    await open_proxy(proxy)
    listener = make_listener(proxy.conninfo)
    mail = Signal()
    listener.subscribe("mail", mail)
    with caplog.at_level(logging.WARNING, logger="pgworker"):
        async with running(listener):
            await listener.proved.reaches(1)
            await proxy.down()
            await listener.lost.reaches(4)  # the connection, and three attempts that were refused
            assert (listener.proved.count, mail.count) == (1, 1)
            await proxy.up(dsn)
            await listener.proved.reaches(2)
            count = mail.count
            send("r:mail")
            await mail.reaches(count + 1)
    assert len(warnings_of(caplog)) == 1


async def test_a_server_that_is_not_there_yet_is_waited_for(
    make_listener: MakeListener,
    open_proxy: Callable[[Proxy], Awaitable[None]],
    dsn: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = Proxy(dsn)
    await open_proxy(proxy)
    await proxy.down()
    listener = make_listener(make_conninfo(proxy.conninfo, application_name="canary"))
    with caplog.at_level(logging.DEBUG, logger="pgworker"):
        async with running(listener):
            await listener.lost.reaches(3)
            await proxy.up(dsn)
            await listener.proved.reaches(1)
    assert len(warnings_of(caplog)) == 1
    assert "127.0.0.1" not in caplog.text  # no text of the exception, which quotes the connection string


@pytest.mark.field("L11")
async def test_a_transaction_pooler_is_noticed_told_once_and_left_as_it_was(
    make_listener: MakeListener,
    open_proxy: Callable[[Proxy], Awaitable[None]],
    dsn: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pooler = TransactionPooler(dsn)
    await open_proxy(pooler)
    listener = make_listener(pooler.conninfo, probe_timeout=0.3)
    with caplog.at_level(logging.WARNING, logger="pgworker"):
        async with running(listener):
            await listener.lost.reaches(2)
    assert listener.proved.count == 0
    assert pooler.unlistened.count == pooler.listens.count >= 2  # also the one that was cancelled
    (warning,) = warnings_of(caplog)
    assert "transaction pooler" in warning
    assert "PGWORKER_LISTEN_DSN" in warning


async def test_a_session_pooler_is_fine(
    make_listener: MakeListener, open_proxy: Callable[[Proxy], Awaitable[None]], dsn: str, send: SendNotify
) -> None:
    pooler = SessionPooler(dsn)
    await open_proxy(pooler)
    listener = make_listener(pooler.conninfo)
    mail = Signal()
    listener.subscribe("mail", mail)
    async with running(listener):
        await listener.proved.reaches(1)
        send("r:mail")
        await mail.reaches(2)


@pytest.mark.field("L11")
async def test_lost_notifications_are_noticed_by_the_next_probe_too(
    make_listener: MakeListener,
    open_proxy: Callable[[Proxy], Awaitable[None]],
    dsn: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = Deaf(dsn)
    proxy.deaf = False
    await open_proxy(proxy)
    listener = make_listener(proxy.conninfo, probe_interval=0.2, probe_timeout=0.2)
    with caplog.at_level(logging.WARNING, logger="pgworker"):
        async with running(listener):
            await listener.proved.reaches(2)
            assert not caplog.records
            proxy.deaf = True
            await listener.lost.reaches(2)
            proxy.deaf = False
            await listener.proved.reaches(listener.proved.count + 1)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.field("L15")
async def test_a_silent_link_is_noticed_by_a_deadline_and_replaced(
    make_listener: MakeListener,
    open_proxy: Callable[[Proxy], Awaitable[None]],
    dsn: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = Proxy(dsn)
    await open_proxy(proxy)
    listener = make_listener(proxy.conninfo, probe_interval=0.3, probe_timeout=0.3)
    with caplog.at_level(logging.WARNING, logger="pgworker"):
        async with running(listener):
            await listener.proved.reaches(1)
            proxy.frozen = True
            await listener.lost.reaches(1)
            proxy.frozen = False
            await listener.proved.reaches(listener.proved.count + 1)
            assert listener.lost.count == 1
    assert len(warnings_of(caplog)) == 1


@pytest.mark.field("L15")
async def test_a_stop_does_not_wait_for_a_silent_link(
    make_listener: MakeListener, open_proxy: Callable[[Proxy], Awaitable[None]], dsn: str
) -> None:
    proxy = Proxy(dsn)
    await open_proxy(proxy)
    listener = make_listener(proxy.conninfo, probe_interval=0.3, probe_timeout=600)
    with anyio.fail_after(20):
        async with running(listener):
            await listener.proved.reaches(1)
            proxy.frozen = True
            connection_count = proxy.connected.count
            await anyio.wait_all_tasks_blocked()
        await proxy.ended.reaches(connection_count)


async def test_a_standby_is_never_asked_to_listen(
    make_listener: MakeListener,
    open_proxy: Callable[[Proxy], Awaitable[None]],
    dsn: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = Standby(dsn)
    await open_proxy(proxy)
    listener = make_listener(proxy.conninfo)
    mail = Signal()
    listener.subscribe("mail", mail)
    with caplog.at_level(logging.WARNING, logger="pgworker"):
        async with running(listener):
            await listener.lost.reaches(3)
            assert (proxy.listens.count, mail.count) == (0, 0)
            proxy.promoted = True
            await listener.proved.reaches(1)
    assert proxy.listens.count == 1
    (warning,) = warnings_of(caplog)
    assert "standby" in warning


@pytest.mark.parametrize("moment", ["listening", "reconnecting"])
async def test_a_stop_closes_the_connection_at_once(
    make_listener: MakeListener, open_proxy: Callable[[Proxy], Awaitable[None]], dsn: str, moment: str
) -> None:
    proxy = Proxy(dsn)
    await open_proxy(proxy)
    listener = make_listener(proxy.conninfo)
    async with running(listener):
        await listener.proved.reaches(1)
        if moment == "reconnecting":
            await proxy.down()
            await listener.lost.reaches(2)
    await proxy.ended.reaches(proxy.connected.count)


async def test_a_subscriber_that_raises_is_a_bug_and_not_an_outage(make_listener: MakeListener) -> None:
    listener = make_listener()
    kinds: Counter[str] = Counter()

    def broken() -> None:
        kinds["called"] += 1
        raise LookupError

    listener.subscribe("mail", broken)
    with pytest.raises(LookupError):
        await listener.run()
    assert kinds["called"] == 1
