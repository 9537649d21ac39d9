"""The edges of the pure decisions: limits that just hold and just do not, rows of tables, classes of errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from types import NoneType
from typing import Any, TypeAlias

import psycopg
import pytest
from psycopg import errors as pg
from psycopg_pool import PoolTimeout

from pgworker import Backoff, Cancel, ConfigError, Lease, NewJob, Park, Pause, Permanent, Retry, Stop
from pgworker.client import put_jobs
from pgworker.db import NO_ANSWER, is_conflict, is_data_error, is_outage
from pgworker.executors.results import raised, returned
from pgworker.job import URGENCIES, Enqueued
from pgworker.kind import Kind
from pgworker.outcome import Failed, Released, Returned, Rules, Settlement, decide, is_result
from pgworker.policy import MAX_BATCH, PRESETS, Policy, covering_ttl, make_policy
from pgworker.statements import FACTS, Put
from pgworker.tablemap import TableMap
from tests.handles import untyped

Make: TypeAlias = Callable[[], object]
SECOND, MINUTE, LONGEST = timedelta(seconds=1), timedelta(minutes=1), timedelta(days=3650)
TICK = timedelta(microseconds=1)


def refuses(make: Make) -> None:
    with pytest.raises(ConfigError):
        make()


def test_the_codes_of_the_table_are_what_they_are() -> None:
    assert URGENCIES == {"fresh": 0, "catch_up": 1}
    assert FACTS == {"none": 0, "exceptional": 1, "all": 2}


# --- Outcomes ----------------------------------------------------------------------------------------------------


def test_a_code_is_one_short_printable_word() -> None:
    assert Permanent("x" * 63).code == "x" * 63
    assert Permanent(" padded ").code == "padded"
    assert (Park("", 1).code, Pause(1, "").code, Cancel("").reason) == ("parked", "paused", "cancelled")
    for code in ("x" * 64, "ä", "a\tb", "a b"):
        refuses(partial(Permanent, code))


@pytest.mark.parametrize("wait", [0, 1, 1.5, timedelta(0), SECOND, LONGEST, LONGEST.total_seconds()])
def test_a_wait_is_a_duration_or_seconds(wait: Any) -> None:
    expected = wait if isinstance(wait, timedelta) else timedelta(seconds=wait)
    assert Park("x", wait).delay == Pause(wait).for_ == Retry(wait).after == expected


@pytest.mark.parametrize(
    "wait", [True, -1, -TICK, LONGEST + TICK, LONGEST.total_seconds() + 1, 1e300, float("nan"), "1", None]
)
def test_what_is_no_wait_is_refused(wait: Any) -> None:
    refuses(lambda: Park("x", wait))


def test_a_failure_counts_those_before_it_and_keeps_its_class() -> None:
    rules = Rules(1, 3, Backoff(jitter="none"))
    again = Settlement("pending", "c", counts=True, delay_seconds=2.0, error_class="KeyError")
    assert decide(Failed("c", "KeyError"), rules, chance=0) == again
    last = Settlement("failed", "c", counts=True, error_class="KeyError")
    assert decide(Failed("c", "KeyError"), rules._replace(attempts=2), chance=0) == last
    assert decide(Pause(5, "p", shared=True), rules, chance=0) == Settlement(
        "pending", "p", delay_seconds=5.0, pause_seconds=5.0, pause_shared=True
    )


def test_what_a_middleware_may_give_back() -> None:
    for result in (
        Failed("x"),
        Released(),
        Retry(),
        Permanent(),
        Park("x", 1),
        Pause(1),
        Cancel(),
        Returned("1"),
        Returned(None),
    ):
        assert is_result(result)
    for other in (None, "1", Returned(1), ConfigError("x")):  # type: ignore[arg-type]
        assert not is_result(other)


# --- Backoff -----------------------------------------------------------------------------------------------------


def test_a_backoff_is_what_it_is_by_default() -> None:
    assert Backoff() == Backoff(SECOND, 10 * MINUTE, "symmetric", 0.2)


def test_the_limits_of_a_backoff() -> None:
    assert Backoff(base=SECOND, cap=SECOND).cap == SECOND
    assert Backoff(cap=LONGEST).cap == LONGEST
    assert Backoff(base=TICK).base == TICK
    assert [Backoff(spread=spread).spread for spread in (0.0, 1.0)] == [0.0, 1.0]
    wrong: Any = 1
    for refused in (
        lambda: Backoff(base=wrong),
        lambda: Backoff(cap=wrong),
        lambda: Backoff(base=timedelta(0)),
        lambda: Backoff(base=SECOND + TICK, cap=SECOND),
        lambda: Backoff(cap=LONGEST + TICK),
        lambda: Backoff(spread=-0.01),
        lambda: Backoff(spread=1.01),
    ):
        refuses(refused)


@pytest.mark.parametrize(
    ("jitter", "low", "middle", "high"), [
        ("none", 4.0, 4.0, 4.0), ("additive", 4.0, 4.4, 4.8), ("symmetric", 3.2, 4.0, 4.8), ("full", 0.0, 2.0, 4.0)
    ]
)  # fmt: skip
def test_each_jitter_at_its_ends(jitter: Any, low: float, middle: float, high: float) -> None:
    backoff = Backoff(jitter=jitter)
    found = [backoff.delay(3, chance=chance).total_seconds() for chance in (0.0, 0.5, 1.0)]
    assert found == pytest.approx([low, middle, high])


def test_a_delay_doubles_up_to_its_cap() -> None:
    backoff = Backoff(jitter="none", cap=MINUTE)
    delays = [backoff.delay(failures, chance=0).total_seconds() for failures in (0, 1, 2, 6, 7, 10**9)]
    assert delays == [1, 1, 2, 32, 60, 60]
    assert Backoff(jitter="additive", cap=MINUTE).delay(7, chance=0.9) == MINUTE


# --- Options of an enqueue ---------------------------------------------------------------------------------------


def sent(**options: Any) -> Any:
    return next(put_jobs(TableMap(), untyped("work"), [NewJob(**options)], if_pending="replace")).parameters


def test_options_at_their_limits() -> None:
    for priority in (-32_767, 32_767):
        assert sent(priority=priority)["priorities"] == [priority]
    assert sent(max_attempts=1)["max_attempts"] == [1]
    assert sent(delay=0)["delays"] == sent(delay=None)["delays"] == []
    assert sent(delay=timedelta(seconds=2))["delays"] == sent(delay=2)["delays"] == [2.0]
    instant = datetime(2030, 1, 1, tzinfo=UTC)
    assert (sent(ready_at=instant)["ready_ats"], sent()["ready_ats"]) == ([instant], [])
    assert sent(key="k", revision="r")["revisions"] == ["r"]
    assert sent(key="k")["revisions"] == []
    assert (sent()["classes"], sent(urgency="catch_up")["classes"]) == ([], [1])


@pytest.mark.parametrize(
    "options",
    [
        {"priority": -32_768}, {"priority": 32_768}, {"priority": True}, {"priority": "1"}, {"max_attempts": 0},
        {"max_attempts": True}, {"max_attempts": 1.0}, {"delay": -TICK}, {"delay": True}, {"delay": "1"},
        {"revision": "r"}, {"ready_at": 1}, {"ready_at": datetime(2030, 1, 1)},  # noqa: DTZ001 - the mistake itself
        {"delay": 1, "ready_at": datetime(2030, 1, 1, tzinfo=UTC)}, {"urgency": "soon"},
    ],
)  # fmt: skip
def test_options_past_their_limits(options: Any) -> None:
    refuses(lambda: sent(**options))


def test_of_equal_keys_the_last_one_has_the_status() -> None:
    jobs = [NewJob(1, "k", "r1"), NewJob(2, "other"), NewJob(3, "k", "r3")]
    flow = put_jobs(TableMap(), untyped("work"), jobs, if_pending="replace")
    assert next(flow).parameters["keys"] == ["other", "k"], "it stands where it was asked for"
    with pytest.raises(StopIteration) as end:
        flow.send({key: Put("created", "pending", "1") for key in ("k", "other")})
    assert [(put.key, put.revision, put.status) for put in end.value.value.enqueued] == [
        ("k", "r3", "replaced"), ("other", None, "created"), ("k", "r3", "created")
    ]  # fmt: skip


def test_events_are_created_and_wait() -> None:
    flow = put_jobs(TableMap(), untyped("work"), [NewJob(1), NewJob(2)], if_pending="replace")
    keys: Any = next(flow).parameters["keys"]
    with pytest.raises(StopIteration) as end:
        flow.send(dict.fromkeys(keys, Put("created", "pending", "7")))
    assert end.value.value == ([Enqueued("work", key, None, "created", "pending") for key in keys], "7")


# --- Errors of the database --------------------------------------------------------------------------------------

CLASSES: dict[str, tuple[BaseException, bool, bool, bool]] = {
    "no answer": (TimeoutError(), True, False, False),
    "closed": (psycopg.InterfaceError("closed"), True, False, False),
    "no connection": (psycopg.OperationalError("refused"), True, False, False),
    "08": (pg.ConnectionFailure(), True, False, False),
    "53": (pg.TooManyConnections(), True, False, False),
    "57": (pg.AdminShutdown(), True, False, False),
    "57014": (pg.QueryCanceled(), True, True, False),
    "58": (pg.IoError(), True, False, False),
    "standby": (pg.ReadOnlySqlTransaction(), True, False, False),
    "40001": (pg.SerializationFailure(), False, True, False),
    "40P01": (pg.DeadlockDetected(), False, True, False),
    "55P03": (pg.LockNotAvailable(), False, True, False),
    "55006": (pg.ObjectInUse(), False, False, False),
    "22": (pg.NumericValueOutOfRange(), False, False, True),
    "23": (pg.UniqueViolation(), False, False, True),
    "42": (pg.UndefinedTable(), False, False, False),
    "no state": (psycopg.DatabaseError("odd"), False, False, False),
    "ours": (ValueError(), False, False, False),
}


@pytest.mark.parametrize("name", CLASSES)
def test_what_an_error_of_the_database_means(name: str) -> None:
    error, outage, conflict, data = CLASSES[name]
    assert (is_outage(error), is_conflict(error), is_data_error(error)) == (outage, conflict, data)
    assert isinstance(error, NO_ANSWER) == (name == "no answer")
    assert isinstance(PoolTimeout(), NO_ANSWER)


# --- Policies ----------------------------------------------------------------------------------------------------

PRESET_VALUES = {
    "standard": Policy(
        concurrency=10, batch=64, window=timedelta(seconds=0.25), poll=SECOND, timeout=None,
        lease=Lease(15 * SECOND, 5 * SECOND), max_attempts=10, max_evictions=5,
        backoff=Backoff(SECOND, 10 * MINUTE, "symmetric", 0.2), stop=Stop("drain", 25 * SECOND), panic="retry",
        facts="exceptional", weights=(4, 1), singly=False, fair=False, supersede="now", results="poll", result_ttl=None,
        keep=timedelta(days=7), keep_failed=timedelta(days=30),
    ),
    "content": Policy(
        concurrency=2, batch=64, window=timedelta(seconds=0.25), poll=SECOND, timeout=2 * MINUTE,
        lease=Lease(770 * SECOND, None), max_attempts=3, max_evictions=5,
        backoff=Backoff(SECOND, MINUTE, "additive", 0.2), stop=Stop("release", None), panic="permanent",
        facts="none", weights=(4, 1), singly=False, fair=False, supersede="now", results="poll", result_ttl=None,
        keep=timedelta(days=7), keep_failed=timedelta(days=30),
    ),
    "pool": Policy(
        concurrency=2, batch=64, window=timedelta(seconds=0.25), poll=SECOND, timeout=10 * MINUTE,
        lease=Lease(2 * MINUTE, 30 * SECOND), max_attempts=3, max_evictions=5,
        backoff=Backoff(2 * SECOND, 5 * MINUTE, "none", 0.2), stop=Stop("drain", None), panic="retry",
        facts="all", weights=(4, 1), singly=False, fair=False, supersede="now", results="poll", result_ttl=None,
        keep=timedelta(days=7), keep_failed=timedelta(days=30),
    ),
    "simple": Policy(
        concurrency=5, batch=64, window=timedelta(seconds=0.25), poll=10 * SECOND, timeout=None,
        lease=Lease(5 * MINUTE, 100 * SECOND), max_attempts=10, max_evictions=5,
        backoff=Backoff(SECOND, 10 * MINUTE, "symmetric", 0.2), stop=Stop("drain", None), panic="retry",
        facts="none", weights=(4, 1), singly=False, fair=False, supersede="now", results="poll", result_ttl=None,
        keep=timedelta(days=7), keep_failed=timedelta(days=30),
    ),
    "dispatch": Policy(
        concurrency=10, batch=64, window=timedelta(seconds=0.25), poll=SECOND, timeout=None,
        lease=Lease(30 * SECOND, 10 * SECOND), max_attempts=10, max_evictions=5,
        backoff=Backoff(SECOND, MINUTE, "full", 0.2), stop=Stop("drain", 30 * SECOND), panic="retry",
        facts="all", weights=(4, 1), singly=False, fair=False, supersede="now", results="poll", result_ttl=None,
        keep=timedelta(days=7), keep_failed=timedelta(days=30),
    ),
}  # fmt: skip


@pytest.mark.ruling("2.1")
@pytest.mark.parametrize("name", PRESET_VALUES)
def test_a_preset_is_these_values(name: str) -> None:
    assert PRESETS[name] == PRESET_VALUES[name]
    assert set(PRESETS) == set(PRESET_VALUES)


ALLOWED: dict[str, list[Any]] = {
    "concurrency": [1, MAX_BATCH],
    "batch": [1, MAX_BATCH],
    "prefetch": [0, MAX_BATCH],
    "window": [timedelta(0), LONGEST],
    "poll": [TICK, LONGEST],
    "timeout": [None, TICK, LONGEST],
    "result_ttl": [None, TICK, LONGEST],
    "keep": [None, TICK, LONGEST],
    "keep_failed": [None, TICK, LONGEST],
    "max_attempts": [None, 1],
    "max_evictions": [None, 1],
    "weights": [(0, 1), (1, 0), (MAX_BATCH, MAX_BATCH)],
    "panic": ["retry", "permanent"],
    "facts": ["none", "exceptional", "all"],
    "supersede": ["now", "wait"],
    "results": ["poll", "notify"],
}
REFUSED: dict[str, list[Any]] = {
    "concurrency": [0, MAX_BATCH + 1],
    "batch": [0, MAX_BATCH + 1],
    "prefetch": [-1, MAX_BATCH + 1],
    "window": [-TICK, LONGEST + TICK],
    "poll": [timedelta(0), LONGEST + TICK],
    "timeout": [timedelta(0), LONGEST + TICK],
    "result_ttl": [timedelta(0), LONGEST + TICK],
    "keep": [timedelta(0), LONGEST + TICK],
    "keep_failed": [timedelta(0), LONGEST + TICK],
    "max_attempts": [0],
    "max_evictions": [0],
    "weights": [(0, 0), (-1, 2), (2, -1), (MAX_BATCH + 1, 0), (0, MAX_BATCH + 1), [1, 1], (1,), (1, 1, 1), (1.0, 1)],
    "panic": ["never"],
    "facts": ["some"],
    "supersede": ["later"],
    "results": ["push"],
}


@pytest.mark.parametrize("name", ALLOWED)
def test_the_limits_of_each_part_of_a_policy(name: str) -> None:
    for value in ALLOWED[name]:
        assert getattr(Policy(**{name: value}), name) == value
    for value in REFUSED[name]:
        refuses(partial(Policy, **{name: value}))


def test_the_limits_of_a_lease() -> None:
    assert Lease(LONGEST, None).ttl == LONGEST
    assert Lease(3 * SECOND, SECOND).heartbeat == SECOND
    assert Lease(3 * SECOND, TICK).heartbeat == TICK
    assert Lease(TICK, None).ttl == TICK
    for make in (
        lambda: Lease(timedelta(0), None),
        lambda: Lease(LONGEST + TICK, None),
        lambda: Lease(3 * SECOND, SECOND + TICK),
        lambda: Lease(3 * SECOND, timedelta(0)),
    ):
        refuses(make)


def test_the_limits_of_a_stop() -> None:
    assert Stop("release", timedelta(0)).grace == timedelta(0)
    assert Stop("drain").grace is None
    wrong: Any = "later"
    refuses(lambda: Stop(wrong))
    refuses(lambda: Stop("drain", -TICK))


def test_a_covering_lease_covers_calls_and_writes() -> None:
    assert covering_ttl(MINUTE, 1) == timedelta(seconds=60 + 4 * 5)
    assert covering_ttl(MINUTE, 10) == timedelta(seconds=60 + 22 * 5)
    assert covering_ttl(MINUTE, 10, singly=True) == timedelta(seconds=11 * 60 + 22 * 5)
    refuses(lambda: covering_ttl(None, 1))
    needed = covering_ttl(MINUTE, 2, singly=True)
    Policy(timeout=MINUTE, batch=2, singly=True, lease=Lease.cover(needed))
    refuses(lambda: Policy(timeout=MINUTE, batch=2, singly=True, lease=Lease.cover(needed - TICK)))


def test_what_is_claimed_ahead_must_survive_a_lost_worker() -> None:
    Policy(prefetch=1, max_evictions=2)
    Policy(prefetch=1, max_evictions=None)
    Policy(prefetch=0, max_evictions=1)
    refuses(lambda: Policy(prefetch=1, max_evictions=1))


def test_what_a_kind_gives_overrides_its_preset() -> None:
    base = PRESETS["standard"]
    lease, backoff, stop = Lease.renew(MINUTE), Backoff(cap=MINUTE), Stop("release")
    made = make_policy("standard", {"lease": lease, "backoff": backoff, "stop": stop, "concurrency": 3})
    assert made == replace(base, lease=lease, backoff=backoff, stop=stop, concurrency=3)
    assert make_policy("standard", {"lease": None, "backoff": None, "stop": None}) == base
    assert make_policy("standard", {"window": timedelta(0)}).window == timedelta(0)
    assert make_policy("standard", {"singly": False, "poll": timedelta(0), "max_attempts": 0}) == base
    assert make_policy("standard", {"max_attempts": -1, "max_evictions": -1}) == replace(
        base, max_attempts=None, max_evictions=None
    )
    window: Any = None
    assert make_policy("standard", {"window": window}) == base


@pytest.mark.parametrize("name", ["lease", "backoff", "stop", "concurrency", "batch", "window", "timeout"])
def test_what_a_kind_may_not_give(name: str) -> None:
    wrong: dict[str, Any] = {"concurrency": -1, "batch": -1, "window": -TICK, "timeout": -TICK}
    options: Any = {name: wrong.get(name, 5)}
    with pytest.raises(ConfigError, match=name):
        make_policy("standard", options)


@pytest.mark.parametrize("name", ["max_attempts", "max_evictions"])
def test_no_limit_is_minus_one_and_nothing_below(name: str) -> None:
    options: Any = {name: -2}
    with pytest.raises(ConfigError, match=f"{name}: a whole number, or -1 for no limit; got -2"):
        make_policy("standard", options)


def test_a_covering_lease_grows_with_what_it_covers() -> None:
    assert make_policy("content", {}).lease.ttl == 770 * SECOND
    assert make_policy("content", {"batch": 1}).lease.ttl == 770 * SECOND  # it does not shrink
    assert make_policy("content", {"batch": 100}).lease.ttl == covering_ttl(2 * MINUTE, 100)
    assert make_policy("content", {"timeout": 30 * MINUTE}).lease.ttl == covering_ttl(30 * MINUTE, 64)
    assert make_policy("content", {"singly": True}).lease.ttl == covering_ttl(2 * MINUTE, 64, singly=True)
    own = Lease.cover(1000 * SECOND)
    assert make_policy("content", {"lease": own}).lease == own
    renewed = Lease.renew(MINUTE)
    assert make_policy("content", {"lease": renewed, "batch": 5000}).lease == renewed


# --- What a call gave --------------------------------------------------------------------------------------------


def kind(*, batch: bool = False, nothing: bool = False, panic: Any = "retry") -> Kind:
    policy = replace(PRESETS["standard"], panic=panic)
    return replace(untyped("work"), policy=policy, batch=batch, returns_nothing=nothing)


@pytest.mark.parametrize("answer", [Retry(), Permanent(), Park("x", 1), Pause(1), Cancel()])
def test_an_instruction_is_for_each_job_of_its_call(answer: Any) -> None:
    assert list(returned(kind(), answer, 1)) == [answer]
    assert list(returned(kind(batch=True), answer, 3)) == [answer] * 3
    assert list(returned(kind(batch=True), [1, answer], 2)) == [Returned("1", 1), answer]


def test_a_value_is_stored_as_json_and_none_is_none() -> None:
    assert list(returned(kind(), None, 1)) == [Returned(None, None)]
    assert list(returned(kind(), [1, 2], 1)) == [Returned("[1,2]", [1, 2])]
    assert list(returned(kind(batch=True), (1, None), 2)) == [Returned("1", 1), Returned(None, None)]


def test_a_batch_says_as_much_as_it_was_asked() -> None:
    wrong = [Failed("handler_result_count", permanent=True)] * 2
    for answer in ([1], [1, 2, 3], "12", {1: 2, 3: 4}, None):
        assert list(returned(kind(batch=True), answer, 2)) == wrong
    assert list(returned(kind(batch=True, nothing=True), None, 2)) == [Returned(None, None)] * 2
    assert list(returned(kind(batch=True, nothing=True), [1], 2)) == wrong


def test_a_value_that_is_no_json_is_rejected() -> None:
    assert list(returned(kind(), object(), 1)) == [Failed("result_rejected", "object")]


@pytest.mark.parametrize(
    ("error", "panic", "expected"),
    [
        (KeyError("x"), "permanent", Failed("handler_failed", "KeyError")),
        (asyncio.CancelledError(), "permanent", Failed("handler_failed", "CancelledError")),
        (SystemExit(1), "retry", Failed("handler_panic", "SystemExit")),
        (SystemExit(1), "permanent", Failed("handler_panic", "SystemExit", permanent=True)),
        (BaseExceptionGroup("g", [SystemExit(1)]), "permanent", Failed("handler_panic", "SystemExit", permanent=True)),
        (ExceptionGroup("g", [ExceptionGroup("h", [KeyError()])]), "retry", Failed("handler_failed", "KeyError")),
        (ExceptionGroup("g", [KeyError(), OSError()]), "retry", Failed("handler_failed", "ExceptionGroup")),
    ],
)
def test_an_exception_is_a_failure_and_what_is_none_a_panic(error: BaseException, panic: str, expected: Failed) -> None:
    assert list(raised(kind(panic=panic), error, 2)) == [expected] * 2


def test_the_type_of_nothing_is_no_option() -> None:
    refuses(lambda: make_policy("standard", {"lease": NoneType}))  # type: ignore[typeddict-item]
