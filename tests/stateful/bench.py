"""What the machine stands on: the connections, how the table is read, and the checks that hold after every step."""

from __future__ import annotations

import itertools
import json
import sys
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Literal, TypeAlias

import psycopg
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from pgworker import statements as sql
from pgworker.job import Claim
from tests.handles import Hand
from tests.stateful.model import Model
from tests.stateful.rows import COLUMNS, FIELDS, Differs, Fact, Lane, Row, Seen, broken_rules
from tests.stateful.tally import Tally

Admin: TypeAlias = psycopg.Connection[Any]
Runner: TypeAlias = Literal["A", "B"]

KEYS = ("a", "b", "c")
TTL = 3600.0
LATER = 7200.0
SHORT = 0.001  # what a claim says of its lease: the server, just started, can have granted no longer one before
LIMIT_OF_EVICTIONS = 2
KEY = st.sampled_from((*KEYS, "claimed", "claimed"))
"""A key, or that of the newest claim: most of what is delicate happens to jobs that run."""

_LOOK = f"""
select n.at, {", ".join(f"j.{column}" for column in COLUMNS)}, r.key, r.revision, r.value #>> '{{}}', r.finished_at
from (select clock_timestamp() as at) n left join (
    (select * from pgworker.jobs where kind = %(kind)s) j
    full join (select * from pgworker.results where kind = %(kind)s and key = any(%(keys)s)) r on r.key = j.key
) on true"""
_LOOK_AT_FACTS = """
select id, at, job_id, generation, attempts, key, revision, what, code, runner from pgworker.facts
where id > %s and kind = %s"""
_TIME_PASSES = """
update pgworker.jobs set ready_at = ready_at - %(by)s, lease_expires_at = lease_expires_at - %(by)s,
    not_before = not_before - %(by)s
where kind = %(kind)s"""
_STRANGERS = """
select string_agg(j::text || coalesce(r::text, ''), ';' order by j.id)
from pgworker.jobs j left join pgworker.results r using (kind, key) where kind like 'stranger%'"""
_EXPIRE = "update pgworker.jobs set lease_expires_at = clock_timestamp() where kind = %s and key = %s"


@dataclass
class Bench:
    """What the examples of one run share."""

    hand: Hand
    admin: Admin
    tally: Tally = field(default_factory=Tally)
    probed: set[tuple[object, ...]] = field(default_factory=set)
    """Combinations of columns of pending rows that claim or reaper were seen to take."""
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    last_fact: int = 0

    def __post_init__(self) -> None:
        self.admin.execute("set enable_seqscan = off")
        self.started: datetime = self._one("select pg_postmaster_start_time()")
        columns = "select array_agg(attname::text) from pg_attribute where attrelid = 'pgworker.jobs'::regclass"
        there = set(self._one(f"{columns} and attnum > 0 and not attisdropped"))
        assert there == {"kind", *COLUMNS}, f"the model does not know {there ^ {'kind', *COLUMNS}}"
        self._make_strangers()

    def _one(self, query: str) -> Any:
        found = self.admin.execute(query.encode()).fetchone()
        assert found is not None
        return found[0]

    def _make_strangers(self) -> None:
        """Jobs of other kinds with the same keys: all have ended; or: ready, runs, its lease has run out."""
        for table in ("jobs", "results"):
            self.admin.execute(f"delete from pgworker.{table} where kind like 'stranger%'".encode())
        self.hand.kind = "stranger.ended"
        for key in KEYS:
            self.hand.enqueue(key)
        for claim in self.hand.claim(len(KEYS)):
            self.hand.finish(claim, '"its result"')
        self.hand.kind = "stranger"
        for key in KEYS:
            self.hand.enqueue(key)
        self.hand.claim(2, ttl_seconds=1e9)
        self.admin.execute(_EXPIRE, ["stranger", "b"])
        self.strangers = self._one(_STRANGERS)

    def clock(self) -> datetime:
        """The database's."""
        at: datetime = self._one("select clock_timestamp()")
        return at

    def look(self, kind: str) -> Seen:
        """Everything there is of a kind, and the facts since the last look."""
        found = self.admin.execute(_LOOK.encode(), {"kind": kind, "keys": list(KEYS)}).fetchall()
        width = len(COLUMNS) + 1
        key = 1 + FIELDS.index("key")
        rows = {line[key]: line[1:width] for line in found if line[key] is not None}
        results = {line[width]: line[width + 1 :] for line in found if line[width] is not None}
        lines = self.admin.execute(_LOOK_AT_FACTS, [self.last_fact, kind]).fetchall()
        self.last_fact = max((line[0] for line in lines), default=self.last_fact)
        return Seen(found[0][0], rows, results, [(Fact(*line[2:]), line[1]) for line in lines])

    def check_strangers(self) -> None:
        """See that nobody has touched another kind. What an example leaves has a kind of its own: it is in no way."""
        if self._one(_STRANGERS) == self.strangers:
            return
        self._make_strangers()  # anew, so that the example fails again when it is repeated
        if sys.exc_info()[0] is None:  # else more is known already
            raise Differs("a job of another kind was touched")


