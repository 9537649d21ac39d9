"""The stage of the crash simulation: a worker whose way to the database leads through a proxy that kills statements."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import psycopg

from pgworker import App, Backoff, Job, Lease, Retry, TableQueue
from pgworker.db import Flow
from pgworker.statements import Statement
from tests.chaos.audit import Admin, findings, install, read, told
from tests.chaos.proxy import Matches, Point, Proxy
from tests.handles import Hand, running

T = TypeVar("T")

_UNDONE = ("table_look",)
"""Sent only in transactions that are rolled back."""

OWN_TABLES = ("things", "things_applied")
"""Tables of the app's own, each the queue of a kind of its name."""

STATEMENTS = sorted(
    path.name.removesuffix(".sql")
    for path in resources.files("pgworker.queries").iterdir()
    if path.name.endswith(".sql")
)

_COMMENT = re.compile(r"\s*--[^\n]*")
_GAP = re.compile(r"\{[^}]*\}|%\(\w+\)s")


def pieces(statement: str) -> list[bytes]:
    """What of a statement's file is sent as it stands, in order."""
    text = resources.files("pgworker.queries").joinpath(f"{statement}.sql").read_text(encoding="utf-8")
    return [piece.replace("%%", "%").encode() for piece in _GAP.split(_COMMENT.sub("", text).strip())]


def recognize(statement: str) -> Matches:
    """Whether a text that is sent is this statement, for whatever tables."""
    first, *others = pieces(statement)

    @cache
    def matches(text: bytes) -> bool:
        if not (text.startswith(first) and text.endswith(others[-1] if others else first)):
            return False
        at = len(first)
        for piece in others:
            at = text.find(piece, at)
            if at < 0:
                return False
            at += len(piece)
        return True

    return matches


# --- the stage ------------------------------------------------------------------------------------------------------


class Stage:
    """A worker, and an app beside it, whose ways to the database lead through the proxy; and what is done with them."""

    def __init__(self, proxy: Proxy, hand: Hand, admin: Admin) -> None:
        self.proxy = proxy
        self.hand = hand
        self.admin = admin
        self.app = App(proxy.dsn)
        self.runs: Counter[str] = Counter()
        self.wanted = 0
        """Successes that there must be in the end."""
        self.events = 0
        """Successes of jobs without a key of their own, beside those."""
        self.rows = 0
        """Rows of the app's own tables."""
        self._fired = 0

    def trap(self, statement: str, point: Point) -> None:
        """From now on the next such statement is hit."""
        self.proxy.set_trap(recognize(statement), point, undone=statement in _UNDONE)
        self._fired = self.proxy.fired

    @property
    def fired(self) -> bool:
        """Whether it has been."""
        return self.proxy.fired > self._fired

    async def until_fired(self) -> None:
        await anyio.to_thread.run_sync(lambda: self.proxy.wait(self._fired + 1))
        assert self.fired, "the injection did not fire"

    async def job(
        self, payload: str = "plain", *, kind: str = "work", delay: float | None = None, tenant: str | None = None
    ) -> str:
        """Enqueue one, again and again until there is an answer, as a caller would."""
        self.wanted += 1
        key = f"k{self.wanted:03}"
        await self.insist(lambda: self.app.enqueue(kind, payload, key=key, revision="r", delay=delay, tenant=tenant))
        return key

    async def event(self, kind: str = "work") -> None:
        """Enqueue one without a key, once: what is lost on the way is the app's own business."""
        self.events += 1
        assert (await self.app.enqueue(kind, "plain")).status == "created"

    def row(self, payload: str = "plain", *, table: str = "things", delay: float = 0, orphaned: bool = False) -> str:
        """Insert one into a table of the app's own; `orphaned` by a worker whose lease has just run out."""
        self.rows += 1
        self.admin.execute(
            f"insert into public.{table} (key, payload, ready_at, token, lease_expires_at)"
            " select %s, %s, clock_timestamp() + %s * interval '1 second', gone.token, gone.at"
            " from (select gen_random_uuid() as token, clock_timestamp() as at) gone right join (select 1) on %s",
            [f"r{self.rows:03}", payload, delay, orphaned],
        )
        return f"r{self.rows:03}"

    async def insist(self, call: Callable[[], Awaitable[T]]) -> T:
        """What an operator or a caller does who got an error instead of an answer."""
        for _ in range(5):
            try:
                return await call()
            except psycopg.OperationalError:
                continue
        return await call()

    async def ask(self, statement: Callable[[], Statement[T]]) -> T:
        """Send one statement as `insist` does."""
        return await self.insist(lambda: self.app._drive(_flow(statement())))

    async def until_reaped(self, key: str) -> None:
        """Let the reaper find something to look through until the injection has fired."""
        await self.until_fired()
        for table in ("pgworker.jobs", *(f"public.{name}" for name in OWN_TABLES)):
            self.admin.execute(f"update {table} set ready_at = clock_timestamp() where key = %s", [key])

    async def until_idle(self, within: float = 15.0) -> None:
        """Wait until everything has succeeded; no event of the app tells of what was written without an answer."""
        with anyio.fail_after(within):
            while self._unfinished():  # noqa: ASYNC110 - said above
                await anyio.sleep(0.02)

    def _unfinished(self) -> bool:
        tables = ["pgworker.jobs", *(f"public.{name}" for name in OWN_TABLES)]
        states = " union all ".join(f"select state from {table}" for table in tables)
        return self.admin.execute(f"select 1 from ({states}) where state <> 'succeeded'").fetchone() is not None


def _flow(statement: Statement[T]) -> Flow[T]:
    answer: T = yield statement
    return answer


