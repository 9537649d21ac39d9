"""The loops that one would write by hand, each in a process of its own: nothing can be quicker, and nothing is safe.

`drain` claims 500 rows and marks them done, without token, lease, attempts or results. `listen` prints how long each
notification took. Both say `ready`; `drain` waits for a line, and prints the time of its end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Final, cast

import psycopg

from pgworker.bench.app import NOOP
from pgworker.bench.arena import connect
from pgworker.config import Settings
from pgworker.tablemap import TableMap

BATCH: Final = 500
CHANNEL: Final = "pgworker_bench_floor"

_CLAIM: Final = """
with pick as materialized (
    select id from {raw_jobs} where kind = %s and state = 'ready' and ready_at <= clock_timestamp()
    order by priority, ready_at, id limit {batch} for no key update skip locked
)
update {raw_jobs} j set state = 'running' from pick where j.id = pick.id returning j.id, j.payload::text"""
_DONE: Final = "update {raw_jobs} set state = 'done' where id = any(%s)"


async def _nothing(_payload: str) -> None:
    pass


def _drain(connection: psycopg.Connection[tuple[object, ...]], tables: TableMap) -> None:
    """Claim and mark until nothing is left; the payload is read, and a coroutine awaited, as every worker does."""
    name = tables.qualified("raw_jobs")
    claim, done = _CLAIM.format(raw_jobs=name, batch=BATCH).encode(), _DONE.format(raw_jobs=name).encode()
    connection.execute("set enable_seqscan = off; set enable_sort = off")
    _say("ready")
    if not sys.stdin.readline():
        return  # who started this is gone
    count = 0
    while rows := connection.execute(claim, [NOOP], prepare=True).fetchall():
        for _, payload in rows:
            _finish(json.loads(str(payload)))
        connection.execute(done, [[cast("int", row[0]) for row in rows]], prepare=True)
        count += len(rows)
    _say(json.dumps({"jobs": count, "ended": time.monotonic()}))
    sys.stdin.read()  # its CPU time can be read until the pipe is closed


def _finish(payload: str) -> None:
    try:
        _nothing(payload).send(None)
    except StopIteration:
        return


def _listen(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    threading.Thread(target=_end_with_the_benchmark, daemon=True).start()
    connection.execute(f"listen {CHANNEL}")
    _say("ready")
    for notification in connection.notifies():
        _say(f"{(time.monotonic() - float(notification.payload)) * 1000:.3f}")


def _end_with_the_benchmark() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201 - read by who started this


def main() -> None:
    """Run the loop that is named, on the database and the schema of the environment."""
    settings = Settings.load(environ=os.environ)
    with connect(settings.dsn, "floor") as connection:
        if sys.argv[1] == "drain":
            _drain(connection, settings.tables)
        else:
            _listen(connection)


if __name__ == "__main__":
    main()
