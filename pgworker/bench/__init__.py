"""The benchmarks P1 to P12 on a user's own database, each beside its floor, in a schema that is dropped again.

scenario  one promise of speed or cost, P1 to P12: what is measured, and the target
subject   what pgworker does: over its public API, and by workers in processes of their own
floor     the least that the same work can cost: what one would write by hand, without any of the promises
round     subject and floor, one right after the other; a pair is a round for ratios that are close to one
sample    one measured piece of work: jobs, seconds, and CPU, WAL and transactions for each job
check     one figure beside its target
arena     the schema that all of it happens in

Machines are noisy and differ: quote ratios to the floor of the same run, and the costs for each job, which hold still.
"""

from __future__ import annotations

from pgworker.bench.arena import new_schema
from pgworker.bench.results import Check, Result, Sample, at_least
from pgworker.bench.run import NAMES, Report, chosen, run_bench
from pgworker.bench.session import FULL, QUICK, STANDARD, Sizes, as_ctrl_c, with_jobs
from pgworker.bench.tables import (
    PEER_HEADINGS,
    Json,
    as_markdown,
    as_text,
    facts,
    peer_rows,
    remarks,
    result_rows,
    results_of,
    to_json,
)

__all__ = [
    "FULL",
    "NAMES",
    "PEER_HEADINGS",
    "QUICK",
    "STANDARD",
    "Check",
    "Json",
    "Report",
    "Result",
    "Sample",
    "Sizes",
    "as_ctrl_c",
    "as_markdown",
    "as_text",
    "at_least",
    "chosen",
    "facts",
    "new_schema",
    "peer_rows",
    "remarks",
    "result_rows",
    "results_of",
    "run_bench",
    "to_json",
    "with_jobs",
]
