"""What a run produced, what the table shall say of it, and the one function between the two.

`decide` is pure: no clock, no randomness of its own, no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from types import NoneType
from typing import Literal, NamedTuple, TypeAlias, assert_never, cast

from pgworker.errors import ConfigError
from pgworker.retry import Backoff

# The closed list of codes that pgworker itself writes. Handlers add their own by Retry, Permanent and so on.
HANDLER_FAILED = "handler_failed"
HANDLER_PANIC = "handler_panic"
HANDLER_TIMEOUT = "handler_timeout"
HANDLER_RESULT_COUNT = "handler_result_count"
PAYLOAD_INVALID = "payload_invalid"
RESULT_REJECTED = "result_rejected"
EVICTED_TOO_OFTEN = "evicted_too_often"
NOT_ELIGIBLE = "not_eligible"
QUEUE_CLAIM_FAILED = "queue_claim_failed"
QUEUE_COMPLETE_FAILED = "queue_complete_failed"
QUEUE_RETRY_FAILED = "queue_retry_failed"
QUEUE_RELEASE_FAILED = "queue_release_failed"
QUEUE_PAUSE_FAILED = "queue_pause_failed"
QUEUE_WRITE_REFUSED = "queue_write_refused"
QUEUE_INVALID_CLAIM = "queue_invalid_claim"
QUEUE_BATCH_LIMIT_EXCEEDED = "queue_batch_limit_exceeded"

_MAX_CODE_LENGTH = 63
_MAX_ERROR_LENGTH = 200
_LONGEST = timedelta(days=3650)  # past that, instants leave the range of the database's timestamps


def _checked(code: str, default: str) -> str:
    """A code that is safe to store: short, printable, one word; a blank one becomes the default."""
    code = code.strip() or default
    if len(code) > _MAX_CODE_LENGTH or not code.isascii() or not code.isprintable() or " " in code:
        msg = f"a code is one printable ASCII word of at most {_MAX_CODE_LENGTH} characters (it is stored and shown)"
        raise ConfigError(msg)
    return code


def _shown(text: str) -> str:
    """A text that can be stored and fits a line, whatever an app has called its classes and its fields."""
    return (text if text.isprintable() else ascii(text)[1:-1])[:_MAX_ERROR_LENGTH]


def _wait(name: str, wait: object) -> timedelta:
    """A wait that the table can keep; a number is seconds. Refuses any other in the handler, not in the runner."""
    if isinstance(wait, (int, float)) and not isinstance(wait, bool) and abs(wait) <= _LONGEST.total_seconds():
        wait = timedelta(seconds=wait)
    if not isinstance(wait, timedelta) or not timedelta(0) <= wait <= _LONGEST:
        msg = f"{name} must be a timedelta (or seconds) from 0 to {_LONGEST.days} days, got {wait!r}"
        raise ConfigError(msg)
    return wait


# --- What a handler may return instead of a value -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Retry:
    """A judged failure that is tried again: after the kind's backoff, or `after` at least if that is longer."""

    after: timedelta | float | None = None
    code: str = HANDLER_FAILED

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", _checked(self.code, HANDLER_FAILED))
        if self.after is not None:
            object.__setattr__(self, "after", _wait("after", self.after))


@dataclass(frozen=True, slots=True)
class Permanent:
    """A failure that no repetition will mend: the job ends as failed at once."""

    code: str = HANDLER_FAILED

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", _checked(self.code, HANDLER_FAILED))


@dataclass(frozen=True, slots=True)
class Park:
    """Not now, and not the job's fault: it waits for `delay` and no attempt is counted."""

    code: str
    delay: timedelta | float

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", _checked(self.code, "parked"))
        object.__setattr__(self, "delay", _wait("delay", self.delay))


@dataclass(frozen=True, slots=True)
class Pause:
    """What the kind depends on is down: the job waits, and this runner claims nothing for as long.

    `shared` pauses the kind for every worker, through the database, until the time is up or somebody resumes it.
    """

    for_: timedelta | float
    code: str = "paused"
    shared: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", _checked(self.code, "paused"))
        object.__setattr__(self, "for_", _wait("for_", self.for_))


