"""The audited stress: everything that may touch a job does so at once, and keeps a book of what it was told.

Eight sessions: a bulk enqueuer, an application that enqueues inside longer transactions, three workers, a renewer, the
reaper, and an operator who locks, deletes, cancels and cuts connections. `audit` holds the book against the log of the
trigger in tests/chaos/audit.py (tests/races/book.py).
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psycopg

from pgworker import NewJob
from pgworker.client import Done, make_order, put_orders
from pgworker.db import drive_sync
from pgworker.job import Claim
from pgworker.outcome import Settlement, Success
from pgworker.statements import (
    BEGINNING,
    Answer,
    Put,
    Statement,
    claim_jobs,
    finish_jobs,
    insert_jobs,
    reap_expired,
    renew_leases,
    settle_jobs,
)
from tests.chaos.audit import Admin, Finding, findings, read
from tests.handles import Hand, hand, untyped
from tests.races.book import Book, Lease, Told, judge, judge_last_puts, judge_results
from tests.races.dice import KEYS, decide, insert, job, value

_MAX_EVICTIONS = 50  # never reached here: an end by too many evictions would hide lost work
_DEADLOCK_TIMEOUT = "50ms"

_CANCEL = """
update pgworker.jobs set state = case when token is null then 'cancelled' else state end,
    finished_at = case when token is null then clock_timestamp() end,
    cancel_requested_at = case when token is not null then clock_timestamp() end
