"""What an operator asks of jobs that are there already, as flows of statements that the app drives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeAlias

from pgworker.db import Flow
from pgworker.errors import ConfigError, PayloadError, PayloadPruned, PgworkerError
from pgworker.job import State
from pgworker.kind import Kind
from pgworker.operations import (
    BEGINNING,
    Deed,
    Found,
    cancel_jobs,
    find_job,
    forget_job,
    list_ended,
    list_pending,
    pause_kind,
    reopen_jobs,
    wait_briefly,
)
from pgworker.outcome import Pause
from pgworker.payload import check_key
from pgworker.statements import FACTS, Due, Lane, Statement, survey_lanes
from pgworker.tablemap import TableMap

Progress: TypeAlias = Callable[[int], object]
"""Told of each statement that changed something: the count so far."""
_Hint: TypeAlias = Callable[[], object]

PAGE: Final = 500
"""The most jobs that one statement reads or changes."""

_WAITS_SECONDS: Final = (0.02, 0.04, 0.08, 0.16, 0.32)  # between the rounds for rows that somebody holds
_START: Final = Found(BEGINNING[1], BEGINNING[0], wanted=False)
_RETRIED: Final[tuple[State, ...]] = ("failed", "cancelled")
_REBUILT: Final[tuple[State, ...]] = ("succeeded", *_RETRIED)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which jobs of a kind a verb is for: one key's, those with a code, or all; at most `limit`.

    Raises ConfigError unless exactly one of the three is given; `takes_code` says whether a code is among the choices.
    """

    key: str | None = None
    code: str | None = None
    everything: bool = False
    limit: int | None = None
    takes_code: bool = False

    def __post_init__(self) -> None:
        given = (self.key is not None) + (self.code is not None) + bool(self.everything)
        if given != 1:
            names = "key=, code= and all=True" if self.takes_code else "key= and all=True"
            raise ConfigError(f"say which jobs: give exactly one of {names}, not {given} of them")
        if self.key is not None:
            _check_key(self.key)
        if self.limit is not None and (self.limit < 1 or isinstance(self.limit, bool)):
            raise ConfigError(f"limit is at least 1, got {self.limit}")


@dataclass
class _Tally:
    """What has become of the jobs so far."""

    write: Callable[[Sequence[int]], Statement[dict[int, Deed]]]
    limit: int | None
    progress: Progress | None
    tell: _Hint
    told_by: Deed
    done: int = 0
    busy: list[int] = field(default_factory=list[int])
    pruned: int = 0

    @property
    def room(self) -> int:
        """How many more may be changed now."""
        return PAGE if self.limit is None else min(PAGE, self.limit - self.done)

    def take(self, ids: Sequence[int]) -> Flow[None]:
        """Change these, and note what became of them."""
        if not ids:
            return
        deeds: dict[int, Deed] = yield self.write(ids)
        self.busy += [each for each, deed in deeds.items() if deed == "busy"]
        self.pruned += sum(deed == "pruned" for deed in deeds.values())
        done = sum(deed in ("done", "requested") for deed in deeds.values())
        if done:
            self.done += done
            if self.told_by in deeds.values():
                self.tell()
            if self.progress is not None:
                self.progress(self.done)

    def walk(self, read: Callable[[Found], Statement[list[Found]]], until: str | None = None) -> Flow[str | None]:
        """Change the wanted jobs of a list, within the limit; `read` gives the page after a job.

        Returns the end of the list, for the next one to have the same: what is reopened may end again, in any state.
        """
        last = _START._replace(until=until)
        while self.room:
            page: list[Found] = yield read(last)
            ids: list[int] = []
            for last in page:
                ids += [last.id] if last.wanted else []
                if len(ids) == self.room:
                    break
            yield from self.take(ids)
            if not page or (len(page) < PAGE and last is page[-1]):
                break
        return last.until

    def try_again(self, tables: TableMap) -> Flow[None]:
        """Ask for what was held by somebody, a few times over, for a little more than half a second in all."""
        for seconds in _WAITS_SECONDS:
            if not self.busy or not self.room:
                return
            yield wait_briefly(tables, seconds)
            again, self.busy = self.busy, []
            while again and self.room:
                ids, again = again[: self.room], again[self.room :]
                yield from self.take(ids)


