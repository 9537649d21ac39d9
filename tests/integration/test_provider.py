"""A handler that calls a provider over HTTP: what each answer does to its job."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker import App, Job, Pause, Permanent
from pgworker.contrib.http import judge_response
from pgworker.events import Event, JobSettled
from tests.handles import Recorder, row, running

Admin: TypeAlias = psycopg.Connection[Any]
Answers: TypeAlias = list[tuple[int, dict[str, str]]]

DOWN = (401, 403, 429, 500, 503)


class Provider:
    """Gives its answers one after the other, then 200s."""

    def __init__(self) -> None:
        self.answers: Answers = []
        self.calls = 0
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.calls += 1
                status, headers = provider.answers.pop(0) if provider.answers else (200, {})
                self.send_response(status)
                for name, value in {"Content-Length": "6", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"SECRET")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"


@contextmanager
def serving() -> Iterator[Provider]:
    provider = Provider()
    thread = threading.Thread(target=provider.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield provider
    provider.server.shutdown()
    provider.server.server_close()
    thread.join()


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serving() as provider:
        yield provider


@pytest.fixture
def providers() -> Iterator[list[Provider]]:
    """One for each way of being down."""
    with ExitStack() as stack:
        yield [stack.enter_context(serving()) for _ in DOWN]


def ask(app: App, url: str, *, kind: str = "embed") -> None:
    @app.kind(kind, max_attempts=1, poll=0.2)
    def embed(job: Job[None]) -> int | Pause | Permanent | None:
        try:
            with urllib.request.urlopen(url) as answer:  # noqa: S310 - our own server
                return len(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return judge_response(error.code, error.headers["Retry-After"])


@pytest.mark.contract("A70")
async def test_a_provider_that_is_down_costs_the_job_no_attempt(
    app: App, admin: Admin, providers: list[Provider]
) -> None:
    """For each of these answers there is a kind, and all of them wait at once."""
    for provider, status in zip(providers, DOWN, strict=True):
        provider.answers = [(status, {"Retry-After": "1"})]
        ask(app, provider.url, kind=f"embed_{status}")
        await app.enqueue(f"embed_{status}", key="k")
    recorder = Recorder(app)
    parked = dict.fromkeys(DOWN, False)

    def note_parked(event: Event) -> None:
        if isinstance(event, JobSettled) and event.state == "pending":
            status = int(event.kind.removeprefix("embed_"))
            found = row(admin, "k", kind=event.kind)
            wait = admin.execute(
                "select ready_at - clock_timestamp() <= interval '1 s' from pgworker.jobs where kind = %s", [event.kind]
            ).fetchone()
            parked[status] = (found["state"], found["attempts"], found["last_code"], wait) == (
                "pending", 0, f"http_{status}", (True,),
            )  # fmt: skip

    app.events.subscribe(note_parked)
    async with running(app.worker()):
        await recorder.count(JobSettled, 2 * len(DOWN))
    assert parked == dict.fromkeys(DOWN, True)
    assert [provider.calls for provider in providers] == [2] * len(DOWN)
    for status in DOWN:
        after = row(admin, "k", kind=f"embed_{status}")
        assert (after["state"], after["attempts"]) == ("succeeded", 0), status


@pytest.mark.contract("A70")
@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_request_that_is_refused_fails_at_once(app: App, admin: Admin, provider: Provider, status: int) -> None:
    provider.answers = [(status, {"Retry-After": "1"})]
    ask(app, provider.url)
    recorder = Recorder(app)
    await app.enqueue("embed", key="k")
    async with running(app.worker()):
        await recorder.count(JobSettled, 1)
    assert provider.calls == 1
    failed = row(admin, "k", kind="embed")
    assert (failed["state"], failed["last_code"]) == ("failed", f"http_{status}")
