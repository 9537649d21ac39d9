"""A proxy between the runtime and the server that kills a connection at a chosen point of a chosen statement.

It understands as much of the protocol as that takes: which statement a client's message is about, when it has run, and
where the answer ends (ReadyForQuery, which comes after the commit). What it cuts off is gone on both sides: the
server's process is terminated, the client's connection is closed without a word of the answer.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

Message: TypeAlias = tuple[bytes, bytes]
"""A message's type and its body."""
Matches: TypeAlias = Callable[[bytes], bool]

_PATIENCE_SECONDS = 5.0


class Point(enum.Enum):
    """When the connection's process at the server is killed."""

    BEFORE = "before"
    """The statement has not been sent."""
    RAN = "ran"
    """The statement has run to its end, its transaction is not committed."""
    COMMITTED = "committed"
    """The transaction has ended, nobody has been told."""


@dataclass(frozen=True, slots=True)
class _Trap:
    matches: Matches
    point: Point
    kill: bool
    undone: bool = False
    """Its transaction is one that is always rolled back."""


class Proxy:
    """Listens on a port of its own; each connection is served by two threads."""

    def __init__(self, dsn: str) -> None:
        self.fired = 0
        """How many connections have been killed at their point."""
        self.sent: list[tuple[int, bytes]] = []
        """Every statement that has been sent, and the process at the server that it was sent to."""
        self._dsn = dsn
        self._parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._traps: list[_Trap] = []
        self._changed = threading.Condition()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    @property
    def dsn(self) -> str:
        """The way to the same database through the proxy."""
        parts = dict(self._parts)
        passfile = parts.pop("passfile", None)
        if passfile is not None and "password" not in parts:
            parts["password"] = Path(passfile).read_text(encoding="utf-8").strip().rsplit(":", 1)[1]
        host, port = self._listener.getsockname()
        parts |= {"host": host, "port": str(port), "sslmode": "disable", "gssencmode": "disable"}
        return make_conninfo("", **parts)

    def swallow(self, marker: str, *, times: int = 1) -> None:
        """Swallow the answers to the next statements whose text has this in it; the server's process lives on."""
        with self._changed:
            self._traps = [_Trap(lambda text: marker.encode() in text, Point.COMMITTED, kill=False)] * times

    def set_trap(self, matches: Matches, point: Point, *, undone: bool = False) -> None:
        """Kill the connection that next sends a statement whose text matches, at this point of it.

        COMMITTED means what it says unless its transaction is one that is always `undone`.
        """
        with self._changed:
            self._traps.append(_Trap(matches, point, kill=True, undone=undone))

    def wait(self, fired: int, *, within: float = 10.0) -> bool:
        """Wait until so many have fired in all; returns whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self.fired >= fired, within)

    def close(self) -> None:
        """Cut everything, and wait for the threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            cut = list(self._sockets)
        for each in cut:
            _cut(each)
        for thread in self._threads:
            thread.join(5)
        for each in cut:
            each.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            for each in (client, server):
                _send_at_once(each)
            pair = _Pair(self, client, server)
            with self._changed:
                self._sockets |= {client, server}
            self._spawn(pair.send_requests)
            self._spawn(pair.send_answers)

    def _connect(self) -> socket.socket:
        host, port = self._parts["host"], self._parts.get("port", "5432")
        if host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{host}/.s.PGSQL.{port}")
            return server
        return socket.create_connection((host, int(port)))

    def take(self, statement: bytes) -> _Trap | None:
        """The trap that this statement has stepped into; it is used up."""
        with self._changed:
            for trap in self._traps:
                if trap.matches(statement):
                    self._traps.remove(trap)
                    return trap
            return None

    def put_back(self, trap: _Trap) -> None:
        """The statement failed, or was rolled back: its trap waits for the next."""
        with self._changed:
            self._traps.append(trap)

    def fire(self, trap: _Trap, pid: int) -> None:
        """Kill the server's process, and wait until it is gone."""
        if trap.kill:
            with psycopg.connect(self._dsn, autocommit=True, application_name="tests") as connection:
                connection.execute("select pg_terminate_backend(%s)", [pid])  # to wait is up to us: it looks too rarely
                give_up_at = time.monotonic() + _PATIENCE_SECONDS
                while connection.execute("select from pg_stat_get_activity(%s)", [pid]).fetchone() is not None:
                    assert time.monotonic() < give_up_at, "the server's process lives on"
                    time.sleep(0.002)
        with self._changed:
            self.fired += 1
            self._changed.notify_all()


