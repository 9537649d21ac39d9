"""The steps of an app: jobs enqueued by each of the three doors, and events."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from hypothesis import strategies as st

from pgworker import NewJob
from pgworker import statements as sql
from pgworker.client import put_jobs
from pgworker.db import drive_sync
from pgworker.job import IfPending, Urgency
from pgworker.kind import Kind, declare_kind
from pgworker.policy import make_policy
from tests.stateful.bench import KEY, LATER, Machine
from tests.stateful.rows import Differs, Wanted
from tests.stateful.steps import step

Asked: TypeAlias = tuple[str, str | None, str, int, bool]
"""Key, revision, when, urgency, whether it is an event: an app's event has a key that no other job has, here it may."""

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)

WHEN = st.sampled_from(("now", "now", "now", "later", "long ago"))
# A revision, or the one that the row has
REVISION = st.sampled_from((None, None, "as it is", "r1", "r2", "r3"))
JOB = st.tuples(KEY, REVISION, WHEN, st.sampled_from((0, 0, 1)), st.sampled_from((False, False, True)))
DOOR = st.sampled_from(("app", "statement", "function"))
"""The three ways in: the runtime's own flow, its bare statement, and the SQL function."""


class Enqueues(Machine):
    """What an app does."""

    def __init__(self) -> None:
        super().__init__()
        self.payloads = itertools.count(1)

    @step(
        5,
        job=JOB,
        door=DOOR,
        keep=st.booleans(),
        wait=st.sampled_from((False, False, True)),
        priority=st.sampled_from((0, 0, 1)),
        max_attempts=st.sampled_from((None, 1, 2)),
        version=st.sampled_from((1, 1, 1, 2)),
    )
    def enqueue(
        self,
        job: Asked,
        door: str,
        *,
        keep: bool,
        wait: bool,
        priority: int,
        max_attempts: int | None,
        version: int,
    ) -> None:
        """One job, by one of the three doors."""
        wanted = self._wanted(job, priority=priority, max_attempts=max_attempts, version=version)
        if door == "function":  # it knows no such options
            wanted = self._wanted(job, priority=priority)
            if wanted.ready_at is not None:
                door = "app"
        self.hit_key("enqueue", wanted.key)
        self._put([wanted], door=door, keep=keep, wait=wait and door != "function")

    @step(2, jobs=st.lists(JOB, min_size=2, max_size=5), door=st.sampled_from(("app", "statement")), keep=st.booleans())
    def enqueue_many(self, jobs: list[Asked], door: str, *, keep: bool) -> None:
        """Several in one call, some with equal keys."""
        wanted = [self._wanted(job) for job in jobs]
        for key in {job.key for job in wanted}:
            self.hit_key("enqueue_many", key)
        self._put(wanted, door=door, keep=keep)

    @step(1, jobs=st.lists(JOB, min_size=1, max_size=3))
    def enqueue_events(self, jobs: list[Asked]) -> None:
        """Events, whose keys were made for them; if one is there, they have been sent before."""
        wanted = {job.key: replace(job, revision="", event=True) for job in (self._wanted(job) for job in jobs)}
        for key in wanted:
            self.hit_key("enqueue_events", key)
        unique = list(wanted.values())
        again = any(key in self.model.rows for key in wanted)
        expected = self.model.put_events(unique)
        tables, rows = self.hand.tables, [_insert(job) for job in unique]
        statement = (
            sql.insert_missing_events(tables, self.kind, rows, version=1, facts=self.facts)
            if again or self.model.level == "all"
            else sql.insert_events(tables, self.kind, rows, version=1)
        )
        actual = {key: (put.status, put.state) for key, put in self.hand.send(statement).items()}
        if actual != expected:
            raise Differs(f"enqueue_events: {actual} instead of {expected}")

    def _wanted(self, asked: Asked, **options: Any) -> Wanted:
        key, revision, when, urgency, event = asked
        key = self.key(key)
        row = self.model.rows.get(key)
        if revision == "as it is":
            revision = row.revision if row else None
        delay, ready_at = (LATER if when == "later" else 0.0), (LONG_AGO if when == "long ago" else None)
        return Wanted(
            key, revision or "", next(self.payloads), urgency, delay=delay, ready_at=ready_at, event=event, **options
        )  # fmt: skip

    def _put(self, jobs: list[Wanted], *, door: str, keep: bool, wait: bool = False) -> None:
        if door != "statement":  # they make an event's key themselves: what is named is none
            jobs = [replace(job, event=False) for job in jobs]
        last = {job.key: job for job in jobs}
        unique = [job for job in jobs if last[job.key] is job]
        for job in unique:
            self.hit("put", self.model.state(job.key), self._revision_case(job), "keep" if keep else "replace")
            if (row := self.model.rows.get(job.key)) is not None:
                self.hit("put", _sort(event=row.event), "by", _sort(event=job.event))
        level = self.model.level
        if door == "function":  # it does not know the kind's level: it tells of what was superseded, and no more
            self.model.level = "all"
        expected = self.model.put(unique, keep=keep, wait=wait)
        if door == "function":
            self.model.level = level
            self.model.facts = [fact for fact in self.model.facts if fact.what == "superseded"]
        answers = {"app": self._put_by_app, "statement": self._put_by_statement, "function": self._put_by_function}
        actual = answers[door](jobs, keep=keep, wait=wait)
        if actual != expected:
            raise Differs(f"enqueue: {actual} instead of {expected}")

    def _revision_case(self, job: Wanted) -> str:
        row = self.model.rows.get(job.key)
        if row is None or not row.revision:
            return "first" if job.revision else "none"
        return "no longer" if not job.revision else "same" if job.revision == row.revision else "new"

    def _put_by_app(self, jobs: list[Wanted], *, keep: bool, wait: bool) -> dict[str, tuple[str, str]]:
        if_pending: IfPending = "keep" if keep else "replace"
        flow = put_jobs(
            self.hand.tables,
            self._declared(jobs[0].version, wait=wait),
            [_new_job(job) for job in jobs],
            if_pending=if_pending,
        )
        put = drive_sync(flow, self.hand.send).enqueued
        last = {job.key: index for index, job in enumerate(jobs)}
        if any(each.status != "replaced" for index, each in enumerate(put) if last[each.key] != index):
            raise Differs(f"enqueue: {put}: of equal keys all but the last are replaced")
        return {each.key: (each.status, each.state) for each in put}

    def _declared(self, version: int, *, wait: bool) -> Kind:
        policy = make_policy("standard", {"facts": self.model.level, "supersede": "wait" if wait else "now"})
        return declare_kind(self.kind, policy, payload=object, payload_limit=None, version=version)

    def _put_by_statement(self, jobs: list[Wanted], *, keep: bool, wait: bool) -> dict[str, tuple[str, str]]:
        statement = sql.insert_jobs(
            self.hand.tables, self.kind, [_insert(job) for job in jobs], version=jobs[0].version, keep=keep, wait=wait,
            facts=self.facts,
        )  # fmt: skip
        return {key: (put.status, put.state) for key, put in self.hand.send(statement).items()}

    def _put_by_function(self, jobs: list[Wanted], *, keep: bool, wait: bool) -> dict[str, tuple[str, str]]:
        (job,) = jobs
        found = self.hand.connection.execute(
            "select job_key, status from pgworker.enqueue(%s, %s::jsonb, key => %s, revision => %s, delay => %s,"
            " priority => %s, urgency => %s, if_pending => %s, tenant => null)",
            [
                self.kind, str(job.payload), job.key, job.revision or None, timedelta(seconds=job.delay), job.priority,
                _urgency(job), "keep" if keep else "replace",
            ],
        ).fetchone()  # fmt: skip
        assert found is not None
        return {str(found[0]): (str(found[1]), self.model.rows[job.key].state)}


def _sort(*, event: bool) -> str:
    return "event" if event else "keyed"


def _insert(job: Wanted) -> sql.Insert:
    return sql.Insert(
        job.key, job.revision, job.urgency, job.priority, job.delay, job.ready_at, job.max_attempts, str(job.payload),
        job.event,
    )  # fmt: skip


def _new_job(job: Wanted) -> NewJob:
    return NewJob(
        job.payload,
        job.key,
        job.revision or None,
        timedelta(seconds=job.delay) if job.delay else None,
        job.ready_at,
        job.priority,
        _urgency(job),
        job.max_attempts,
    )


def _urgency(job: Wanted) -> Urgency:
    return "catch_up" if job.urgency else "fresh"