where key = %s and state = 'pending'"""
# Two statements: the first may wait for a completion, whose result only a later snapshot sees.
_DELETE = ("delete from pgworker.jobs where key = %s", "delete from pgworker.results where key = %s")


class Held(NamedTuple):
    """A claim that is being renewed."""

    claim: Claim
    ttl_seconds: float


class Stress:
    """One run over one database; `run` may be called again, and goes on with the same book."""

    def __init__(self, dsn: str, admin: Admin, seed: int) -> None:
        self.seed = seed
        self.book = Book()
        self._dsn = dsn
        self._admin = admin
        self._random = random.Random(seed)  # noqa: S311 - for its seed
        self._stop = threading.Event()
        self._drained = threading.Event()
        self._held: dict[Lease, Held] = {}
        self._workers: dict[int, Hand] = {}
        self._deadlocks = _deadlocks(admin)

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let all sessions loose for so long, and wait for their ends."""
        self._stop.clear()
        actors = [self._enqueue_in_bulk, self._enqueue_in_transactions, self._renew, self._reap, self._operate]
        actors += [self._work] * 3
        threads = [self._thread(actor) for actor in actors]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self._stop.set()
        for thread in threads:
            thread.join()

    def drain(self, seconds: float) -> None:
        """Let workers alone finish all that is left; what cannot be finished in this time is for the audit to find."""
        self._drained.clear()
        threads = [self._thread(self._work_off) for _ in range(3)] + [self._thread(self._reap_until_drained)]
        for thread in threads:
            thread.start()
        give_up_at = time.monotonic() + seconds
        while time.monotonic() < give_up_at and self._pending():
            self._drained.wait(0.05)
        self._drained.set()
        for thread in threads:
            thread.join()

    def _pending(self) -> int:
        found = self._admin.execute("select count(*) from pgworker.jobs where state = 'pending'").fetchone()
        assert found is not None
        return int(found[0])

    def _thread(self, actor: Callable[[Hand, random.Random], None]) -> threading.Thread:
        chance = random.Random(self._random.getrandbits(64))  # noqa: S311 - for its seed

        def body() -> None:
            mine = self._connect()
            try:
                actor(mine, chance)
            except psycopg.Error as error:  # a session that ends early is itself a finding
                self._error(error)
            finally:
                mine.connection.close()

        return threading.Thread(target=body, name=actor.__name__)

    def _connect(self) -> Hand:
        mine = hand(self._dsn)
        if mine.connection.info.parameter_status("is_superuser") == "on":
            mine.connection.execute(f"set deadlock_timeout = '{_DEADLOCK_TIMEOUT}'")
        return mine

    def _error(self, error: psycopg.Error) -> None:
        where = error.diag.constraint_name or error.diag.context or ""
        self.book.errors.append(f"{type(error).__name__} {error.sqlstate} {where} in {threading.current_thread().name}")

    # --- enqueuers --------------------------------------------------------------------------------------------------

    def _enqueue_in_bulk(self, mine: Hand, chance: random.Random) -> None:
        while not self._stop.wait(chance.uniform(0, 0.02)):
            jobs = [job(chance, chance.choice(KEYS)) for _ in range(60)]
            keep = chance.random() < 0.1
            if chance.random() < 0.5:
                self._sent(self._enqueue(mine, jobs, keep=keep))
            else:
                self._sent(self._enqueue_raw(mine, jobs, keep=keep))

    def _enqueue_in_transactions(self, mine: Hand, chance: random.Random) -> None:
        """Four enqueues in one transaction, keys ascending, some in savepoints; some taken back."""
        while not self._stop.wait(chance.uniform(0, 0.02)):
            keys = sorted(chance.sample(KEYS, 8))
            written: list[tuple[str, str]] = []
            try:
                with mine.connection.transaction():
                    for first in range(0, 8, 2):
                        written += self._in_savepoint(mine, chance, keys[first : first + 2])
                        self._stop.wait(chance.choice([0, 0, 0.01, 0.15]))
                    if chance.random() < 0.2:
                        written.clear()
                        raise psycopg.Rollback
            except psycopg.errors.DeadlockDetected as error:
                self._error(error)
            else:
                self._sent(written)

    def _in_savepoint(self, mine: Hand, chance: random.Random, keys: Sequence[str]) -> list[tuple[str, str]]:
        written: list[tuple[str, str]] = []
        with mine.connection.transaction():
            written = self._enqueue(mine, [job(chance, key) for key in keys], keep=False)
            if chance.random() < 0.3:
                written = []
                raise psycopg.Rollback
        return written

    def _enqueue(self, mine: Hand, jobs: Sequence[NewJob], *, keep: bool) -> list[tuple[str, str]]:
        """As an application does; returns transaction and key of what was written."""
        order = make_order(untyped(mine.kind), jobs, if_pending="keep" if keep else "replace")
        done = Done()
        drive_sync(put_orders(mine.tables, [order], done), mine.send)
        return self._written(done.puts)

    def _enqueue_raw(self, mine: Hand, jobs: Sequence[NewJob], *, keep: bool) -> list[tuple[str, str]]:
        """The statement itself, with the duplicates that an application's call would have collapsed."""
        written: list[tuple[str, str]] = []
        missing = [insert(job) for job in jobs]
        while missing:
            puts: dict[str, Put] = mine.send(insert_jobs(mine.tables, mine.kind, missing, version=1, keep=keep))
            written += self._written(puts)
            missing = [row for row in missing if row.key not in puts]
            self.book.counts["sent again"] += len(missing)
        return written

    def _written(self, puts: Mapping[str, Put]) -> list[tuple[str, str]]:
        """Each with a transaction of its own: a key that was sent again was put by another."""
        self.book.counts.update(put.status for put in puts.values())
        return [(put.transaction, key) for key, put in puts.items() if put.transaction]

    def _sent(self, written: Sequence[tuple[str, str]]) -> None:
        self.book.puts += written

    # --- workers ----------------------------------------------------------------------------------------------------

    def _work(self, mine: Hand, chance: random.Random) -> None:
        me = threading.get_ident()
        self._workers[me] = mine
        try:
            while not self._stop.is_set():
                try:
                    self._work_once(mine, chance)
                except (psycopg.OperationalError, psycopg.InterfaceError):
                    if not mine.connection.broken:
                        raise
                    self.book.counts["connections cut"] += 1
                    mine.connection = self._connect().connection
        finally:
            self._workers.pop(me, None)

    def _work_once(self, mine: Hand, chance: random.Random) -> None:
        frozen = chance.random() < 0.3
        ttl = chance.uniform(0.15, 0.4 if frozen else 2.0)
        claims = self._claim(mine, chance, ttl)
        if not claims:
            self._stop.wait(0.02)
            return
        claims = [claim for claim in claims if chance.random() > 0.1]  # the rest is abandoned
        if frozen:
            self._stop.wait(ttl + chance.choice((-0.01, 0.0, 0.01, 0.05, 0.2)))
        self._held.update({(c.id, c.token): Held(c, ttl) for c in claims})  # one that thaws renews before it looks
        self._stop.wait(chance.choice((0.0, 0.01, 0.08)))
        chance.shuffle(claims)
        endings = [(claim, decide(chance, claim)) for claim in claims]
        try:
            self._end(mine, chance, endings, until=time.monotonic() + ttl)
        finally:
            for claim in claims:
                self._held.pop((claim.id, claim.token), None)

    def _claim(self, mine: Hand, chance: random.Random, ttl: float, limit: int = 40) -> list[Claim]:
        lanes = mine.lanes()
        if not lanes:
            return []
        token = uuid.uuid4()
        self.book.ttls[token] = ttl
        self.book.unknown_tokens.add(token)
        claims = mine.send(
            claim_jobs(
                mine.tables, chance.choice(lanes), limit=limit, token=token, runner=str(threading.get_ident()),
                ttl_seconds=ttl, max_evictions=_MAX_EVICTIONS, version=1,
            )
        )  # fmt: skip
        self.book.unknown_tokens.discard(token)
        self.book.claimed += claims
        self.book.counts["claimed"] += len(claims)
        return claims

    def _end(
        self, mine: Hand, chance: random.Random, endings: Sequence[tuple[Claim, Success | Settlement]], until: float
    ) -> None:
        """Write these ends in parts; what is busy is asked again until the lease must have ended."""
        while endings:
            size = chance.randint(1, len(endings))
            busy = [ending for part in (endings[:size], endings[size:]) for ending in self._write(mine, part)]
            if busy and time.monotonic() > until:
                self.book.counts["busy to the end"] += len(busy)
                return
            if busy:
                time.sleep(chance.uniform(0.005, 0.05))
            endings = busy

    def _write(
        self, mine: Hand, endings: Sequence[tuple[Claim, Success | Settlement]]
    ) -> Iterator[tuple[Claim, Success | Settlement]]:
        finished = [(claim, each) for claim, each in endings if isinstance(each, Success)]
        settled = [(claim, each) for claim, each in endings if isinstance(each, Settlement)]
        if finished:
            yield from self._send_ends(mine, finish_jobs(mine.tables, mine.kind, finished), finished)
        if settled:
            yield from self._send_ends(mine, settle_jobs(mine.tables, mine.kind, settled), settled)

    def _send_ends(
        self,
        mine: Hand,
        statement: Statement[dict[int, Answer]],
        endings: Sequence[tuple[Claim, Success]] | Sequence[tuple[Claim, Settlement]],
    ) -> Iterator[tuple[Claim, Success | Settlement]]:
        leases = {(claim.id, claim.token) for claim, _ in endings}
        try:
            answers = mine.send(statement)
        except psycopg.Error:
            self.book.unknown |= leases
            raise
        for claim, decision in endings:
            answer = answers[claim.id]
            self.book.counts[answer.verdict] += 1
            if answer.verdict == "done":
                self.book.told.append(Told(claim, decision, answer.state))
            elif answer.verdict == "busy":
                yield claim, decision

    def _work_off(self, mine: Hand, chance: random.Random) -> None:
        """Claim and succeed, nothing else."""
        while not self._drained.is_set():
            claims = self._claim(mine, chance, 5.0)
            if not claims:
                self._drained.wait(0.02)
            endings = [(claim, Success(value(claim))) for claim in claims]
            self._end(mine, chance, endings, until=time.monotonic() + 5.0)

    # --- the others -------------------------------------------------------------------------------------------------

    def _renew(self, mine: Hand, chance: random.Random) -> None:
        """One for the leases of all three workers."""
        while not self._stop.wait(0.03):
            held = list(self._held.items())
            if not held:
                continue
            # some rows travel twice in a life of claims, but never twice in one statement
            leases = list({lease[0]: (lease, each) for lease, each in held}.values())
            answers = mine.send(renew_leases(mine.tables, [(each.claim, each.ttl_seconds) for _, each in leases]))
            for lease, each in leases:
                verdict = answers[each.claim.id].verdict
                self.book.counts[f"renewal {verdict}"] += 1
                if verdict == "done":
                    self.book.renewed.append(lease)
                elif verdict != "busy":
                    self._held.pop(lease, None)

    def _reap(self, mine: Hand, chance: random.Random) -> None:
        while not self._stop.wait(0.1):
            self._reap_once(mine)

    def _reap_until_drained(self, mine: Hand, chance: random.Random) -> None:
        while not self._drained.wait(0.1):
            self._reap_once(mine)

    def _reap_once(self, mine: Hand) -> None:
        for lane in mine.lanes():
            page = mine.send(
                reap_expired(
                    mine.tables, lane, limit=1000, ttl_seconds=0.1, max_evictions=_MAX_EVICTIONS, after=BEGINNING
                )
            )
            self.book.counts["reaped"] += page.ended_or_freed

    def _operate(self, mine: Hand, chance: random.Random) -> None:
        cut_at = time.monotonic() + 1.0
        while not self._stop.wait(chance.uniform(0, 0.05)):
            key = chance.choice(KEYS)
            match chance.random():
                case dice if dice < 0.15:
                    with mine.connection.transaction():
                        mine.connection.execute("select from pgworker.jobs where key = %s for update", [key])
                        self._stop.wait(chance.uniform(0, 0.6))
                case dice if dice < 0.45:
                    with mine.connection.transaction():
                        for statement in _DELETE:
                            mine.connection.execute(statement, [key])
                case _:
                    running = [each.claim.key for each in list(self._held.values())]
                    for each in [key, *chance.sample(running, min(3, len(running)))]:
                        mine.connection.execute(_CANCEL, [each])
            if time.monotonic() > cut_at:
                cut_at = time.monotonic() + 1.5
                self._cut_a_connection(mine, chance)

    def _cut_a_connection(self, mine: Hand, chance: random.Random) -> None:
        workers = list(self._workers.values())
        if workers:
            pid = chance.choice(workers).connection.info.backend_pid
            mine.connection.execute("select pg_terminate_backend(%s)", [pid])

    # --- audit ------------------------------------------------------------------------------------------------------

    def audit(self, *, drained: bool = False) -> list[Finding]:
        """All that is wrong. Only between runs: the book is behind the log while one goes on."""
        log = read(self._admin)
        found = [*findings(log), *judge(self.book, log), *judge_results(self.book, self._admin)]
        found += [("error", error) for error in self.book.errors]
        deadlocks = _deadlocks(self._admin) - self._deadlocks
        found += [("deadlock", f"{deadlocks} in pg_stat_database")] * bool(deadlocks)
        if drained:
            left = self._pending()
            found += [("pending after the drain", f"{left} jobs")] * bool(left)
            found += judge_last_puts(log)
        return found


def _deadlocks(admin: Admin) -> int:
    found: Any = admin.execute("select deadlocks from pg_stat_database where datname = current_database()").fetchone()
    return int(found[0])
