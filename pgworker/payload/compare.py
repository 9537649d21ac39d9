"""Finds what JSON did not carry: the value that was sent, beside the one that was read back."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from pgworker.payload.parts import (
    MAX_DEPTH,
    NOT_TEXT_KEY,
    TOO_DEEP,
    Fault,
    is_array,
    is_dict,
    parts_of,
    path_segment,
)

_ATOMS: Final = frozenset({str, int, float, bool, type(None)})
_TEXT: Final = frozenset({str})
_NOT_EQUAL: Final = "does not come back equal from JSON: declare another type for it"
_NOT_DECLARED: Final = "is not part of the declared type and would be lost: declare it, or leave it out"


def lost(sent: object, back: object, depth: int) -> Fault | None:
    """Return where `back`, as read from the JSON text, is not what was sent, or None when nothing was lost."""
    if type(sent) in _ATOMS and type(sent) is type(back) and sent == back:
        return None
    if type(sent) is not type(back) and not _stands_for(sent, back):
        given, read = type(sent).__name__, type(back).__name__
        return "", f"is `{given}`, which would come back as `{read}`: send `{read}`, or declare the type `{given}`"
    if is_dict(sent) and is_dict(back):
        if [*sent] == [*back] and _TEXT.issuperset(map(type, back)):
            return _first_lost(sent, sent.values(), back.values(), depth)
        return _lost_key(sent, back) or _first_lost(sent, sent.values(), [back[key] for key in sent], depth)
    if is_array(sent) and is_array(back):
        return _first_lost(range(len(sent)), sent, back, depth)
    ours, theirs = parts_of(sent), parts_of(back)
    if ours is None or theirs is None:
        return None if _equal(sent, back) else ("", _NOT_EQUAL)
    return _first_lost(ours[0], ours[1], theirs[1], depth)


def _first_lost(labels: Iterable[object], sent: Iterable[object], back: Iterable[object], depth: int) -> Fault | None:
    """Compare the parts of one container; every stored value passes here, so equal scalars cost no call."""
    if depth >= MAX_DEPTH:
        return "", TOO_DEEP
    for label, ours, theirs in zip(labels, sent, back, strict=True):
        if ours is theirs or (type(ours) is type(theirs) and type(ours) in _ATOMS and ours == theirs):
            continue
        fault = lost(ours, theirs, depth + 1)
        if fault is not None:
            return path_segment(label) + fault[0], fault[1]
    return None


def _lost_key(sent: dict[object, object], back: dict[object, object]) -> Fault | None:
    for key in sent:
        if not isinstance(key, str):
            return "", NOT_TEXT_KEY
        if key not in back:
            return path_segment(key), _NOT_DECLARED
    return None


def _stands_for(sent: object, back: object) -> bool:
    """Whether a value may be read back as another type: an int as float, a subclass of a plain type as that."""
    if type(back) is float:
        return type(sent) is int
    return isinstance(sent, type(back)) and parts_of(back) is None


def _equal(sent: object, back: object) -> bool:
    if sent == back:
        return True
    # Two aware datetimes in a repeated hour never compare equal across zones, whatever their instants.
    if isinstance(sent, datetime) and isinstance(back, datetime) and sent.tzinfo and back.tzinfo:
        return sent.astimezone(UTC) == back.astimezone(UTC)
    return False
