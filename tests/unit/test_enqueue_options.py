"""What an enqueue refuses before anything is sent."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pgworker import ConfigError, NewJob, PayloadError
from pgworker.client import event_key, put_jobs
from pgworker.tablemap import TableMap
from tests.handles import untyped


def sent(**options: Any) -> Any:
    """The parameters of the statement that would be sent."""
    flow = put_jobs(TableMap(), untyped("work"), [NewJob(**options)], if_pending="replace")
    return next(flow).parameters


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"revision": "r"}, "give the key, too"),
        ({"delay": timedelta(1), "ready_at": datetime.now(UTC)}, "not both"),
        ({"delay": timedelta(seconds=-1)}, "not negative"),
        ({"delay": -0.1}, "not negative"),
        ({"delay": "5"}, "delay must be timedelta or int or float, got str"),
        ({"delay": True}, "got bool"),
        ({"ready_at": datetime(2030, 1, 1)}, "time zone"),  # noqa: DTZ001 - the mistake itself
        ({"ready_at": "2030-01-01"}, "ready_at must be datetime, got str"),
        ({"priority": 1.5}, "priority must be int, got float"),
        ({"priority": 40_000}, "priority is"),
        ({"urgency": "soon"}, "urgency is"),
        ({"max_attempts": 0}, "at least 1"),
        ({"max_attempts": 2.0}, "got float"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        sent(**options)


@pytest.mark.ruling("2.22")
@pytest.mark.parametrize("key", ["", "x" * 513, "é" * 257, "a\0b", "\ud800"])
def test_keys_that_cannot_be_stored_are_refused(key: str) -> None:
    with pytest.raises(PayloadError):
        sent(key=key)


@pytest.mark.ruling("2.22")
@pytest.mark.parametrize("revision", ["", "x" * 129, "a\0b"])
def test_revisions_that_cannot_be_stored_are_refused(revision: str) -> None:
    with pytest.raises(PayloadError):
        sent(key="k", revision=revision)


def test_a_number_is_a_delay_in_seconds() -> None:
    assert sent(delay=1.5)["delays"] == sent(delay=timedelta(seconds=1.5))["delays"] == [1.5]
    assert sent()["delays"] == []  # the default, which is not sent


@pytest.mark.ruling("2.5")
def test_event_keys_are_distinct_and_ordered_by_time() -> None:
    keys = [event_key() for _ in range(1000)]
    assert len(set(keys)) == 1000
    assert [key[:13] for key in keys] == sorted(key[:13] for key in keys)
    assert all(key[14] == "7" and key[19] in "89ab" for key in keys)
