"""A runner's pauses, without a database: which of them hold, and what the table's news are worth."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import anyio.lowlevel
import psycopg
import pytest

from pgworker.events import Event, RunnerTrouble
from pgworker.outcome import Settlement
from pgworker.pauses import Pauses
from pgworker.tablemap import TableMap


class Table:
    """Stands for Shared and its database: keeps the pauses that were sent, or refuses them."""

    def __init__(self, *, refuses: bool = False, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.tables = TableMap()
        self.apply_database = self
        self.sent: list[tuple[float, str]] = []
        self.told: list[Event] = []
        self._refuses = refuses
        self._meanwhile = meanwhile

    async def run(self, statement: Any, *, within: float) -> None:
        self._meanwhile()
        if self._refuses:
            raise psycopg.OperationalError
        self.sent.append((statement.parameters["seconds"], statement.parameters["code"]))

    def pauses(self) -> Pauses:
        return Pauses("work", cast("Any", self), tell=self.told.append, give_up_at=lambda: float("inf"))


def asking(seconds: float, *, shared: bool = False, code: str = "down") -> Settlement:
    return Settlement("pending", code, delay_seconds=seconds, pause_seconds=seconds, pause_shared=shared)


def seconds_left(pauses: Pauses) -> float:
    return pauses.until - time.monotonic()


@pytest.mark.contract("A52")
@pytest.mark.parametrize("order", [(50, 100), (100, 50)])
async def test_the_longest_holds_whatever_comes_after_it(order: tuple[float, float]) -> None:
    pauses = Table().pauses()
    for seconds in order:
        await pauses.settled(pauses.start([asking(seconds)]))
    assert 90 < seconds_left(pauses) <= 100


@pytest.mark.contract("A51")
async def test_the_time_counts_from_the_writing_as_it_does_in_the_row() -> None:
    pauses = Table().pauses()
    started = pauses.start([asking(50)])
    started[0].until -= 40  # so long did the writing take
    await pauses.settled(started)
    assert 45 < seconds_left(pauses) <= 50


async def test_what_asks_for_no_pause_starts_none() -> None:
    pauses = Table().pauses()
    assert pauses.start([Settlement("failed", "x"), asking(0)]) == []
    assert not pauses.hold
    assert await pauses.wait_out() is False


async def test_a_pause_for_all_is_the_tables_once_it_is_written() -> None:
    table = Table()
    pauses = table.pauses()
    started = pauses.start([asking(50, shared=True), asking(70, shared=True, code="longer"), asking(1)])
    assert pauses.hold
    await pauses.settled(started)
    assert table.sent == [(70, "longer")]
    assert pauses.in_table
    assert seconds_left(pauses) <= 1  # its own is left


@pytest.mark.race(11)
async def test_two_calls_that_pause_for_all_do_not_undo_each_other() -> None:
    seen: list[bool] = []
    pauses = Table(meanwhile=lambda: seen.append(pauses.hold)).pauses()
    first = pauses.start([asking(30, shared=True)])
    second = pauses.start([asking(10, shared=True)])
    await pauses.settled(second)
    assert 20 < seconds_left(pauses) <= 30  # the first is not written yet
    await pauses.settled(first)
    assert seen == [True, True]
    assert not pauses.hold


async def test_one_that_cannot_be_written_holds_here_and_is_told() -> None:
    table = Table(refuses=True)
    pauses = table.pauses()
    await pauses.settled(pauses.start([asking(50, shared=True)]))
    assert table.told == [RunnerTrouble("work", "queue_pause_failed", "OperationalError")]
    assert (pauses.hold, pauses.in_table) == (True, False)


@pytest.mark.race(11)
async def test_an_answer_to_an_older_question_does_not_end_what_was_written_after_it() -> None:
    pauses = Table().pauses()
    asked_at = time.monotonic()
    await pauses.settled(pauses.start([asking(50, shared=True)]))
    pauses.observe(paused=False, asked_at=asked_at)
    assert pauses.in_table
    pauses.observe(paused=False, asked_at=time.monotonic())
    assert not pauses.in_table


async def test_who_waits_goes_on_when_the_table_has_taken_over() -> None:
    table = Table()
    pauses = table.pauses()
    started = pauses.start([asking(3600, shared=True)])
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(pauses.wait_out)
            await anyio.lowlevel.checkpoint()
            await pauses.settled(started)


async def test_who_waits_waits_for_what_was_added_meanwhile() -> None:
    pauses = Table().pauses()
    pauses.start([asking(0.05)])
    async with anyio.create_task_group() as group:
        group.start_soon(pauses.wait_out)
        await anyio.lowlevel.checkpoint()
        pauses.start([asking(0.1)])
        until = pauses.until
    assert time.monotonic() >= until
