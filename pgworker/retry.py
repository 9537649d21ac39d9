"""How long a failed job waits before it runs again: pure functions of the failures so far."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias, cast

from pgworker.errors import ConfigError

_LONGEST = timedelta(days=3650)  # past that, instants leave the range of the database's timestamps

Jitter: TypeAlias = Literal["none", "additive", "symmetric", "full"]


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential delays, `base` doubling up to `cap`, spread by a jitter so that failures do not return as one herd.

    The jitter is `none`; `additive`: up to `spread` on top; `symmetric`: up to `spread` either way; `full`: anywhere
    between zero and the delay. The cap holds after the jitter.
    """

    base: timedelta = timedelta(seconds=1)
    cap: timedelta = timedelta(minutes=10)
    jitter: Jitter = "symmetric"
    spread: float = 0.2

    def __post_init__(self) -> None:
        for name, value in (("base", self.base), ("cap", self.cap)):
            if not isinstance(cast("object", value), timedelta):
                msg = f"backoff {name} must be a timedelta, got {value!r}"
                raise ConfigError(msg)
        if not timedelta(0) < self.base <= self.cap <= _LONGEST:
            msg = f"backoff needs 0 < base <= cap <= {_LONGEST.days} days, got base={self.base} cap={self.cap}"
            raise ConfigError(msg)
        if not 0 <= self.spread <= 1:
            msg = f"backoff spread is a share from 0 to 1, got {self.spread}"
            raise ConfigError(msg)

    def delay(self, failures: int, *, chance: float) -> timedelta:
        """The wait after the `failures`-th judged failure (the first is 1); `chance` is uniform in [0, 1)."""
        doublings = min(max(failures, 1) - 1, 62)  # past that the power leaves the range of a timedelta
        cap = self.cap.total_seconds()
        plain = min(self.base.total_seconds() * 2.0**doublings, cap)
        match self.jitter:
            case "none":
                seconds = plain
            case "additive":
                seconds = plain * (1 + self.spread * chance)
            case "symmetric":
                seconds = plain * (1 + self.spread * (2 * chance - 1))
            case "full":
                seconds = plain * chance
        return timedelta(seconds=min(seconds, cap))