class Machine(RuleBasedStateMachine):
    """The parts of the state machine that no step is made of. Each example has a kind of its own."""

    bench: ClassVar[Bench]

    def __init__(self) -> None:
        super().__init__()
        self.hand, self.admin, self.tally = self.bench.hand, self.bench.admin, self.bench.tally
        self.tally.examples += 1
        self.kind = f"kind{next(self.bench.numbers)}"
        self.hand.kind = self.kind
        self.model = Model(self.bench.clock(), self.bench.started, "all")
        self.claims: deque[tuple[Runner, Claim]] = deque()
        """Those of both runners: held, lost, ended, whatever."""
        self.claimed: list[tuple[Claim, Row]] = []
        """By the step just done."""
        self.generations: dict[int, int] = {}

    @invariant()
    def the_table_is_as_the_model_says(self) -> None:
        """So are claims as their rows are; generations never fall, and no row is out of everybody's sight."""
        self.tally.steps += 1
        self.model.compare(self.bench.look(self.kind))
        for claim, row in self.claimed:
            self._check_claim(claim, row)
        self.claimed = []
        rows = list(self.model.rows.values())
        found = [*broken_rules(rows, self.model.results), *self._fallen_generations(rows)]
        if found:
            raise Differs("\n".join(found))
        for row in rows:
            if row.state == "pending":
                self._probe(row)

    def teardown(self) -> None:
        self.bench.check_strangers()

    # --- checks -------------------------------------------------------------------------------------------------------

    def _fallen_generations(self, rows: Iterable[Row]) -> list[str]:
        before = self.generations
        self.generations = {row.id: row.generation for row in rows if row.id is not None}
        fallen = (id_ for id_, generation in self.generations.items() if generation < before.get(id_, 0))
        return [f"the generation of row {id_} fell" for id_ in fallen]

    def _check_claim(self, claim: Claim, row: Row) -> None:
        got = (
            claim.kind, claim.key, claim.revision, claim.generation, claim.token, claim.attempts, claim.max_attempts,
            claim.evictions, claim.lease_epoch, claim.priority, claim.urgency, claim.ready_at, claim.payload,
        )  # fmt: skip
        has = (
            self.kind, row.key, row.revision, row.generation, row.token, row.attempts, row.max_attempts,
            row.evictions, row.lease_epoch, row.priority, row.urgency, row.ready_at, json.dumps(row.payload),
        )  # fmt: skip
        if got != has:
            raise Differs(f"claim: {got} of a row with {has}")

    def _probe(self, row: Row) -> None:
        """A combination of columns that is new: in time, reaper or claim must take such a row."""
        combination = (
            row.token is not None, self.model.live(row), row.cancel_requested_at is not None, self.model.due(row),
            min(row.evictions, LIMIT_OF_EVICTIONS), row.version, row.urgency, row.priority, row.max_attempts,
            bool(row.revision), row.attempts > 0, row.generation > 1, row.has_result, row.last_code,
        )  # fmt: skip
        if combination in self.bench.probed:
            return
        probe = uuid.uuid4()
        with self.hand.connection.transaction(force_rollback=True):
            self.hand.connection.execute("delete from pgworker.kinds where kind = %s", [self.kind])
            self.hand.connection.execute(_TIME_PASSES, {"by": timedelta(days=1000), "kind": self.kind})
            for lane in self.model.lanes():
                self._take_all(lane, probe)
            left = self.hand.connection.execute(
                "select key from pgworker.jobs where kind = %s and state = 'pending' and token is distinct from %s",
                [self.kind, probe],
            ).fetchall()
        if left:
            raise Differs(f"neither claim nor reaper takes {left}; {row}")
        self.bench.probed.add(combination)

    def _take_all(self, lane: Lane, token: uuid.UUID) -> None:
        named = sql.Lane(self.kind, *lane)
        self.hand.send(
            sql.reap_expired(
                self.hand.tables, named, limit=1000, ttl_seconds=SHORT, max_evictions=LIMIT_OF_EVICTIONS,
                after=sql.BEGINNING,
            )
        )  # fmt: skip
        self.hand.send(
            sql.claim_jobs(
                self.hand.tables, named, limit=1000, token=token, runner="probe", ttl_seconds=TTL,
                max_evictions=LIMIT_OF_EVICTIONS, version=2,
            )
        )  # fmt: skip

    # --- handles ------------------------------------------------------------------------------------------------------

    @property
    def facts(self) -> int:
        """The level of the journal, as statements take it."""
        return sql.FACTS[self.model.level]

    def key(self, key: str) -> str:
        """The key that a step means."""
        if key != "claimed":
            return key
        return self.claims[-1][1].key if self.claims else KEYS[0]

    def pick(self, pick: int) -> Claim:
        """One of the claims, the newest first."""
        return self.claims[-1 - pick % len(self.claims)][1]

    # --- the tally ----------------------------------------------------------------------------------------------------

    def hit(self, *hit: str) -> None:
        """Count this."""
        self.tally.hits[hit] += 1

    def hit_rows(self, name: str, rows: Iterable[Row]) -> None:
        """A rule meets these rows."""
        for row in rows:
            self.hit("rule", name, self.model.state(row.key))

    def hit_key(self, name: str, key: str) -> None:
        """A rule is for this key."""
        self.hit("rule", name, self.model.state(key))
