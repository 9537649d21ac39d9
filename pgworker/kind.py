"""A registered kind: its handler, how that is called, what its payload is, and its policy."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, cast

from pgworker.errors import ConfigError
from pgworker.job import Job
from pgworker.outcome import Cancel, Park, Pause, Permanent, Retry
from pgworker.payload import DEFAULT_LIMIT_BYTES, Codec, check_kind, codec_for
from pgworker.policy import Policy
from pgworker.tablequeue import TableQueue

Handler: TypeAlias = Callable[[Any], Any]
"""`def` or `async def`, taking a Job or, for a batch kind, a list of them."""
Apply: TypeAlias = Callable[..., Any]
"""`(connection, job, value)`, `def` or `async def` like its handler: the app's own writes of a completion."""
Eligible: TypeAlias = Callable[..., Any]
"""`(connection, job) -> bool`, `def` or `async def` like its handler: whether the result is still wanted."""

_UNIONS = (typing.Union, types.UnionType)
_NO_VALUES = (None, types.NoneType, Retry, Permanent, Park, Pause, Cancel)
_MAX_VERSION = 32_767  # a smallint column


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind as an app knows it; `handler` is None for a kind that is only enqueued here."""

    name: str
    policy: Policy
    payload: Codec
    handler: Handler | None = None
    apply: Apply | None = None
    eligible: Eligible | None = None
    batch: bool = False
    is_async: bool = True
    returns_nothing: bool = False
    version: int = 1
    queue: TableQueue | None = None
    """The app's own table, whose rows are the jobs; None: they are in the jobs table."""
    result: Codec | None = None
    """How values become results; None when the handler does not say what it returns: then by each value's own type."""

    @property
    def call_size(self) -> int:
        """Most jobs in one call of the handler."""
        return self.policy.batch if self.batch else 1

    @property
    def window(self) -> timedelta:
        """How long a claim waits for more: only a batch has use for it."""
        return self.policy.window if self.batch else timedelta(0)

    @property
    def has_guests(self) -> bool:
        """Whether the app's own code takes part in the transaction of a completion."""
        return self.apply is not None or self.eligible is not None


@contextmanager
def about_kind(name: str) -> Generator[None, None, None]:
    """Let a ConfigError that is raised inside say which kind it is about."""
    try:
        yield
    except ConfigError as error:
        error.args = (f"kind {name!r}: {error}",)
        raise


def declare_kind(
    name: str,
    policy: Policy,
    *,
    payload: object,
    payload_limit: int | None,
    version: int,
    queue: TableQueue | None = None,
) -> Kind:
    """A kind without a handler. Raises ConfigError for a name or version that cannot be stored."""
    check_kind(name)
    with about_kind(name):
        _check_version(version)
        _check_fair(policy, queue)
        codec = codec_for(payload, limit=payload_limit or DEFAULT_LIMIT_BYTES)
        return Kind(name, policy, codec, version=version, queue=queue)


def handled_kind(
    name: str,
    policy: Policy,
    handler: Handler,
    *,
    batch: bool,
    apply: Apply | None,
    eligible: Eligible | None = None,
    payload: object | None,
    payload_limit: int | None,
    version: int,
    queue: TableQueue | None = None,
) -> Kind:
    """A kind with a handler; the payload's type is read from its annotation unless it is given."""
    check_kind(name)
    with about_kind(name):
        _check_version(version)
        _check_fair(policy, queue)
        if policy.singly and not batch:
            raise ConfigError("singly= is for batches, give batch= with it")
        is_async = inspect.iscoroutinefunction(handler)
        _check_call("a handler takes one argument: the job or, with batch=, the list of jobs", handler, 1)
        _check_guest("apply", apply, ("the connection", "the job", "the value"), is_async=is_async)
        _check_guest("eligible", eligible, ("the connection", "the job"), is_async=is_async)
        hints = _hints(handler)
        annotated = _payload_type(hints, batch=batch)
        wanted = payload if payload is not None else annotated
        return Kind(
            name,
            policy,
            codec_for(wanted, limit=payload_limit or DEFAULT_LIMIT_BYTES),
            handler=handler,
            apply=apply,
            eligible=eligible,
            batch=batch,
            is_async=is_async,
            returns_nothing="return" in hints and hints["return"] is types.NoneType,
            version=version,
            queue=queue,
            result=_result_codec(hints.get("return"), batch=batch),
        )


