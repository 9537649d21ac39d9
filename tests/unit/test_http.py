"""What an HTTP answer means for a job."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pgworker import Pause, Permanent
from pgworker.contrib.http import judge_response, parse_retry_after

NOW = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.contract("A70")
@pytest.mark.parametrize("status", [401, 403, 408, 425, 429, 500, 502, 503, 504, 599])
def test_what_is_the_providers_fault_pauses_for_five_seconds(status: int) -> None:
    assert judge_response(status) == Pause(timedelta(seconds=5), f"http_{status}")


@pytest.mark.contract("A70")
@pytest.mark.parametrize("status", [400, 402, 404, 405, 409, 410, 413, 415, 422, 451])
def test_any_other_refusal_is_permanent(status: int) -> None:
    assert judge_response(status, "7") == Permanent(f"http_{status}")


@pytest.mark.parametrize("status", [200, 201, 204, 304])
def test_what_is_no_error_is_no_outcome(status: int) -> None:
    assert judge_response(status, "7") is None


@pytest.mark.contract("A70")
def test_the_header_wins_over_the_default_and_the_default_can_be_given() -> None:
    assert judge_response(429, "90") == Pause(timedelta(seconds=90), "http_429")
    assert judge_response(429, "soon", pause=timedelta(seconds=2)) == Pause(timedelta(seconds=2), "http_429")
    assert judge_response(503, shared=True) == Pause(timedelta(seconds=5), "http_503", shared=True)


@pytest.mark.contract("A70")
@pytest.mark.parametrize(
    ("value", "wait"),
    [
        ("120", timedelta(seconds=120)),
        (" 1 ", timedelta(seconds=1)),
        ("0", None),
        ("Tue, 01 Jan 2030 12:01:30 GMT", timedelta(seconds=90)),
        ("Tue, 01 Jan 2030 13:01:30 +0100", timedelta(seconds=90)),
        ("Tue, 01 Jan 2030 12:01:30 -0000", timedelta(seconds=90)),
        ("Tue, 01 Jan 2030 11:59:00 GMT", None),
        ("99999999999999999999999999", timedelta(days=30)),
        ("Fri, 31 Dec 9999 23:59:59 GMT", timedelta(days=30)),
        ("-5", None),
        ("1.5", None),
        ("٣", None),
        ("soon", None),
        ("", None),
        (None, None),
    ],
)
def test_a_wait_is_seconds_or_a_date(value: str | None, wait: timedelta | None) -> None:
    assert parse_retry_after(value, now=NOW) == wait
