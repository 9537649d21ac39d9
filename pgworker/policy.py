"""How a runner behaves: small frozen values, checked when they are made, and the presets made of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeAlias, TypedDict, cast, get_args

from pgworker.errors import ConfigError
from pgworker.retry import Backoff

STORE_TIMEOUT = timedelta(seconds=5)
"""The deadline of every statement a runner sends; the server's own statement_timeout lies a little below it."""

Facts: TypeAlias = Literal["all", "exceptional", "none"]
"""What of a job's history is kept: every step, what went otherwise than planned, or nothing."""

FACTS_KEPT = timedelta(days=30)
"""For how long the journal keeps a fact, of whatever kind: it is pruned from its beginning, as a whole."""

MAX_BATCH = 10_000
_LONGEST = timedelta(days=3650)  # past that, instants leave the range of the database's timestamps


def _check(*, holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _check_time(name: str, value: object) -> None:
    _check(holds=isinstance(value, timedelta), message=f"{name} must be a timedelta, got {value!r}")


@dataclass(frozen=True, slots=True)
class Lease:
    """For how long a claim owns its jobs, and how often that is renewed (None: it covers the whole run instead)."""

    ttl: timedelta
    heartbeat: timedelta | None

    def __post_init__(self) -> None:
        _check_time("a lease's ttl", self.ttl)
        _check(holds=timedelta(0) < self.ttl <= _LONGEST, message=f"a lease lasts more than nothing, got {self.ttl}")
        if self.heartbeat is not None:
            _check_time("a lease's heartbeat", self.heartbeat)
            _check(
                holds=timedelta(0) < self.heartbeat <= self.ttl / 3,
                message=f"a heartbeat must be at most a third of the lease ({self.ttl}), got {self.heartbeat}: "
                "two renewals may then fail without the lease being lost",
            )

    @classmethod
    def renew(cls, ttl: timedelta, heartbeat: timedelta | None = None) -> Lease:
        """A short lease that is renewed while the handler runs; the heartbeat is a third of it unless given."""
        _check_time("a lease's ttl", ttl)
        return cls(ttl, heartbeat if heartbeat is not None else ttl / 3)

    @classmethod
    def cover(cls, ttl: timedelta) -> Lease:
        """A lease that outlasts the handler's deadline and the writes after it, and is never renewed."""
        return cls(ttl, None)


@dataclass(frozen=True, slots=True)
class Stop:
    """What a stop does to running jobs: let them end (`drain`, at most for `grace`), or give them back (`release`)."""

    mode: Literal["drain", "release"] = "drain"
    grace: timedelta | None = None

    def __post_init__(self) -> None:
        _check(holds=self.mode in ("drain", "release"), message=f"on stop: drain or release, got {self.mode!r}")
        if self.grace is not None:
            _check_time("a stop's grace", self.grace)
        _check(holds=self.grace is None or self.grace >= timedelta(0), message="a grace is not negative")


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that a runner is told about its own behaviour. Zero, for a limit or a time, means the default."""

    concurrency: int = 10
    """Calls of the handler at the same time; a batch is one call."""
    batch: int = 64
    """Most jobs in one call of a batch handler; single handlers get one."""
    prefetch: int = 0
    """Most jobs that are claimed ahead of free slots: fewer claims for short jobs, but for long ones they had better be
    left to another worker."""
    window: timedelta = timedelta(seconds=0.25)
    """How long a batch handler's claim waits for more to come, unless the last one was full."""
    poll: timedelta = timedelta(seconds=1)
    """The longest an idle runner waits for a wake-up before it looks by itself."""
    timeout: timedelta | None = None
    """Deadline of one call; later values do not count (None: none)."""
    lease: Lease = Lease.renew(timedelta(seconds=15), timedelta(seconds=5))
    max_attempts: int | None = 10
    """Judged failures until the job ends as failed (None: no limit)."""
    max_evictions: int | None = 5
    """Lost workers until the job ends as failed (None: no limit)."""
    backoff: Backoff = field(default_factory=Backoff)
    stop: Stop = Stop("drain", timedelta(seconds=25))
    panic: Literal["retry", "permanent"] = "retry"
    """What a crash (an exception outside Exception, such as SystemExit) does to its jobs."""
    facts: Facts = "exceptional"
    """How much the journal keeps of these jobs."""
    weights: tuple[int, int] = (4, 1)
    """Rounds of claims in a row that prefer fresh jobs, then those that prefer catch-up; zero: only what is left."""
    singly: bool = False
    """Whether a batch call that fails as a whole is made again for each of its jobs alone."""
    fair: bool = False
    """Whether claims take an equal share of each tenant's jobs, rather than the oldest, whosever they are."""
    supersede: Literal["now", "wait"] = "now"
    """Whether a new revision may start at once, beside the run that it supersedes, or when that one's lease ends."""
    results: Literal["poll", "notify"] = "poll"
    """How those who wait for results learn of them: by looking once a second, or by a notification, too."""
    result_ttl: timedelta | None = None
    """For how long a result is kept, if for less time than `keep` says (None: as `keep` says)."""
    keep: timedelta | None = timedelta(days=7)
    """For how long what has succeeded or was cancelled is kept (None: for ever). Then an event goes with its result, of
    a keyed job the payload and the result."""
    keep_failed: timedelta | None = timedelta(days=30)
    """For how long a failed event is kept (None: for ever); a keyed job that has failed stays as it is."""

    def __post_init__(self) -> None:
        _check(
            holds=1 <= self.concurrency <= MAX_BATCH, message=f"concurrency: 1 to {MAX_BATCH}, got {self.concurrency}"
        )
        _check(holds=1 <= self.batch <= MAX_BATCH, message=f"batch is 1 to {MAX_BATCH}, got {self.batch}")
        _check(holds=0 <= self.prefetch <= MAX_BATCH, message=f"prefetch is 0 to {MAX_BATCH}, got {self.prefetch}")
        _check(holds=timedelta(0) <= self.window <= _LONGEST, message=f"window must not be negative, got {self.window}")
        _check(holds=timedelta(0) < self.poll <= _LONGEST, message=f"poll must be positive, got {self.poll}")
        _check(
            holds=self.timeout is None or timedelta(0) < self.timeout <= _LONGEST,
            message=f"timeout must be positive, got {self.timeout}",
        )
        for name in ("result_ttl", "keep", "keep_failed"):
            time = getattr(self, name)
            _check(
                holds=time is None or timedelta(0) < time <= _LONGEST, message=f"{name} must be positive, got {time}"
            )
        for name, limit in (("max_attempts", self.max_attempts), ("max_evictions", self.max_evictions)):
            _check(holds=limit is None or limit >= 1, message=f"{name} must be at least 1 or None, got {limit}")
        _check(
            holds=not (self.prefetch and self.max_evictions == 1),
            message="prefetch needs a max_evictions of 2 or more: a lost worker evicts what it has claimed ahead, too",
        )
        for name, choices in _CHOICES.items():
            chosen = getattr(self, name)
            _check(holds=chosen in choices, message=f"{name} is one of {', '.join(choices)}, got {chosen!r}")
        _check_weights(self.weights)
        if self.lease.heartbeat is None:
            needed = covering_ttl(self.timeout, self.batch, singly=self.singly, prefetch=self.prefetch)
            _check(
                holds=self.lease.ttl >= needed,
                message=f"a lease without renewal must cover the handler and its writes: at least "
                f"{needed.total_seconds():g} s, got {self.lease.ttl.total_seconds():g} s",
            )


_CHOICES: dict[str, tuple[str, ...]] = {
    "panic": ("retry", "permanent"),
    "facts": get_args(Facts),
    "supersede": ("now", "wait"),
    "results": ("poll", "notify"),
}


def _check_weights(weights: object) -> None:
    """Raise ConfigError for anything but two counts of rounds of which one at least is positive."""
    match weights:
        case (int(fresh), int(catch_up)) if isinstance(weights, tuple):
            fits = 0 <= fresh <= MAX_BATCH and 0 <= catch_up <= MAX_BATCH and fresh + catch_up > 0
        case _:
            fits = False
    _check(
        holds=fits,
        message=f"weights are two numbers of rounds from 0 to {MAX_BATCH}, fresh then catch-up, such as (4, 1), "
        f"got {weights!r}",
    )


def covering_ttl(timeout: timedelta | None, batch: int, *, singly: bool = False, prefetch: int = 0) -> timedelta:
    """The shortest lease that covers a call: its deadline, then two statements a job, the claim and the clean-up.

    With `singly` the call may be followed by one for each job, each with a deadline of its own. With `prefetch` it may
    begin when only half of the lease is left.
    """
    if timeout is None:
        msg = "a lease without renewal needs a timeout to cover"
        raise ConfigError(msg)
    try:
        whole = timeout * (1 + batch if singly else 1) + (2 * batch + 2) * STORE_TIMEOUT
        return 2 * whole if prefetch else whole
    except OverflowError as error:
        msg = f"a timeout of {timeout} and a batch of {batch} are too much to cover"
        raise ConfigError(msg) from error


def _content() -> Policy:
    timeout = timedelta(minutes=2)
    return Policy(
        concurrency=2,
        batch=64,
        timeout=timeout,
        lease=Lease.cover(covering_ttl(timeout, 64)),
        max_attempts=3,
        backoff=Backoff(cap=timedelta(minutes=1), jitter="additive"),
        stop=Stop("release"),
        panic="permanent",
        facts="none",
    )


def _pool() -> Policy:
    return Policy(
        concurrency=2,
        timeout=timedelta(minutes=10),
        lease=Lease.renew(timedelta(minutes=2), timedelta(seconds=30)),
        max_attempts=3,
        backoff=Backoff(base=timedelta(seconds=2), cap=timedelta(minutes=5), jitter="none"),
        stop=Stop("drain"),
        facts="all",
    )


def _simple() -> Policy:
    return Policy(
        concurrency=5,
        poll=timedelta(seconds=10),
        lease=Lease.renew(timedelta(minutes=5)),
        stop=Stop("drain"),
        facts="none",
    )


def _dispatch() -> Policy:
    return Policy(
        lease=Lease.renew(timedelta(seconds=30), timedelta(seconds=10)),
        backoff=Backoff(cap=timedelta(minutes=1), jitter="full"),
        stop=Stop("drain", timedelta(seconds=30)),
        facts="all",
    )


PRESETS: dict[str, Policy] = {
    "standard": Policy(),  # the default: short renewed leases, ten calls at a time, retries over half an hour and more
    "content": _content(),  # derived content kept fresh: batches, a covering lease, release on stop
    "pool": _pool(),  # long, costly work: two at a time, two-minute leases, drain however long it takes
    "simple": _simple(),  # a plain poller
    "dispatch": _dispatch(),  # many short tasks: thirty-second leases, full jitter
}
"""Named policies. A preset is a starting point: each option of a kind overrides its own part."""


class PolicyOptions(TypedDict, total=False):
    """The parts of a policy that a kind may give, numbers for times as seconds; None or zero leaves the preset's."""

    concurrency: int
    batch: int
    prefetch: int
    window: timedelta | float
    poll: timedelta | float
    timeout: timedelta | float | None
    lease: Lease | None
    max_attempts: int | None
    max_evictions: int | None
    backoff: Backoff | None
    stop: Stop | None
    panic: Literal["retry", "permanent"]
    facts: Facts
    weights: tuple[int, int]
    singly: bool
    fair: bool
    supersede: Literal["now", "wait"]
    results: Literal["poll", "notify"]
    result_ttl: timedelta | float | None
    keep: timedelta | float | None
    keep_failed: timedelta | float | None


UNLIMITED = -1
"""For what may have no limit at all (None and zero mean the preset's)."""
_MAY_BE_UNLIMITED = frozenset({"max_attempts", "max_evictions", "keep", "keep_failed"})

_COUNT, _LIMIT = f"a whole number up to {MAX_BATCH}", "a whole number, or -1 for no limit"
_TIME, _KEPT = "seconds or a timedelta", "seconds, a timedelta, or -1 for ever"
_TAKES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("concurrency", "batch", "prefetch"), ((int,), _COUNT)),
    **dict.fromkeys(("max_attempts", "max_evictions"), ((int,), _LIMIT)),
    **dict.fromkeys(("window", "poll", "timeout", "result_ttl"), ((timedelta, int, float), _TIME)),
    **dict.fromkeys(("keep", "keep_failed"), ((timedelta, int, float), _KEPT)),
    **dict.fromkeys(("singly", "fair"), ((bool,), "True or False")),
    "lease": ((Lease,), "a Lease"),
    "backoff": ((Backoff,), "a Backoff"),
    "stop": ((Stop,), "a Stop"),
    **{name: ((str,), f"one of {', '.join(choices)}") for name, choices in _CHOICES.items()},
    "weights": ((tuple,), "two numbers of rounds, such as (4, 1)"),
}
"""The types of each option, and how they are told."""


