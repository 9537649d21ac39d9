"""Mutants and their tests: the likeliest first, until one fails."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tests.mutants.catalogue import CODE, ROOT, Mutant
from tests.mutants.survey import Seen, command, environment, files_of, fingerprint, key_of, shared_fingerprint

_ABOUT_TERMS: Final = (
    "tests/plans/",
    "tests/integration/test_statement_terms",
    "tests/integration/test_conformance_statements",
    "tests/integration/test_own_table",
)
_LONGEST_TEST: Final = 4.0  # seconds without a mutant; slower ones are for what they say, not for terms of a statement
_TEST_TIMEOUT: Final = 25  # far above the longest test: whoever runs into it hangs
_NONSENSE: Final = ("psycopg.errors.SyntaxError", "psycopg.errors.DatatypeMismatch", "psycopg.errors.UndefinedColumn")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant; `key` is the content that this was found for."""

    status: Literal["killed", "lives", "invalid"]
    key: str
    by: str = ""
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Bench:
    """What mutants are tried with: a server, the tests that pass without a mutant, and how many seconds of them."""

    dsn: str
    tests: Sequence[Seen]
    seconds: float

    def tests_for(self, group: str, killers: Counter[str]) -> list[Seen]:
        """The tests that may notice: those that have killed and those about terms and plans, then quick ones.

        The quick ones up to a bound of seconds, as any number of tests may send a statement.
        """
        fitting = [seen for seen in self._fitting(group) if seen.seconds <= _LONGEST_TEST]
        chosen = [seen for seen in fitting if killers[seen.test] or seen.path.startswith(_ABOUT_TERMS)]
        left = self.seconds
        for seen in sorted(set(fitting) - set(chosen), key=lambda seen: (seen.seconds, seen.test)):
            if seen.seconds <= left:
                chosen.append(seen)
                left -= seen.seconds
        return chosen

    def _fitting(self, group: str) -> Iterator[Seen]:
        for seen in self.tests:
            if group in seen.statements if group not in CODE else seen.path in CODE[group].tests:
                yield seen

    def still_holds(self, mutant: Mutant, outcome: Outcome) -> bool:
        """Whether nothing has changed since that this outcome depends on."""
        return outcome.key == self._key(mutant, outcome.by)

    def _key(self, mutant: Mutant, killer: str) -> str:
        """What was run: the mutated text, what tests share, and the killer's file, or all that might have killed."""
        paths = [killer.partition("::")[0]] if killer else files_of(self._fitting(mutant.group))
        return key_of(mutant.text, shared_fingerprint(), *(fingerprint(path) for path in sorted(set(paths))))

    def run(self, mutants: Sequence[Mutant], killers: Counter[str]) -> Iterator[tuple[Mutant, Outcome]]:
        """Try mutants of one group; a process that ends, or is ended, is followed by another for the rest."""
        left = {mutant.id: mutant for mutant in mutants}
        tests = self.tests_for(mutants[0].group, killers)
        if not tests:
            for mutant in mutants:
                yield mutant, Outcome("lives", self._key(mutant, ""), why="no test sends it")
            return
        while left:
            for mutant_id, by, why, seconds in self._batch(list(left), tests, killers):
                mutant = left.pop(mutant_id)
                yield mutant, Outcome(_status(by, why), self._key(mutant, by), by, why, seconds)

    def _batch(
        self, ids: Sequence[str], tests: Sequence[Seen], killers: Counter[str]
    ) -> list[tuple[str, str, str, float]]:
        """One process: for each mutant its id, its killer or '', the reason, and the seconds."""
        with tempfile.TemporaryDirectory(prefix="pgworker-mutants-") as name:
            batch = Path(name) / "batch.json"
            wanted = {"mutants": ids, "tests": {seen.test: seen.seconds for seen in tests}, "killers": killers}
            batch.write_text(json.dumps(wanted), encoding="utf-8")
            log = Path(name) / "log"
            options = ["-p", "no:xdist", f"--timeout={_TEST_TIMEOUT}"]
            with log.open("w") as out:
                subprocess.run(
                    command([*options, *files_of(tests)]),
                    cwd=ROOT,
                    env=environment(self.dsn, PGWORKER_MUTANT_BATCH=str(batch)),
                    stdout=out,
                    stderr=out,
                    check=False,
                )
            found = list(_results(batch))
            return found or [_hung(batch, log)]


def _status(by: str, why: str) -> Literal["killed", "lives", "invalid"]:
    """What that means: a text that the server cannot read proves nothing, whichever test it fails."""
    if why.startswith(_NONSENSE):
        return "invalid"
    return "killed" if by else "lives"


def _results(batch: Path) -> Iterator[tuple[str, str, str, float]]:
    """What the plugin has written down; a mutant that ended its process has no line, but the next process has."""
    results = batch.with_suffix(".results")
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        said = json.loads(line)
        yield said["id"], said["by"], said["why"], said["seconds"]


def _hung(batch: Path, log: Path) -> tuple[str, str, str, float]:
    """The first mutant has ended its process: pytest-timeout does so with a test that hangs."""
    running = batch.with_suffix(".running")
    if not running.exists():
        raise RuntimeError(f"pytest ended early:\n{log.read_text(encoding='utf-8')[-3000:]}")
    mutant, test = running.read_text(encoding="utf-8").splitlines()
    return mutant, test, f"no end within {_TEST_TIMEOUT} s", float(_TEST_TIMEOUT)


def batches(mutants: Iterable[Mutant], size: int) -> list[list[Mutant]]:
    """Mutants of one statement together, up to a number; those of a module alone, as it is imported once."""
    made: list[list[Mutant]] = []
    for mutant in mutants:
        together = made and mutant.group not in CODE and made[-1][0].group == mutant.group and len(made[-1]) < size
        if together:
            made[-1].append(mutant)
        else:
            made.append([mutant])
    return made
