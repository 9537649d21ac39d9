"""A pytest plugin, loaded by `-p tests.mutants.plugin`: runs tests under mutants, or notes what tests do without one.

PGWORKER_MUTANT=<id> puts one mutant in its place before anything of ours is imported; for looking at it by hand.
PGWORKER_MUTANT_BATCH=<file> does so for each mutant of a list in turn (see Batch), and writes down what became of it.
PGWORKER_MUTANT_SURVEY=<file> notes which tests pass, their seconds, and the statements that they build.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import pytest

from tests.mutants.catalogue import Mutant, find
from tests.mutants.place import Place

_DOUBTFUL_SECONDS: Final = 0.5  # a test that takes so long waits for something, perhaps too short: it must fail twice


def _why(longrepr: object) -> str:
    """The line of a failure that says what went wrong."""
    lines = [line[1:].strip() for line in str(longrepr).splitlines() if line.startswith("E")]
    return (lines or str(longrepr).splitlines() or [""])[0][:200]


class Survey:
    """Notes what each test does."""

    def __init__(self, path: Path) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        self._path = path.with_suffix(f".{worker}.json") if worker else path
        self._tests: dict[str, dict[str, Any]] = {}
        self._failed: dict[str, str] = {}
        self._built: set[str] = set()
        self._watch_statements()

    def _watch_statements(self) -> None:
        from pgworker.statements import Statement  # noqa: PLC0415 - a plugin must not import ours too early

        build = Statement.__init__

        def noted(statement: Statement[object], name: str, *args: Any, **options: Any) -> None:
            self._built.add(name)
            build(statement, name, *args, **options)

        Statement.__init__ = noted  # type: ignore[method-assign, assignment]

    def pytest_runtest_logstart(self) -> None:
        self._built.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": False, "statements": []})
        test["seconds"] += report.duration
        if report.when == "call":
            test["passed"] = report.passed and not hasattr(report, "wasxfail")
            test["statements"] = sorted(self._built)
        if report.failed:
            self._failed[report.nodeid] = _why(report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = _why(report.longrepr)

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps({"failed": self._failed, "tests": self._tests}), encoding="utf-8")


class Batch:
    """Runs the listed tests under each mutant until one fails, in one process, each mutant with a result of one line.

    The file holds {"mutants": [id, ...], "tests": {node id: seconds}, "killers": {node id: count}}. The results go to a
    file beside it, `.results`, and `.running` says what is being run for whoever has to end this process.
    A module is imported once, so its mutants come one at a time.
    """

    def __init__(self, path: Path) -> None:
        wanted = json.loads(path.read_text(encoding="utf-8"))
        self._mutants: list[Mutant] = [find(mutant) for mutant in wanted["mutants"]]
        self._seconds: dict[str, float] = wanted["tests"]
        self._killers: Counter[str] = Counter(wanted["killers"])
        self._results = path.with_suffix(".results")
        self._running = path.with_suffix(".running")
        self._place = Place()
        self._place.put(self._mutants[0])
        self._failure = ""
        self._untidy = False
        self._not_collected = ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._not_collected = f"{report.nodeid}\n{_why(report.longrepr)}"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the listed tests only."""
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._seconds])
        items[:] = [item for item in items if item.nodeid in self._seconds]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        """Instead of pytest's own loop over the tests: one over the mutants."""
        for mutant in self._mutants:
            self._place.put(mutant)
            started = time.monotonic()
            killer, why = self._killer(session, mutant)
            self._note(mutant.id, killer, why, time.monotonic() - started, len(session.items))
            self._killers[killer] += 1
            if self._untidy:  # whatever the last test has left behind might kill the next mutant, too
                break
        return True

    def _note(self, mutant: str, killer: str, why: str, seconds: float, count: int) -> None:
        line = {"id": mutant, "by": killer, "why": why or f"{count} tests passed", "seconds": round(seconds, 2)}
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _killer(self, session: pytest.Session, mutant: Mutant) -> tuple[str, str]:
        """The test that kills, and its word; two empty texts when none does."""
        if self._not_collected:
            test, _, why = self._not_collected.partition("\n")
            return test, why
        for item in self._ordered(session.items):
            self._running.write_text(f"{mutant.id}\n{item.nodeid}", encoding="utf-8")
            failure = self._run(session, item)
            if failure and self._seconds[item.nodeid] > _DOUBTFUL_SECONDS:
                failure = self._run(session, item)
            if failure:
                return item.nodeid, failure
        return "", ""

    def _ordered(self, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Those first that have killed most, then the quick ones."""
        return sorted(items, key=lambda item: (-self._killers[item.nodeid], self._seconds[item.nodeid], item.nodeid))

    def _run(self, session: pytest.Session, item: pytest.Item) -> str:
        """Run a test to its end, with all fixtures but the session's; its failure, or an empty text."""
        self._failure = ""
        # What comes next is not known yet: the session itself stands for it, whose fixtures stay.
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=cast("pytest.Item", session))
        return self._failure

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "teardown":
            self._untidy = True
        elif report.failed:
            self._failure = self._failure or _why(report.longrepr) or "failed"


@contextmanager
def _as_usage_error() -> Iterator[None]:
    try:
        yield
    except (LookupError, RuntimeError) as error:
        raise pytest.UsageError(str(error)) from error


def _begin() -> Batch | Place | None:
    """Put the first mutant in its place: now, as the tests' own plugins are imported soon."""
    with _as_usage_error():
        if "PGWORKER_MUTANT_BATCH" in os.environ:
            return Batch(Path(os.environ["PGWORKER_MUTANT_BATCH"]))
        if "PGWORKER_MUTANT" in os.environ:
            mutant = find(os.environ["PGWORKER_MUTANT"])
            place = Place()
            place.put(mutant)
            return place
    return None


_begun: Final = _begin()  # kept as long as the process: the mutant's folder ends with it


def pytest_configure(config: pytest.Config) -> None:
    """Register what the environment asks for; a survey is made by the workers of xdist, not by their controller."""
    if isinstance(_begun, Batch):
        config.pluginmanager.register(_begun, "mutant-batch")
    survey = os.environ.get("PGWORKER_MUTANT_SURVEY")
    if survey and ("PYTEST_XDIST_WORKER" in os.environ or config.getoption("dist", "no") == "no"):
        config.pluginmanager.register(Survey(Path(survey)), "mutant-survey")
