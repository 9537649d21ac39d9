"""The App of a command: the one that it names, or one of our own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from pgworker import schema as migrations
from pgworker.app import App
from pgworker.cli.database import app_settings, connected
from pgworker.cli.loading import known_kind, load_app
from pgworker.cli.logs import log_to_stderr


def make_front(kind: str, target: str | None, *, dsn: str | None, schema: str | None) -> App:
    """The named app, or one of our own that knows the kind and nothing about it. Raises UnknownKind, ConfigError."""
    if target is None:
        made = App()
        made.declare(kind, fair=True)  # nobody knows here: then a job without a tenant has its share, too
    else:
        made = load_app(target)
        known_kind(made, kind)
    app_settings(made, dsn=dsn, schema=schema)
    return made


@contextmanager
def ready_front(kind: str, target: str | None, *, dsn: str | None, schema: str | None) -> Generator[App, None, None]:
    """As make_front, with our log shown and the schema looked at; at the end its hints are sent and it is closed."""
    log_to_stderr("warning")
    made = make_front(kind, target, dsn=dsn, schema=schema)
    with connected(made.settings, "enqueue") as connection:
        migrations.check(connection, made.settings.tables)
    with made.sync:
        yield made
