"""The signal that tells a handler to stop: from any thread, whoever came first."""

from __future__ import annotations

import threading

import pytest

from pgworker.job import Signal


def test_the_first_cause_stays_and_waits_are_over() -> None:
    signal = Signal()
    assert (signal.is_set(), signal.cause, signal.wait(0.0)) == (False, None, False)
    signal.set("cancel")
    signal.set("lost")
    assert (signal.is_set(), signal.cause, signal.wait(0.0)) == (True, "cancel", True)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("first", ["wait", "set"])
def test_several_threads_wait_whatever_comes_first(first: str) -> None:
    for _ in range(50):
        signal = Signal()
        told: list[bool] = []
        threads = [threading.Thread(target=lambda: told.append(signal.wait(20))) for _ in range(3)]  # noqa: B023
        if first == "set":
            signal.set("release")
        for each in threads:
            each.start()
        signal.set("release")
        for each in threads:
            each.join()
        assert told == [True] * 3