def make_policy(preset: str, options: PolicyOptions) -> Policy:
    """The preset with the options that were given; a covering lease that was not given grows with timeout and batch."""
    if preset not in tuple(PRESETS):
        msg = f"no preset {preset!r}; there are {', '.join(sorted(PRESETS))}"
        raise ConfigError(msg)
    base = PRESETS[preset]
    read = {name: _read(name, value) for name, value in options.items() if value is not None}
    given = {
        name: None if value == UNLIMITED else value
        for name, value in read.items()
        if value or name == "window"  # no window at all is a fair wish; no limit of zero is not
    }
    if base.lease.heartbeat is None and "lease" not in given:
        timeout = cast("timedelta | None", given.get("timeout", base.timeout))
        batch = cast("int", given.get("batch", base.batch))
        needed = covering_ttl(
            timeout, batch, singly=bool(given.get("singly")), prefetch=cast("int", given.get("prefetch", 0))
        )
        given["lease"] = Lease.cover(max(base.lease.ttl, needed))
    return replace(base, **cast("Any", given))


def _read(name: str, value: object) -> object:
    """An option as a policy has it: seconds are a time. Raises ConfigError for what the option does not take."""
    types, takes = _TAKES[name]
    fits = isinstance(value, types) and (types == (bool,) or not isinstance(value, bool))
    if fits and value == UNLIMITED and name in _MAY_BE_UNLIMITED:
        return UNLIMITED
    read = value
    if timedelta in types and isinstance(value, (int, float)):
        try:
            read = timedelta(seconds=value)
        except (ValueError, OverflowError):  # no number, or one that is no time
            fits = False
    if fits and isinstance(read, timedelta):
        fits = timedelta(0) <= read <= _LONGEST
        takes = f"{takes} (at most {_LONGEST.days} days)"
    elif fits and isinstance(read, int):
        fits = read >= 0
    _check(holds=fits, message=f"{name}: {takes}; got {value!r}")
    return read
