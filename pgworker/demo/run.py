"""Bring a folder's index up to date: list, look, enqueue what changed, and see the jobs to their ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, cast

import anyio
import anyio.to_thread
import psycopg

from pgworker.db import AsyncConnection
from pgworker.demo.files import Listing, Stamp, from_text, list_files, real_folder, revision, stamp_of, to_text
from pgworker.demo.jobs import LASTING, SourceFile, make_app
from pgworker.demo.report import Failures, Progress, Report
from pgworker.demo.round import Round
from pgworker.demo.store import KIND, Seen, Store, prepare
from pgworker.events import Event
from pgworker.job import NewJob
from pgworker.worker import one_line

_CHUNK: Final = 200  # files in one transaction
_QUIET_SECONDS: Final = 1.0  # without an event for so long, the table is asked
_LOOK_EVERY_SECONDS: Final = 1.0
_REST: Final = 5  # times as long as a look took: a huge folder is not looked at all the time
_EXAMPLES: Final = 3


def _ignore(_: object) -> None:
    """Nobody listens."""


class Indexer:
    """Keeps the index of one folder, in the database of the DSN. Its worker takes what other folders have left, too.

    `on_report` gets each round's report, `on_trouble` a line about what keeps a later round from being done. They are
    called in the event loop and return at once.
    """

    def __init__(
        self,
        dsn: str,
        folder: Path,
        *,
        schema: str | None = None,
        listen_dsn: str | None = None,
        on_report: Callable[[Report], None] = _ignore,
        on_trouble: Callable[[str], None] = _ignore,
    ) -> None:
        self._root = str(real_folder(folder))
        self._app = make_app(dsn, schema=schema, listen_dsn=listen_dsn)
        self._app.events.subscribe(self._observe)
        self._on_report = on_report
        self._on_trouble = on_trouble
        self._round = Round()
        self._seen: dict[str, Stamp | None] = {}
        self._scope: anyio.CancelScope | None = None
        self._stopped = False
        self._told = False
        self._listing_seconds = 0.0

    @property
    def folder(self) -> str:
        """The folder's real path."""
        return self._root

    def stop(self) -> None:
        """Let run() come to its end soon: jobs that have not ended wait for the next run."""
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()

    def progress(self) -> Progress:
        """How far the current round is."""
        return Progress(self._round.files, self._round.settled, self._round.failed)

    async def run(self, *, watch: bool = False) -> None:
        """Do one round, and with `watch` more of them until stop() or a cancellation.

        Migrates and makes its tables first. Raises ConfigError, SchemaError, DatabaseUnavailable, psycopg.Error. After
        the first round, a database that is away is only a trouble.
        """
        settings = self._app.settings
        folder = await anyio.to_thread.run_sync(prepare, settings.dsn, settings.tables, to_text(self._root))
        self._store = Store(settings.tables, folder)
        try:
            async with self._app, anyio.create_task_group() as group:
                group.start_soon(self._app.run)
                await self._rounds(watch=watch)
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    def _observe(self, event: Event) -> None:
        self._round.observe(event)

    # --- rounds -----------------------------------------------------------------------------------------------------

    async def _rounds(self, *, watch: bool) -> None:
        with anyio.CancelScope() as self._scope:
            if not self._stopped:
                await self._first_round()
            if watch and not self._stopped:
                await self._watch()
        if not self._told:
            self._on_report(self._report([], interrupted=True))

    async def _first_round(self) -> None:
        async with self._store.connection(self._app.settings.dsn) as conn:
            self._seen = {from_text(path): None for path in await self._store.paths(conn)}
            listing = await self._list()
            await self._forget(conn, await self._store.failed_for_now(conn, LASTING), documents=False)
            await self._bring_up_to_date(conn, listing)

    async def _watch(self) -> None:
        trouble = ""
        while True:
            await anyio.sleep(max(_LOOK_EVERY_SECONDS, _REST * self._listing_seconds))
            try:
                await self._next_round()
            except (psycopg.OperationalError, OSError) as error:
                if one_line(error) != trouble:
                    trouble = one_line(error)
                    self._on_trouble(trouble)
            else:
                trouble = ""

    async def _next_round(self) -> None:
        """Nothing at all is done, and no connection made, unless a file seems to have changed."""
        listing = await self._list()
        if self._suspects(listing) or self._gone(listing):
            async with self._store.connection(self._app.settings.dsn) as conn:
                await self._bring_up_to_date(conn, listing)

    async def _list(self) -> Listing:
        began = time.monotonic()
        listing = await anyio.to_thread.run_sync(list_files, self._root)
        self._listing_seconds = time.monotonic() - began
        return listing

    def _suspects(self, listing: Listing) -> list[str]:
        return [path for path, stamp in listing.files.items() if self._seen.get(path) != stamp]

    def _gone(self, listing: Listing) -> list[str]:
        return [path for path in self._seen if path not in listing.files and not listing.may_hold(path)]

    async def _bring_up_to_date(self, conn: AsyncConnection, listing: Listing) -> None:
        """One round. What has been seen is noted after its commit: a round that fails leaves it to the next."""
        self._told = False
        this = self._round = Round(files=len(listing.files), closed=listing.closed)
        gone = self._gone(listing)
        await self._forget(conn, [self._store.key(to_text(path)) for path in gone], documents=True)
        this.forgotten(gone)
        for path in gone:
            del self._seen[path]
        suspects = self._suspects(listing)
        this.looked_at = len(suspects)
        await self._enqueue(conn, {path: listing.files[path] for path in suspects})
        await self._settle(conn)
        failures = await self._store.failures(conn, examples=_EXAMPLES)
        self._told = True
        self._on_report(self._report(failures, interrupted=False))

    # --- steps ------------------------------------------------------------------------------------------------------

    async def _forget(self, conn: AsyncConnection, keys: Sequence[str], *, documents: bool) -> None:
        for chunk in _chunks(keys):
            async with conn.transaction():
                await self._store.lock(conn)
                await self._store.forget(conn, chunk, documents=documents)

    async def _enqueue(self, conn: AsyncConnection, stamps: dict[str, Stamp]) -> None:
        """Write the documents and enqueue their jobs, a chunk a transaction; the database tells what is new."""
        for chunk in _chunks(sorted(stamps)):
            seen = await anyio.to_thread.run_sync(self._look, {path: stamps[path] for path in chunk})
            if seen:
                await self._enqueue_chunk(conn, seen)
            self._seen |= {path: stamps[path] for path in seen}
            if self._round.files is not None:
                self._round.files -= len(chunk) - len(seen)

    def _look(self, stamps: dict[str, Stamp]) -> dict[str, Seen]:
        """In a thread, as it reads the files; those that are gone again are left out."""
        return {
            path: Seen(to_text(path), found, stamp.size)
            for path, stamp in stamps.items()
            if (found := revision(self._root, path, stamp)) is not None
        }

    async def _enqueue_chunk(self, conn: AsyncConnection, seen: dict[str, Seen]) -> None:
        root = to_text(self._root)
        jobs = [
            NewJob(SourceFile(root, file.path), key=self._store.key(file.path), revision=file.revision)
            for file in seen.values()
        ]
        async with conn.transaction():
            await self._store.lock(conn)
            await self._store.write(conn, list(seen.values()))
            self._round.expect(seen, await self._app.enqueue_many(KIND, jobs, conn=conn))

    async def _settle(self, conn: AsyncConnection) -> None:
        """Until no job of this round is left; looks again at files that had changed when their job read them."""
        while self._round.outstanding:
            with anyio.move_on_after(_QUIET_SECONDS) as quiet:
                await self._round.moved.wait()
            if quiet.cancelled_caught:
                keys = list(self._round.outstanding)
                self._round.ended_elsewhere(set(keys) - await self._store.waiting(conn, keys))
            again = self._round.look_again()
            if again:
                stamps = {path: stamp for path in again if (stamp := stamp_of(self._root, path)) is not None}
                await self._enqueue(conn, stamps)

    def _report(self, failures: Sequence[Failures], *, interrupted: bool) -> Report:
        this = self._round
        return Report(
            folder=self._root,
            files=this.files or 0,
            looked_at=this.looked_at,
            changed=this.changed,
            gone=this.gone,
            closed=this.closed,
            done=this.done,
            unchanged=this.unchanged,
            elsewhere=this.elsewhere,
            failed=this.failed,
            failures=list(failures),
            waiting=len(this.outstanding),
            seconds=time.monotonic() - this.began,
            jobs_per_second=this.jobs_per_second,
            picked_up=this.picked_up,
            pickup_p50=this.pickup(0.5),
            pickup_p99=this.pickup(0.99),
            interrupted=interrupted,
        )


def _chunks(items: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(items), _CHUNK):
        yield items[first : first + _CHUNK]


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a task group in which one task failed and took the others with it."""
    first = errors.exceptions[0]
    return _first(cast("BaseExceptionGroup[BaseException]", first)) if isinstance(first, BaseExceptionGroup) else first
