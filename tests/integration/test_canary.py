"""Failures tell a code of a closed list and nothing else: no payload, result or error text in rows, status or logs."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import anyio
import psycopg
import pytest

from pgworker import App, Job, Lease, NewJob, Pause, Permanent, Retry, outcome
from pgworker.claimer import Claimer, ClaimRefused
from pgworker.db import Database
from pgworker.events import Event, JobLost, JobSettled, RunnerTrouble
from pgworker.job import Claim
from pgworker.kind import Kind
from pgworker.maintenance import Reaper
from pgworker.outcome import Settlement, Success
from pgworker.queue import JobsTable, Renewals
from pgworker.statements import BEGINNING, Answer, Cursor, Due, Lane, Reaped, Statement
from pgworker.surveys import Surveys
from pgworker.tablemap import TableMap
from tests.databases import WorkerDatabase
from tests.handles import Hand, Recorder, age, row, running

T = TypeVar("T")
Admin: TypeAlias = psycopg.Connection[Any]

SECRET = "SECRET"


def jobs(count: int) -> list[NewJob]:
    return [NewJob(index, key=f"k{index}", revision="r") for index in range(count)]


# --- statements that fail, and a table that lies --------------------------------------------------------------------


@dataclass
class Trouble:
    """Lets the runtime's next statements of some names fail, with an error that quotes a value."""

    failing: dict[str, int] = field(default_factory=dict)
    wanted: Callable[[Statement[Any]], bool] = lambda _: True

    def strikes(self, statement: Statement[Any]) -> bool:
        left = self.failing.get(statement.name, 0)
        if not left or not self.wanted(statement):
            return False
        self.failing[statement.name] = left - 1
        return True


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> Trouble:
    trouble = Trouble()
    original = Database.run

    async def run(self: Database, statement: Statement[T], *, within: float = float("inf")) -> T:
        if trouble.strikes(statement):
            raise psycopg.errors.InternalError_(f"no good: {SECRET}")
        return await original(self, statement, within=within)

    monkeypatch.setattr(Database, "run", run)
    return trouble


@dataclass(frozen=True)
class Lying:
    """A queue of an app's own making: its first claim that finds anything is answered with `lie` instead."""

    real: JobsTable
    lie: Callable[[Sequence[Claim]], list[Claim]]
    more: int = 0
    asked: list[float] = field(default_factory=list)
    lied: list[Claim] = field(default_factory=list)

    @property
    def kind(self) -> Kind:
        return self.real.kind

    @property
    def renewals(self) -> Renewals:
        return self.real.renewals

    @property
    def has_blank_keys(self) -> bool:
        return self.real.has_blank_keys

    def claim(
        self, lane: Lane, *, limit: int, token: uuid.UUID, runner: str, after: Cursor = BEGINNING
    ) -> Statement[list[Claim]]:
        self.asked.append(time.monotonic())
        honest = bool(self.lied)
        more = 0 if honest else self.more
        statement = self.real.claim(lane, limit=limit + more, token=token, runner=runner, after=after)

        def read(rows: Sequence[tuple[object, ...]]) -> list[Claim]:
            claims = statement.read(rows)
            if not honest and claims:
                self.lied.extend(self.lie(claims))
                return self.lied
            return claims

        return replace(statement, read=read)

    def survey(self) -> Statement[list[Due]]:
        return self.real.survey()

    def finish(self, finished: Sequence[tuple[Claim, Success]]) -> Statement[dict[int, Answer]]:
        return self.real.finish(finished)

    def settle(self, settled: Sequence[tuple[Claim, Settlement]]) -> Statement[dict[int, Answer]]:
        return self.real.settle(settled)

    def check(self, claim: Claim) -> Statement[int | None]:
        return self.real.check(claim)

    def reap(self, lane: Lane, *, limit: int, after: Cursor = BEGINNING) -> Statement[Reaped]:
        return self.real.reap(lane, limit=limit, after=after)


Lie: TypeAlias = Callable[..., list[Lying]]


@pytest.fixture
def lie(monkeypatch: pytest.MonkeyPatch) -> Lie:
    def install(lie: Callable[[Sequence[Claim]], list[Claim]], *, more: int = 0) -> list[Lying]:
        made: list[Lying] = []

        def make(tables: TableMap, kind: Kind) -> Lying:
            made.append(Lying(JobsTable(tables, kind), lie, more))
            return made[-1]

        monkeypatch.setattr("pgworker.worker.JobsTable", make)
        return made

    return install


