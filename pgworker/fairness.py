"""The claim that is fair between tenants: queries/claim_fair.sql as a typed value, and how its answer is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast
from uuid import UUID

from pgworker.job import Claim
from pgworker.statements import BEGINNING, Cursor, Lane, Row, Statement, after_ready, statement
from pgworker.tablemap import TableMap

FIRST_TENANT: Final = ""
"""Where a ring begins that nobody has been round yet: with '', which is last in it, begins what has no tenant."""
LOOKS: Final = 1000
"""The most tenants that one claim looks at: those behind them are next, however many have nothing to be claimed."""


class Shares(NamedTuple):
    """What a fair claim brought: of each tenant the oldest first, then of each the second, and so on."""

    claims: list[Claim]
    served: str | None
    """The tenant after which the next claim is to begin; None when nobody was served, and all had been looked at."""


def claim_fair(
    tables: TableMap,
    lane: Lane,
    *,
    limit: int,
    token: UUID,
    runner: str,
    ttl_seconds: float,
    max_evictions: int | None,
    version: int,
    served: str = FIRST_TENANT,
    after: Cursor = BEGINNING,
    looks: int = LOOKS,
    facts: int = 0,
) -> Statement[Shares]:
    """Take up to `limit` ready jobs of a lane, of each tenant an equal share, beginning behind the one served last.

    Fewer than `limit` do not mean that there are no more: a tenant may have had less than its share, or no tenant.
    """
    parameters = {
        "kind": lane.kind,
        "class": lane.urgency,
        "priority": lane.priority,
        "limit": limit,
        "token": token,
        "runner": runner,
        "ttl": ttl_seconds,
        "max_evictions": max_evictions,
        "version": version,
        "after_tenant": served,
        "after_ready": after_ready(after),
        "after_id": after[1],
        "looks": looks,
        "facts": facts,
    }
    return statement("claim_fair", tables, parameters, _read_shares)


def _read_shares(rows: Sequence[Row]) -> Shares:
    """Interleave the tenants, who come numbered by their places in the ring; UPDATE ... RETURNING has no order."""
    by_tenant: defaultdict[int, list[Claim]] = defaultdict(list)
    for _, place, *columns in cast("Sequence[tuple[Any, ...]]", rows):
        if place is not None:
            by_tenant[place].append(Claim._make(columns))
    turns: list[tuple[int, int, Claim]] = []
    for place, claims in by_tenant.items():
        in_order = sorted(claims, key=lambda claim: (claim.ready_at, claim.id))
        turns += [(turn, place, claim) for turn, claim in enumerate(in_order)]
    claims = [claim for _, _, claim in sorted(turns, key=lambda each: each[:2])]
    return Shares(claims, cast("str | None", rows[0][0]))
