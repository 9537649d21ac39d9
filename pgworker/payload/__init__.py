"""Typed payloads and results, to and from the JSON text of a jsonb column.

What may be stored: dataclasses, `msgspec.Struct`, `TypedDict`, builtin containers, None, and pydantic models; inside of
these str, int, float, bool, bytes (as base64), `Decimal`, `UUID`, `Enum` (by value), `datetime`, `date`, `time`,
`timedelta`, and sets and tuples where the type declares them. `Any` and `object` stand for plain JSON.

The rule behind all checks: **a value is stored only if reading it again gives an equal value of the declared type.** So
each encode also decodes and compares: nothing is coerced, dropped or rounded in silence, wrong values are refused.
Equal, yet not identical: -0.0 comes back as 0.0; an aware datetime as the same instant with a fixed offset; an instance
of a subclass of str, int, dict or list as the plain type; an int in a float field as the float of the same value.

Errors name the path (`$.rows[3].name`), never a value. A key that does not look like a field's name may be data too:
it shows as `[...]`.
"""

from __future__ import annotations

from pgworker.payload.codec import DEFAULT_LIMIT_BYTES, Codec, codec_for
from pgworker.payload.identifiers import check_key, check_kind, check_revision, check_tenant
from pgworker.payload.parts import MAX_DEPTH, Adapter, path_segment

__all__ = [
    "DEFAULT_LIMIT_BYTES",
    "MAX_DEPTH",
    "Adapter",
    "Codec",
    "check_key",
    "check_kind",
    "check_revision",
    "check_tenant",
    "codec_for",
    "path_segment",
]
