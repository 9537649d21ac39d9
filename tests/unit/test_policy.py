"""Policies are checked when they are made, and presets are plain values."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pgworker import App, Backoff, ConfigError, Job, Lease, Stop
from pgworker.policy import PRESETS, covering_ttl, make_policy

SECOND = timedelta(seconds=1)


@pytest.mark.contract("A42")
def test_the_covering_lease_of_content_outlasts_handler_writes_and_clean_up() -> None:
    content = PRESETS["content"]
    assert content.lease == Lease(timedelta(seconds=770), None)
    assert covering_ttl(timedelta(minutes=2), 64) == timedelta(seconds=120 + (2 * 64 + 2) * 5)


@pytest.mark.contract("A42")
def test_a_covering_lease_that_was_not_given_grows_with_timeout_and_batch() -> None:
    policy = make_policy("content", {"timeout": timedelta(minutes=10), "batch": 100})
    assert policy.lease.ttl == timedelta(seconds=600 + 202 * 5)


@pytest.mark.contract("A43")
def test_a_covering_lease_too_short_to_cover_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 770 s, got 769 s"):
        make_policy("content", {"lease": Lease.cover(769 * SECOND)})
    assert make_policy("content", {"lease": Lease.cover(770 * SECOND)}).lease.ttl == 770 * SECOND


@pytest.mark.contract("A43")
@pytest.mark.parametrize(
    "options", [{"batch": 2**62}, {"timeout": timedelta.max}, {"timeout": timedelta(days=3649), "batch": 10_000}]
)
def test_times_that_cannot_be_added_up_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError):
        make_policy("content", options)


@pytest.mark.contract("A44")
@pytest.mark.parametrize(
    "options",
    [
        {"concurrency": -1},
        {"batch": -1},
        {"window": -SECOND},
        {"poll": -SECOND},
        {"timeout": -SECOND},
        {"max_attempts": -2},
        {"max_evictions": -2},
        {"concurrency": 10_001},
    ],
)
def test_limits_that_cannot_work_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError):
        make_policy("standard", options)


@pytest.mark.contract("A44")
def test_a_backoff_whose_cap_lies_below_its_base_is_refused() -> None:
    with pytest.raises(ConfigError):
        Backoff(base=2 * SECOND, cap=SECOND)
    with pytest.raises(ConfigError):
        Backoff(base=timedelta(0))


@pytest.mark.contract("A44")
@pytest.mark.parametrize("kind", ["", " ", "a b", "x" * 64, "ä", "a\0b"])
def test_a_name_that_cannot_be_a_kind_is_refused(kind: str) -> None:
    app = App("postgresql://nowhere")
    with pytest.raises(ValueError, match=r"^not a usable name for a kind"):

        @app.kind(kind)
        async def handler(job: Job[object]) -> None: ...


@pytest.mark.contract("A44")
@pytest.mark.parametrize("preset", PRESETS)
def test_zero_means_the_default_of_the_preset(preset: str) -> None:
    zeros: Any = {
        "concurrency": 0,
        "batch": 0,
        "poll": timedelta(0),
        "timeout": timedelta(0),
        "max_attempts": 0,
        "max_evictions": 0,
    }
    assert make_policy(preset, zeros) == PRESETS[preset]


@pytest.mark.contract("A44")
@pytest.mark.parametrize(
    "options",
    [
        {"weights": (0, 0)},
        {"weights": (-1, 1)},
        {"weights": (4, -1)},
        {"weights": (4,)},
        {"weights": (4, 1, 1)},
        {"weights": (4, 1.5)},
        {"weights": ("4", "1")},
        {"weights": [4, 1]},
        {"weights": (10_001, 1)},
        {"weights": 5},
        {"facts": "some"},
        {"supersede": "later"},
        {"results": "push"},
        {"panic": "never"},
    ],
)
def test_choices_and_weights_that_there_are_not_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_policy("standard", options)


@pytest.mark.contract("A44")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep": "7d"}, "keep: seconds, a timedelta, or -1 for ever; got '7d'"),
        ({"keep": -2}, "keep: seconds, a timedelta, or -1 for ever (at most 3650 days); got -2"),
        ({"keep_failed": True}, "keep_failed: seconds, a timedelta, or -1 for ever; got True"),
        ({"result_ttl": -1}, "result_ttl: seconds or a timedelta (at most 3650 days); got -1"),
        ({"timeout": "30"}, "timeout: seconds or a timedelta; got '30'"),
        ({"timeout": float("nan")}, "timeout: seconds or a timedelta; got nan"),
        ({"poll": float("inf")}, "poll: seconds or a timedelta; got inf"),
        ({"window": "0.5", "batch": 2}, "window: seconds or a timedelta; got '0.5'"),
        ({"window": 1}, "window= is for batches, give batch= with it"),
        ({"concurrency": "10"}, "concurrency: a whole number up to 10000; got '10'"),
        ({"concurrency": 2.5}, "concurrency: a whole number up to 10000; got 2.5"),
        ({"batch": True}, "batch: a whole number up to 10000; got True"),
        ({"prefetch": "5"}, "prefetch: a whole number up to 10000; got '5'"),
        ({"max_attempts": "3"}, "max_attempts: a whole number, or -1 for no limit; got '3'"),
        ({"max_attempts": -1.0}, "max_attempts: a whole number, or -1 for no limit; got -1.0"),
        ({"fair": "no"}, "fair: True or False; got 'no'"),
        ({"singly": 1, "batch": 2}, "singly: True or False; got 1"),
        ({"weights": "41"}, "weights: two numbers of rounds, such as (4, 1); got '41'"),
        ({"facts": ["all"]}, "facts: one of all, exceptional, none; got ['all']"),
        ({"lease": 30}, "lease: a Lease; got 30"),
        ({"lease": SECOND}, "lease: a Lease; got datetime.timedelta(seconds=1)"),
        ({"max_evictions": SECOND * 0}, "max_evictions: a whole number, or -1 for no limit; got datetime.timedelta(0)"),
        ({"preset": ["pool"]}, "no preset ['pool']; there are content, dispatch, pool, simple, standard"),
        ({"version": "2"}, "version is 1 to 32767, got '2'"),
        ({"payload_limit": "1MB"}, f"a payload limit is 1 to {255 * 2**20} bytes, got '1MB'"),
    ],
)
def test_an_option_of_a_wrong_type_is_told_what_it_takes(options: Any, told: str) -> None:
    app = App("")
    with pytest.raises(ConfigError) as refused:

        @app.kind("work", **options)
        def handler(_: Any) -> None: ...

    assert str(refused.value) == f"kind 'work': {told}"
    assert app.kinds == {}


@pytest.mark.contract("A44")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"facts": "some"}, "facts is one of all, exceptional, none, got 'some'"),
        ({"result_ttl": "1h"}, "result_ttl: seconds or a timedelta; got '1h'"),
        ({"version": 0}, "version is 1 to 32767, got 0"),
        ({"payload_limit": -1}, f"a payload limit is 1 to {255 * 2**20} bytes, got -1"),
        ({"payload": "no type"}, "no type cannot be the type of a payload or result: "),
    ],
)
def test_a_kind_that_is_declared_wrongly_is_named(options: Any, told: str) -> None:
    app = App("")
    with pytest.raises(ConfigError) as refused:
        app.declare("work", **options)
    assert str(refused.value).startswith(f"kind 'work': {told}")
    assert app.kinds == {}


@pytest.mark.parametrize("make", [lambda: Lease.renew(30), lambda: Lease.cover("1h"), lambda: Stop("drain", 25)])  # type: ignore[arg-type]
def test_the_times_of_a_policy_are_timedeltas(make: Any) -> None:
    with pytest.raises(ConfigError, match="must be a timedelta"):
        make()


@pytest.mark.parametrize("weights", [(4, 1), (1, 0), (0, 1), (10_000, 10_000)])
def test_weights_that_give_one_class_a_turn_at_least(weights: tuple[int, int]) -> None:
    assert make_policy("standard", {"weights": weights}).weights == weights


def test_how_much_the_journal_keeps_by_preset() -> None:
    facts = {name: policy.facts for name, policy in PRESETS.items()}
    assert facts == {
        "standard": "exceptional", "content": "none", "pool": "all", "simple": "none", "dispatch": "all",
    }  # fmt: skip
    assert make_policy("content", {"facts": "all"}).facts == "all"


def test_minus_one_means_no_limit_of_attempts_and_evictions() -> None:
    policy = make_policy("standard", {"max_attempts": -1, "max_evictions": -1})
    assert (policy.max_attempts, policy.max_evictions) == (None, None)


@pytest.mark.contract("B9")
@pytest.mark.ruling("1.27")
def test_a_heartbeat_slower_than_a_third_of_the_lease_is_refused() -> None:
    for too_slow in (10.001 * SECOND, 30 * SECOND, 31 * SECOND):
        with pytest.raises(ConfigError, match="a third"):
            Lease.renew(30 * SECOND, too_slow)
    assert Lease.renew(30 * SECOND, 10 * SECOND).heartbeat == 10 * SECOND
    assert Lease.renew(30 * SECOND).heartbeat == 10 * SECOND
    assert PRESETS["pool"].lease == Lease(120 * SECOND, 30 * SECOND)


@pytest.mark.ruling("1.14", "2.1")
def test_the_default_preset_is_standard() -> None:
    standard = PRESETS["standard"]
    assert make_policy("standard", {}) == standard
    assert (standard.concurrency, standard.max_attempts, standard.max_evictions) == (10, 10, 5)
    assert standard.lease == Lease(15 * SECOND, 5 * SECOND)
    assert standard.stop == Stop("drain", 25 * SECOND)
    assert (standard.poll, standard.timeout) == (SECOND, None)
    assert (standard.backoff.base, standard.backoff.cap) == (SECOND, timedelta(minutes=10))


def test_an_unknown_preset_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="no preset 'fast'; there are content, dispatch, pool, simple, standard"):
        make_policy("fast", {})


def test_a_policy_that_waits_for_nothing_is_refused() -> None:
    with pytest.raises(ConfigError):
        Stop("later")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Lease.cover(timedelta(0))


@pytest.mark.ruling("2.1")
def test_for_how_long_a_kind_keeps_its_jobs() -> None:
    app = App("")

    def kept(name: str, **options: Any) -> tuple[timedelta | None, timedelta | None]:
        @app.kind(name, **options)
        async def handler(job: Job[None]) -> None: ...

        policy = app.kinds[name].policy
        return policy.keep, policy.keep_failed

    week, month = timedelta(days=7), timedelta(days=30)
    assert kept("default") == kept("zero", keep=0, keep_failed=timedelta(0)) == (week, month)
    assert kept("seconds", keep=60, keep_failed=0.5) == (timedelta(minutes=1), timedelta(seconds=0.5))
    assert kept("duration", keep=timedelta(days=1)) == (timedelta(days=1), month)
    assert kept("longest", keep=timedelta(days=3650), keep_failed=3650 * 86_400) == (timedelta(days=3650),) * 2
    assert kept("forever", keep=-1, keep_failed=-1) == (None, None)
    for wrong in (-2, -0.5, timedelta(seconds=-1), timedelta(days=3651)):
        with pytest.raises(ConfigError, match="keep: seconds, a timedelta, or -1 for ever"):
            kept("wrong", keep=wrong)
        with pytest.raises(ConfigError, match="keep_failed: seconds, a timedelta, or -1 for ever"):
            kept("wrong", keep_failed=wrong)


@pytest.mark.ruling("1.15")
def test_nothing_is_claimed_ahead_unless_it_is_asked_for_and_then_a_lease_covers_the_wait_as_well() -> None:
    assert {policy.prefetch for policy in PRESETS.values()} == {0}
    assert make_policy("standard", {"prefetch": 100}).prefetch == 100
    for wrong in (-1, 10_001):
        with pytest.raises(ConfigError, match="prefetch"):
            make_policy("standard", {"prefetch": wrong})
    alone = make_policy("content", {})
    assert make_policy("content", {"prefetch": 1}).lease == Lease.cover(2 * alone.lease.ttl)
    with pytest.raises(ConfigError, match="at least 1540 s"):
        make_policy("content", {"prefetch": 1, "lease": Lease.cover(1539 * SECOND)})