class _Pair:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._pid = 0
        self._texts: dict[bytes, bytes] = {}
        self._trap: _Trap | None = None
        self._held: list[Message] = []
        self._ended = threading.Event()
        """The trapped statement has run or failed, or the connection has ended by itself; for Point.RAN."""
        self._has_run = False
        self._firing = threading.Lock()
        """Held from before the kill until it has been counted: the client is to see nothing of it earlier."""

    # --- from the client to the server ------------------------------------------------------------------------------

    def send_requests(self) -> None:
        """Looks at what each message is about."""
        try:
            length = _read(self._client, 4)
            rest = _read(self._client, int.from_bytes(length) - 4)
            self._server.sendall(length + rest)  # the start, which has no type
            for kind, body in _messages(self._client):
                text = self._text(kind, body)
                if text is not None:
                    self._proxy.sent.append((self._pid, text))
                    if self._trap is None:
                        self._trap = self._proxy.take(text)
                point = None if self._trap is None else self._trap.point
                if self._trap is not None and point is Point.BEFORE:
                    self._fire(self._trap)
                    return
                if point is Point.RAN and kind in (b"Q", b"S"):
                    if self._run_uncommitted(kind, body):
                        return
                else:
                    self._server.sendall(_packed(kind, body))
        except OSError:
            pass
        finally:
            _cut(self._server)

    def _text(self, kind: bytes, body: bytes) -> bytes | None:
        """The statement that this message runs, if it runs one."""
        if kind == b"Q":
            return body[:-1]
        if kind == b"P":
            name, text, *_ = body.split(b"\0")
            self._texts[name] = text
        if kind == b"B":
            _, name, *_ = body.split(b"\0")
            return self._texts.get(name, b"")
        return None

    def _run_uncommitted(self, kind: bytes, body: bytes) -> bool:
        """Let the statement run, but never say Sync, which would commit it; returns whether it has run."""
        if kind == b"Q":  # which says Sync by itself: the same in the messages that do not
            self._server.sendall(_packed(b"P", b"\0" + body + b"\0\0") + _packed(b"B", b"\0" * 8))
            self._server.sendall(_packed(b"D", b"P\0") + _packed(b"E", b"\0" * 5))
        self._server.sendall(_packed(b"H", b""))
        self._ended.wait()
        trap, self._trap = self._trap, None
        if trap is not None and self._has_run:
            self._fire(trap)
            return True
        self._ended.clear()
        self._server.sendall(_packed(b"S", b""))  # it failed: let it
        return False

    def _fire(self, trap: _Trap) -> None:
        with self._firing:
            self._proxy.fire(trap, self._pid)

    # --- from the server to the client ------------------------------------------------------------------------------

    def send_answers(self) -> None:
        """Holds back what belongs to a trapped statement, until it is known whether the client may see it."""
        try:
            for kind, body in _messages(self._server):
                if kind == b"K":
                    self._pid = int.from_bytes(body[:4])
                if self._trap is None:
                    self._client.sendall(_packed(kind, body))
                    continue
                self._held.append((kind, body))
                if self._trap.point is Point.RAN and kind in (b"C", b"E"):
                    self._ran(self._trap, failed=kind == b"E")
                elif kind == b"Z" and self._is_committed(self._trap, body):
                    self._fire(self._trap)
                    return
        except OSError:
            pass
        finally:
            self._ended.set()
            with self._firing:
                _cut(self._client)
            _cut(self._server)

    def _ran(self, trap: _Trap, *, failed: bool) -> None:
        self._has_run = not failed
        if failed:
            self._trap = None
            self._proxy.put_back(trap)
            self._let_go()
        self._ended.set()

    def _is_committed(self, trap: _Trap, status: bytes) -> bool:
        """At the end of an answer: a transaction that is still open is waited for, one that was undone is not."""
        failed = any(kind == b"E" or (body == b"ROLLBACK\0" and not trap.undone) for kind, body in self._held)
        done = status == b"I" and not failed
        if not done:
            if status == b"I":
                self._trap = None
                self._proxy.put_back(trap)
            self._let_go()
        return done

    def _let_go(self) -> None:
        for kind, body in self._held:
            self._client.sendall(_packed(kind, body))
        self._held.clear()


def _packed(kind: bytes, body: bytes) -> bytes:
    return kind + (len(body) + 4).to_bytes(4) + body


def _messages(source: socket.socket) -> Iterator[Message]:
    while True:
        kind = _read(source, 1)
        yield kind, _read(source, int.from_bytes(_read(source, 4)) - 4)


def _read(source: socket.socket, length: int) -> bytes:
    parts = b""
    while len(parts) < length:
        part = source.recv(length - len(parts))
        if not part:
            raise ConnectionResetError
        parts += part
    return parts


def _send_at_once(each: socket.socket) -> None:
    """Each message goes on by itself: held back until those before it are acknowledged, it would wait for 40 ms."""
    if each.family != socket.AF_UNIX:
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _cut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(dsn: str) -> Iterator[Proxy]:
    """A proxy for the time of a block."""
    proxy = Proxy(dsn)
    try:
        yield proxy
    finally:
        proxy.close()