def reopen(
    tables: TableMap, kind: Kind, chosen: Selection, *, rebuild: bool, progress: Progress | None, ready: _Hint
) -> Flow[int]:
    """Put failed and cancelled jobs back to work, with `rebuild` succeeded ones, too; how many."""
    states, what = (_REBUILT, "rebuild_requested") if rebuild else (_RETRIED, "retry_requested")

    def write(ids: Sequence[int]) -> Statement[dict[int, Deed]]:
        return reopen_jobs(
            tables, kind.name, ids, states=states, what=what, code=chosen.code, facts=FACTS[kind.policy.facts]
        )

    tally = _Tally(write, chosen.limit, progress, ready, "done")
    if chosen.key is not None:
        yield from tally.take((yield find_job(tables, kind.name, chosen.key)))
    else:
        until: str | None = None
        for state in states:
            until = yield from tally.walk(partial(_list_ended, tables, kind.name, state, chosen.code), until)
    yield from tally.try_again(tables)
    verb = "rebuilt" if rebuild else "retried"
    if tally.pruned:
        raise PayloadPruned(
            f"{_jobs(tally.pruned)} of kind {kind.name!r} cannot be {verb}, the payload has been pruned"
            f"{_rest(tally.done, verb)}: enqueue with a payload and another revision, or forget the job first"
        )
    return _all_done(tally, kind, verb)


def _list_ended(tables: TableMap, kind: str, state: State, code: str | None, last: Found) -> Statement[list[Found]]:
    """Of the jobs that had ended in this state when the walk began; they may end again during it."""
    return list_ended(tables, kind, state, after=last.cursor, until=last.until, code=code, limit=PAGE)


def _list_pending(tables: TableMap, lane: Lane, last: Found) -> Statement[list[Found]]:
    return list_pending(tables, lane, after=last.cursor, limit=PAGE)


def cancel(tables: TableMap, kind: Kind, chosen: Selection, *, progress: Progress | None, control: _Hint) -> Flow[int]:
    """Cancel pending jobs, those that run by a request; how many."""

    def write(ids: Sequence[int]) -> Statement[dict[int, Deed]]:
        return cancel_jobs(tables, kind.name, ids, facts=FACTS[kind.policy.facts])

    tally = _Tally(write, chosen.limit, progress, control, "requested")
    if chosen.key is not None:
        yield from tally.take((yield find_job(tables, kind.name, chosen.key)))
    else:
        lanes: list[Due] = yield survey_lanes(tables, [kind.name])
        for due in lanes:
            yield from tally.walk(partial(_list_pending, tables, due.lane))
    yield from tally.try_again(tables)
    return _all_done(tally, kind, "cancelled")


def forget(tables: TableMap, kind: Kind, key: str, *, control: _Hint) -> Flow[bool]:
    """Delete one key's job and result; whether there was any."""
    _check_key(key)
    for seconds in (*_WAITS_SECONDS, None):
        deed: Deed = yield forget_job(tables, kind.name, key, facts=FACTS[kind.policy.facts])
        if deed == "requested":
            control()
        if deed != "busy":
            return deed != "passed"
        if seconds is not None:
            yield wait_briefly(tables, seconds)
    raise PgworkerError(f"this key's row of kind {kind.name!r} is held by another transaction: try again later")


def pause(
    tables: TableMap, kind: str, *, until: datetime | None, for_: timedelta | float | None, code: str
) -> Flow[None]:
    """Pause a kind: until an instant, for a time, or (without either) until it is resumed. Raises ConfigError."""
    if until is not None and for_ is not None:
        raise ConfigError("give until= or for_=, not both; without either the pause lasts until app.resume()")
    if until is not None and until.tzinfo is None:
        raise ConfigError("until needs a time zone: datetime.now(UTC), not datetime.now()")
    checked = Pause(for_ if for_ is not None else 0, code)
    seconds = checked.for_.total_seconds() if isinstance(checked.for_, timedelta) else checked.for_
    yield pause_kind(tables, kind, None if for_ is None else seconds, checked.code, until=until)


def _all_done(tally: _Tally, kind: Kind, verb: str) -> int:
    if tally.busy and tally.room:
        raise PgworkerError(
            f"{_jobs(len(tally.busy))} of kind {kind.name!r} {_held(len(tally.busy))}"
            f"{_rest(tally.done, verb)}: try again later"
        )
    return tally.done


def _check_key(key: str) -> None:
    try:
        check_key(key)
    except PayloadError as error:
        raise ConfigError(f"no job has such a key: it {error.reason}") from None


def _held(count: int) -> str:
    if count == 1:
        return "is held by another transaction and was left as it is"
    return "are held by other transactions and were left as they are"


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"


def _rest(done: int, verb: str) -> str:
    return f" ({_jobs(done)} {'was' if done == 1 else 'were'} {verb})" if done else ""
