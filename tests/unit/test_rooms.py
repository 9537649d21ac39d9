"""Which room of the package may import which: the import contract is kept, and it would notice."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pgworker"
UPWARDS = {  # who lies lower, and whom it must not know
    "leases": "runner",
    "finisher": "runner",
    "claimer": "runner",
    "registry": "worker",
    "worker": "app",
    "hints": "client",
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of the package that lies in a folder, as `make check-layers` does."""
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", script, "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The package and its contract, to be changed."""
    shutil.copytree(PACKAGE, tmp_path / "pgworker", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.ruling("1.38")
def test_no_room_imports_from_its_own_floor_or_above() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.ruling("1.38")
@pytest.mark.parametrize(("room", "above"), UPWARDS.items())
def test_a_room_that_knows_one_above_it_is_noticed(copied: Path, room: str, above: str) -> None:
    with (copied / "pgworker" / f"{room}.py").open("a") as source:
        source.write(f"\nimport pgworker.{above}\n")
    done = lint(copied)
    assert done.returncode == 1
    assert f"pgworker.{room} -> pgworker.{above}" in done.stdout


@pytest.mark.ruling("1.38")
def test_a_new_room_needs_a_floor(copied: Path) -> None:
    (copied / "pgworker" / "attic.py").touch()
    done = lint(copied)
    assert done.returncode == 1
    assert "attic" in done.stdout


@pytest.mark.ruling("1.38")
def test_nothing_is_excepted_from_the_floors() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (each for each in project["tool"]["importlinter"]["contracts"] if each["type"] == "layers")
    assert contract["containers"] == ["pgworker"]
    assert contract.keys() == {"name", "type", "containers", "exhaustive", "layers"}
