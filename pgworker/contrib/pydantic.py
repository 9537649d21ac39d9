"""Pydantic models as payloads and results; `pgworker.payload` loads this module by name when it meets the first one.

A model is dumped by alias and read back strictly, by its own validators. One that comes back unequal is refused:
`exclude=True` on a field with a value, an alias that serves only one way, a `SecretStr`. Private attributes are not
data and do not travel; after reading, every field counts as set.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from pydantic import BaseModel, TypeAdapter, ValidationError

from pgworker.errors import PayloadError
from pgworker.payload import path_segment


def dump(value: object, /) -> bytes:
    """Return the value as JSON; what pydantic would only warn of is found later, by comparing."""
    kind: type = type(value)
    return _adapter(kind).dump_json(value, by_alias=True, round_trip=True, warnings=False)


def load(kind: type, text: bytes, /) -> object:
    """Return an instance of `kind`; PayloadError with the path and pydantic's code for the first fault, no message."""
    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = "$" + "".join(map(path_segment, first["loc"]))
    reason = "is required and missing" if first["type"] == "missing" else f"is refused by pydantic: {first['type']}"
    raise PayloadError(path, reason)


def members(value: object, /) -> Mapping[str, object] | None:
    """Return a model's fields, by alias, and its extras; None for pydantic's other classes: they are compared whole."""
    if not isinstance(value, BaseModel):
        return None
    fields = type(value).model_fields.items()
    stored = {info.serialization_alias or info.alias or name: getattr(value, name) for name, info in fields}
    return stored | (value.model_extra or {})


@lru_cache(maxsize=1024)
def _adapter(kind: type) -> TypeAdapter[object]:
    return TypeAdapter(kind)
