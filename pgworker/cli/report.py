"""What `pgworker status` knows: counts and runners as they are shown, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from pgworker.cli.output import age
from pgworker.operations import KindCount, KindPause, Lag
from pgworker.presence import Presence

STALE_SECONDS = 10.0  # a report missed, and those that should have made up for it

_PENDING = ("ready", "running", "scheduled", "expired")
_ENDED = ("succeeded", "failed", "cancelled")
_OUTCOMES = ("succeeded", "retried", "failed", "parked", "cancelled", "released", "superseded")


@dataclass(frozen=True, slots=True)
class KindRow:
    """The jobs of one kind, by derived state."""

    kind: str
    counts: dict[str, int]
    at_least: list[str]
    """The states whose count is a lower bound: there were more rows than are counted."""
    oldest_ready_seconds: float | None


@dataclass(frozen=True, slots=True)
class RunnerRow:
    """A runner as it last reported itself."""

    runner: str
    kind: str
    release: str
    stale: bool
    silent_seconds: float
    up_seconds: float
    lifecycle: str
    in_flight: int
    outcomes: dict[str, int]
    last_error: str | None
    last_success_at: str | None


@dataclass(frozen=True, slots=True)
class PauseRow:
    """A kind that is paused; instants are ISO texts, `until` is None where it waits to be resumed."""

    kind: str
    since: str
    until: str | None
    code: str


@dataclass(frozen=True, slots=True)
class Report:
    """All that `status` shows."""

    database: str
    schema: str
    kinds: list[KindRow]
    lag: list[Lag]
    pauses: list[PauseRow]
    runners: list[RunnerRow]
    findings: list[str]


class _Reported(msgspec.Struct):
    """What a runner of any release may have written about itself."""

    lifecycle: str = "unknown"
    in_flight: int = 0
    succeeded: int = 0
    retried: int = 0
    failed: int = 0
    parked: int = 0
    cancelled: int = 0
    released: int = 0
    superseded: int = 0
    last_error: str | None = None
    last_success_at: str | None = None


def make_report(
    database: str,
    schema: str,
    counts: Sequence[KindCount],
    presences: Sequence[Presence],
    *,
    bound: int,
    kinds: Sequence[str],
    lag: Sequence[Lag] = (),
    pauses: Sequence[KindPause] = (),
) -> Report:
    """Put together what the database answered, for these kinds, or for all when none are named."""

    def shown(kind: str) -> bool:
        return not kinds or kind in kinds

    waiting = [each for each in lag if shown(each.kind)]
    paused = [pause_row(each) for each in pauses if shown(each.kind)]
    names = sorted({count.kind for count in counts if shown(count.kind)})
    rows = [_kind_row(name, counts, waiting, bound) for name in names]
    runners = [_runner_row(presence) for presence in presences if shown(presence.kind)]
    return Report(database, schema, rows, waiting, paused, runners, list(_findings(rows, runners, kinds)))


def _kind_row(name: str, counts: Sequence[KindCount], lag: Sequence[Lag], bound: int) -> KindRow:
    found = {state: number for kind, state, number, _ in counts if kind == name}
    by_state = dict.fromkeys((*_PENDING, *_ENDED), 0) | found
    at_least = [state for state in _ENDED if by_state[state] >= bound]
    if sum(by_state[state] for state in _PENDING) >= bound:  # one bound for all of them
        at_least = [*_PENDING, *at_least]
    ages = [each.oldest_seconds for each in lag if each.kind == name and each.oldest_seconds is not None]
    return KindRow(name, by_state, at_least, max(ages, default=None))


def pause_row(pause: KindPause) -> PauseRow:
    """A pause as it is shown."""
    until = None if pause.until is None else _instant(pause.until)
    return PauseRow(pause.kind, _instant(pause.since), until, pause.code)


def tell_pause(pause: PauseRow) -> str:
    """A pause in one line, with its code if somebody gave it one."""
    why = "" if pause.code in {"", "paused"} else f" ({pause.code})"
    return f"paused {pause.kind} until {pause.until or 'it is resumed'}{why}"


def _instant(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _runner_row(presence: Presence) -> RunnerRow:
    try:
        reported = msgspec.json.decode(presence.status, type=_Reported)
    except msgspec.DecodeError:  # another release's idea of a status: the runner is there all the same
        reported = _Reported()
    return RunnerRow(
        runner=presence.runner,
        kind=presence.kind,
        release=presence.release,
        stale=presence.silent_seconds > STALE_SECONDS,
        silent_seconds=round(presence.silent_seconds, 1),
        up_seconds=round(presence.up_seconds, 1),
        lifecycle=reported.lifecycle,
        in_flight=reported.in_flight,
        outcomes={name: getattr(reported, name) for name in _OUTCOMES},
        last_error=reported.last_error,
        last_success_at=reported.last_success_at,
    )


def _findings(rows: Sequence[KindRow], runners: Sequence[RunnerRow], asked: Sequence[str]) -> Iterable[str]:
    """Kinds without a live runner that should have one: those asked for, those with work, those whose runners died."""
    waiting = {row.kind: row.counts["ready"] + row.counts["expired"] for row in rows}
    bounded = {row.kind for row in rows if "ready" in row.at_least}
    last = {row.kind: row for row in sorted(runners, key=lambda row: -row.silent_seconds)}
    for kind in sorted({*asked, *last, *(kind for kind, count in waiting.items() if count)}):
        heard = last.get(kind)
        if heard is not None and not heard.stale:
            continue
        finding = f"kind {kind} has no live runner"
        if heard is not None:
            finding += f", the last was heard of {age(heard.silent_seconds)} ago ({heard.runner})"
        if jobs := waiting.get(kind):
            more = " or more" if kind in bounded else ""
            finding += f"; {jobs:,}{more} of its jobs {'waits' if jobs == 1 else 'wait'}"
        yield finding
