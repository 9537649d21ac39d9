"""From what a handler returned or raised to one result a job."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import cast

from pgworker.errors import ConfigError, PayloadError, class_name
from pgworker.kind import Kind
from pgworker.outcome import (
    HANDLER_FAILED,
    HANDLER_PANIC,
    HANDLER_RESULT_COUNT,
    NOTHING,
    RESULT_REJECTED,
    Cancel,
    Failed,
    Park,
    Pause,
    Permanent,
    Result,
    Retry,
    Returned,
)
from pgworker.payload import Codec, codec_for

_log = logging.getLogger("pgworker")
_INSTRUCTIONS = (Retry, Permanent, Park, Pause, Cancel)
_FRAMES = 12


def returned(kind: Kind, answer: object, count: int) -> Sequence[Result]:
    """The results of a call that returned; a batch's answer must be a list of as many as it got."""
    if not kind.batch:
        return [_one(kind, answer)]
    if isinstance(answer, _INSTRUCTIONS):
        return [answer] * count
    if answer is None and kind.returns_nothing:
        return [NOTHING] * count
    answers = cast("Sequence[object]", answer)
    if not isinstance(answer, (list, tuple)) or len(answers) != count:
        what = f"{len(answers)} outcomes" if isinstance(answer, (list, tuple)) else f"a {class_name(answer)}"
        _log.warning(
            "kind=%s returned %s for %d jobs: a batch handler returns a list of outcomes, or is annotated -> None",
            kind.name, what, count,
        )  # fmt: skip
        return [Failed(HANDLER_RESULT_COUNT, permanent=True)] * count
    return [_one(kind, each) for each in answers]


def _one(kind: Kind, answer: object) -> Result:
    if isinstance(answer, _INSTRUCTIONS):
        return answer
    if answer is None:
        return NOTHING
    try:
        return Returned(_codec(kind, answer).encode(answer), answer)
    except PayloadError as error:
        _log.warning("result rejected kind=%s path=%s reason=%s", kind.name, error.path, error.reason)
        return Failed(RESULT_REJECTED, class_name(answer))


def _codec(kind: Kind, answer: object) -> Codec:
    """For the type that the handler declares, else the value's own, else plain JSON (a subclass of dict or list)."""
    return kind.result if kind.result is not None else _codec_of(cast("Hashable", type(answer)))


@lru_cache(maxsize=256)
def _codec_of(kind: Hashable) -> Codec:
    try:
        return codec_for(kind)
    except ConfigError:
        return codec_for(object)


def raised(kind: Kind, error: BaseException, count: int) -> Sequence[Failed]:
    """The results of a call that raised: a failure, or a panic for what is no Exception. Logs where, never what."""
    panic = not isinstance(_innermost(error), (Exception, asyncio.CancelledError))
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    where = " < ".join(f"{frame.filename}:{frame.lineno}:{frame.name}" for frame in reversed(frames))
    name = class_name(_innermost(error))
    _log.warning("handler raised kind=%s error=%s at %s", kind.name, name, where)
    code = HANDLER_PANIC if panic else HANDLER_FAILED
    return [Failed(code, name, permanent=panic and kind.policy.panic == "permanent")] * count


def _innermost(error: BaseException) -> BaseException:
    """The one exception of a group of one, however deeply task groups have wrapped it."""
    while isinstance(error, BaseExceptionGroup):
        inner = cast("tuple[BaseException, ...]", error.exceptions)
        if len(inner) != 1:
            break
        error = inner[0]
    return error  # pyright: ignore[reportUnknownVariableType] - a group of unknown type parameter
