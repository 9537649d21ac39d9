"""What a value consists of, and which class needs another package's help to become JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, Protocol, TypeAlias, TypeGuard, cast

import msgspec

from pgworker.foreign import find_adapter

Fault: TypeAlias = tuple[str, str]
"""A path below the root, and the reason."""
Parts: TypeAlias = tuple[Iterable[str], Iterable[object]]
"""The names in the JSON of what an object consists of, and the values beside them."""

ROOT: Final = "$"
MAX_DEPTH: Final = 200  # Postgres bears about 10,000 levels, Python 1,000 frames with the caller's own
TOO_DEEP: Final = f"is nested deeper than {MAX_DEPTH} levels, or contains itself: flatten it, or send a reference to it"
NOT_TEXT_KEY: Final = "has a key that is not a str, and JSON has no others: convert the keys, or send a list of pairs"

_FIELD_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

# The one exception to "the core never imports an extra": top-level module of a class or of its bases -> the module of
# ours that can carry it, loaded by name when the first such class is met; its user has imported the package by then.
_ADAPTERS: Final = {"pydantic": "pgworker.contrib.pydantic"}


class Adapter(Protocol):
    """What a contrib module offers, as plain functions, so that another package's classes may be payloads."""

    def dump(self, value: object, /) -> bytes:
        """Return the value as JSON; any exception means that it cannot be stored."""
        ...

    def load(self, kind: type, text: bytes, /) -> object:
        """Return an instance of `kind`, strictly; PayloadError with a path when the text does not fit."""
        ...

    def members(self, value: object, /) -> Mapping[str, object] | None:
        """Return the stored parts of a value by their names in the JSON; None for a class that has no parts."""
        ...


def path_segment(label: object) -> str:
    """Return one step of a path: `[3]` for an index, `.name` for a field, `[...]` for a key that may be data."""
    if isinstance(label, int):
        return f"[{label}]"
    if isinstance(label, str) and _FIELD_NAME.fullmatch(label):
        return f".{label}"
    return "[...]"


def is_dict(value: object) -> TypeGuard[dict[object, object]]:
    """Whether this is a dict, of anything."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[Sequence[object]]:
    """Whether JSON would write this as an array in its own order."""
    return isinstance(value, list | tuple)


def children_of(value: object) -> Iterable[tuple[object, object]] | None:
    """Return the labels and the parts of any value, or None for a scalar or an unknown class."""
    if is_dict(value):
        return value.items()
    if is_array(value):
        return enumerate(value)
    if isinstance(value, set | frozenset):
        return ((None, item) for item in cast("Iterable[object]", value))
    parts = parts_of(value)
    return None if parts is None else [pair for pair in zip(*parts, strict=True) if pair[1] is not msgspec.UNSET]


def parts_of(value: object) -> Parts | None:
    """Return the names in the JSON and the values of an object's parts, or None for a scalar or an unknown class."""
    kind: type = type(value)
    fields = _fields(kind)
    if fields is not None:
        names, attributes = fields
        return names, [getattr(value, attribute) for attribute in attributes]
    adapter = _adapter(kind)
    members = None if adapter is None else adapter.members(value)
    return None if members is None else (members.keys(), members.values())


@lru_cache(maxsize=1024)
def _fields(kind: type[object]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The names in the JSON and the attributes of a class that msgspec itself can write."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_encode_fields__, kind.__struct_fields__
    if dataclasses.is_dataclass(kind):
        names = tuple(field.name for field in dataclasses.fields(kind))
        return names, names
    return None


@lru_cache(maxsize=1024)
def _adapter(kind: type) -> Adapter | None:
    return cast("Adapter | None", find_adapter(kind, _ADAPTERS))


def _dump_foreign(value: object) -> msgspec.Raw:
    kind: type = type(value)
    adapter = _adapter(kind)
    if adapter is None:
        msg = "no adapter for this class"
        raise TypeError(msg)
    return msgspec.Raw(adapter.dump(value))


def is_readable(kind: type) -> bool:
    """Whether `load_foreign` can make such a class; msgspec takes `object` for one of them."""
    return kind is object or _adapter(kind) is not None


def load_foreign(kind: type, plain: object) -> object:
    """Turn plain data into a class that msgspec does not know; PayloadError when it does not fit."""
    adapter = _adapter(kind)
    return plain if adapter is None else adapter.load(kind, ENCODER.encode(plain))


ENCODER: Final = msgspec.json.Encoder(enc_hook=_dump_foreign)
