"""The codec of one declared type: JSON text from a value and back, with nothing lost on the way."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any, Final, cast

import msgspec

from pgworker.errors import ConfigError, PayloadError
from pgworker.payload.compare import lost
from pgworker.payload.parts import ENCODER, ROOT, Fault, is_array, is_readable, load_foreign
from pgworker.payload.refusal import HAS_NUL, refusal, unstorable

DEFAULT_LIMIT_BYTES: Final = 1024 * 1024

_MAX_LIMIT_BYTES: Final = 255 * 1024 * 1024  # jsonb's own ceiling for one string or container is 256 MiB
_MAX_PATH: Final = 120  # characters; only a value that contains itself has a longer one
_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_EXPONENT: Final = re.compile(rb"e\+?[0-9]+(?:[,\]}]|$)")
_STRING_OR_EXPONENT: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|-?[0-9]+(?:\.[0-9]+)?e\+?[0-9]+')


def codec_for(declared: object, *, limit: int = DEFAULT_LIMIT_BYTES) -> Codec:
    """Return the codec of a type; ConfigError for a type that cannot be carried, or a limit that cannot be kept."""
    if not isinstance(cast("object", limit), int) or not 1 <= limit <= _MAX_LIMIT_BYTES:
        msg = f"a payload limit is 1 to {_MAX_LIMIT_BYTES} bytes, got {limit!r}"
        raise ConfigError(msg)
    if declared is object:
        declared = Any  # the same to us; msgspec would call the hook for each value
    try:
        decoder: msgspec.json.Decoder[object] = msgspec.json.Decoder(declared, dec_hook=load_foreign)
        _check_classes(msgspec.inspect.type_info(declared), set())
    except (TypeError, ValueError, NameError, AttributeError, SyntaxError) as error:
        name = declared.__name__ if isinstance(declared, type) else str(declared)
        msg = f"{name} cannot be the type of a payload or result: {error}"
        raise ConfigError(msg) from error
    return Codec(decoder, limit)


def _check_classes(part: object, seen: set[int]) -> None:
    """Raise TypeError for a class, at any depth of a type, that neither msgspec nor an adapter can read."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, msgspec.inspect.CustomType) and not is_readable(part.cls):
        msg = f"no JSON is known for `{part.cls.__name__}`"
        raise TypeError(msg)
    if isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
        part = msgspec.structs.astuple(part)
    if is_array(part):
        for inner in part:
            _check_classes(inner, seen)


class Codec:
    """Turns values of one declared type into JSON text and back; made once per kind, shared by threads."""

    __slots__ = ("_decoder", "_limit")

    def __init__(self, decoder: msgspec.json.Decoder[object], limit: int) -> None:
        self._decoder = decoder
        self._limit = limit

    def encode(self, value: object) -> str:
        """Return a value's JSON text; PayloadError with the path to what cannot be stored or is of a wrong type.

        The text is also read back, so constructors' hooks (`__post_init__`, validators) run once more.
        """
        data = b""
        try:
            data = ENCODER.encode(value)
            if _EXPONENT.search(data):
                data = _STRING_OR_EXPONENT.sub(_spell_out, data)
            fault = self._fault(value, data)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a type's own code may raise anything, and quote the value in it
            fault = refusal(error)
        if fault is None:
            return data.decode()
        if len(data) <= self._limit:
            fault = _better(fault, value)
        # Raised out here, so that no traceback shows the other exception, which may quote the value.
        raise _error(fault)

    def decode(self, text: str) -> object:
        """Return the typed value of a JSON text, ignoring unknown fields; PayloadError when it does not fit."""
        try:
            return self._decoder.decode(text)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - as above; and a row that cannot be read has to fail alone
            fault = refusal(error)
        raise _error(fault)

    def _fault(self, value: object, data: bytes) -> Fault | None:
        if len(data) > self._limit:
            reason = f"takes {len(data)} bytes of JSON, over the limit of {self._limit}: store it and send a reference"
            return "", reason
        if b"\\u0000" in data and _NUL.search(data):
            return "", HAS_NUL
        return lost(value, self._decoder.decode(data), 0)


def _spell_out(match: re.Match[bytes]) -> bytes:
    """Write 1e16 as 10000000000000000.0: jsonb drops the exponent, and without a point it would be read as an int."""
    token = match[0]
    if token.startswith(b'"'):
        return token
    digits = format(Decimal(token.decode()), "f")
    return (digits if "." in digits else f"{digits}.0").encode()


def _better(fault: Fault, value: object) -> Fault:
    """Prefer what no type could carry to what msgspec made of it."""
    try:
        return unstorable(value, 0) or fault
    except Exception:  # noqa: BLE001 - it is the refused value's own code that fails here, and the refusal stands
        return fault


def _error(fault: Fault) -> PayloadError:
    path, reason = fault
    return PayloadError(ROOT + (path if len(path) <= _MAX_PATH else path[:_MAX_PATH] + " ..."), reason)