# --- each code of the closed list -----------------------------------------------------------------------------------


@dataclass
class Stage:
    """Where a scenario plays."""

    app: App
    admin: Admin
    trouble: Trouble
    lie: Lie
    seen: Recorder
    shown: list[str | None] = field(default_factory=list)
    """status.last_error at each event."""

    async def play(self, until: Callable[[], bool]) -> None:
        """Run the worker until then, and note what its status shows."""
        worker = self.app.worker()

        def note(event: Event) -> None:
            self.shown.append(worker.status()["work"].last_error)

        self.app.events.subscribe(note)
        async with running(worker):
            await self.seen.wait(until)

    def settled(self, count: int = 1) -> Callable[[], bool]:
        return lambda: len(self.seen.of(JobSettled)) == count

    @property
    def codes(self) -> list[str | None]:
        """The codes on the rows."""
        return [code for (code,) in self.admin.execute("select last_code from pgworker.jobs order by key")]


@pytest.fixture
def stage(app: App, admin: Admin, trouble: Trouble, lie: Lie) -> Stage:
    return Stage(app, admin, trouble, lie, Recorder(app))


async def handler_failed(stage: Stage) -> None:
    @stage.app.kind("work", max_attempts=5)
    async def work(job: Job[int]) -> Permanent:
        if job.payload == 0:
            raise ValueError(SECRET)
        return Permanent(code=" ")  # blank: becomes this code

    await stage.app.enqueue_many("work", jobs(2))
    await stage.play(stage.settled(2))
    assert stage.codes == ["handler_failed"] * 2
    assert [row(stage.admin, key)["state"] for key in ("k0", "k1")] == ["pending", "failed"]


async def handler_panic(stage: Stage) -> None:
    @stage.app.kind("work")
    async def work(job: Job[int]) -> None:
        raise SystemExit(SECRET)

    await stage.app.enqueue("work", 1)
    await stage.play(stage.settled())
    assert stage.codes == ["handler_panic"]


async def handler_timeout(stage: Stage) -> None:
    @stage.app.kind("work", timeout=0.05)
    async def work(job: Job[int]) -> None:
        await anyio.sleep_forever()

    await stage.app.enqueue("work", 1)
    await stage.play(stage.settled())
    assert stage.codes == ["handler_timeout"]


async def handler_result_count(stage: Stage) -> None:
    @stage.app.kind("work", batch=5)
    async def work(jobs: list[Job[int]]) -> list[str]:
        return [SECRET]

    await stage.app.enqueue_many("work", jobs(2))
    await stage.play(stage.settled(2))
    assert stage.codes == ["handler_result_count"] * 2


async def payload_invalid(stage: Stage) -> None:
    @stage.app.kind("work")
    async def work(job: Job[int]) -> None: ...

    stage.admin.execute("insert into pgworker.jobs (kind, key, payload) values ('work', 'k', '\"SECRET\"')")
    await stage.play(stage.settled())
    assert stage.codes == ["payload_invalid"]


async def result_rejected(stage: Stage) -> None:
    @stage.app.kind("work")
    async def work(job: Job[int]) -> Any:
        return {"SECRET": SECRET, "nan": float("nan")}

    await stage.app.enqueue("work", 1)
    await stage.play(stage.settled())
    assert stage.codes == ["result_rejected"]


async def queue_claim_failed(stage: Stage) -> None:
    @stage.app.kind("work", poll=0.05)
    async def work(job: Job[int]) -> None: ...

    await stage.app.enqueue("work", 1)
    stage.trouble.failing = {"survey_lanes": 1, "claim_jobs": 2}
    await stage.play(stage.settled())
    assert len(stage.seen.of(RunnerTrouble)) == 3
    assert stage.codes == [None]


async def queue_complete_failed(stage: Stage) -> None:
    @stage.app.kind("work")
    async def work(job: Job[int]) -> str:
        return SECRET

    await stage.app.enqueue("work", 1)
    stage.trouble.failing = {"finish_jobs": 2}
    await stage.play(stage.settled())
    assert len(stage.seen.of(RunnerTrouble)) == 2
    assert stage.codes == [None]  # a completion that could not be sent at once is no failure of the job


