"""What is mutated: every statement by directory listing, and the pure tables and decisions by name."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutants import pycode, sqltext

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = ROOT / "pgworker"
QUERIES: Final = PACKAGE / "queries"
SURVIVORS: Final = Path(__file__).with_name("survivors.toml")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed file. `group` is the file's name without its ending, `id` is unique and outlives edits elsewhere."""

    group: str
    name: str
    path: Path
    line: int
    text: str

    @property
    def id(self) -> str:
        return f"{self.group}/{self.name}"


@dataclass(frozen=True, slots=True)
class Code:
    """A module, the definitions in it that decide, and the tests that may notice."""

    module: str
    definitions: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def path(self) -> Path:
        return ROOT.joinpath(*self.module.split(".")).with_suffix(".py")


CODE: Final = {
    code.module.rpartition(".")[2]: code
    for code in (
        Code(
            "pgworker.job",
            ("MOVES", "URGENCIES"),
            ("tests/unit/test_outcome.py", "tests/unit/test_decisions.py", "tests/integration/test_enqueue.py"),
        ),
        Code(
            "pgworker.outcome",
            ("_checked", "_wait", "decide", "_failure", "is_result"),
            ("tests/unit/test_outcome.py", "tests/unit/test_decisions.py", "tests/integration/test_runner.py"),
        ),
        Code(
            "pgworker.retry",
            ("Backoff", "Backoff.__post_init__", "Backoff.delay"),
            ("tests/unit/test_outcome.py", "tests/unit/test_policy.py", "tests/unit/test_decisions.py"),
        ),
        Code(
            "pgworker.policy",
            (
                "Policy",
                "Lease.__post_init__",
                "Stop.__post_init__",
                "Policy.__post_init__",
                "_CHOICES",
                "_check_weights",
                "covering_ttl",
                "_content",
                "_pool",
                "_simple",
                "_dispatch",
                "PRESETS",
                "_MAY_BE_UNLIMITED",
                "_TAKES",
                "make_policy",
                "_read",
            ),
            ("tests/unit/test_policy.py", "tests/unit/test_decisions.py"),
        ),
        Code(
            "pgworker.client",
            ("_OPTION_TYPES", "_check_options", "_wrong_type", "_seconds", "in_callers_order"),
            ("tests/unit/test_enqueue_options.py", "tests/unit/test_decisions.py", "tests/integration/test_enqueue.py"),
        ),
        Code(
            "pgworker.groups",
            (
                "_CONFLICTS",
                "Call.keys",
                "_size",
                "Line.take",
                "Line.part",
                "_may_join",
                "_is_replaceable",
                "_join",
                "_is_held_up",
                "_is_unanswered",
            ),
            ("tests/unit/test_groups.py",),
        ),
        Code(
            "pgworker.retention",
            (
                "Retention.__init__",
                "Retention.begin_anew",
                "Retention.prune_all",
                "Retention.prune",
                "Retention.prune_facts",
                "Retention._prune_jobs",
                "Retention._prune_results",
                "_job_shelves",
                "_result_shelves",
                "prune_apart",
            ),
            ("tests/integration/test_retention.py", "tests/integration/test_results.py"),
        ),
        Code(
            "pgworker.db",
            ("NO_ANSWER", "is_outage", "is_conflict", "is_data_error"),
            ("tests/unit/test_decisions.py", "tests/integration/test_attempt.py", "tests/integration/test_apply.py"),
        ),
        Code(
            "pgworker.statements",
            ("FACTS", "after_ready"),
            ("tests/unit/test_decisions.py", "tests/integration/test_reaper.py", "tests/integration/test_runner.py"),
        ),
        Code(
            "pgworker.executors.results",
            ("_INSTRUCTIONS", "returned", "_one", "_codec", "raised", "_innermost"),
            ("tests/unit/test_decisions.py", "tests/integration/test_runner.py", "tests/integration/test_payloads.py"),
        ),
    )
}
"""The pure tables and decisions, by group."""


def groups() -> list[str]:
    """All groups: the statements, then the modules."""
    return [*(path.stem for path in sorted(QUERIES.glob("*.sql"))), *CODE]


def mutants_of(group: str) -> Iterator[Mutant]:
    """The mutants of one file, in its order."""
    if group in CODE:
        code = CODE[group]
        path = code.path
        edits = pycode.mutants(path.read_text(encoding="utf-8"), code.definitions)
    else:
        path = QUERIES / f"{group}.sql"
        edits = sqltext.mutants(path.read_text(encoding="utf-8"))
    for edit in edits:
        yield Mutant(group, edit.name, path, edit.line, edit.text)


def find(mutant_id: str) -> Mutant:
    """The mutant of this id. Raises LookupError."""
    group = mutant_id.partition("/")[0]
    for mutant in mutants_of(group) if group in groups() else ():
        if mutant.id == mutant_id:
            return mutant
    raise LookupError(f"no mutant {mutant_id!r}: see python -m tests.mutants --list")


def reasons() -> dict[str, str]:
    """Why a mutant may live, by its id. Raises ValueError for a reason that says nothing."""
    found: dict[str, str] = {}
    for group, lines in tomllib.loads(SURVIVORS.read_text(encoding="utf-8")).items():
        for name, reason in lines.items():
            if not isinstance(reason, str) or not reason.strip() or "\n" in reason:
                raise ValueError(f"survivors.toml: {group}/{name} needs a reason of one line")
            found[f"{group}/{name}"] = reason
    return found
