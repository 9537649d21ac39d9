"""python -m tests.mutants: try every mutant whose outcome is not known yet, and compare with survivors.toml."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import Final

from tests import postgres
from tests.mutants.catalogue import Mutant, groups, mutants_of, reasons
from tests.mutants.check import refused
from tests.mutants.survey import OUT, survey
from tests.mutants.trial import Bench, Outcome, batches

_RESULTS: Final = OUT / "mutants.json"
_BATCH: Final = 15  # mutants of one statement in one process: few enough for two processes to share the work


@dataclass(slots=True)
class Ledger:
    """The outcomes so far, kept in a file from run to run, and the reasons why some may live."""

    mutants: Sequence[Mutant]
    reasons: dict[str, str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def load(self) -> None:
        """Read what is known from earlier runs."""
        if _RESULTS.exists():
            stored = json.loads(_RESULTS.read_text(encoding="utf-8"))
            self.outcomes = {mutant: Outcome(**outcome) for mutant, outcome in stored.items()}

    def save(self) -> None:
        """Write what is known now."""
        stored = {mutant: asdict(outcome) for mutant, outcome in sorted(self.outcomes.items())}
        _RESULTS.write_text(json.dumps(stored, indent=1, ensure_ascii=False), encoding="utf-8")

    def killers(self) -> defaultdict[str, Counter[str]]:
        """How often each test has killed, by group: those are tried first."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for mutant, outcome in self.outcomes.items():
            if outcome.by:
                counts[mutant.partition("/")[0]][outcome.by] += 1
        return counts

    def word(self, mutant: Mutant) -> str:
        """One word for a mutant's outcome."""
        outcome = self.outcomes[mutant.id]
        return "explained" if outcome.status == "lives" and mutant.id in self.reasons else outcome.status

    def faults(self, existing: set[str]) -> list[str]:
        """What keeps the run from being green."""
        found = [f"a reason for a mutant that there is not: {each}" for each in self.reasons if each not in existing]
        for mutant in self.mutants:
            outcome = self.outcomes[mutant.id]
            place = f"{mutant.path.name}:{mutant.line} {mutant.id}"
            if outcome.status == "invalid":
                found.append(f"the generator made nonsense of {place}: {outcome.why}")
            elif outcome.status == "lives" and mutant.id not in self.reasons:
                found.append(f"lives: {place} ({outcome.why})")
            elif outcome.status == "killed" and mutant.id in self.reasons:
                found.append(f"has a reason to live, and is killed: {place} by {outcome.by}: {outcome.why}")
        return found

    def table(self) -> list[str]:
        """A line a group: how many mutants, and what became of them."""
        words = ("killed", "explained", "lives", "invalid")
        rows: list[tuple[str, ...]] = [("", "mutants", *words)]
        for group in dict.fromkeys(mutant.group for mutant in self.mutants):
            mine = [self.word(mutant) for mutant in self.mutants if mutant.group == group]
            rows.append((group, str(len(mine)), *(str(mine.count(word) or "") for word in words)))
        all_words = [self.word(mutant) for mutant in self.mutants]
        rows.append(("all", str(len(all_words)), *(str(all_words.count(word) or "") for word in words)))
        return ["".join(f"{cell:20}" if not at else f"{cell:>10}" for at, cell in enumerate(row)) for row in rows]


def _say(text: str, *, live: bool = False) -> None:
    """A line, or on a terminal one that the next takes the place of."""
    if sys.stdout.isatty():
        text = f"\r\x1b[2K{text[: os.get_terminal_size().columns - 1]}" if live else f"\r\x1b[2K{text}"
    elif live:
        return
    sys.stdout.write(text if live else f"{text}\n")
    sys.stdout.flush()


def _try_all(bench: Bench, ledger: Ledger, *, jobs: int, keep: bool) -> None:
    """Run the mutants whose outcome is not known, so many at a time."""
    left = [m for m in ledger.mutants if m.id not in ledger.outcomes or not bench.still_holds(m, ledger.outcomes[m.id])]
    known = len(ledger.mutants) - len(left)
    _say(f"{len(ledger.mutants)} mutants, {known} of them known from an earlier run; {jobs} at a time")
    killers = ledger.killers()

    def work(batch: list[Mutant]) -> None:
        for mutant, outcome in bench.run(batch, killers[batch[0].group]):
            ledger.outcomes[mutant.id] = outcome
            killers[mutant.group][outcome.by] += 1
            word = ledger.word(mutant)
            progress.append(mutant.id)
            text = f"[{len(progress):4}/{len(left)}] {word:9} {mutant.id} ({outcome.seconds:.1f} s)"
            _say(text, live=word == "killed")

    progress: list[str] = []
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(work, batch) for batch in batches(left, _BATCH)]
        try:
            for future in as_completed(running):
                future.result()
                if keep:
                    ledger.save()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _chosen(only: str) -> list[Mutant]:
    """The mutants of one group, or whose ids contain the text; all for an empty one."""
    everything = [mutant for group in groups() for mutant in mutants_of(group)]
    return [mutant for mutant in everything if only in ("", mutant.group)] or [
        mutant for mutant in everything if only in mutant.id
    ]


def _run(options: argparse.Namespace) -> int:
    mutants = _chosen(options.only)
    if options.list or not mutants:
        _say("\n".join(f"{mutant.path.name}:{mutant.line}\t{mutant.id}" for mutant in mutants) or "no such mutant")
        return 0 if mutants else 2
    OUT.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(mutants, reasons())
    if not options.fresh and not options.tests:
        ledger.load()
    with postgres.serve(postgres.choose(os.environ), os.environ) as server:
        tests, failing = survey(server.dsn, options.tests, jobs=options.jobs, fresh=options.fresh)
        invalid = refused(server.dsn, mutants)
        _try_all(Bench(server.dsn, tests, options.seconds), ledger, jobs=options.jobs, keep=not options.tests)
        ledger.outcomes |= {mutant: Outcome("invalid", "", why=why) for mutant, why in invalid.items()}
    existing = {mutant.id for group in groups() for mutant in mutants_of(group)}
    faults = ledger.faults(existing)
    _say("\n".join(ledger.table()))
    for test in failing:
        _say(f"fails without a mutant, and so kills none: {test}")
    for fault in faults:
        _say(fault)
    return 1 if faults else 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="a statement, a module, or a part of a mutant's id")
    parser.add_argument("--tests", default="", help="only by the test files whose path matches; for a first look")
    parser.add_argument("--jobs", type=int, default=2, help="so many pytest processes at once")
    parser.add_argument("--seconds", type=float, default=25, help="of tests for one mutant, quick ones first")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    parser.add_argument("--list", action="store_true", help="list the mutants and end")
    return _run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