def _check_version(version: int) -> None:
    if not isinstance(cast("object", version), int) or not 1 <= version <= _MAX_VERSION:
        msg = f"version is 1 to {_MAX_VERSION}, got {version!r}"
        raise ConfigError(msg)


def _check_fair(policy: Policy, queue: TableQueue | None) -> None:
    if policy.fair and queue is not None:
        msg = f"fair= is for jobs in the jobs table, the rows of {queue.table} have no tenants"
        raise ConfigError(msg)


def _check_guest(role: str, function: Callable[..., object] | None, takes: Sequence[str], *, is_async: bool) -> None:
    """Raise ConfigError for a function that could not take part in its kind's completions."""
    if function is None:
        return
    if inspect.iscoroutinefunction(function) != is_async:
        msg = f"handler and {role} must both be `async def` or both be `def`"
        raise ConfigError(msg)
    count = {2: "two", 3: "three"}[len(takes)]
    _check_call(f"{role} takes {count} arguments: {', '.join(takes)}", function, len(takes))


def _check_call(wanted: str, function: Callable[..., object], arguments: int) -> None:
    """Raise ConfigError now for a function that could not be called later."""
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError as error:
        msg = f"{wanted} ({error})"
        raise ConfigError(msg) from error


def _hints(handler: Handler) -> dict[str, object]:
    """The handler's annotations, evaluated, with the first parameter's under the empty name."""
    parameters = list(inspect.signature(handler).parameters.values())
    try:
        hints = typing.get_type_hints(handler)
    except (NameError, TypeError) as error:
        # A type that is not visible from the handler's module: it can be given as payload= instead.
        if parameters[0].annotation is inspect.Parameter.empty:
            return {}
        msg = f"cannot evaluate the handler's annotations ({error}); define the types at module level"
        raise ConfigError(msg) from error
    if parameters[0].name in hints:
        hints[""] = hints[parameters[0].name]
    return cast("dict[str, object]", hints)


def _result_codec(annotation: object, *, batch: bool) -> Codec | None:
    """The codec for what the handler says that it returns, apart from None and the instructions."""
    if batch and typing.get_origin(annotation) is list:
        (annotation,) = typing.get_args(annotation)
    elif batch:
        return None
    parts = typing.get_args(annotation) if typing.get_origin(annotation) in _UNIONS else (annotation,)
    values = [part for part in parts if part not in _NO_VALUES]
    if len(values) != 1 or values[0] in (object, Any):
        return None
    try:
        return codec_for(values[0])
    except ConfigError:  # no single type that JSON can give back: each value is judged by its own
        return None


def _payload_type(hints: dict[str, object], *, batch: bool) -> object:
    """T of `Job[T]`, or of `list[Job[T]]` for a batch; object when it is not said."""
    annotation = hints.get("", object)
    if annotation is object or annotation is Any:
        return object
    inner = annotation
    is_list = typing.get_origin(annotation) in (list, Sequence) or annotation is list
    if is_list:
        inner = (*typing.get_args(annotation), Job)[0]
    if is_list != batch:
        wanted = "list[Job[...]] (batch= was given)" if batch else "Job[...] (or give batch=)"
        msg = f"the handler's argument must be {wanted}"
        raise ConfigError(msg)
    if inner is Job:
        return object
    if typing.get_origin(inner) is not Job:
        msg = "the handler's argument must be annotated as Job[...] or list[Job[...]]"
        raise ConfigError(msg)
    return typing.get_args(inner)[0]
