"""What the two halves of the front door share: the kinds of an app, its settings, and its sender of hints."""

from __future__ import annotations

from pgworker.client import PutMany
from pgworker.config import Settings, connect_options
from pgworker.errors import ConfigError, UnknownKind
from pgworker.hints import Hints
from pgworker.job import Enqueued
from pgworker.kind import Kind


class Registry:
    """The kinds by name, and what is made of the settings at first use."""

    def __init__(self, *, dsn: str | None, schema: str | None, listen_dsn: str | None) -> None:
        self._dsn = dsn
        self._schema = schema
        self._listen_dsn = listen_dsn
        self._settings: Settings | None = None
        self._hints: Hints | None = None
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
            msg = "the app is in use already: configure it before its first enqueue or run"
            raise ConfigError(msg)
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
            msg = f"kind {kind.name!r} is registered already"
            raise ConfigError(msg)
        self._kinds[kind.name] = kind

    def known(self, name: str) -> Kind:
        """The kind of this name. Raises UnknownKind."""
        if name not in self._kinds:
            known = ", ".join(sorted(self._kinds)) or "none yet"
            msg = f"unknown kind {name!r} (known: {known}); a kind handled elsewhere is made known by app.declare()"
            raise UnknownKind(msg)
        return self._kinds[name]

    def handled(self) -> list[str]:
        """The names of the kinds that have a handler."""
        return [kind.name for kind in self._kinds.values() if kind.handler is not None]

    def hint(self, kind: str, put: PutMany, *, committed: bool) -> list[Enqueued]:
        """Wake the workers: at once if what was put is committed, else when its transaction is."""
        if put.transaction is not None:
            if self._hints is None:
                settings = self.settings
                self._hints = Hints(settings.dsn, connect_options("hints"), channel=settings.tables.channel)
            self._hints.ready(kind, transaction=None if committed else put.transaction)
        return put.enqueued

    def close(self) -> None:
        """Send what hints are left, waiting a second at most."""
        if self._hints is not None:
            self._hints.close()
