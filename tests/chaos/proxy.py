"""A proxy between a worker and the server that swallows the answer to a chosen statement, once it is committed.

It understands as much of the protocol as that takes: which statement a client's message is about, and where the answer
of the server ends (ReadyForQuery, which comes after the commit). Then it cuts the connection, as a lost network would.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo


class Proxy:
    """Listens on a port of its own; each connection is served by two threads."""

    def __init__(self, dsn: str) -> None:
        self.fired = 0
        """How many answers have been swallowed."""
        self._parts = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._armed: list[bytes] = []
        self._lock = threading.Lock()
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
        """Swallow the answers to the next statements whose text has this in it."""
        with self._lock:
            self._armed = [marker.encode()] * times

    def close(self) -> None:
        """Cut everything, and wait for the threads."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
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
            server = self._connect()
            pair = _Pair(self, client, server)
            with self._lock:
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

    def take(self, statement: bytes) -> bool:
        """Whether the answer to this statement is to be swallowed; that uses up one."""
        with self._lock:
            if self._armed and self._armed[0] in statement:
                self._armed.pop()
                self.fired += 1
                return True
            return False


class _Pair:
    """One connection through the proxy."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._texts: dict[bytes, bytes] = {}
        self._swallowing = threading.Event()

    def send_requests(self) -> None:
        """From the client to the server, looking at what each message is about."""
        try:
            length = _read(self._client, 4)
            self._server.sendall(
                length + _read(self._client, int.from_bytes(length) - 4)
            )  # the start, which has no type
            for kind, body in _messages(self._client):
                if self._about(kind, body):
                    self._swallowing.set()
                self._server.sendall(kind + (len(body) + 4).to_bytes(4) + body)
        except OSError:
            pass
        finally:
            _cut(self._server)

    def _about(self, kind: bytes, body: bytes) -> bool:
        """Whether this message runs a statement whose answer is wanted."""
        if kind == b"Q":
            return self._proxy.take(body)
        if kind == b"P":
            name, text, *_ = body.split(b"\0")
            self._texts[name] = text
        if kind == b"B":
            _, name, *_ = body.split(b"\0")
            return self._proxy.take(self._texts.get(name, b""))
        return False

    def send_answers(self) -> None:
        """From the server to the client; the swallowed answer is read to its end, and then nothing works any more."""
        try:
            for kind, body in _messages(self._server):
                if not self._swallowing.is_set():
                    self._client.sendall(kind + (len(body) + 4).to_bytes(4) + body)
                elif kind == b"Z":
                    return
        except OSError:
            pass
        finally:
            _cut(self._client)
            _cut(self._server)


def _messages(source: socket.socket) -> Iterator[tuple[bytes, bytes]]:
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