async def queue_retry_failed(stage: Stage) -> None:
    @stage.app.kind("work")
    async def work(job: Job[int]) -> Retry:
        return Retry(code="upstream")

    await stage.app.enqueue("work", 1)
    stage.trouble.failing = {"settle_jobs": 2}
    await stage.play(stage.settled())
    assert len(stage.seen.of(RunnerTrouble)) == 2
    assert stage.codes == ["upstream"]


async def queue_release_failed(stage: Stage) -> None:
    entered = anyio.Event()

    @stage.app.kind("work")
    async def work(job: Job[int]) -> None:
        entered.set()
        await anyio.sleep_forever()

    await stage.app.enqueue("work", 1)
    stage.trouble.failing = {"settle_jobs": 2}
    async with anyio.create_task_group() as group:
        worker = stage.app.worker()
        stage.app.events.subscribe(lambda event: stage.shown.append(worker.status()["work"].last_error))
        group.start_soon(worker.run)
        await entered.wait()
        worker.release()
    assert len(stage.seen.of(RunnerTrouble)) == 2
    assert stage.codes == [None]


async def queue_invalid_claim(stage: Stage) -> None:
    @stage.app.kind("work", poll=0.05)
    async def work(job: Job[int]) -> None: ...

    await stage.app.enqueue("work", 1)
    stage.lie(lambda claims: [claim._replace(attempts=-1) for claim in claims])
    await stage.play(stage.settled())
    assert stage.codes == [None]


async def queue_batch_limit_exceeded(stage: Stage) -> None:
    @stage.app.kind("work", poll=0.05, concurrency=1)
    async def work(job: Job[int]) -> None: ...

    await stage.app.enqueue_many("work", jobs(3))
    stage.lie(list, more=2)
    await stage.play(stage.settled(3))
    assert stage.codes == [None] * 3


async def evicted_too_often(stage: Stage) -> None:
    @stage.app.kind("work", max_evictions=1, lease=Lease.renew(timedelta(seconds=0.3)))
    async def work(job: Job[int]) -> None:
        worker.drain()

    stage.admin.execute(
        "insert into pgworker.jobs (kind, key, payload, ready_at, token, lease_expires_at) values"
        " ('work', 'k', '1', clock_timestamp() - interval '1 hour', gen_random_uuid(), clock_timestamp())"
    )
    await stage.app.enqueue("work", 1, key="other")
    worker = stage.app.worker()
    await worker.run()
    await _reap(worker)
    assert stage.codes == ["evicted_too_often", None]
    stage.shown.append("evicted_too_often")  # the worker that could show it is gone


async def not_eligible(stage: Stage) -> None:
    async def eligible(conn: psycopg.AsyncConnection[Any], job: Job[int]) -> bool:
        return False

    @stage.app.kind("work", eligible=eligible)
    async def work(job: Job[int]) -> str:
        return SECRET

    await stage.app.enqueue("work", 1)
    await stage.play(stage.settled())
    assert stage.codes == ["not_eligible"]
    assert stage.shown == [None]  # no error: nobody wants it any more
    stage.shown.append("not_eligible")


async def queue_pause_failed(stage: Stage) -> None:
    @stage.app.kind("work")
    async def work(job: Job[int]) -> Pause:
        return Pause(60, "down", shared=True)

    await stage.app.enqueue("work", 1)
    stage.trouble.failing = {"pause_kind": 1}
    await stage.play(lambda: len(stage.seen.of(RunnerTrouble)) == 1)
    assert stage.codes == ["down"]


async def queue_write_refused(stage: Stage) -> None:
    @stage.app.kind("work")
    async def work(job: Job[int]) -> Retry:
        return Retry(code="upstream")

    await stage.app.enqueue("work", 1)
    stage.trouble.failing = {"settle_jobs": 1_000_000}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pgworker.finisher._REFUSED_SECONDS", 0.1)
        await stage.play(lambda: len(stage.seen.of(JobLost)) == 1)
    assert stage.codes == [None]
    assert stage.seen.of(JobLost)[0].reason == "refused"


