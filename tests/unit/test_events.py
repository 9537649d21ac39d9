"""Observers see what happened, and can break nothing."""

from __future__ import annotations

import logging

import pytest

from pgworker.events import Event, Events, JobLost, JobSettled, RunnerTrouble

SETTLED = JobSettled("work", "k", 1, "failed", "handler_failed", counted=True, waited_seconds=0.1, run_seconds=0.2)


def test_an_observer_that_raises_stops_neither_the_others_nor_the_teller(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []
    events = Events()

    def broken(event: Event) -> None:
        raise ValueError("SECRET")

    events.subscribe(broken)
    events.subscribe(seen.append)
    events.tell(SETTLED)
    assert seen == [SETTLED]
    assert "observer failed event=JobSettled error=ValueError" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    ("event", "level", "line"),
    [
        (SETTLED, logging.INFO, "job settled kind=work key=k attempt=1 state=failed code=handler_failed run=0.200s"),
        (JobLost("work", "k", "lost"), logging.WARNING, "lost lease kind=work key=k reason=lost"),
        (RunnerTrouble("work", "queue_claim_failed", "OperationalError"), logging.WARNING, "runner trouble"),
    ],
)
def test_each_event_is_one_line(event: Event, level: int, line: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="pgworker"):
        Events().tell(event)
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().startswith(line)
