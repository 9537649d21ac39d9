"""Where the database is and how to connect to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from psycopg import ProgrammingError
from psycopg.conninfo import make_conninfo

from pgworker.errors import ConfigError
from pgworker.tablemap import TableMap

_CONNECT_TIMEOUT_SECONDS = 5
_APPLICATION_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class Settings:
    """The effective configuration: the database, the direct connection for LISTEN, and the schema's tables."""

    dsn: str
    listen_dsn: str
    tables: TableMap

    @classmethod
    def load(
        cls,
        dsn: str | None = None,
        *,
        schema: str | None = None,
        listen_dsn: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        """What was given, else PGWORKER_DSN, PGWORKER_LISTEN_DSN, PGWORKER_SCHEMA.

        Raises ConfigError without a DSN, or for one that libpq cannot read.
        """
        environ = os.environ if environ is None else environ
        dsn = dsn or environ.get("PGWORKER_DSN")
        if not dsn:
            raise ConfigError(
                "no database: set PGWORKER_DSN or pass --dsn (for example postgresql://user@host/database)"
            )
        return cls(
            dsn=_readable("DSN", dsn),
            listen_dsn=_readable("listen DSN", listen_dsn or environ.get("PGWORKER_LISTEN_DSN") or dsn),
            tables=TableMap(schema or environ.get("PGWORKER_SCHEMA") or "pgworker"),
        )


def _readable(name: str, dsn: str) -> str:
    """The DSN, if libpq can read it. Raises ConfigError without libpq's own text, which may quote a password."""
    try:
        make_conninfo(dsn)
    except ProgrammingError:
        example = "postgresql://user:password@host:5432/database, or host=... dbname=..."
        raise ConfigError(f"the {name} cannot be read: it is like {example}") from None
    return dsn


def conninfo(dsn: str, role: str) -> str:
    """The DSN for a connection with this role (`worker`, `listen`, `lease`, ...), which pg_stat_activity shows.

    Our own keywords win. Keepalives notice a dead peer while we wait, tcp_user_timeout while our own bytes are
    unacknowledged: without both a silent network loss hangs for minutes. A standby is never good enough: everything
    here writes. Keys and payloads are any text there is, whatever PGCLIENTENCODING or the role's settings say.
    """
    return make_conninfo(
        dsn,
        application_name=f"pgworker {role}"[:_APPLICATION_NAME_BYTES],
        connect_timeout=_CONNECT_TIMEOUT_SECONDS,
        keepalives=1,
        keepalives_idle=5,
        keepalives_interval=2,
        keepalives_count=3,
        tcp_user_timeout=10_000,
        target_session_attrs="read-write",
        client_encoding="UTF8",
    )
