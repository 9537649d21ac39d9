"""Group commit without a database: who goes with whom, and what each caller gets when a flush fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import psycopg
import pytest
from psycopg import errors as pg
from psycopg_pool import PoolClosed, PoolTimeout

from pgworker import App, Enqueued, NewJob, PgworkerError
from pgworker.client import make_order
from pgworker.groups import MAX_BYTES, MAX_ROWS, Call, Groups, Line
from pgworker.operations import list_pauses
from pgworker.statements import Statement
from pgworker.tablemap import TableMap
from tests.handles import untyped

T = TypeVar("T")

WORK = untyped("work")


def call(*jobs: NewJob, keep: bool = False) -> Call:
    order = make_order(WORK, jobs, if_pending="keep" if keep else "replace")
    return Call(order, asyncio.get_running_loop().create_future(), until=float("inf"))


def line(*calls: Call) -> Line:
    made = Line()
    made.waiting.extend(calls)
    return made


def job(key: str | None = None, revision: str | None = None, **options: Any) -> NewJob:
    return NewJob("x", key, revision, **options)


# --- who goes with whom ---------------------------------------------------------------------------------------------


async def test_those_who_wait_go_together_in_their_order() -> None:
    calls = [call(job(key, "r")) for key in "cab"]
    waiting = line(*calls)
    assert waiting.take() == calls
    assert waiting.flying == set(calls)
    assert waiting.take() == []


@pytest.mark.ruling("2.7")
async def test_a_call_that_was_cancelled_is_withdrawn() -> None:
    calls = [call(job()) for _ in range(3)]
    calls[1].answer.cancel()
    assert line(*calls).take() == [calls[0], calls[2]]


async def test_a_flush_has_so_many_rows_at_most_and_nobody_overtakes() -> None:
    calls = [
        call(*[job()] * 200),
        call(*[job()] * (MAX_ROWS - 200)),
        call(job()),
        call(*[job()] * MAX_ROWS),
        call(job()),
    ]
    waiting = line(*calls)
    assert [waiting.take() for _ in range(4)] == [calls[:2], [calls[2]], [calls[3]], [calls[4]]]


async def test_a_flush_has_so_many_bytes_at_most() -> None:
    large = MAX_BYTES * 2 // 5
    calls = [call(job()) for _ in range(4)]
    for each in calls:
        each.size = large
    waiting = line(*calls)
    assert [waiting.take() for _ in range(2)] == [calls[:2], calls[2:]]
    assert call(NewJob("€" * 10)).size == 32  # bytes, and the quotes
    calls[0].size, calls[1].size, calls[2].size = large, MAX_BYTES - large, 1
    assert line(*calls[:3]).take() == calls[:2]


async def test_a_large_call_that_waits_for_its_key_keeps_no_other_from_going() -> None:
    held = call(job("k", "r1"))
    waiting = line(held)
    waiting.take()
    calls = [call(job("k", "r2"), *[job()] * (MAX_ROWS - 1)), call(job("l", "r")), call(job("m", "r"))]
    waiting.waiting.extend(calls)
    assert waiting.take() == [calls[1]]
    assert waiting.waiting == [calls[0], calls[2]]


SECOND: list[tuple[NewJob, NewJob, int, int]] = [
    (job("k"), job("k"), False, True),
    (job("k", urgency="catch_up"), job("k"), False, False),
    (job("k"), job("k", urgency="catch_up"), False, False),
    (job("k"), job("k"), True, False),
    (job("k"), job("k", "r"), False, False),
    (job("k", "r"), job("k"), False, False),
    (job("k", "r"), job("k", "r"), False, False),
    (job("k", "r"), job("k", "r2"), False, False),
    (job("k", "r"), job("l", "r"), False, True),
    (job("k"), job("l", "r"), False, True),
]


@pytest.mark.ruling("2.6")
@pytest.mark.parametrize(("first", "second", "keep", "together"), SECOND)
async def test_a_later_call_for_the_same_key_waits_unless_both_just_say_the_latest(
    first: NewJob, second: NewJob, keep: int, together: int
) -> None:
    calls = [call(first, keep=bool(keep)), call(second, keep=bool(keep))]
    waiting = line(*calls)
    assert waiting.take() == (calls if together else calls[:1])
    if not together:
        assert waiting.take() == []  # while the first one flies
        waiting.flying.clear()
        assert waiting.take() == calls[1:]


async def test_nobody_overtakes_one_that_waits_for_the_same_key() -> None:
    calls = [call(job("k", "r1")), call(job("k", "r2"), job("l", "r1")), call(job("l", "r2")), call(job("m", "r"))]
    waiting = line(*calls)
    assert waiting.take() == [calls[0], calls[3]]
    waiting.flying.clear()
    assert waiting.take() == [calls[1]]


async def test_a_call_that_says_more_than_the_latest_of_a_shared_key_waits_as_a_whole() -> None:
    calls = [call(job("k")), call(job("k"), job("l", "r"))]
    assert line(*calls).take() == calls[:1]


async def test_those_that_replace_one_another_are_parted_before_they_are_tried_again() -> None:
    calls = [call(job("k")), call(job("l")), call(job("k")), call(job("m"), job("l"))]
    waiting = line(*calls, last := call(job("n", "r")))
    waiting.take()
    waiting.waiting.append(last)
    assert waiting.part(calls) == calls[:2]
    assert waiting.waiting == [*calls[2:], last]
    assert waiting.flying == {*calls[:2], last}


# --- what each gets -------------------------------------------------------------------------------------------------


class Server:
    """Answers statements when it is told to; a flush is the keys or payloads that were sent together."""

    def __init__(self, fails: Callable[[Statement[Any], bool], Exception | None] = lambda _, __: None) -> None:
        self.flushes: list[list[str]] = []
        self.alone: list[list[str]] = []
        self.may_answer = anyio.Event()
        self.may_answer.set()
        self.fails = fails
        self.told: list[tuple[str, bool]] = []
        self.groups = Groups(TableMap(), shared=self.run, alone=self.run_alone, committed=self.tell, patience=5.0)

    def tell(self, kind: str, superseded: bool) -> None:  # noqa: FBT001 - as it is called
        self.told.append((kind, superseded))

    async def run(self, statement: Statement[T], /, *, within: float = 5.0) -> T:
        return await self._run(statement, self.flushes, alone=False)

    async def run_alone(self, statement: Statement[T], /, *, within: float = 5.0) -> T:
        return await self._run(statement, self.alone, alone=True)

    async def _run(self, statement: Statement[T], log: list[list[str]], *, alone: bool) -> T:
        names = statement.parameters["payloads" if statement.name != "insert_jobs" else "keys"]
        assert isinstance(names, list)
        log.append(names)
        await self.may_answer.wait()
        await anyio.lowlevel.checkpoint()
        if (error := self.fails(statement, alone)) is not None:
            raise error
        if statement.name != "insert_jobs":
            return statement.read([("7",)])
        return statement.read([(key, "created", "pending", "7") for key in names])

    async def put(self, *jobs: NewJob) -> list[Enqueued]:
        return await self.groups.put(make_order(WORK, jobs, if_pending="replace"))


async def gather(server: Server, jobs: Sequence[NewJob]) -> list[list[Enqueued] | BaseException]:
    return await asyncio.gather(*(server.put(each) for each in jobs), return_exceptions=True)


async def test_what_gathers_during_a_flush_goes_with_the_next() -> None:
    server = Server()
    server.may_answer = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(server.put, NewJob(0))
        await anyio.wait_all_tasks_blocked()
        for number in range(1, 5):
            group.start_soon(server.put, NewJob(number))
        await anyio.wait_all_tasks_blocked()
        assert server.flushes == [["0"]]
        server.may_answer.set()
    assert server.flushes == [["0"], ["1", "2", "3", "4"]]
    assert server.told == [("work", False)] * 2


async def test_those_who_are_answered_together_come_again_together() -> None:
    server = Server()

    async def client() -> None:
        for _ in range(10):
            await server.put(NewJob(1))

    async with anyio.create_task_group() as group:
        for _ in range(16):
            group.start_soon(client)
    assert [len(flush) for flush in server.flushes] == [16] * 10


async def test_those_who_are_answered_join_those_who_wait_already() -> None:
    server = Server()
    server.may_answer = anyio.Event()

    async def client() -> None:
        for _ in range(5):
            await server.put(NewJob(1))

    async with anyio.create_task_group() as group:
        group.start_soon(client)
        await anyio.wait_all_tasks_blocked()
        for _ in range(15):
            group.start_soon(client)
        await anyio.wait_all_tasks_blocked()
        server.may_answer.set()
    assert [len(flush) for flush in server.flushes] == [1, 16, 16, 16, 16, 15]


async def test_kinds_and_events_have_lines_of_their_own() -> None:
    server = Server()
    other = make_order(untyped("other"), [NewJob(1)], if_pending="replace")
    keep = make_order(WORK, [job("k")], if_pending="keep")
    await asyncio.gather(server.put(NewJob(1)), server.put(job("k")), server.groups.put(other), server.groups.put(keep))
    assert sorted(server.flushes) == [["1"], ["1"], ["k"], ["k"]]


async def test_one_too_large_to_share_goes_by_itself_in_its_turn_and_holds_up_nobody() -> None:
    answered = anyio.Event()

    class Slow(Server):
        async def run_alone(self, statement: Statement[T], /, *, within: float = 5.0) -> T:
            answer = await super().run_alone(statement, within=within)
            await answered.wait()
            return answer

    server = Slow()
    server.may_answer = anyio.Event()
    large = [job(f"k{number}", "r") for number in range(MAX_ROWS + 1)]
    async with anyio.create_task_group() as group:
        group.start_soon(server.put, job("k0", "older"))
        await anyio.wait_all_tasks_blocked()
        group.start_soon(server.put, *large)
        group.start_soon(server.put, job("other", "r"))
        group.start_soon(server.put, job("k1", "newer"))
        await anyio.wait_all_tasks_blocked()
        assert (server.flushes, server.alone) == ([["k0"]], []), "it would overtake the first"
        server.may_answer.set()
        await anyio.wait_all_tasks_blocked()
        assert [len(flush) for flush in server.alone] == [MAX_ROWS + 1]
        assert server.flushes == [["k0"], ["other"]]
        answered.set()
    assert server.flushes == [["k0"], ["other"], ["k1"]]


@pytest.mark.ruling("2.8")
@pytest.mark.parametrize("bad", range(7))
async def test_one_bad_row_costs_its_caller_alone(bad: int) -> None:
    def fails(statement: Statement[Any], _: bool) -> Exception | None:  # noqa: FBT001
        return pg.NumericValueOutOfRange("no") if f"k{bad}" in statement.parameters["keys"] else None  # type: ignore[operator]

    server = Server(fails)
    answers = await gather(server, [job(f"k{number}", "r") for number in range(7)])
    assert [type(answer) for answer in answers] == [
        pg.NumericValueOutOfRange if number == bad else list for number in range(7)
    ]
    assert not server.alone


@pytest.mark.ruling("2.8")
async def test_who_meets_a_lock_waits_for_it_alone_and_nobody_else_does() -> None:
    release = anyio.Event()
    begun: list[object] = []

    class Held(Server):
        async def run_alone(self, statement: Statement[T], /, *, within: float = 5.0) -> T:
            begun.append(statement.parameters["payloads"])
            await release.wait()
            return await super().run_alone(statement, within=within)

    def fails(statement: Statement[Any], alone: bool) -> Exception | None:  # noqa: FBT001
        return pg.LockNotAvailable("held") if not alone and "k3" in statement.parameters["keys"] else None  # type: ignore[operator]

    server = Held(fails)
    answers: dict[str, str] = {}

    async def put(key: str, revision: str | None) -> None:
        answers[f"{key}{revision or ''}"] = (await server.put(job(key, revision)))[0].status

    async with anyio.create_task_group() as group:
        for number in range(7):
            group.start_soon(put, f"k{number}", None)
        group.start_soon(put, "k3", None)
        await anyio.wait_all_tasks_blocked()
        assert answers.keys() == {f"k{number}" for number in range(7) if number != 3}
        group.start_soon(put, "k3", "later")  # waits for its turn, which keeps the order, and flushes from failing
        group.start_soon(put, "new", None)
        await anyio.wait_all_tasks_blocked()
        assert "new" in answers
        assert begun == [['"x"']]  # of the two for this key the first, and then the second: it would win otherwise
        release.set()
    assert server.alone == [["k3"]] * 3
    assert answers["k3later"] == "created"


async def test_what_is_put_already_is_not_put_again_when_the_rest_fails() -> None:
    """What somebody else has just put the same is asked for once more; that may fail, and the others are there."""

    class Partial(Server):
        async def run(self, statement: Statement[T], /, *, within: float = 5.0) -> T:
            answer = await super().run(statement, within=within)
            if len(self.flushes) == 1:
                assert isinstance(answer, dict)
                del answer["k2"]
            return answer

    def fails(statement: Statement[Any], alone: bool) -> Exception | None:  # noqa: FBT001
        return pg.LockNotAvailable("held") if statement.parameters["keys"] == ["k2"] and not alone else None

    server = Partial(fails)
    calls = [[job("k0")], [job("k1", "r")], [job("k2", "r"), job("k3", "r")], [job("k0")]]
    answers = await asyncio.gather(*(server.put(*jobs) for jobs in calls))
    assert [answer[0].status for answer in answers] == ["replaced", *["created"] * 3]
    assert server.flushes == [["k1", "k2", "k3", "k0"], ["k2"], ["k2"]]
    assert server.alone == [["k2"]]
    assert server.told == [("work", False)] * 2, "of each commit once, also of the one before the error"


async def test_an_error_that_is_nobodys_is_everybodys_one_each() -> None:
    def fails(_: Statement[Any], __: bool) -> Exception:  # noqa: FBT001
        return psycopg.OperationalError("gone")

    answers = await gather(Server(fails), [job(f"k{number}", "r") for number in range(3)])
    assert [str(answer) for answer in answers] == ["gone"] * 3
    assert len({id(answer) for answer in answers}) == 3


ERRORS: list[tuple[Exception, bool, bool, bool]] = [
    (pg.NumericValueOutOfRange("no"), True, False, False),
    (pg.LockNotAvailable("held"), True, True, False),
    (pg.DeadlockDetected("held"), True, True, False),
    (pg.SerializationFailure("held"), True, True, False),
    (PgworkerError("kept changing"), True, True, False),
    (pg.UndefinedTable("no"), True, False, False),
    (pg.RaiseException("by a trigger"), True, False, False),
    (psycopg.DatabaseError("by a trigger, with a code of its own"), True, False, False),
    (psycopg.DataError("by the driver"), True, False, False),
    (TimeoutError(), False, False, False),
    (PoolTimeout("busy"), False, False, False),
    (pg.QueryCanceled("late"), False, False, False),
    (pg.AdminShutdown("gone"), False, False, True),
    (psycopg.OperationalError("gone"), False, False, True),
]


@pytest.mark.parametrize(("error", "apart", "alone", "again"), ERRORS, ids=lambda value: type(value).__name__)
async def test_which_errors_may_be_one_callers_which_pass_and_after_which_events_are_sent_again(
    error: Exception,
    apart: bool,  # noqa: FBT001
    alone: bool,  # noqa: FBT001
    again: bool,  # noqa: FBT001
) -> None:
    def fails(_: Statement[Any], __: bool) -> Exception:  # noqa: FBT001
        return error

    keyed, events = Server(fails), Server(fails)
    await gather(keyed, [job("k", "r"), job("l", "r")])
    assert keyed.flushes == [["k", "l"], *([["k"], ["l"]] if apart else [])]
    assert keyed.alone == ([["k"], ["l"]] if alone else [])
    await gather(events, [NewJob(0), NewJob(1)])
    assert events.flushes.count(["0", "1"]) == 1 + again


@pytest.mark.parametrize("times", [1, 2])
async def test_events_whose_answer_was_lost_are_sent_once_more(times: int) -> None:
    left, names = times, list[str]()

    def fails(statement: Statement[Any], _: bool) -> Exception | None:  # noqa: FBT001
        nonlocal left
        left -= 1
        names.append(statement.name)
        return psycopg.OperationalError(f"gone {left}") if left >= 0 else None

    server = Server(fails)
    answers = await gather(server, [NewJob(number) for number in range(3)])
    assert server.flushes == [["0", "1", "2"]] * 2
    assert names == ["insert_events", "insert_missing_events"]
    if times == 1:
        assert [answer[0].status for answer in answers if isinstance(answer, list)] == ["created"] * 3
    else:
        assert [str(answer) for answer in answers] == ["gone 1"] * 3  # the first, which may have been written


@pytest.mark.ruling("2.7")
@pytest.mark.parametrize("cancelled", [0, 2])
async def test_a_cancelled_caller_harms_nobody(cancelled: int) -> None:
    server = Server()
    server.may_answer = anyio.Event()
    tasks = [asyncio.get_running_loop().create_task(server.put(NewJob(number))) for number in range(4)]
    await anyio.wait_all_tasks_blocked()
    assert server.flushes == [["0", "1", "2", "3"]]
    tasks[cancelled].cancel()  # as asyncio does it, which no scope of anyio's keeps off
    await asyncio.wait(tasks[cancelled : cancelled + 1])
    server.may_answer.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [n == cancelled for n in range(4)]
    assert len(server.flushes) == 1


@pytest.mark.ruling("2.7")
async def test_one_that_is_cancelled_before_its_flush_is_not_sent() -> None:
    server = Server()
    server.may_answer = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(server.put, NewJob(0))
        await anyio.wait_all_tasks_blocked()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(server.put, NewJob(1))
                await anyio.wait_all_tasks_blocked()
                group.start_soon(server.put, NewJob(2))
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
        server.may_answer.set()
    assert server.flushes == [["0"], ["2"]]


async def test_one_that_was_cancelled_is_left_out_when_the_others_are_tried_again() -> None:
    def fails(statement: Statement[Any], _: bool) -> Exception | None:  # noqa: FBT001
        return pg.LockNotAvailable("held") if len(statement.parameters["keys"]) > 1 else None  # type: ignore[arg-type]

    server = Server(fails)
    server.may_answer = anyio.Event()
    tasks = [asyncio.get_running_loop().create_task(server.put(job(f"k{number}"))) for number in range(3)]
    await anyio.wait_all_tasks_blocked()
    tasks[1].cancel()
    await asyncio.wait(tasks[1:2])
    server.may_answer.set()
    await asyncio.wait(tasks)
    assert sorted(server.flushes[1:]) == [["k0"], ["k2"]]


async def test_who_waits_too_long_for_a_flush_hears_that_nothing_was_sent() -> None:
    server = Server()
    server.groups._patience = 0.0
    server.may_answer = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(server.put, NewJob(0))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(PoolTimeout):
            await server.put(NewJob(1))
        server.may_answer.set()
    assert server.flushes == [["0"]]


async def test_who_is_parted_from_others_and_waits_again_does_so_for_no_longer() -> None:
    released = anyio.Event()

    class Held(Server):
        async def run_alone(self, statement: Statement[T], /, *, within: float = 5.0) -> T:
            await released.wait()
            return await super().run_alone(statement, within=within)

    server = Held(lambda _, alone: None if alone else pg.LockNotAvailable("held"))
    server.groups._patience = 0.2
    answers: list[object] = []

    async def put() -> None:
        try:
            answers.append((await server.put(job("k")))[0].status)
        except PoolTimeout as error:
            answers.append(type(error))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(put)
        with anyio.fail_after(5):
            while len(answers) < 3:  # noqa: ASYNC110 - timers tell of nothing
                await anyio.sleep(0.01)
        assert answers == [PoolTimeout] * 3
        (waiting,) = server.groups._lines.values()
        assert not waiting.waiting, "they have let go of their payloads"
        released.set()
    assert answers[3:] == ["created"]


async def test_what_is_committed_is_answered_although_a_later_round_fails() -> None:
    class Partial(Server):
        async def run(self, statement: Statement[T], /, *, within: float = 5.0) -> T:
            answer = await super().run(statement, within=within)
            assert isinstance(answer, dict)
            del answer["b"]
            return answer

    def fails(statement: Statement[Any], _: bool) -> Exception | None:  # noqa: FBT001
        return psycopg.OperationalError("gone") if statement.parameters["keys"] == ["b"] else None

    server = Partial(fails)
    created, lost = await gather(server, [job("a", "r"), job("b", "r")])
    assert isinstance(created, list)
    assert created[0].status == "created"
    assert isinstance(lost, psycopg.OperationalError)
    assert server.told == [("work", False)], "nobody else wakes the workers for what is committed"


async def test_of_what_only_was_there_nobody_is_told() -> None:
    class Partial(Server):
        async def run(self, statement: Statement[T], /, *, within: float = 5.0) -> T:
            await super().run(statement, within=within)
            return statement.read([("a", "unchanged", "pending", None)])

    def fails(statement: Statement[Any], _: bool) -> Exception | None:  # noqa: FBT001
        return psycopg.OperationalError("gone") if statement.parameters["keys"] == ["b"] else None

    server = Partial(fails)
    await gather(server, [job("a", "r"), job("b", "r")])
    assert server.flushes == [["a", "b"], ["b"]]
    assert server.told == []


async def test_a_call_of_which_a_part_is_committed_does_not_hear_that_nothing_was_sent() -> None:
    class Partial(Server):
        async def run(self, statement: Statement[T], /, *, within: float = 5.0) -> T:
            answer = await super().run(statement, within=within)
            assert isinstance(answer, dict)
            del answer["b"], answer["c"]
            return answer

    def fails(statement: Statement[Any], _: bool) -> Exception | None:  # noqa: FBT001
        return PoolTimeout("no connection") if statement.parameters["keys"] == ["b", "c"] else None

    server = Partial(fails)
    calls = [[job("a", "r"), job("b", "r")], [job("c", "r")]]
    answers = await asyncio.gather(*(server.put(*jobs) for jobs in calls), return_exceptions=True)
    assert [type(answer) for answer in answers] == [TimeoutError, PoolTimeout]


async def test_closing_waits_for_what_follows_a_flush_too() -> None:
    server = Server(lambda statement, _: pg.RaiseException("no") if statement.parameters["keys"] != ["b"] else None)
    server.may_answer = anyio.Event()
    answers: list[object] = []

    async def put(key: str) -> None:
        try:
            answers.append((await server.put(job(key, "r")))[0].status)
        except pg.RaiseException as error:
            answers.append(type(error))

    async with anyio.create_task_group() as group:
        for key in "abc":
            group.start_soon(put, key)
        await anyio.wait_all_tasks_blocked()
        server.may_answer.set()
        await server.groups.close(5)
        assert not server.groups._tasks
        assert len(server.flushes) == 4
    assert sorted(map(str, answers)) == sorted([str(pg.RaiseException)] * 2 + ["created"])


async def test_a_closed_app_opens_no_pool_for_what_comes_too_late() -> None:
    app = App("postgresql:///never")
    door = app._door()
    await app.close()
    with pytest.raises(PoolClosed):
        await door.run(list_pauses(TableMap()))
    assert not door._databases
    assert app._door() is not door, "the app may be used again"


async def test_when_the_event_loop_ends_nobody_is_left_waiting() -> None:
    server = Server()
    server.may_answer = anyio.Event()
    loop = asyncio.get_running_loop()
    first = loop.create_task(server.put(NewJob(0)))
    await anyio.wait_all_tasks_blocked()
    second = loop.create_task(server.put(NewJob(1)))
    await anyio.wait_all_tasks_blocked()
    for task in list(server.groups._tasks):
        task.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert second.cancelled()
