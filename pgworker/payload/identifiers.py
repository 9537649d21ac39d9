"""The limits of a job's names: what its kind, key, revision and tenant may be."""

from __future__ import annotations

import re
from typing import Final

from pgworker.errors import ConfigError, PayloadError
from pgworker.payload.refusal import text_fault

_KIND: Final = re.compile(r"[A-Za-z0-9_.:-]{1,63}")
_MAX_KEY_BYTES: Final = 512
_MAX_REVISION_BYTES: Final = 128
_MAX_TENANT_BYTES: Final = 512


def check_kind(name: str) -> None:
    """Refuse, with ConfigError, a kind's name that is not 1 to 63 of A-Z a-z 0-9 _ . : -."""
    if not _KIND.fullmatch(name):
        msg = f"not a usable name for a kind: {name!r} (1 to 63 of A-Z a-z 0-9 _ . : -)"
        raise ConfigError(msg)


def check_key(key: object) -> None:
    """Refuse, with PayloadError, a key that is not 1 to 512 bytes of text that Postgres can store."""
    _check_identifier("key", key, _MAX_KEY_BYTES)


def check_revision(revision: object) -> None:
    """Refuse, with PayloadError, a revision that is not 1 to 128 bytes of text that Postgres can store."""
    _check_identifier("revision", revision, _MAX_REVISION_BYTES)


def check_tenant(tenant: object) -> None:
    """Refuse, with PayloadError, a tenant that is not 1 to 512 bytes of text that Postgres can store."""
    _check_identifier("tenant", tenant, _MAX_TENANT_BYTES)


def _check_identifier(name: str, value: object, most: int) -> None:
    if not isinstance(value, str):
        raise PayloadError(name, f"must be a str, is `{type(value).__name__}`")
    reason = text_fault(value)
    if reason is not None:
        raise PayloadError(name, reason)
    size = len(value.encode())
    if not 1 <= size <= most:
        raise PayloadError(name, f"takes {size} bytes, must take 1 to {most}")
