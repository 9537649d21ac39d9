"""How the command line presents itself."""

from __future__ import annotations

import pytest

from pgworker.cli.errors import Code
from tests.commandline import invoke

COMMANDS = [
    "run",
    "migrate",
    "enqueue",
    "status",
    "retry",
    "rebuild",
    "cancel",
    "forget",
    "pause",
    "resume",
    "prune",
    "bench",
    "demo",
]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_and_lists_every_exit_code(command: str | None, width: int) -> None:
    words = [command] if command else []
    ended = invoke(*words, "--help", width=width)
    assert (ended.code, ended.err) == (0, "")
    assert max(map(len, ended.out.splitlines())) <= width
    codes = ended.out.partition("Exit codes:\n")[2].splitlines()
    assert [int(line.split()[0]) for line in codes if line.strip()] == list(Code)
    assert invoke(*words, "-h", width=width) == ended


@pytest.mark.ruling("2.28")
def test_the_first_page_names_every_command_in_one_line() -> None:
    listed = invoke("--help", width=80).out.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == COMMANDS
    assert not [line for line in listed if line.endswith("...")], "a first sentence is too long for its line"


@pytest.mark.ruling("2.27")
def test_without_a_command_the_first_page_is_a_usage_error() -> None:
    ended = invoke()
    assert ended.code == Code.USAGE
    assert invoke("--help").out.strip() in ended.out + ended.err


@pytest.mark.ruling("2.27")
@pytest.mark.parametrize(
    "words", [["rum"], ["run"], ["run", "a:b", "--nope"], ["run", "a:b", "--startup-timeout", "inf"]]
)
def test_wrong_usage_ends_with_two_and_a_hint(words: list[str]) -> None:
    ended = invoke(*words)
    assert (ended.code, ended.out) == (Code.USAGE, "")
    assert "-h' for help." in ended.err


@pytest.mark.parametrize("words", [["pause", "work", "--for", "1h"], ["enqueue", "work", "--delay", "5m"]])
def test_a_time_is_told_to_be_a_number_of_seconds(words: list[str]) -> None:
    ended = invoke(*words)
    assert ended.code == Code.USAGE
    assert f"'{words[2]}': write a number of seconds, such as 90, got '{words[3]}'" in ended.err


@pytest.mark.parametrize("option", ["--dsn", "--schema"])
def test_an_option_before_the_command_is_told_where_it_belongs(option: str) -> None:
    ended = invoke(option, "x", "status")
    assert ended.code == Code.USAGE
    assert f"it belongs after the command, as in: pgworker status {option} ..." in ended.err


def test_the_version() -> None:
    assert invoke("--version").out.startswith("pgworker 0.")
