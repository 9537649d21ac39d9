"""Says why a value or a text was refused, with its path and without quoting it; only errors pay for this."""

from __future__ import annotations

import math
import re
import sys
from decimal import Decimal
from enum import Enum
from typing import Final

import msgspec

from pgworker.errors import PayloadError
from pgworker.payload.parts import (
    ENCODER,
    MAX_DEPTH,
    NOT_TEXT_KEY,
    ROOT,
    TOO_DEEP,
    Fault,
    children_of,
    is_dict,
    path_segment,
)

HAS_NUL: Final = "contains U+0000, which Postgres cannot store: remove it, or send base64"

_MAX_DIGITS: Final = 4300  # with the sign, for msgspec; Python's own default, too. jsonb would hold 131,072
_HAS_SURROGATE: Final = "contains a lone surrogate, which UTF-8 cannot hold: decode the text properly, or send base64"
_NOT_FINITE: Final = "is NaN or infinite, for which JSON has no number: send None or a string"
_AT_PATH: Final = re.compile(r"(?P<message>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(.*)`")
_NOT_A_CHOICE: Final = ("Invalid enum value", "Invalid value")
_VALUE_FREE: Final = re.compile(r"Expected `.*|Invalid [A-Za-z0-9 -]+|[A-Za-z ]+ out of range")


def unstorable(value: object, depth: int) -> Fault | None:
    """Return the first part of a value that JSON or Postgres could never hold, whatever its declared type."""
    children = children_of(value)
    if children is None:
        reason = _scalar_fault(value.value if isinstance(value, Enum) else value)
        return None if reason is None else ("", reason)
    if depth >= MAX_DEPTH:
        return "", TOO_DEEP
    for label, child in children:
        if is_dict(value) and not isinstance(label, str):
            return "", NOT_TEXT_KEY
        reason = text_fault(label) if isinstance(label, str) else None
        fault = ("", f"is under a key that {reason}") if reason else unstorable(child, depth + 1)
        if fault is not None:
            return path_segment(label) + fault[0], fault[1]
    return None


def _scalar_fault(value: object) -> str | None:
    if isinstance(value, str):
        return text_fault(value)
    if isinstance(value, int):
        digits = min(sys.get_int_max_str_digits() or _MAX_DIGITS, _MAX_DIGITS)
        too_long = not -(10 ** (digits - 1)) < value < 10**digits
        return f"is an int of more than {digits} digits: send it in parts, or as bytes" if too_long else None
    if isinstance(value, float | Decimal):
        finite = value.is_finite() if isinstance(value, Decimal) else math.isfinite(value)
        return None if finite else _NOT_FINITE
    try:
        ENCODER.encode(value)
    except (TypeError, ValueError):
        return f"is `{type(value).__name__}`, which cannot be stored as JSON: send plain data instead"
    return None


def text_fault(text: str) -> str | None:
    """Say why Postgres could not store a text, or None when it could."""
    if "\0" in text:
        return HAS_NUL
    try:
        text.encode()
    except UnicodeEncodeError:
        return _HAS_SURROGATE
    return None


def refusal(error: Exception) -> Fault:
    """Say why msgspec or a type's own code refused, without those parts of its message that may quote the value."""
    if isinstance(error, RecursionError):
        return "", TOO_DEEP
    if isinstance(error, UnicodeError):
        return "", _HAS_SURROGATE
    found = _AT_PATH.fullmatch(str(error))
    if not isinstance(error, msgspec.ValidationError) or found is None:
        malformed = isinstance(error, msgspec.DecodeError)
        return "", "is not valid JSON" if malformed else f"is refused by its type with {type(error).__name__}"
    path, cause = found["path"] or "", error.__cause__
    if isinstance(cause, PayloadError):
        return path + cause.path.removeprefix(ROOT), cause.reason
    if cause is not None:
        return path, f"is refused by its type with {type(cause).__name__}"
    missing = _MISSING.fullmatch(found["message"])
    if missing:
        return f"{path}.{missing[1]}", "is required and missing"
    reason = _reason(found["message"])
    return path, f"has a key of a wrong type: {reason}" if found["key"] else reason


def _reason(message: str) -> str:
    if message.startswith(_NOT_A_CHOICE):
        return "is not one of the values that its type allows"
    return message[0].lower() + message[1:] if _VALUE_FREE.fullmatch(message) else "does not fit its type"
