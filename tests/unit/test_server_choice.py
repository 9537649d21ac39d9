"""Which server the tests take, by the environment. Nothing is started here."""

from __future__ import annotations

import socket
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from tests.postgres import Choice, ServerChoiceError, Source, choose, docker_answers, image

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def engine(_environ: Mapping[str, str]) -> bool:
    return True


def no_engine(_environ: Mapping[str, str]) -> bool:
    return False


DSN = {"PGWORKER_TEST_DSN": "dbname=x"}


@pytest.mark.parametrize(
    ("environ", "with_engine", "without"),
    [
        ({}, Source.CONTAINER, Source.EMBEDDED),
        (DSN, Source.DSN, Source.DSN),
        ({"PGWORKER_TEST_SERVER": "dsn", **DSN}, Source.DSN, Source.DSN),
        ({"PGWORKER_TEST_SERVER": "container", **DSN}, Source.CONTAINER, Source.NONE),
        ({"PGWORKER_TEST_SERVER": "embedded", **DSN}, Source.EMBEDDED, Source.EMBEDDED),
        ({"PGWORKER_TEST_BIN_DIR": "/opt/bin"}, Source.EMBEDDED, Source.EMBEDDED),
    ],
)
def test_the_order_of_sources(environ: dict[str, str], with_engine: Source, without: Source) -> None:
    assert choose(environ, engine).source is with_engine
    assert choose(environ, no_engine).source is without


@pytest.mark.parametrize("forced", ["", "container"])
def test_a_required_engine_that_is_missing_is_an_error(forced: str) -> None:
    environ = {"PGWORKER_REQUIRE_ENGINE": "1", "PGWORKER_TEST_SERVER": forced}
    with pytest.raises(ServerChoiceError, match="PGWORKER_REQUIRE_ENGINE=1"):
        choose(environ, no_engine)
    assert choose(environ, engine) == Choice(Source.CONTAINER, "container of postgres:18", may_fall_back=False)


def test_a_required_engine_does_not_matter_where_none_is_used() -> None:
    for other in ({"PGWORKER_TEST_SERVER": "embedded"}, DSN):
        assert choose({"PGWORKER_REQUIRE_ENGINE": "1", **other}, no_engine).source is not Source.NONE


def test_a_missing_engine_is_said_in_one_line() -> None:
    for environ in ({}, {"PGWORKER_TEST_SERVER": "container"}):
        note = choose(environ, no_engine).note
        assert "no Docker engine answers" in note
        assert "\n" not in note


@pytest.mark.parametrize("environ", [{"PGWORKER_TEST_SERVER": "podman"}, {"PGWORKER_TEST_SERVER": "dsn"}])
def test_what_cannot_be_had_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ServerChoiceError, match="PGWORKER_TEST_"):
        choose(environ, engine)


def test_the_image_follows_the_version() -> None:
    assert image({}) == "postgres:18"
    assert image({"PGWORKER_TEST_PG": "14"}) == "postgres:14"


@pytest.mark.parametrize(
    ("answer", "expected"), [(b"HTTP/1.0 200 OK\r\n\r\nOK", True), (b"HTTP/1.0 500 Oh\r\n\r\n", False)]
)
def test_an_engine_is_asked_at_its_socket(tmp_path: Path, answer: bytes, *, expected: bool) -> None:
    path = str(tmp_path / "docker.sock")
    assert not docker_answers({"DOCKER_HOST": f"unix://{path}"})
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.recv(1024)
                connection.sendall(answer)

        thread = Thread(target=serve)
        thread.start()
        assert docker_answers({"DOCKER_HOST": f"unix://{path}"}) is expected
        thread.join()
