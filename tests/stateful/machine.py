"""The state machine: every statement that moves a job, sent by two runners, an app and an operator, one at a time.

Nothing here waits. Leases last an hour and end when a rule says so; what the database decides by its clock is therefore
the same in each run of an example.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from pgworker import operations
from pgworker import statements as sql
from pgworker.job import State
from pgworker.operations import Deed
from tests.stateful.bench import KEY, KEYS, LATER, SHORT
from tests.stateful.enqueues import LONG_AGO, Asked, Enqueues
from tests.stateful.rows import Differs, Lane, at
from tests.stateful.runs import Runs
from tests.stateful.steps import Step, step, steps_of
from tests.stateful.table import Level
from tests.stateful.tally import STATES

MORE = st.sampled_from(("", "evicted", "outdated"))
"""What has happened to a run: it was another's that died; its payload has been replaced."""
ARRANGED = st.tuples(
    st.sampled_from(("absent", *STATES)), st.sampled_from((None, "r1")), MORE, st.sampled_from((False, False, True)),
    st.booleans(),
)  # fmt: skip
"""State, revision, what has happened to the run, whether there is an older result, whether it is an event."""

ENDED: tuple[State, ...] = ("succeeded", "failed", "cancelled")

_AGE = """
update pgworker.jobs set ready_at = ready_at - %(by)s, lease_expires_at = lease_expires_at - %(by)s,
    not_before = not_before - %(by)s,
    created_at = created_at - %(by)s, finished_at = finished_at - %(by)s where kind = %(kind)s"""
_SET_BACK = (
    "update pgworker.jobs set lease_expires_at = lease_expires_at + interval '24 hours'"
    " where kind = %s and key = %s and token is not null"
)
_EXPIRE = (
    "update pgworker.jobs set lease_expires_at = clock_timestamp() where kind = %s and key = %s and token is not null"
)


