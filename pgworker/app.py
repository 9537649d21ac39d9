"""The front door: the registry of kinds, and the worker; how jobs get into the table is told by AsyncApp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal, TypeVar, cast

from pgworker.asyncapp import AsyncApp
from pgworker.config import Settings
from pgworker.errors import ConfigError
from pgworker.events import Events
from pgworker.kind import Apply, Eligible, Handler, Kind, about_kind, declare_kind, handled_kind
from pgworker.middleware import Middleware
from pgworker.policy import Facts, Lease, Policy, PolicyOptions, Stop, make_policy
from pgworker.registry import Registry
from pgworker.retry import Backoff
from pgworker.syncapp import SyncApp
from pgworker.tablequeue import TableQueue
from pgworker.worker import Worker

H = TypeVar("H", bound=Handler)


class App(AsyncApp):
    """The kinds of an application and its door to the jobs table.

    Making one connects to nothing: the DSN is looked up (argument, else PGWORKER_DSN) and pools are opened at first
    use, one for each event loop and process, so that a fork or a second loop shares no socket. `async with app` closes.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        schema: str | None = None,
        listen_dsn: str | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        super().__init__(Registry(dsn=dsn, schema=schema, listen_dsn=listen_dsn))
        self._middleware = tuple(middleware)
        self.events = Events()
        self.sync = SyncApp(self._registry)

    # --- configuration ----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The effective settings. Raises ConfigError when no DSN was given and PGWORKER_DSN is not set."""
        return self._registry.settings

    def configure(self, *, dsn: str | None = None, schema: str | None = None, listen_dsn: str | None = None) -> None:
        """Settings that win over those given to App, as the command line's do. Raises ConfigError after first use."""
        self._registry.configure(dsn=dsn, schema=schema, listen_dsn=listen_dsn)

    @property
    def kinds(self) -> dict[str, Kind]:
        """The registered kinds by name, a copy."""
        return self._registry.kinds

    def kind(
        self,
        name: str,
        *,
        preset: str = "standard",
        batch: int | None = None,
        window: timedelta | float | None = None,
        concurrency: int | None = None,
        prefetch: int | None = None,
        max_attempts: int | None = None,
        max_evictions: int | None = None,
        timeout: timedelta | float | None = None,
        poll: timedelta | float | None = None,
        lease: Lease | None = None,
        backoff: Backoff | None = None,
        stop: Stop | None = None,
        panic: Literal["retry", "permanent"] | None = None,
        weights: tuple[int, int] | None = None,
        singly: bool = False,
        fair: bool = False,
        supersede: Literal["now", "wait"] | None = None,
        results: Literal["poll", "notify"] | None = None,
        result_ttl: timedelta | float | None = None,
        keep: timedelta | float | None = None,
        keep_failed: timedelta | float | None = None,
        facts: Facts | None = None,
        apply: Apply | None = None,
        eligible: Eligible | None = None,
        payload: object | None = None,
        payload_limit: int | None = None,
        version: int = 1,
        queue: TableQueue | None = None,
    ) -> Callable[[H], H]:
        """Register a handler: `async def` runs in the event loop, `def` in a thread; with `batch` it gets a list.

        Numbers for times are seconds. None and zero mean the preset's value; -1 for max_attempts, max_evictions, keep
        and keep_failed means no limit. `apply(connection, job, value)` makes the app's own writes in the transaction
        that completes the job; `eligible(connection, job)` says there, before that, whether the result is still wanted.
        With `queue` the jobs are rows of the app's own table. A `fair` kind gives each tenant its share.
        Raises ConfigError for options that cannot work together.
        """
        if callable(cast("object", name)):
            raise ConfigError('write @app.kind("name"): a kind is registered under a name of its own')
        policy = _policy(
            name,
            preset,
            {
                "batch": batch,
                "window": window,
                "concurrency": concurrency,
                "prefetch": prefetch,
                "max_attempts": max_attempts,
                "max_evictions": max_evictions,
                "timeout": timeout,
                "poll": poll,
                "lease": lease,
                "backoff": backoff,
                "stop": stop,
                "panic": panic,
                "weights": weights,
                "singly": singly,
                "fair": fair,
                "supersede": supersede,
                "results": results,
                "result_ttl": result_ttl,
                "keep": keep,
                "keep_failed": keep_failed,
                "facts": facts,
            },
        )

        def register(handler: H) -> H:
            self._registry.add(
                handled_kind(
                    name,
                    policy,
                    handler,
                    batch=bool(batch),
                    apply=apply,
                    eligible=eligible,
                    payload=payload,
                    payload_limit=payload_limit,
                    version=version,
                    queue=queue,
                )
            )
            return handler

        return register

    def declare(
        self,
        name: str,
        *,
        payload: object = object,
        payload_limit: int | None = None,
        supersede: Literal["now", "wait"] | None = None,
        fair: bool = False,
        result_ttl: timedelta | float | None = None,
        facts: Facts | None = None,
        version: int = 1,
        queue: TableQueue | None = None,
    ) -> None:
        """Make a kind known that is enqueued here and handled elsewhere; the options must be those given there."""
        options: dict[str, object] = {"supersede": supersede, "fair": fair, "result_ttl": result_ttl}
        options["facts"] = facts
        policy = _policy(name, "standard", options)
        self._registry.add(
            declare_kind(name, policy, payload=payload, payload_limit=payload_limit, version=version, queue=queue)
        )

    # --- work -------------------------------------------------------------------------------------------------------

    def worker(self, kinds: Sequence[str] | None = None) -> Worker:
        """A worker for these kinds, or for all that have a handler. Raises UnknownKind, ConfigError."""
        if kinds is None:
            chosen = [kind for kind in self.kinds.values() if kind.handler is not None]
        else:
            chosen = [self._registry.known(name) for name in dict.fromkeys(kinds)]
        return Worker(self.settings, chosen, events=self.events, middleware=self._middleware)

    async def run(self, kinds: Sequence[str] | None = None) -> None:
        """Work until cancelled; then stop as the kinds' policies say. See Worker.run."""
        await self.worker(kinds).run()


def _policy(name: str, preset: str, options: dict[str, object]) -> Policy:
    given = {option: value for option, value in options.items() if value is not None}
    with about_kind(name):
        policy = make_policy(preset, cast("PolicyOptions", given))
        if given.get("window") and not given.get("batch"):
            raise ConfigError("window= is for batches, give batch= with it")
        return policy
