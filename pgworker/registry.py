"""What the two halves of the front door share: the kinds of an app, its settings, its flows and their hints."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Final, cast

from psycopg_pool import PoolTimeout

from pgworker import verbs
from pgworker.adapters import Caller
from pgworker.client import Order, make_order, put_jobs
from pgworker.config import Settings, conninfo
from pgworker.db import Flow
from pgworker.errors import ConfigError, DatabaseUnavailable, UnknownKind
from pgworker.hints import Hints
from pgworker.job import Enqueued, IfPending, NewJob
from pgworker.kind import Kind
from pgworker.operations import current_transaction, resume_kind
from pgworker.policy import STORE_TIMEOUT
from pgworker.verbs import Progress, Selection
from pgworker.waiter import Results

DOOR_CONNECTIONS: Final = 4
"""The most connections of one of the door's pools."""


class Registry:
    """The kinds by name, and what is made of the settings at first use."""

    def __init__(self, *, dsn: str | None, schema: str | None, listen_dsn: str | None) -> None:
        self._dsn = dsn
        self._schema = schema
        self._listen_dsn = listen_dsn
        self._settings: Settings | None = None
        self._hints: Hints | None = None
        self.results = Results()
        self._kinds: dict[str, Kind] = {}

    @property
    def settings(self) -> Settings:
        """The effective settings. Raises ConfigError when no DSN was given and PGWORKER_DSN is not set."""
        if self._settings is None:
            self._settings = Settings.load(self._dsn, schema=self._schema, listen_dsn=self._listen_dsn)
        return self._settings

    def configure(self, *, dsn: str | None, schema: str | None, listen_dsn: str | None) -> None:
        """Settings that win over the earlier ones. Raises ConfigError after first use."""
        if self._settings is not None:
            raise ConfigError("the app is in use already: configure it before its first enqueue or run")
        if dsn is not None:
            self._dsn, self._listen_dsn = dsn, None  # the old one may lead to another database
        self._schema = schema or self._schema
        self._listen_dsn = listen_dsn or self._listen_dsn

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds by name, a copy."""
        return dict(self._kinds)

    def add(self, kind: Kind) -> None:
        """Register a kind. Raises ConfigError for a name that is taken."""
        if kind.name in self._kinds:
            raise ConfigError(f"kind {kind.name!r} is registered already")
        self._kinds[kind.name] = kind

    def known(self, name: str) -> Kind:
        """The kind of this name. Raises UnknownKind."""
        if name not in self._kinds:
            known = ", ".join(sorted(self._kinds)) or "none yet"
            raise UnknownKind(
                f"unknown kind {name!r} (known: {known}); a kind handled elsewhere is made known by app.declare()"
            )
        return self._kinds[name]

    def in_jobs_table(self, name: str) -> Kind:
        """As known, but raises ConfigError for a kind whose jobs are rows of the app's own table."""
        kind = self.known(name)
        if kind.queue is not None:
            raise ConfigError(
                f"the jobs of kind {name!r} are the rows of {kind.queue.table}, which the app writes and reads itself; "
                "after a change it calls app.notify()"
            )
        return kind

    @property
    def hints(self) -> Hints:
        """The sender of hints, made at first use."""
        if self._hints is None:
            settings = self.settings
            self._hints = Hints(conninfo(settings.dsn, "hints"), channel=settings.tables.channel)
        return self._hints

    # --- flows ------------------------------------------------------------------------------------------------------

    def order(self, kind: str, jobs: Sequence[NewJob], *, if_pending: IfPending) -> Order:
        """What one call enqueues, checked and encoded. Raises PayloadError, ConfigError, UnknownKind."""
        return make_order(self.in_jobs_table(kind), jobs, if_pending=if_pending)

    def wake(self, kind: str, superseded: bool) -> None:  # noqa: FBT001 - called back with both by position
        """Wake the workers for jobs that have been committed, and those that run superseded ones."""
        self._wake(kind, None, None, control=superseded)

    def put(
        self, kind: str, jobs: Sequence[NewJob], *, if_pending: IfPending, caller: Caller | None
    ) -> Flow[list[Enqueued]]:
        """Enqueue, and wake the workers: at once, or when the transaction of a caller's connection is committed."""
        put = yield from put_jobs(self.settings.tables, self.in_jobs_table(kind), jobs, if_pending=if_pending)
        if put.transaction is not None:
            superseded = any(each.status == "superseded" for each in put.enqueued)
            self._wake(kind, caller, put.transaction, control=superseded)
        return put.enqueued

    def notify(self, kind: str, *, caller: Caller | None) -> Flow[None]:
        """Wake the workers: at once, or when the transaction of a caller's connection is committed."""
        known = self.known(kind)
        transaction = None if caller is None else (yield current_transaction(self.settings.tables))
        # (in an app's own table a row may have changed that is being worked on)
        self._wake(kind, caller, transaction, control=known.queue is not None)

    def _wake(self, kind: str, caller: Caller | None, transaction: str | None, *, control: bool) -> None:
        for hint in (self.hints.ready, self.hints.control) if control else (self.hints.ready,):
            if caller is None:
                hint(kind)
            elif caller.on_commit is None or not caller.on_commit(partial(hint, kind)):
                hint(kind, transaction=transaction)

    def reopen(self, kind: str, chosen: Selection, progress: Progress | None, *, rebuild: bool) -> Flow[int]:
        """Retry or rebuild jobs; the workers are woken by the first of them."""
        known = self.in_jobs_table(kind)
        ready = partial(self.hints.ready, kind)
        return verbs.reopen(self.settings.tables, known, chosen, rebuild=rebuild, progress=progress, ready=ready)

    def cancel(self, kind: str, chosen: Selection, progress: Progress | None) -> Flow[int]:
        """Cancel jobs; the runners of those that run are told at once."""
        known = self.in_jobs_table(kind)
        control = partial(self.hints.control, kind)
        return verbs.cancel(self.settings.tables, known, chosen, progress=progress, control=control)

    def forget(self, kind: str, key: str) -> Flow[bool]:
        """Delete a job and its result; its runner is told at once."""
        known = self.in_jobs_table(kind)
        return verbs.forget(self.settings.tables, known, key, control=partial(self.hints.control, kind))

    def pause(self, kind: str, *, until: datetime | None, for_: timedelta | float | None, code: str) -> Flow[None]:
        """Pause a kind; its runners are told at once."""
        yield from verbs.pause(self.settings.tables, self.known(kind).name, until=until, for_=for_, code=code)
        self.hints.control(kind)

    def resume(self, kind: str) -> Flow[bool]:
        """End a kind's pause; its runners are woken."""
        paused = yield resume_kind(self.settings.tables, self.known(kind).name)
        if paused:
            self.hints.ready(kind)
        return cast("bool", paused)

    def close(self) -> None:
        """End the waits for results and send what hints are left, a second for each at most."""
        self.results.close()
        if self._hints is not None:
            self._hints.close()


def unavailable(error: BaseException) -> DatabaseUnavailable:
    """What to raise for a call that got no connection, or no answer, in time."""
    seconds = STORE_TIMEOUT.total_seconds()
    if isinstance(error, PoolTimeout):
        return DatabaseUnavailable(f"no connection to the database within {seconds:g} s: nothing was sent")
    return DatabaseUnavailable(f"the database did not answer within {seconds:g} s; what was sent may have been written")
