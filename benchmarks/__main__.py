"""Run the benchmarks on a server of their own and write `benchmarks/out/bench.json`; see `make bench`.

How the figures are made: a new embedded Postgres with fsync and synchronous_commit on and 512 MB of shared buffers;
each scenario's rounds interleave pgworker and its floor; workers and the floors' loops are processes of their own;
rates are medians, and costs a job come from /proc, the WAL position and the database's count of transactions: see
pgworker.bench. `--peers` installs other queues, runs the same jobs through them on such a server, and adds their rows.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Final, cast

from benchmarks.server import own_server
from pgworker import bench

OUT: Final = Path(__file__).parent / "out" / "bench.json"
_TIMES_PGQUEUER: Final = "as a multiple of pgqueuer's rate"
_LIMIT_SECONDS: Final = 2 * 3600.0


def main() -> None:
    """Do what the options say."""
    options = _options()
    signal.signal(signal.SIGTERM, bench.as_ctrl_c)  # so that the server and its folder go, too
    if options.markdown:
        print(_markdown(json.loads(OUT.read_text())))
        return
    report = json.loads(OUT.read_text()) if OUT.exists() and (options.peers or options.which) else {}
    with own_server() as dsn:
        if options.peers:
            from benchmarks.peers import run_peers  # noqa: PLC0415 - it needs a package index

            report["peers"] = run_peers(dsn, jobs=2_000 if options.quick else 20_000, say=_say)
        else:
            _merge(report, _run(dsn, options))
    _compare_with_pgqueuer(report)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(report, indent=2) + "\n")
    print(_text(report))
    _say(f"written to {OUT}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "which", nargs="*", metavar="P1", help="scenarios; all, unless named (others keep their figures)"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="tiny: for breakage only")
    size.add_argument("--full", action="store_true", help="half a million other rows, a stream of ten minutes")
    parser.add_argument("--peers", action="store_true", help="other queues, on the same workload")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the last run; measure nothing")
    return parser.parse_args()


def _run(dsn: str, options: argparse.Namespace) -> bench.Json:
    sizes = bench.QUICK if options.quick else bench.FULL if options.full else bench.STANDARD
    names = bench.chosen(options.which)
    return bench.to_json(
        bench.run_bench(
            dsn, schema=bench.new_schema(), names=names, sizes=sizes, limit_seconds=_LIMIT_SECONDS, say=_say
        )
    )


def _merge(report: bench.Json, new: bench.Json) -> None:
    """Put new figures into the last run's; those of scenarios that were not run again stay."""
    results = {**bench.results_of(report), **bench.results_of(new)}
    report.update(new)
    report["results"] = {name: results[name] for name in bench.NAMES if name in results}


def _compare_with_pgqueuer(report: bench.Json) -> None:
    """P1's other target, by the two queues' rows of one run; it stays out until there are both."""
    p1, peers = bench.results_of(report).get("P1"), report.get("peers")
    if p1 is None or not isinstance(peers, dict):
        return
    rates = [peers[name]["one_worker"] for name in ("pgworker", "pgqueuer")]
    check = asdict(bench.at_least(_TIMES_PGQUEUER, rates[0] / rates[1], 1.5, floor=1.0))
    others = [each for each in cast("list[bench.Json]", p1["checks"]) if each["what"] != _TIMES_PGQUEUER]
    p1["checks"] = [*others, check]
    p1["met"] = all(each["met"] for each in [*others, check] if each["met"] is not None)


def _text(report: bench.Json) -> str:
    parts: list[str] = []
    if "results" in report:
        parts += [bench.facts(report), bench.as_text(bench.result_rows(report)), "\n".join(bench.remarks(report))]
    if "peers" in report:
        parts.append(bench.as_text(bench.peer_rows(report), bench.PEER_HEADINGS))
    return "\n\n".join(parts)


def _markdown(report: bench.Json) -> str:
    parts = [bench.facts(report), bench.as_markdown(bench.result_rows(report))]
    parts.append("\n".join(f"- {line}" for line in bench.remarks(report)))
    if "peers" in report:
        parts.append(bench.as_markdown(bench.peer_rows(report), bench.PEER_HEADINGS))
    return "\n\n".join(part for part in parts if part)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
