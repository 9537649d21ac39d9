"""A run without a mutant: which tests pass, how long they take, which statements they send.

What was learnt of a test file is kept until the file, or what all tests share, changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias, cast

from tests.mutants.catalogue import CODE, ROOT

OUT: Final = ROOT / "tests" / "out"
_FOLDERS: Final = ("tests/unit", "tests/integration", "tests/races", "tests/plans", "tests/stateful")
# They speak to processes of their own, which no mutant reaches, or start servers.
_SPARED: Final = ("test_cli_", "test_demo", "test_embedded", "test_mutants", "test_docs_", "test_compose")
_PLUGINS: Final = ("-p", "tests.mutants.plugin", "-p", "no:randomly", "-p", "no:cacheprovider")

Kept: TypeAlias = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of one test: its seconds with its fixtures, and the statements that were built while it ran."""

    test: str
    seconds: float
    statements: frozenset[str]

    @property
    def path(self) -> str:
        return self.test.partition("::")[0]


@cache
def fingerprint(path: str) -> str:
    """A hash of one file's content, '' for a file that is gone."""
    file = ROOT / path
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""


@cache
def shared_fingerprint() -> str:
    """A hash of what all tests use, and of the schema."""
    files = [*ROOT.glob("tests/*.py"), *ROOT.glob("tests/plugins/*.py"), *ROOT.glob("migrations/*.sql")]
    files += [*ROOT.glob("tests/races/[!t]*.py"), *ROOT.glob("tests/stateful/[!t]*.py")]
    together = "".join(fingerprint(str(path.relative_to(ROOT))) for path in sorted(files))
    return hashlib.sha256(together.encode()).hexdigest()


def key_of(*texts: str) -> str:
    """One short hash of several texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def test_files() -> list[str]:
    """The test files that may kill a mutant."""
    paths = [path for folder in _FOLDERS for path in sorted((ROOT / folder).glob("test_*.py"))]
    paths += [ROOT / test for code in CODE.values() for test in code.tests if (ROOT / test).exists()]
    names = dict.fromkeys(str(path.relative_to(ROOT)) for path in paths)
    return [name for name in names if not any(part in name for part in _SPARED)]


def command(arguments: Sequence[str]) -> list[str]:
    """The pytest command that both a survey and a mutant are run by."""
    return [sys.executable, "-m", "pytest", "-q", *_PLUGINS, *arguments]


def environment(dsn: str, **more: str) -> dict[str, str]:
    """For a pytest process on the runner's server."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PGWORKER_")}
    return clean | {"PGWORKER_TEST_DSN": dsn, "PGWORKER_TEST_SERVER": "dsn"} | more


def survey(dsn: str, part: str, *, jobs: int, fresh: bool) -> tuple[list[Seen], list[str]]:
    """What is known of all tests, and those that fail without a mutant, which can kill none."""
    store = OUT / "mutants-survey.json"
    kept = cast("Kept", json.loads(store.read_text(encoding="utf-8"))) if store.exists() and not fresh else {}
    keys = {path: key_of(fingerprint(path), shared_fingerprint()) for path in test_files() if re.search(part, path)}
    stale = [path for path, key in keys.items() if kept.get(path, {}).get("key") != key]
    if stale:
        sys.stdout.write(f"looking at the tests of {len(stale)} files, without a mutant\n")
        sys.stdout.flush()
        kept |= _run(dsn, stale, keys, jobs=jobs)
        store.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    tests = {test: seen for path in keys for test, seen in kept.get(path, {}).get("tests", {}).items()}
    passing = {test: seen for test, seen in tests.items() if seen["passed"]}
    known = [Seen(test, seen["seconds"], frozenset(seen["statements"])) for test, seen in passing.items()]
    return known, [test for path in keys for test in kept.get(path, {}).get("failed", [])]


def _run(dsn: str, paths: Sequence[str], keys: Mapping[str, str], *, jobs: int) -> Kept:
    report = OUT / "mutants-survey-run.json"
    for old in OUT.glob("mutants-survey-run*.json"):
        old.unlink()
    log = OUT / "mutants-survey.log"
    with log.open("w") as out:
        arguments = ["-n", str(jobs), *paths]
        surroundings = environment(dsn, PGWORKER_MUTANT_SURVEY=str(report))
        subprocess.run(command(arguments), cwd=ROOT, env=surroundings, stdout=out, stderr=out, check=False)
    found: Kept = {path: {"key": keys[path], "tests": {}, "failed": []} for path in paths}
    for part in OUT.glob("mutants-survey-run*.json"):
        reported = json.loads(part.read_text(encoding="utf-8"))
        for test, seen in reported["tests"].items():
            found[test.partition("::")[0]]["tests"][test] = seen
        for test in reported["failed"]:
            _note_failure(found, test)
    if not any(each["tests"] for each in found.values()):
        raise RuntimeError(f"no test was run: see {log.relative_to(ROOT)}")
    return found


def _note_failure(found: Kept, test: str) -> None:
    """A file with a failure is looked at again the next time."""
    entry = found.get(test.partition("::")[0])
    if entry is not None:
        entry["failed"].append(test)
        entry["key"] = ""


def files_of(tests: Iterable[Seen]) -> list[str]:
    """The files of these tests, in their order."""
    return list(dict.fromkeys(test.path for test in tests))
