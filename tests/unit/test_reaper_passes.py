"""How much of a backlog the reaper reads in one pass, without a database: leased rows have no index of their own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, cast

import pytest

from pgworker.kind import declare_kind
from pgworker.maintenance import Reaper
from pgworker.policy import make_policy
from pgworker.statements import BEGINNING, Cursor, Due, Lane, Reaped

LANE = Lane("work", 0, 0)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
PAGE = 1_000
pytestmark = pytest.mark.ruling("1.7")


class Page(NamedTuple):
    """A statement of the reaper's: the page after this cursor."""

    after: Cursor
    limit: int


class Backlog:
    """A lane of so many ready rows, of which some are leased; the queue and the database of the test."""

    def __init__(self, rows: int, leased: set[int], *, apart: float = 1.0, fair: bool = False) -> None:
        self.kind = declare_kind(
            "work", make_policy("standard", {"fair": fair}), payload=object, payload_limit=None, version=1
        )
        self.rows = rows
        self.leased = leased
        self.apart = timedelta(seconds=apart)
        self.read: list[int] = []
        """With which row each page began."""

    def reap(self, lane: Lane, *, limit: int, after: Cursor) -> Page:
        assert lane == LANE
        return Page(after, limit)

    async def recent(self, queue: Backlog, *, within: float) -> list[Due]:
        return [Due(LANE, -1.0, paused=False)]

    async def run(self, page: Page) -> Reaped:
        first = 0 if page.after == BEGINNING else cast("int", page.after[1]) + 1
        last = min(first + page.limit, self.rows) - 1
        self.read.append(first)
        if first > last:
            return Reaped(0, 0, 0, None, 0)
        cursor = (NOON + last * self.apart, last)
        leased = len(self.leased.intersection(range(first, last + 1)))
        return Reaped(last - first + 1, leased, leased, cursor, leased)

    async def passes(self, count: int) -> list[list[int]]:
        """The first rows of the pages that each of so many passes read."""
        fake = cast("Any", self)
        reaper, seen = Reaper(fake, fake), list[list[int]]()
        for _ in range(count):
            self.read = []
            await reaper.reap(fake)
            seen.append(self.read)
        return seen


def pages(*numbers: int) -> list[int]:
    return [number * PAGE for number in numbers]


async def test_a_short_lane_is_read_whole_by_each_pass() -> None:
    assert await Backlog(2_500, {2_400}).passes(2) == [pages(0, 1, 2)] * 2


async def test_a_pass_reads_the_head_until_a_page_has_no_leases_and_goes_on_where_the_last_one_stopped() -> None:
    first, second, third = await Backlog(1_000_000, set(range(1_500))).passes(3)
    assert first == pages(0, 1, 2, *range(3, 23))
    assert second == pages(0, 1, 2, *range(23, 43))
    assert third == pages(0, 1, 2, *range(43, 63))


async def test_after_the_end_of_the_lane_it_begins_again() -> None:
    seen = await Backlog(30_500, {5}).passes(4)
    assert seen == [pages(*range(22)), pages(0, 1, *range(22, 31)), pages(*range(22)), pages(0, 1, *range(22, 31))]


async def test_a_head_that_never_ends_leaves_room_for_the_rest() -> None:
    """As of a kind that is fair between tenants, whose leases lie all over the lane."""
    backlog = Backlog(200_000, set(range(0, 200_000, PAGE)))
    assert await backlog.passes(2) == [pages(*range(120)), pages(*range(100), *range(120, 140))]


@pytest.mark.parametrize("apart", [1.0, 0.0], ids=["one a second", "all at once"])
@pytest.mark.parametrize("row", [0, 999, 1_000, 22_999, 23_000, 99_999])
async def test_each_leased_row_is_reached(row: int, apart: float) -> None:
    backlog = Backlog(100_000, {row}, apart=apart)
    seen = await backlog.passes(6)
    assert row // PAGE * PAGE in {first for each in seen for first in each}


async def test_a_kind_that_is_fair_between_tenants_is_read_in_a_few_passes() -> None:
    """Its leased rows lie all over the lane."""
    seen = await Backlog(300_000, {250_000}, fair=True).passes(2)
    assert 250_000 in {first for each in seen for first in each}


async def test_what_is_read_twice_by_a_pass_is_nothing() -> None:
    for read in await Backlog(45_000, {3, 1_003}).passes(6):
        assert len(set(read)) == len(read)
