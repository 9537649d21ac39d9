"""What a run of the machine has hit, and what it should have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import TypeAlias

Hit: TypeAlias = tuple[str, ...]

STATES = (
    "ready", "scheduled", "running", "cancelling", "expired running", "expired cancelling", "succeeded", "failed",
    "cancelled", "pruned",
)  # fmt: skip
REVISIONS = ("same", "new", "first", "none", "no longer")
"""What the enqueue gives against what the row has: the same revision, another, one where there was none, none on
either side, none where there was one."""

RULES_OF_KEYS = (
    "enqueue",
    "enqueue_many",
    "enqueue_events",
    "cancel",
    "retry",
    "rebuild",
    "forget",
    "expire",
    "delete",
    "set_clock_back",
)
RULES_OF_CLAIMS = ("complete", "fail", "give_back", "renew", "look", "check_fence")
PRUNED = (
    *product(("succeeded", "failed", "cancelled"), ("event", "keyed")),
    ("pruned", "keyed"),
)
"""What retention may come across among what has ended."""
RULES_OF_LANES = ("claim", "reap", "survey")
OUTCOMES = (
    "value", "no value", "retry", "error", "last attempt", "permanent", "panic", "park", "pause", "cancel", "release",
)  # fmt: skip
VERDICTS = ("done", "expired", "lost")


def expected() -> Iterator[Hit]:
    """All that must be hit: the re-enqueue table, each outcome, each rule in each state."""
    for keep in ("replace", "keep"):
        yield from (("put", "absent", revision, keep) for revision in ("first", "none"))
        yield from (("put", *cell, keep) for cell in product(STATES, REVISIONS))
    yield from (("put", old, "by", new) for old, new in product(("event", "keyed"), repeat=2))
    yield from (("outcome", *pair) for pair in product(OUTCOMES, VERDICTS))
    yield from (("rule", *pair) for pair in product(RULES_OF_KEYS, ("absent", *STATES)))
    # (to one that has lost its row, a pruned row is as any that has ended)
    yield from (("rule", *pair) for pair in product(RULES_OF_CLAIMS, ("absent", *STATES)) if pair[1] != "pruned")
    yield from (("answer", *pair) for pair in product(("retry", "rebuild"), ("done", "passed", "pruned")))
    yield from (("rule", *pair) for pair in product(RULES_OF_LANES, STATES))
    yield from (("rule", "crash", state) for state in ("running", "cancelling"))
    yield from (("rule", *pair) for pair in product(("age", "prune"), STATES))
    yield from (("prune", *cell, age) for cell, age in product(PRUNED, ("old", "young")))


class Tally:
    """How often what was hit, over all examples of a run."""

    def __init__(self) -> None:
        self.hits: Counter[Hit] = Counter()
        self.examples = 0
        self.steps = 0

    def rare(self, least: int) -> list[str]:
        """What should have been hit so often, and was not."""
        return [f"{' / '.join(hit)}: {self.hits[hit]}" for hit in expected() if self.hits[hit] < least]

    def report(self) -> str:
        """The statistics in full."""
        wanted = set(expected())
        lines = [f"{self.examples} examples, {self.steps} steps; {len(wanted)} things to hit"]
        for hit, count in sorted(self.hits.items()):
            lines.append(f"{count:8} {' / '.join(hit)}{'' if hit in wanted else '  (besides)'}")
        return "\n".join(lines)
