"""Mistakes in a registration are told when it is made, not when a job comes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pgworker import App, ConfigError, Job, NewJob, Park, Pause, Retry
from pgworker.client import put_jobs
from pgworker.kind import declare_kind
from pgworker.policy import make_policy
from pgworker.tablemap import TableMap
from tests.handles import untyped


@pytest.fixture
def app() -> App:
    return App("postgresql://nowhere")


async def good(job: Job[int]) -> None: ...


def test_a_kind_without_parentheses(app: App) -> None:
    decorate: Any = app.kind
    with pytest.raises(ConfigError, match=r"write @app.kind\(\"name\"\)"):
        decorate(good)


def test_a_handler_of_two_arguments(app: App) -> None:
    async def handler(job: Job[int], extra: int) -> None: ...

    with pytest.raises(ConfigError, match=r"^kind 'work': a handler takes one argument"):
        app.kind("work")(handler)  # type: ignore[type-var]


def test_an_apply_of_two_arguments(app: App) -> None:
    async def apply(connection: object, job: Job[int]) -> None: ...

    with pytest.raises(ConfigError, match=r"^kind 'work': apply takes three arguments"):
        app.kind("work", apply=apply)(good)


def test_an_async_handler_with_a_plain_apply(app: App) -> None:
    def apply(connection: object, job: Job[int], value: None) -> None: ...

    with pytest.raises(ConfigError, match="must both be"):
        app.kind("work", apply=apply)(good)


def test_a_batch_handler_without_a_batch_and_the_reverse(app: App) -> None:
    async def batch(jobs: list[Job[int]]) -> None: ...

    with pytest.raises(ConfigError, match="or give batch="):
        app.kind("work")(batch)
    with pytest.raises(ConfigError, match=r"^kind 'work': .*batch= was given"):
        app.kind("work", batch=2)(good)


def test_a_kind_that_is_registered_already(app: App) -> None:
    app.kind("work")(good)
    with pytest.raises(ConfigError, match="registered already"):
        app.declare("work")


@pytest.mark.parametrize("options", [{"lease": 30}, {"backoff": 3}, {"stop": "drain"}, {"version": 0}])
def test_options_of_a_wrong_type(app: App, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        app.kind("work", **options)(good)


def test_bare_payloads_for_enqueue_many() -> None:
    bare: Any = [{"to": "ada"}]
    with pytest.raises(ConfigError, match=r"takes NewJob objects, got dict"):
        next(put_jobs(TableMap(), untyped("work"), bare, if_pending="replace"))
    assert next(put_jobs(TableMap(), untyped("work"), [NewJob(1)], if_pending="replace")).name == "insert_events"
    told = declare_kind(
        "work", make_policy("standard", {"facts": "all"}), payload=object, payload_limit=None, version=1
    )
    assert next(put_jobs(TableMap(), told, [NewJob(1)], if_pending="replace")).name == "insert_missing_events"
    assert next(put_jobs(TableMap(), untyped("work"), [NewJob(1, "k")], if_pending="replace")).name == "insert_jobs"


def test_the_waits_of_outcomes_are_timedeltas_or_seconds() -> None:
    assert Retry(5) == Retry(timedelta(seconds=5))
    assert Park("quota", 0.5) == Park("quota", timedelta(seconds=0.5))
    assert Pause(3) == Pause(timedelta(seconds=3))


@pytest.mark.parametrize("wait", ["busy", -1, timedelta(-1), float("nan"), float("inf"), True, timedelta.max])
def test_a_wait_that_cannot_be_kept_is_refused_in_the_handler(wait: Any) -> None:
    for make in (lambda: Retry(wait), lambda: Park("quota", wait), lambda: Pause(wait)):
        with pytest.raises(ConfigError, match="must be a timedelta"):
            make()
