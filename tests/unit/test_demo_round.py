"""A round's account of its jobs."""

from __future__ import annotations

import pytest

from pgworker.demo.jobs import CHANGED
from pgworker.demo.report import percentile
from pgworker.demo.round import Round
from pgworker.events import JobSettled
from pgworker.job import Enqueued, EnqueueStatus, State


def put(key: str, status: EnqueueStatus = "created", state: State = "pending") -> Enqueued:
    return Enqueued("index_file", key, "r", status, state)


def settled(
    key: str, state: State = "succeeded", code: str | None = None, *, waited: float = 0.5, kind: str = "index_file"
) -> JobSettled:
    return JobSettled(kind, key, 1, state, code, counted=code is not None, waited_seconds=waited, run_seconds=0.1)


def expecting(*enqueued: Enqueued) -> Round:
    this = Round(files=len(enqueued))
    this.expect([each.key.upper() for each in enqueued], enqueued)
    return this


def test_each_file_comes_to_one_end() -> None:
    this = expecting(
        put("a"), put("b", "requeued"), put("c", "unchanged", "succeeded"), put("d", "unchanged", "failed")
    )
    assert (this.unchanged, this.settled, list(this.outstanding)) == (2, 2, ["a", "b"])
    this.observe(settled("a"))
    this.observe(settled("b", "failed", "binary"))
    assert (this.done, this.failed, this.settled, this.outstanding) == (1, 1, 4, {})
    assert this.changed == ["A", "B"]


def test_work_left_by_an_earlier_run_is_waited_for_but_was_not_picked_up_in_this_one() -> None:
    this = expecting(put("a"), put("left", "unchanged", "pending"))
    this.observe(settled("left", waited=3600.0))
    this.observe(settled("a", waited=0.25))
    assert this.done == 2
    assert (this.picked_up, this.pickup(0.99)) == (1, 0.25)


def test_only_the_first_pickup_of_a_job_counts() -> None:
    this = expecting(put("a"))
    this.observe(settled("a", "pending", "handler_failed", waited=0.1))
    this.observe(settled("a", waited=9.0))
    assert (this.picked_up, this.pickup(0.5), this.done) == (1, 0.1, 1)


def test_other_folders_and_other_kinds_pass_by() -> None:
    this = expecting(put("a"))
    this.observe(settled("b"))
    this.observe(settled("a", kind="other"))
    assert (this.done, list(this.outstanding)) == (0, ["a"])


def test_a_file_that_has_changed_is_looked_at_again_three_times_at_most() -> None:
    this = expecting(put("a"))
    for _ in range(3):
        this.observe(settled("a", "pending", CHANGED))
        assert this.look_again() == ["A"]
        assert this.look_again() == []
        this.expect(["A"], [put("a", "replaced")])
    this.observe(settled("a", "pending", CHANGED))
    assert this.look_again() == []


def test_an_end_that_nobody_told_of_is_another_process_s_when_it_is_seen_twice() -> None:
    this = expecting(put("a"), put("b"))
    this.ended_elsewhere(["a", "b"])
    assert this.elsewhere == 0
    this.observe(settled("b"))  # ours after all: the event came a little later
    this.ended_elsewhere(["a"])
    assert (this.elsewhere, this.done, this.settled, this.outstanding) == (1, 1, 2, {})


def test_documents_that_go_are_counted_and_the_first_of_them_named() -> None:
    this = Round()
    this.forgotten([str(number) for number in range(9)])
    assert (this.gone, this.changed) == (9, ["0", "1", "2", "3", "4"])


def test_a_round_without_jobs_has_no_rate() -> None:
    this = expecting(put("a", "unchanged", "succeeded"))
    assert (this.jobs_per_second, this.pickup(0.5)) == (None, None)
    assert Round().jobs_per_second is None


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_a_value_that_was_seen(share: float, value: int) -> None:
    assert percentile([float(number) for number in range(100, 0, -1)], share) == value


def test_no_values_have_no_percentile() -> None:
    assert percentile([], 0.5) is None
