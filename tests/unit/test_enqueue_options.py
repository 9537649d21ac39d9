"""What an enqueue refuses before anything is sent."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from uuid import RFC_4122, UUID

import pytest

from pgworker import ConfigError, NewJob, PayloadError
from pgworker.client import event_keys, put_jobs
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
    keys = [next(event_keys()) for _ in range(1000)]
    assert len(set(keys)) == 1000
    assert [key[:13] for key in keys] == sorted(key[:13] for key in keys)
    assert {(UUID(key).version, UUID(key).variant) for key in keys} == {(7, RFC_4122)}


@pytest.mark.ruling("2.5")
@pytest.mark.parametrize("chance", [b"\0" * 10, b"\xff" * 10], ids=["least", "most"])
def test_the_event_keys_of_one_call_are_in_its_order(monkeypatch: pytest.MonkeyPatch, chance: bytes) -> None:
    monkeypatch.setattr("os.urandom", lambda size: chance[:size])
    keys = list(islice(event_keys(), 3000))
    assert keys == sorted(set(keys))
    assert [UUID(key).int - UUID(keys[0]).int for key in keys] == list(range(3000))
    assert {(UUID(key).version, UUID(key).variant, str(UUID(key)) == key) for key in keys} == {(7, RFC_4122, True)}


def test_event_keys_begin_anywhere() -> None:
    """Each of the 73 bits that tell two calls of the same millisecond apart is by chance."""
    numbers = [UUID(next(event_keys())).int for _ in range(200)]
    either = [bit for bit in range(80) if len({number >> bit & 1 for number in numbers}) == 2]
    assert either == [*range(47), *range(48, 62), *range(64, 76)]
