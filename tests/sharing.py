"""One server for all processes of a test run: the controller starts it when the first worker asks."""

from __future__ import annotations

import secrets
import tempfile
from contextlib import ExitStack
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tests.postgres import Server

_STOP: Final = "stop"
_WHERE: Final = "where"


class ServerBroker:
    """Listens on a private socket; starts the server on the first question and answers where it is.

    One thread does everything, as a child that dies with its parent dies with the thread that started it.
    """

    def __init__(self, start: Callable[[], AbstractContextManager[Server]]) -> None:
        self._start = start
        self._folder = tempfile.TemporaryDirectory(prefix="pgworker-tests-")
        self.address = str(Path(self._folder.name) / "broker")
        self.key = secrets.token_bytes(32)
        self.server: Server | None = None
        self._listener = Listener(self.address, family="AF_UNIX", backlog=64, authkey=self.key)
        self._thread = Thread(target=self._serve, name="tests-server-broker", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        answer: Server | str | None = None
        with ExitStack() as stack:
            while True:
                try:
                    with self._listener.accept() as connection:
                        if connection.recv() == _STOP:
                            return
                        if answer is None:
                            answer = self._begin(stack)
                        connection.send(answer)
                except (EOFError, OSError):  # a worker that was killed while it asked
                    continue

    def _begin(self, stack: ExitStack) -> Server | str:
        try:
            self.server = stack.enter_context(self._start())
        except Exception as error:  # noqa: BLE001 - told to every worker, which fails its tests with it
            return f"{type(error).__name__}: {error}"
        return self.server

    def close(self) -> None:
        """Stop the server, if it was started, and wait for that."""
        with Client(self.address, family="AF_UNIX", authkey=self.key) as connection:
            connection.send(_STOP)
        self._thread.join()
        self._listener.close()
        self._folder.cleanup()


def ask(address: str, key: bytes) -> Server | str:
    """Where the shared server is, or why there is none; waits while it starts."""
    with Client(address, family="AF_UNIX", authkey=key) as connection:
        connection.send(_WHERE)
        return cast("Server | str", connection.recv())