def register(stage: Stage) -> None:
    """The kinds of the stage. No run of theirs fails, so whatever is counted as a failure would be a fault."""
    short = Lease.renew(timedelta(seconds=0.6), timedelta(seconds=0.15))
    soon = Backoff(base=timedelta(seconds=0.01))

    async def store(connection: psycopg.AsyncConnection[Any], job: Job[str], value: str) -> None:
        await connection.execute("insert into public.stored values (%s)", [job.key])

    @stage.app.kind("applied", poll=0.1, lease=short, max_evictions=-1, apply=store)
    async def applied(job: Job[str]) -> str:
        return job.key

    @stage.app.kind("spare", poll=0.1, lease=short, max_evictions=-1, result_ttl=timedelta(hours=1), facts="all")
    async def spare(job: Job[str]) -> str:
        return job.key

    @stage.app.kind("fair", poll=0.1, lease=short, max_evictions=-1, fair=True)
    async def fair(job: Job[str]) -> str:
        return job.key

    async def own(job: Job[str]) -> str | Retry:
        return await work(job)

    for name, apply in (("things", None), ("things_applied", store)):
        stage.app.kind(
            name, poll=0.1, lease=short, max_evictions=-1, backoff=soon, apply=apply, queue=_own_table(name)
        )(own)

    @stage.app.kind("work", poll=0.1, lease=short, max_evictions=-1, backoff=soon)
    async def work(job: Job[str]) -> str | Retry:
        stage.runs[job.key] += 1
        if job.payload == "again" and not job.attempts:
            return Retry(code="again")
        if job.payload == "long":
            with anyio.move_on_after(5):
                await stage.until_fired()
        return job.key


_OWN_TABLE = """
create table public.{0} (
    key text primary key, revision int not null default 1, state text not null default 'pending',
    urgency smallint not null default 0, priority smallint not null default 0, token uuid,
    lease_expires_at timestamptz, ready_at timestamptz not null default clock_timestamp(),
    attempts int not null default 0, evictions int not null default 0, cancel_requested_at timestamptz, runner text,
    code text, finished_at timestamptz, result jsonb, payload text not null);
create index on public.{0} (urgency, priority, ready_at, key) where state = 'pending';
create trigger audit after update on public.{0} for each row
    when (new.state = 'succeeded' and old.state <> 'succeeded') execute function public.log_success();
grant all on public.{0} to public"""

_LOG_SUCCESS = """
create table public.own_successes (name text, key text);
create function public.log_success() returns trigger language plpgsql security definer as $$ begin
    insert into public.own_successes values (tg_table_name, new.key);
    return null;
end $$"""


def _own_table(name: str) -> TableQueue:
    """A table with all that a queue may have, so that nothing is left out of its statements."""
    columns = (
        *("key", "revision", "state", "token", "lease_expires_at", "ready_at", "attempts", "urgency", "priority"),
        *("evictions", "cancel_requested_at", "runner", "code", "finished_at", "result", "payload"),
    )
    return TableQueue(f"public.{name}", **{column: column for column in columns})  # type: ignore[arg-type]


def build(stage: Stage) -> None:
    """Begin to log, and make what the handlers need."""
    install(stage.admin)
    stage.admin.execute("create table public.stored (key text); grant all on public.stored to public")
    stage.admin.execute(_LOG_SUCCESS)
    for name in OWN_TABLES:
        stage.admin.execute(_OWN_TABLE.format(name))
    register(stage)


@asynccontextmanager
async def working(stage: Stage, *, own_tables: bool) -> AsyncIterator[None]:
    """A worker runs, of the kinds that are needed; in the end there is nothing left to do."""
    kinds = ["work", "applied", "spare", "fair", *(OWN_TABLES if own_tables else ())]
    async with stage.app, running(stage.app.worker(kinds)) as worker:
        while not worker.status():  # noqa: ASYNC110 - no event tells that it has looked at the tables, by most statements
            await anyio.sleep(0.01)
        yield
        await stage.until_idle()


def check(stage: Stage) -> None:
    """Each job succeeded once, with its own result, and at nobody's cost."""
    log = read(stage.admin)
    found = findings(log)
    assert not found, told(found)
    assert sum(change.is_success for change in log) == stage.wanted + stage.events
    rows = stage.admin.execute(
        "select j.key, j.state, j.attempts = (j.payload = '\"again\"')::int, r.value::text,"
        " r.revision = j.revision, j.generation = case j.revision when 'r2' then 2 else 1 end, j.token"
        " from pgworker.jobs j left join pgworker.results r on r.kind = j.kind and r.key = j.key order by j.key"
    ).fetchall()
    keys = [f"k{number:03}" for number in range(1, stage.wanted + 1)]
    events = [(key, "succeeded", True, f'"{key}"', True, True, None) for key, *_ in rows if not key.startswith("k")]
    assert len(events) == stage.events
    assert rows == events + [(key, "succeeded", True, f'"{key}"', True, True, None) for key in keys]
    _check_own_tables(stage)
    applied = stage.admin.execute(
        "select key from pgworker.jobs where kind = 'applied'"
        " union all select key from public.things_applied order by 1"
    ).fetchall()
    assert stage.admin.execute("select key from public.stored order by key").fetchall() == applied


def _check_own_tables(stage: Stage) -> None:
    rows = [
        row
        for name in OWN_TABLES
        for row in stage.admin.execute(
            "select key, state, attempts = (payload = 'again')::int, result #>> '{}', token,"
            f" (select count(*) from public.own_successes s where s.name = %s and s.key = t.key) from public.{name} t",
            [name],
        )
    ]
    keys = [f"r{number:03}" for number in range(1, stage.rows + 1)]
    assert sorted(rows) == [(key, "succeeded", True, key, None, 1) for key in keys]
