"""Other queues on the same work: installed each in an environment of its own, driven by the same commands.

Every queue gets a new database on our server. Jobs are enqueued first, then the workers start; the clock runs from the
first job's call until the database shows nothing left, and so do the counters: starting up costs nobody anything. The
settings were swept, and none was better beyond the noise; benchmarks/peers/drive_*.py say which. pgworker goes the same
way here, but that its worker is run by its command line; it is not the figure of P1.
"""

from __future__ import annotations

from benchmarks.peers.compare import run_peers

__all__ = ["run_peers"]