@dataclass(frozen=True, slots=True)
class Cancel:
    """The work is no longer wanted: the job ends as cancelled."""

    reason: str = "cancelled"

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", _checked(self.reason, "cancelled"))


Instruction: TypeAlias = Retry | Permanent | Park | Pause | Cancel


# --- What a run produced --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Returned:
    """The handler returned a value: its JSON text (None for no value), and itself for the app's own writes."""

    value: str | None
    itself: object = None


NOTHING = Returned(None)


@dataclass(frozen=True, slots=True)
class Failed:
    """The run ended without a value: a code, and the class name of the exception if there was one."""

    code: str
    error_class: str | None = None
    permanent: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", _checked(self.code, HANDLER_FAILED))
        if self.error_class is not None:
            object.__setattr__(self, "error_class", _shown(self.error_class))

    @property
    def is_cancelled(self) -> bool:
        """Whether the call was cancelled, and not by us."""
        return self.error_class == "CancelledError"


@dataclass(frozen=True, slots=True)
class Released:
    """The run was cut short by a stop and is given back as if it had not been claimed."""


Result: TypeAlias = Returned | Failed | Released | Retry | Permanent | Park | Pause | Cancel


def is_result(value: object) -> bool:
    """Whether a middleware has given back something that can be judged and stored."""
    if isinstance(value, Returned):
        return isinstance(cast("object", value.value), (str, NoneType))
    return isinstance(value, (Failed, Released, Retry, Permanent, Park, Pause, Cancel))


# --- What the table shall say ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Success:
    """The job succeeded; `value` is stored as its result, None stores none."""

    value: str | None


@dataclass(frozen=True, slots=True)
class Settlement:
    """The job did not succeed (yet): its new state, the wait until it is ready again, and whether an attempt counts.

    `delay_seconds` None leaves ready_at as it is. The pause is for the runner, or for all of the kind, not for the row.
    """

    state: Literal["pending", "failed", "cancelled"]
    code: str | None
    counts: bool = False
    delay_seconds: float | None = None
    pause_seconds: float | None = None
    error_class: str | None = None
    pause_shared: bool = False


Decision: TypeAlias = Success | Settlement
_NO_VALUE = Success(None)


class Rules(NamedTuple):
    """What `decide` must know of the job: judged failures before this run, their limit, and the kind's backoff."""

    attempts: int
    max_attempts: int | None
    backoff: Backoff


def decide(result: Result, rules: Rules, *, chance: float) -> Decision:
    """What the table shall say after this run; `chance`, uniform in [0, 1), is the backoff's jitter."""
    match result:
        case Returned(value, _):
            return _NO_VALUE if value is None else Success(value)
        case Failed(code, error_class, permanent):
            if permanent:
                return Settlement("failed", code, counts=True, error_class=error_class)
            return _failure(code, rules, chance, error_class=error_class)
        case Retry(after, code):
            return _failure(code, rules, chance, after=cast("timedelta | None", after))
        case Permanent(code):
            return Settlement("failed", code, counts=True)
        case Park(code, delay):
            return Settlement("pending", code, delay_seconds=_wait("delay", delay).total_seconds())
        case Pause(for_, code, shared):
            seconds = _wait("for_", for_).total_seconds()
            return Settlement("pending", code, delay_seconds=seconds, pause_seconds=seconds, pause_shared=shared)
        case Cancel(reason):
            return Settlement("cancelled", reason)
        case Released():
            return Settlement("pending", None)
        case _:
            assert_never(result)


def _failure(
    code: str, rules: Rules, chance: float, *, after: timedelta | None = None, error_class: str | None = None
) -> Settlement:
    """A judged failure: again after the backoff, or failed for good when that was the last attempt allowed."""
    failures = rules.attempts + 1
    if rules.max_attempts is not None and failures >= rules.max_attempts:
        return Settlement("failed", code, counts=True, error_class=error_class)
    delay = rules.backoff.delay(failures, chance=chance)
    seconds = max(delay, after or delay).total_seconds()
    return Settlement("pending", code, counts=True, delay_seconds=seconds, error_class=error_class)
