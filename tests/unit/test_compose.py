"""docker-compose.yml and the Dockerfile say nothing that this release does not know: commands, kinds, files."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CALL = ["python", "-m", "pgworker"]


class Condition(TypedDict):
    condition: str


class Healthcheck(TypedDict):
    test: list[str]


class Service(TypedDict, total=False):
    command: list[str]
    depends_on: dict[str, Condition]
    environment: dict[str, str]
    healthcheck: Healthcheck
    image: str
    restart: str


@dataclass(frozen=True)
class Command:
    """One call of our command line: the service it was found in, and the words after `python -m pgworker`."""

    service: str
    words: list[str]

    def option(self, name: str) -> str:
        return self.words[self.words.index(name) + 1]


def services() -> dict[str, Service]:
    text = (ROOT / "docker-compose.yml").read_text()
    return cast("dict[str, Service]", yaml.safe_load(text)["services"])


def commands() -> list[Command]:
    """Every call in the file, health checks included."""
    found: list[Command] = []
    for name, service in services().items():
        check = service["healthcheck"]["test"] if "healthcheck" in service else ["CMD"]
        calls = [words for words in (service.get("command", []), check[1:]) if words[: len(CALL)] == CALL]
        found.extend(Command(name, words[len(CALL) :]) for words in calls)
    return found


def workers() -> dict[str, Command]:
    """The worker of each service that is one."""
    return {command.service: command for command in commands() if command.words[0] == "run"}


@pytest.mark.parametrize("command", commands(), ids=lambda command: f"{command.service}-{command.words[0]}")
def test_each_command_exists_with_its_options(command: Command) -> None:
    from typer.main import get_command  # noqa: PLC0415 - the command line is loaded by this test alone

    from pgworker.cli import app  # noqa: PLC0415

    verbs = cast("Any", get_command(app)).commands
    verb, *rest = command.words
    assert verb in verbs, f"{command.service}: pgworker has no command {verb}"
    verbs[verb].make_context(verb, rest)  # raises click's UsageError for an option or argument that is not there


def test_each_kind_of_the_app_has_one_worker_service() -> None:
    named = [(command.words[1], command.option("--kind")) for command in workers().values()]
    (target,) = {name for name, _ in named}
    module, _, attribute = target.partition(":")
    app = getattr(importlib.import_module(module), attribute)
    assert sorted(kind for _, kind in named) == sorted(app.kinds)


def test_each_worker_is_checked_for_its_own_kind() -> None:
    checks = {command.service: command for command in commands() if command.words[0] == "status"}
    assert {name: check.option("--kind") for name, check in checks.items()} == {
        name: worker.option("--kind") for name, worker in workers().items()
    }
    assert all("--check" in check.words for check in checks.values())


def test_workers_start_after_the_migration_and_it_after_the_database() -> None:
    every = services()
    assert every["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert every["migrate"]["restart"] == "no"
    assert "healthcheck" in every["postgres"]
    for name in workers():
        assert every[name]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}


def test_server_and_clients_agree_on_the_password_and_take_it_from_the_environment() -> None:
    every = services()
    secret = every["postgres"]["environment"]["POSTGRES_PASSWORD"]
    assert secret.startswith("${PGWORKER_DB_PASSWORD:-")
    assert {every[command.service]["environment"]["PGPASSWORD"] for command in commands()} == {secret}


def test_compose_itself_finds_the_file_valid() -> None:
    version = ["docker", "compose", "version"]
    if not shutil.which("docker") or subprocess.run(version, capture_output=True, check=False).returncode != 0:
        reason = "docker compose is not installed here"
        (pytest.fail if os.environ.get("PGWORKER_REQUIRE_ENGINE") == "1" else pytest.skip)(reason)
    checked = subprocess.run(
        ["docker", "compose", "--file", str(ROOT / "docker-compose.yml"), "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_dockerfile_copies_what_is_there_and_builds_without_buildkit() -> None:
    lines = [line.split() for line in (ROOT / "Dockerfile").read_text().splitlines() if line and line[0] != "#"]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in (word for line in lines if line[0] == "COPY" for word in line[1:-1]):
        assert (ROOT / source).exists(), f"COPY {source}: not in the repository"
        assert source in allowed, f"COPY {source}: hidden by .dockerignore"
    assert not [line for line in lines if any(word.startswith(("--mount", "<<")) for word in line)]
    assert [line[0] for line in lines if line[0] in {"USER", "CMD"}] == ["USER", "CMD"], "runs as root, or runs nothing"