async def _reap(worker: Any) -> None:
    database = Database(
        worker._settings.dsn, "worker", deadline=worker._runners[0]._shared.database.deadline, connections=1
    )
    await database.open()
    await Reaper(Surveys(database), database).reap(worker._runners[0]._queue)
    await database.close()


SCENARIOS: list[Callable[[Stage], Awaitable[None]]] = [
    handler_failed,
    handler_panic,
    handler_timeout,
    handler_result_count,
    payload_invalid,
    result_rejected,
    evicted_too_often,
    not_eligible,
    queue_claim_failed,
    queue_complete_failed,
    queue_retry_failed,
    queue_release_failed,
    queue_pause_failed,
    queue_write_refused,
    queue_invalid_claim,
    queue_batch_limit_exceeded,
]


@pytest.mark.contract("A46", "A47")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_each_code_is_shown_as_it_is_in_the_list(
    stage: Stage, caplog: pytest.LogCaptureFixture, scenario: Callable[[Stage], Awaitable[None]]
) -> None:
    caplog.set_level(logging.DEBUG)
    await scenario(stage)
    assert scenario.__name__ in stage.shown
    assert SECRET not in caplog.text
    assert SECRET not in str(stage.codes)


@pytest.mark.contract("A47")
def test_the_list_is_closed() -> None:
    codes = {value for name, value in vars(outcome).items() if name.isupper() and isinstance(value, str)}
    assert codes == {scenario.__name__ for scenario in SCENARIOS}


# --- claims that cannot be right ------------------------------------------------------------------------------------


def blank(**parts: Any) -> Callable[[Sequence[Claim]], list[Claim]]:
    return lambda claims: [claims[0]._replace(**parts), *claims[1:]]


LIES: dict[str, tuple[Callable[[Sequence[Claim]], list[Claim]], str]] = {
    "too many": (list, "queue_batch_limit_exceeded"),
    "blank key": (blank(key=""), "queue_invalid_claim"),
    "blank kind": (blank(kind=""), "queue_invalid_claim"),
    "foreign token": (blank(token=uuid.UUID(int=1)), "queue_invalid_claim"),
    "repeated": (lambda claims: [*claims[:-1], claims[0]], "queue_invalid_claim"),
    "negative attempts": (blank(attempts=-1), "queue_invalid_claim"),
}


@pytest.mark.contract("A58")
@pytest.mark.parametrize("name", LIES)
async def test_an_impossible_claim_is_released_unrun(app: App, admin: Admin, lie: Lie, name: str) -> None:
    calls: list[str] = []
    before: list[Any] = []

    @app.kind("work", batch=5, concurrency=1, window=0, poll=0.4)
    async def work(batch: list[Job[int]]) -> None:
        calls.extend(job.key for job in batch)

    told, code = LIES[name]
    (queues) = lie(told, more=3 if name == "too many" else 0)
    await app.enqueue_many("work", jobs(10))

    def look(event: Event) -> None:
        if isinstance(event, RunnerTrouble):
            before.append((list(calls), worker.status()["work"].last_error))

    app.events.subscribe(look)
    worker = app.worker()
    seen = Recorder(app)
    async with running(worker):
        with anyio.fail_after(10):
            while not (queues and len(queues[0].asked) >= 2):  # noqa: ASYNC110 - nothing tells of a release
                await anyio.sleep(0.01)
        await seen.wait(lambda: worker.status()["work"].succeeded >= 9)
        released = worker.status()["work"].released
    assert before == [([], code)]
    assert queues[0].asked[1] - queues[0].asked[0] >= 0.4
    # A row that was told wrongly cannot be given back, as the fence looks at all of it: its lease runs out.
    held = [key for (key,) in admin.execute("select key from pgworker.jobs where token is not null")]
    assert held == {"blank key": ["k0"], "foreign token": ["k0"], "repeated": ["k4"]}.get(name, [])
    assert released == {"too many": 8, "blank key": 4, "foreign token": 4, "repeated": 4}.get(name, 5)
    assert sorted({*calls, *held}) == [f"k{index}" for index in range(10)]


