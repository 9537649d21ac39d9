"""P11: how long a claim takes that is fair between a thousand tenants, against one that takes the oldest jobs."""

from __future__ import annotations

import time
from typing import Final
from uuid import uuid4

from pgworker.bench.app import NOOP, PAYLOAD
from pgworker.bench.results import Result, Run, at_most, noted
from pgworker.bench.session import Session
from pgworker.bench.stats import percentile
from pgworker.db import SyncConnection, send_sync, session_settings
from pgworker.fairness import FIRST_TENANT, claim_fair
from pgworker.job import Claim
from pgworker.outcome import Success
from pgworker.policy import STORE_TIMEOUT
from pgworker.statements import BEGINNING, Cursor, Lane, claim_jobs, finish_jobs, survey_lanes

TENANTS: Final = 1_000
BATCH: Final = 100

_LANE: Final = Lane(NOOP, 0, 0)
_FILL: Final = """
insert into {jobs} (kind, key, tenant, payload, ready_at)
select %s, 'tenant:' || n, 'tenant ' || n %% %s, to_jsonb(%s::text), clock_timestamp() + n * interval '1 microsecond'
from generate_series(1, %s) n"""


class _Claims:
    """Claims as a runner makes them: behind what a survey has found, and what was taken has ended before the next."""

    def __init__(self, session: Session, connection: SyncConnection) -> None:
        self._tables = session.arena.tables
        self._connection = connection
        self._served = FIRST_TENANT

    def fair(self) -> tuple[float, int]:
        """The seconds that one fair claim takes, and how many tenants it serves."""
        after = self._start()
        began = time.perf_counter()
        shares = send_sync(
            self._connection,
            claim_fair(
                self._tables,
                _LANE,
                limit=BATCH,
                token=uuid4(),
                runner="bench",
                ttl_seconds=60,
                max_evictions=5,
                version=1,
                served=self._served,
                after=after,
            ),
        )
        seconds = time.perf_counter() - began
        self._served = shares.served or self._served
        self._end(shares.claims)
        return seconds, len(shares.claims)

    def plain(self) -> tuple[float, int]:
        """The same for a claim of the oldest."""
        after = self._start()
        began = time.perf_counter()
        claims = send_sync(
            self._connection,
            claim_jobs(
                self._tables,
                _LANE,
                limit=BATCH,
                token=uuid4(),
                runner="bench",
                ttl_seconds=60,
                max_evictions=5,
                version=1,
                after=after,
            ),
        )
        seconds = time.perf_counter() - began
        self._end(claims)
        return seconds, len(claims)

    def _start(self) -> Cursor:
        dues = send_sync(self._connection, survey_lanes(self._tables, [NOOP]))
        return next((due.start for due in dues), BEGINNING)

    def _end(self, claims: list[Claim]) -> None:
        send_sync(self._connection, finish_jobs(self._tables, NOOP, [(claim, Success(None)) for claim in claims]))


def p11(session: Session) -> Result:
    """Claims of a hundred jobs, fair ones and plain ones in turn, out of a backlog of a thousand tenants."""
    count, claims = session.sizes.tenanted, session.sizes.fair_claims
    session.say(f"{count} jobs of {TENANTS} tenants")
    session.arena.execute(_FILL, NOOP, TENANTS, PAYLOAD, count)
    runs: list[Run] = []
    with session.arena.connect() as connection:
        connection.execute(session_settings(STORE_TIMEOUT))
        connection.prepare_threshold = 0
        hands = _Claims(session, connection)
        for _ in range(claims):
            session.left()
            (fair, served), (plain, taken) = hands.fair(), hands.plain()
            runs.append(
                {"subject_ms": fair * 1000, "floor_ms": plain * 1000, "subject_jobs": served, "floor_jobs": taken}
            )
    session.arena.empty()
    ours, bare = ([run[name] or 0.0 for run in runs] for name in ("subject_ms", "floor_ms"))
    checks = (
        at_most(f"a claim of {BATCH}, p50", percentile(ours, 0.5), 10, unit="ms", floor=percentile(bare, 0.5)),
        noted("p99", percentile(ours, 0.99), unit="ms", floor=percentile(bare, 0.99)),
    )
    note = f"{count:,} ready jobs of {TENANTS:,} tenants; the floor is our own claim of the oldest, whosever they are"
    return Result("P11", "Claims fair between tenants", session.variant("tenanted"), checks, tuple(runs), note)
