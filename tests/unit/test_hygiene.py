"""What the tests' house does to every test: async tests run, threads may not stay."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from tests.plugins import hygiene

if TYPE_CHECKING:
    from collections.abc import Iterator

RELEASE = threading.Event()


class Connection:
    """As open as it says."""

    closed = False


KEPT = Connection()


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.Pytester]:
    monkeypatch.setattr(hygiene, "_GRACE_SECONDS", 0.05)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing those again takes most of a second
    pytester.makeconftest('pytest_plugins = ["tests.plugins.hygiene"]')
    RELEASE.clear()
    yield pytester
    RELEASE.set()


@pytest.mark.parametrize("daemon", [True, False])
def test_a_thread_that_stays_fails_its_test(inner: pytest.Pytester, *, daemon: bool) -> None:
    inner.makepyfile(
        f"""
        import threading
        from tests.unit.test_hygiene import RELEASE

        def test_leaks():
            threading.Thread(target=RELEASE.wait, name="lost", daemon={daemon}).start()
        """
    )
    result = inner.runpytest()
    result.assert_outcomes(passed=1, errors=0 if daemon else 1)
    if not daemon:
        result.stdout.fnmatch_lines(["*threads left running: lost"])


def test_a_thread_that_is_ending_is_waited_for(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hygiene, "_GRACE_SECONDS", 30.0)
    inner.makepyfile(
        """
        import threading
        from tests.unit.test_hygiene import RELEASE

        def test_ends_soon():
            threading.Thread(target=RELEASE.wait).start()
            threading.Timer(0.05, RELEASE.set).start()
        """
    )
    inner.runpytest().assert_outcomes(passed=1)


def test_async_tests_need_no_mark(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import asyncio
        from hypothesis import given, settings, strategies

        async def test_plain():
            assert asyncio.get_running_loop()

        class TestInside:
            async def test_method(self):
                assert asyncio.get_running_loop()

        @settings(max_examples=2, database=None)
        @given(n=strategies.integers())
        async def test_property(n):
            assert asyncio.get_running_loop() and isinstance(n, int)
        """
    )
    inner.runpytest("-p", "anyio.pytest_plugin").assert_outcomes(passed=3)


def test_a_connection_that_stays_open_fails_its_test_and_says_where_it_was_made(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        from tests.plugins import hygiene
        from tests.unit.test_hygiene import KEPT

        def test_leaks():
            hygiene.made[KEPT] = "somewhere.py:7"
        """
    )
    result = inner.runpytest()
    hygiene.made.clear()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.re_match_lines([r".*connections left open, made at:.*", r".*somewhere\.py:7"])