@pytest.mark.contract("A46", "A58")
async def test_an_impossible_claim_that_cannot_be_released_comes_back_with_its_lease(
    app: App, admin: Admin, hand: Hand, lie: Lie, trouble: Trouble
) -> None:
    @app.kind("work", poll=0.1)
    async def work(job: Job[int]) -> None: ...

    lie(lambda claims: [claim._replace(attempts=-1) for claim in claims])
    trouble.failing = {"settle_jobs": 1}
    seen = Recorder(app)
    await app.enqueue("work", 1, key="k")
    async with running(app.worker()) as worker:
        await seen.wait(lambda: len(seen.of(RunnerTrouble)) == 2)
        assert [event.code for event in seen.of(RunnerTrouble)] == ["queue_invalid_claim", "queue_release_failed"]
        assert SECRET not in str(seen.events)
        assert row(admin, "k")["token"] is not None
        assert worker.status()["work"].released == 0
        age(admin, 60)
        await seen.wait(lambda: bool(seen.of(JobSettled)))
    assert row(admin, "k")["attempts"] == 0


@pytest.mark.contract("A58")
async def test_what_the_lanes_before_gave_is_released_with_an_impossible_claim(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Claimer._claim_from

    async def claim(self: Claimer, lane: Lane, after: Cursor, limit: int, *, fair: bool) -> list[Claim]:
        claims = await original(self, lane, after, limit, fair=fair)
        if lane.urgency and not seen.of(RunnerTrouble):
            raise ClaimRefused("queue_invalid_claim", "made up", claims)
        return claims

    monkeypatch.setattr(Claimer, "_claim_from", claim)

    @app.kind("work", poll=0.1)
    async def work(job: Job[int]) -> None: ...

    seen = Recorder(app)
    await app.enqueue_many("work", [NewJob(index, urgency="catch_up" if index % 2 else "fresh") for index in range(4)])
    async with running(app.worker()) as worker:
        await seen.count(JobSettled, 4)
        assert worker.status()["work"].released == 4


# --- nothing leaks --------------------------------------------------------------------------------------------------


@pytest.fixture
def canary() -> str:
    return f"canary-{uuid.uuid4().hex}"


@pytest.fixture
def server_log(admin: Admin) -> Iterator[Callable[[], str] | None]:
    """Everything that the server has logged until now, or None where its log cannot be read."""
    folder = admin.execute("show data_directory").fetchone()
    assert folder is not None
    log = Path(folder[0]).parent / "server.log"  # of an embedded server
    if not log.exists():
        yield None
        return

    def read() -> str:
        mark = uuid.uuid4().hex
        admin.execute(f"do $$ begin raise log 'mark {mark}'; end $$".encode())
        until = time.monotonic() + 10
        while mark not in (text := log.read_text(errors="replace")):
            assert time.monotonic() < until, "the server's log does not grow"
            time.sleep(0.02)
        rotated = log.with_suffix(".log.1")
        return (rotated.read_text(errors="replace") if rotated.exists() else "") + text

    yield read


@pytest.fixture
def terse(
    admin: Admin, dsn: str, worker_database: WorkerDatabase, server_log: Callable[[], str] | None
) -> Callable[[], str] | None:
    """The server's log, for a role that may keep rows out of it; one that is no superuser is given that right here."""
    with psycopg.connect(dsn) as connection:
        role = connection.info.user
    if admin.execute("select rolsuper from pg_roles where rolname = %s", [role]).fetchone() == (False,):
        admin.execute(
            f'alter role "{role}" in database "{worker_database.name}" set log_error_verbosity = terse'.encode()
        )
    return server_log


class Odd(BaseException):
    """No Exception, and full of data."""


# Kinds that fail in each way in which a value could slip out; the payload is the canary.


def reply(canary: str) -> None:
    raise ValueError(f"provider replied {canary}") from KeyError(canary)


async def raises(job: Job[str]) -> None:
    reply(job.payload)


def raises_in_a_thread(job: Job[str]) -> None:
    reply(job.payload)


async def raises_a_group(job: Job[str]) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(raises, job)


async def panics(job: Job[str]) -> None:
    raise Odd(job.payload)


async def unstorable(job: Job[str]) -> Any:
    return {job.payload: [job.payload, float("nan")], "deep": {"name": f"{job.payload}\0"}}


async def refused(job: Job[str]) -> str:
    return f"refused {job.payload}"


async def undecodable(job: Job[int]) -> None: ...


async def fine(job: Job[str]) -> str:
    return job.payload


def fine_in_a_thread(job: Job[str]) -> str:
    return job.payload


async def store_refused(conn: psycopg.AsyncConnection[Any], job: Job[str], value: str) -> None:
    await conn.execute("insert into public.documents values (%s, %s)", (value, f"refused {value}"))


def store_twice(conn: psycopg.Connection[Any], job: Job[str], value: str) -> None:
    for _ in range(2):
        conn.execute("insert into public.documents values (%s, %s)", (value, value))


async def store_raises(conn: psycopg.AsyncConnection[Any], job: Job[str], value: str) -> None:
    reply(value)


def misbehave(app: App) -> None:
    conflicts = [psycopg.errors.SerializationFailure]

    async def store_conflicts(conn: psycopg.AsyncConnection[Any], job: Job[str], value: str) -> None:
        raise (conflicts.pop() if conflicts else ValueError)(value)  # the first is tried again, and told as trouble

    for handler in (raises, raises_in_a_thread, raises_a_group, panics, unstorable, refused, undecodable):
        app.kind(handler.__name__, max_attempts=1)(handler)
    app.kind("store_refused", max_attempts=1, apply=store_refused)(fine)
    app.kind("store_twice", max_attempts=1, apply=store_twice)(fine_in_a_thread)
    app.kind("store_raises", max_attempts=1, apply=store_raises)(fine)
    app.kind("store_conflicts", max_attempts=1, apply=store_conflicts)(fine)


TABLES_THAT_REFUSE = """
create table public.documents (key text primary key, body text check (body not like 'refused%'));
alter table pgworker.results add constraint refuse check (value::text not like '"refused%');
alter table pgworker.jobs add constraint refuse check (payload::text not like '"refused%')"""

VISIBLE = """
select (to_jsonb(j) - 'payload')::text from pgworker.jobs j
union all select to_jsonb(s)::text from pgworker.job_states s
union all select to_jsonb(r)::text from pgworker.results r
union all select to_jsonb(r)::text from pgworker.runners r"""


@pytest.mark.contract("A46")
@pytest.mark.ruling("1.20", "4.8")
async def test_no_value_leaves_its_column(
    app: App, admin: Admin, canary: str, caplog: pytest.LogCaptureFixture, terse: Callable[[], str] | None
) -> None:
    caplog.set_level(logging.DEBUG)
    admin.execute(TABLES_THAT_REFUSE)
    misbehave(app)
    app.events.subscribe(lambda event: reply(canary))
    seen = Recorder(app)
    for kind in app.kinds.keys() - {"undecodable"}:
        await app.enqueue(kind, canary, key="k", revision="r")
    admin.execute(
        "insert into pgworker.jobs (kind, key, payload) values ('undecodable', 'k', to_jsonb(%s::text))", [canary]
    )
    with pytest.raises(
        psycopg.errors.CheckViolation
    ):  # the caller gets the database's error as it is; nobody else does
        await app.enqueue("raises", f"refused {canary}", key=canary)
    with pytest.raises(psycopg.errors.CheckViolation):
        app.sync.enqueue("raises", f"refused {canary}", key=canary)
    app.sync.close()

    async with running(app.worker()) as worker:
        await seen.wait(lambda: len(seen.of(JobSettled)) == len(app.kinds))
        shown = [worker.status(), *seen.events]
        stored = admin.execute(VISIBLE).fetchall()
    assert seen.of(JobLost) == []
    assert {event.state for event in seen.of(JobSettled)} == {"failed"}
    for place, text in (("rows", str(stored)), ("status", str(shown)), ("client log", caplog.text)):
        assert canary not in text, f"a value is in the {place}"
    assert "observer failed event=JobSettled error=ValueError" in caplog.text  # the log was really caught

    if terse is None:
        pytest.skip("the server's log cannot be read here; all the rest holds")
    logged = terse()
    assert 'violates check constraint "refuse"' in logged
    assert 'violates check constraint "documents_body_check"' in logged
    assert 'violates unique constraint "documents_pkey"' in logged
    assert canary not in logged, [line for line in logged.splitlines() if canary in line]
    with pytest.raises(psycopg.errors.CheckViolation):  # what it would look like
        admin.execute("insert into public.documents values ('k', %s)", [f"refused {canary}"])
    assert canary in terse()
