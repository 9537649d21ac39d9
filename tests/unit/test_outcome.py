"""What the table shall say after a run: every result, and the delays of retries."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pgworker import Backoff, Cancel, ConfigError, Park, Pause, Permanent, Retry
from pgworker.job import MOVES
from pgworker.outcome import Decision, Failed, Released, Result, Returned, Rules, Settlement, Success, decide
from pgworker.policy import PRESETS

CONTENT = PRESETS["content"].backoff
SECOND = timedelta(seconds=1)


def rules(attempts: int = 0, max_attempts: int | None = 3) -> Rules:
    return Rules(attempts, max_attempts, Backoff(jitter="none"))


@pytest.mark.parametrize(
    ("result", "decision"),
    [
        (Returned("1"), Success("1")),
        (Returned(None), Success(None)),
        (Failed("handler_failed", "KeyError"), Settlement("pending", "handler_failed", True, 1.0, None, "KeyError")),
        (
            Failed("handler_panic", "SystemExit", permanent=True),
            Settlement("failed", "handler_panic", True, None, None, "SystemExit"),
        ),
        (Retry(), Settlement("pending", "handler_failed", True, 1.0)),
        (Retry(code="upstream"), Settlement("pending", "upstream", True, 1.0)),
        (Permanent("no_such_user"), Settlement("failed", "no_such_user", True)),
        (Park("quota", 30 * SECOND), Settlement("pending", "quota", False, 30.0)),
        (Pause(5 * SECOND, "provider_down"), Settlement("pending", "provider_down", False, 5.0, 5.0)),
        (Pause(5, shared=True), Settlement("pending", "paused", False, 5.0, 5.0, pause_shared=True)),
        (Cancel("unsubscribed"), Settlement("cancelled", "unsubscribed")),
        (Released(), Settlement("pending", None)),
    ],
)
def test_each_result_has_its_decision(result: Result, decision: Decision) -> None:
    assert decide(result, rules(), chance=0.5) == decision


@pytest.mark.contract("A50")
def test_the_last_allowed_failure_fails_the_job() -> None:
    states = [decide(Failed("handler_failed"), rules(attempts), chance=0) for attempts in range(3)]
    assert [each.state for each in states if isinstance(each, Settlement)] == ["pending", "pending", "failed"]
    unlimited = decide(Failed("handler_failed"), rules(10**6, None), chance=0)
    assert isinstance(unlimited, Settlement)
    assert unlimited.state == "pending"


@pytest.mark.ruling("2.29")
def test_a_limit_lowered_below_the_attempts_fails_at_the_next_failure_only() -> None:
    assert decide(Returned("1"), rules(7, 3), chance=0) == Success("1")
    failed = decide(Retry(), rules(7, 3), chance=0)
    assert isinstance(failed, Settlement)
    assert failed.state == "failed"


@pytest.mark.contract("A53")
def test_an_asked_delay_is_a_minimum_and_may_exceed_the_cap() -> None:
    longer = decide(Retry(90 * SECOND), Rules(0, 3, CONTENT), chance=0)
    shorter = decide(Retry(timedelta(milliseconds=1)), Rules(0, 3, CONTENT), chance=0)
    assert isinstance(longer, Settlement)
    assert isinstance(shorter, Settlement)
    assert (longer.delay_seconds, shorter.delay_seconds) == (90.0, 1.0)


@pytest.mark.contract("A48")
@pytest.mark.parametrize("failures", range(1, 9))
def test_content_backs_off_from_a_second_to_a_minute_with_up_to_a_fifth_on_top(failures: int) -> None:
    base = min(2.0 ** (failures - 1), 60.0)
    for chance in (0.0, 0.25, 0.5, 0.999):
        seconds = CONTENT.delay(failures, chance=chance).total_seconds()
        assert seconds == pytest.approx(min(base * (1 + 0.2 * chance), 60.0))
        assert base <= seconds <= min(1.2 * base, 60.0)


@pytest.mark.contract("A49")
@pytest.mark.parametrize("failures", [7, 100, 10**9])
def test_at_the_cap_jitter_adds_nothing(failures: int) -> None:
    assert CONTENT.delay(failures, chance=0.999) == 60 * SECOND


def test_each_jitter_keeps_its_bounds() -> None:
    chances = [index / 100 for index in range(100)]
    assert {Backoff(jitter="none").delay(3, chance=chance) for chance in chances} == {4 * SECOND}
    full = [Backoff(jitter="full").delay(3, chance=chance) for chance in chances]
    assert min(full) == timedelta(0)
    assert 3.9 * SECOND < max(full) < 4 * SECOND
    symmetric = [Backoff(jitter="symmetric").delay(3, chance=chance) for chance in chances]
    assert (min(symmetric), max(symmetric)) == (3.2 * SECOND, 4.784 * SECOND)


@pytest.mark.contract("A47")
def test_a_blank_code_becomes_handler_failed() -> None:
    assert Retry(code=" ").code == Permanent(code="").code == "handler_failed"


@pytest.mark.contract("A46")
@pytest.mark.parametrize("code", ["two words", "x" * 64, "naïve", "a\nb", "a\0b"])
def test_a_code_that_could_carry_a_text_is_refused(code: str) -> None:
    for make in (
        lambda: Retry(code=code),
        lambda: Permanent(code),
        lambda: Park(code, SECOND),
        lambda: Cancel(code),
        lambda: Failed(code),
    ):
        with pytest.raises(ConfigError, match="code"):
            make()


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b", "a\nb", "x" * 300], ids=["NUL", "surrogate", "two lines", "long"])
def test_what_failed_is_named_by_a_text_that_can_be_stored(text: str) -> None:
    """Names come from an app's classes and, in paths, from the names of its fields."""
    named = Failed("code", text).error_class
    assert named is not None
    assert named.isprintable()
    assert 0 < len(named) <= 200
    assert named[0] == text[0]


@pytest.mark.ruling("2.31")
def test_the_states_and_their_moves_are_one_table() -> None:
    assert set(MOVES) == {"pending", "succeeded", "failed", "cancelled"}
    assert MOVES["pending"] == set(MOVES)
    for ended in ("succeeded", "failed", "cancelled"):
        assert MOVES[ended] == {"pending"}
