"""What users install carries the SQL: the sdist, and the wheel built from it, are opened; the wheel is used."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Built:
    """The two archives of one build."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    out = tmp_path_factory.mktemp("dist")
    # An sdist, and the wheel out of that sdist; without isolation, so that no package index is asked.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)])
    (sdist,) = out.glob("pgworker-*.tar.gz")
    (wheel,) = out.glob("pgworker-*.whl")
    return Built(sdist, wheel)


def run(command: list[str], *, cwd: Path | None = None, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def tree(folder: str) -> dict[str, bytes]:
    """The files below a folder of this repository that belong to a release."""
    files = (path for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in files}


def test_the_wheel_carries_package_queries_and_migrations(built: Built) -> None:
    wanted = tree("pgworker") | {f"pgworker/{name}": content for name, content in tree("migrations").items()}
    assert "pgworker/py.typed" in wanted
    assert [name for name in wanted if name.startswith("pgworker/migrations/0001_")]
    assert [name for name in wanted if name.startswith("pgworker/queries/") and name.endswith(".sql")]
    with zipfile.ZipFile(built.wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    assert sorted(found) == sorted(wanted)
    assert found == wanted


def test_the_wheel_says_what_it_is(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "pgworker = pgworker.__main__:main" in texts["entry_points.txt"]
    assert "License-Expression: MIT" in texts["METADATA"]
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()


def test_the_sdist_carries_all_that_its_tests_read(built: Built) -> None:
    folders = {name for folder in ("pgworker", "migrations", "examples", "tests/unit") for name in tree(folder)}
    wanted = folders | {"pyproject.toml", "Makefile", "Dockerfile", "docker-compose.yml", ".dockerignore", ".ci/run"}
    with tarfile.open(built.sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(wanted - found) == []
    assert [name for name in found if name.startswith((".venv", "tests/out")) or "__pycache__" in name] == []


def test_an_installed_wheel_finds_its_sql(built: Built, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    run([*pip, str(tmp_path / "site"), str(built.wheel)])
    # From elsewhere, with the installed copy first on the path: this repository's own files must not be the ones found.
    script = "import pgworker.schema as s; print(s.__file__); print(*(m.number for m in s.migrations()))"
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    where, numbers = run([sys.executable, "-c", script], cwd=tmp_path, environ=environ).splitlines()
    assert where.startswith(str(tmp_path))
    assert len(numbers.split()) == len([name for name in tree("migrations") if name.endswith(".sql")])