class JobsMachine(Enqueues, Runs):
    """Jobs of one kind with three keys; here, what operators do, and time."""

    # --- arrangements -------------------------------------------------------------------------------------------------

    @initialize(
        level=st.sampled_from(("all", "all", "all", "exceptional", "none")), first=st.tuples(*[ARRANGED] * len(KEYS))
    )
    def begin(self, level: Level, first: tuple[tuple[str, str | None, str, bool, bool], ...]) -> None:
        """Some jobs are there already."""
        self.model.level = level
        for key, (state, revision, more, before, event) in zip(KEYS, first, strict=True):
            if before:
                self.arrange(key, "succeeded", "r0", more="", event=False)
            self.arrange(key, state, revision, more=more, event=event)

    @step(
        2,
        key=KEY,
        state=st.sampled_from(("absent", *STATES)),
        revision=st.sampled_from((None, "r1", "new")),
        more=MORE,
        event=st.booleans(),
    )
    def arrange(self, key: str, state: str, revision: str | None, *, more: str, event: bool) -> None:
        """Bring a job into a state that chance alone would seldom bring about."""
        key = self.key(key)
        row = self.model.rows.get(key)
        revision = f"s{next(self.payloads)}" if revision == "new" else revision
        # (one that is to wait for the end of a lease cannot be brought to run)
        if row is not None and (state == "absent" or row.revision == (revision or "") or row.not_before is not None):
            self._do(self.delete, key)
        if state == "absent":
            return
        event = event and state != "pruned"  # it would be deleted
        arranged: Asked = (key, revision, "later" if state == "scheduled" else "now", 1, event)
        options = {"keep": False, "wait": False, "priority": 1, "max_attempts": None, "version": 1}
        self._do(self.enqueue, arranged, "statement", **options)
        if state in {"ready", "scheduled"}:
            return
        self._do(self.pause, "resumed")
        row = self.model.rows[key]
        lane = Lane(row.urgency, row.priority)
        self._do(self.claim_from, "A", lane, limit=10, ttl=SHORT, evictions=None, version=2)
        if more == "evicted":
            self._do(self.expire, key)
            self._do(self.claim_from, "A", lane, limit=10, ttl=SHORT, evictions=None, version=2)
        elif more == "outdated" and revision is None:
            self._do(self.enqueue, arranged, "statement", **options)
        self._bring(key, state, more=more)

    def _bring(self, key: str, state: str, *, more: str) -> None:
        """A job that runs is to be in another state."""
        newest = next(index for index, (_, claim) in enumerate(reversed(self.claims)) if claim.key == key)
        if "cancelling" in state:
            self._do(self.cancel, key)
        if "expired" in state:
            self._do(self.expire, key)
        if state == "pruned":
            ends = "cancelled" if more == "evicted" else "succeeded"
            self._bring(key, ends, more=more)
            if self.model.rows[key].state == ends:  # an outdated run ends nothing
                self._do(self.prune, [ends], keep=0.0, limit=1000)
        elif state == "succeeded":
            self._do(self.complete, [(newest, True)])
        elif state == "failed":
            self._do(self.fail, newest, "permanent", 0)
        elif state == "cancelled":
            self._do(self.give_back, newest, "cancel", 0)

    def _do(self, method: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """One step of an arrangement."""
        method(*arguments, **options)
        self.the_table_is_as_the_model_says()

    # --- operators and time -------------------------------------------------------------------------------------------

    @step(3, key=KEY)
    def cancel(self, key: str) -> None:
        """An operator cancels a job."""
        key = self.key(key)
        self.hit_key("cancel", key)
        self._judge_deed(
            "cancel",
            key,
            lambda ids: operations.cancel_jobs(self.hand.tables, self.kind, ids, facts=self.facts),
            self.model.cancel,
        )

    @step(1, key=KEY, code=st.sampled_from((None, None, "no")))
    def retry(self, key: str, code: str | None) -> None:
        """An operator puts what has failed or was cancelled back to work."""
        self._reopen("retry", key, ("failed", "cancelled"), code)

    @step(1, key=KEY, code=st.sampled_from((None, None, "no")))
    def rebuild(self, key: str, code: str | None) -> None:
        """An operator puts whatever has ended back to work."""
        self._reopen("rebuild", key, ENDED, code)

    def _reopen(self, name: str, key: str, states: tuple[State, ...], code: str | None) -> None:
        key = self.key(key)
        self.hit_key(name, key)
        what = f"{name}_requested"
        self._judge_deed(
            name,
            key,
            lambda ids: operations.reopen_jobs(
                self.hand.tables, self.kind, ids, states=states, what=what, code=code, facts=self.facts
            ),
            lambda key: self.model.reopen(key, states=states, what=what, code=code),
        )

    def _judge_deed(
        self,
        name: str,
        key: str,
        statement: Callable[[list[int]], sql.Statement[dict[int, Deed]]],
        predict: Callable[[str], str | None],
    ) -> None:
        ids = self.hand.send(operations.find_job(self.hand.tables, self.kind, key))
        row = self.model.rows.get(key)
        if ids != ([row.id] if row else []):
            raise Differs(f"find_job: {ids} for {row}")
        deeds = self.hand.send(statement([*ids, 0]))
        expected = predict(key)
        if expected is not None:
            self.hit("answer", name, expected)
        if deeds != {0: "passed"} | dict.fromkeys(ids, expected):
            raise Differs(f"{name} {key}: {deeds} instead of {expected}")

    @step(1, key=KEY)
    def forget(self, key: str) -> None:
        """An operator forgets a job and its result."""
        key = self.key(key)
        self.hit_key("forget", key)
        deed = self.hand.send(operations.forget_job(self.hand.tables, self.kind, key, facts=self.facts))
        expected = self.model.forget(key)
        if deed != expected:
            raise Differs(f"forget {key}: {deed} instead of {expected}")

    @step(1, key=KEY)
    def delete(self, key: str) -> None:
        """An operator deletes a job and its result."""
        key = self.key(key)
        self.hit_key("delete", key)
        self.admin.execute("delete from pgworker.jobs where kind = %s and key = %s", [self.kind, key])
        self.admin.execute("delete from pgworker.results where kind = %s and key = %s", [self.kind, key])
        self.model.delete(key)

    @step(1, until=st.sampled_from(("resumed", "resumed", "resumed", "for ever", "a day", "long ago")))
    def pause(self, until: str) -> None:
        """An operator pauses the kind, or resumes it."""
        if until == "resumed":
            resumed = self.hand.send(operations.resume_kind(self.hand.tables, self.kind))
            if resumed != self.model.resume():
                raise Differs(f"resume: {resumed}")
            return
        seconds = 86_400.0 if until == "a day" else None
        past = LONG_AGO if until == "long ago" else None
        self.hand.send(operations.pause_kind(self.hand.tables, self.kind, seconds, "paused", until=past))
        self.model.pause(past or (self.model.now + timedelta(seconds=seconds) if seconds else None))

    @step(3, key=KEY)
    def expire(self, key: str) -> None:
        """A lease ends."""
        key = self.key(key)
        self.hit_key("expire", key)
        self.admin.execute(_EXPIRE, [self.kind, key])
        self.model.expire(key)

    @step(1, key=KEY)
    def set_clock_back(self, key: str) -> None:
        """A lease is a day longer than anybody asked for: the reaper is to shorten it."""
        key = self.key(key)
        self.hit_key("set_clock_back", key)
        self.admin.execute(_SET_BACK, [self.kind, key])
        self.model.set_clock_back(key, timedelta(days=1))

    @step(1)
    def age(self) -> None:
        """Three hours pass: all leases end, as in an outage, and what was scheduled is due."""
        self.hit_rows("age", self.model.rows.values())
        self.admin.execute(_AGE, {"by": timedelta(hours=3), "kind": self.kind})
        self.model.age(10_800)

    @step(
        2,
        states=st.lists(st.sampled_from(ENDED), min_size=1, unique=True),
        keep=st.sampled_from((0.0, LATER)),
        limit=st.sampled_from((1, 1000)),
    )
    def prune(self, states: list[State], *, keep: float, limit: int) -> None:
        """Retention goes through some states, page by page; what ended before the last ageing is older than LATER."""
        self.hit_rows("prune", self.model.rows.values())
        for row in self.model.rows.values():
            if row.state in states:
                old = at(row.finished_at) < self.model.now - timedelta(seconds=keep)
                what = "event" if row.event else "keyed"
                self.hit("prune", self.model.state(row.key), what, "old" if old else "young")
        shelves = [operations.Shelf(self.kind, state, keep) for state in states]
        while True:
            found = self.hand.send(operations.prune_jobs(self.hand.tables, shelves, limit=limit))
            pages = {number: (*each[:-1], each.cursor[1]) for number, each in found.items()}
            predicted = [self.model.prune(state, keep=keep, limit=limit) for state in states]
            expected = {number: page for number, page in enumerate(predicted) if page.read}
            if pages != expected:
                raise Differs(f"prune {states}: {pages} instead of {expected}")
            if not found:
                return
            for number, page in found.items():
                shelves[number] = shelves[number]._replace(after=page.cursor)

    @rule(step=steps_of(vars(Enqueues) | vars(Runs) | locals()))
    def then(self, step: Step) -> None:
        """The next step; without a claim there is none to end."""
        if not self.claims and step.arguments.keys() & {"pick", "picks"}:
            return
        getattr(self, step.name)(**step.arguments)
