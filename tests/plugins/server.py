"""One PostgreSQL server for the whole run, started when the first test asks for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, Protocol, cast

import pytest

from tests import postgres
from tests.sharing import ServerBroker, ask

if TYPE_CHECKING:
    from collections.abc import Iterator


class XdistNode(Protocol):
    """What we use of the controller's side of an xdist worker."""

    config: pytest.Config
    workerinput: dict[str, object]


_CHOICE: Final = pytest.StashKey[postgres.Choice]()
_BROKER: Final = pytest.StashKey[ServerBroker]()
_SERVER: Final = pytest.StashKey[postgres.Server]()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the server; an environment that asks for what cannot be had is a usage error."""
    if not hasattr(config, "workerinput"):
        try:
            config.stash[_CHOICE] = postgres.choose(os.environ)
        except postgres.ServerChoiceError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say where the tests' server comes from, and whether a Docker engine is missing."""
    choice = config.stash.get(_CHOICE, None)
    mode = " (hostile mode)" if os.environ.get("PGWORKER_TEST_HOSTILE") == "1" else ""
    return f"postgres: {choice.note}{mode}" if choice else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: XdistNode) -> None:
    """Tell an xdist worker whom to ask for the server."""
    config = node.config
    if _BROKER not in config.stash:
        choice = config.stash[_CHOICE]
        config.stash[_BROKER] = ServerBroker(lambda: postgres.serve(choice, os.environ))
    broker = config.stash[_BROKER]
    node.workerinput["pgworker_server"] = (config.stash[_CHOICE].source.value, broker.address, broker.key)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which server was used in the end: its version, and what it fell back from."""
    broker = config.stash.get(_BROKER, None)
    server = config.stash.get(_SERVER, None) or (broker.server if broker else None)
    if server:
        terminalreporter.write_line(f"postgres: {server.about}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the shared server."""
    broker = config.stash.get(_BROKER, None)
    if broker:
        broker.close()


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> Iterator[postgres.Server]:
    """The server of this run; started by the controller under xdist, else here."""
    workerinput = cast("dict[str, tuple[str, str, bytes]] | None", getattr(pytestconfig, "workerinput", None))
    if workerinput is not None:
        source, address, key = workerinput["pgworker_server"]
        _skip_without(source)
        answer = ask(address, key)
        if isinstance(answer, str):
            pytest.fail(f"the tests' server did not start: {answer}", pytrace=False)
        yield answer
        return
    choice = pytestconfig.stash[_CHOICE]
    _skip_without(choice.source.value)
    with postgres.serve(choice, os.environ) as running:
        pytestconfig.stash[_SERVER] = running
        yield running


def _skip_without(source: str) -> None:
    if source == postgres.Source.NONE.value:
        pytest.skip("PGWORKER_TEST_SERVER=container, and no Docker engine answers")


@pytest.fixture(scope="session")
def server_dsn(server: postgres.Server) -> str:
    """An administrator's DSN to the server's `postgres` database."""
    return server.dsn
