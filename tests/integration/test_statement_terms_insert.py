"""What each term of the insert asks for: quick tests, one of which fails without it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker import NewJob
from pgworker.job import Enqueued
from pgworker.statements import Insert, Put, insert_jobs
from tests.handles import Hand, age, copy_of, everything, row

Admin: TypeAlias = psycopg.Connection[Any]


def put(hand: Hand, revision: str, *, keep: bool = False, wait: bool = False, facts: int = 0) -> Put:
    job = Insert("k", revision, 0, 0, 0.0, None, None, "1")
    statement = insert_jobs(hand.tables, hand.kind, [job], version=1, keep=keep, wait=wait, facts=facts)
    return hand.send(statement)["k"]


def statuses(enqueued: list[Enqueued]) -> dict[str, str]:
    return {each.key: each.status for each in enqueued}


def test_each_key_of_a_call_has_its_own_status(hand: Hand, admin: Admin) -> None:
    for key in ("unchanged", "replaced", "superseded", "requeued"):
        hand.enqueue(key, "r", priority=-1 if key in ("superseded", "requeued") else 0)
    running, done = hand.claim(2, priority=-1)
    hand.finish(done)
    revisions = {"new": "r", "unchanged": "r", "replaced": "r2", "superseded": "r2", "requeued": "r2"}
    put = hand.enqueue_many([NewJob(None, key, revision) for key, revision in revisions.items()])
    assert statuses(put) == {key: "created" if key == "new" else key for key in revisions}
    assert {each.key: each.state for each in put} == dict.fromkeys(revisions, "pending")
    assert [row(admin, key)["generation"] for key in revisions] == [1, 1, 2, 2, 2]
    assert (running.key, row(admin, "superseded")["token"]) == ("superseded", None)


def test_what_is_kept_and_what_is_not(hand: Hand, admin: Admin) -> None:
    hand.enqueue("waits", "r")
    hand.enqueue("ended", "r", priority=-1)
    hand.finish(hand.claim(priority=-1)[0])
    jobs = [NewJob(None, key, "r2") for key in ("waits", "ended", "new")]
    put = hand.enqueue_many(jobs, if_pending="keep")
    assert statuses(put) == {"waits": "kept", "ended": "requeued", "new": "created"}
    assert [row(admin, key)["revision"] for key in ("waits", "ended", "new")] == ["r", "r2", "r2"]
    hand.enqueue("without", payload=1)
    assert hand.enqueue("without", payload=2).status == "replaced"
    assert hand.enqueue("without", payload=3, if_pending="keep").status == "kept"
    assert row(admin, "without")["payload"] == 2


def test_the_same_key_of_another_kind_is_another_job(hand: Hand, admin: Admin) -> None:
    hand.kind = "another"
    hand.enqueue("k", "r")
    hand.kind = "work"
    hand.enqueue("neighbour", "r")
    assert hand.enqueue("k", "r").status == "created"


@pytest.mark.parametrize("if_pending", ["replace", "keep"])
def test_what_stays_as_it_is_waits_for_no_lock(hand: Hand, dsn: str, if_pending: Any) -> None:
    hand.enqueue("k", "r1")
    hand.connection.execute("set lock_timeout = '100ms'")
    revision, status = ("r1", "unchanged") if if_pending == "replace" else ("r2", "kept")
    with psycopg.connect(dsn) as other:
        other.execute("select from pgworker.jobs for update")
        assert hand.enqueue("k", revision, if_pending=if_pending).status == status


def test_fresh_work_lifts_what_waits_and_that_only(hand: Hand, admin: Admin) -> None:
    for key in ("lifted", "neighbour"):
        hand.enqueue(key, "r", urgency="catch_up")
    copy_of(admin, "lifted", kind="copy")
    others = everything(admin, but=("work", "lifted"))
    assert hand.enqueue("lifted", "r").status == "unchanged"
    assert row(admin, "lifted")["class"] == 0
    assert everything(admin, but=("work", "lifted")) == others


def test_what_runs_or_has_ended_is_not_lifted(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", "r", urgency="catch_up")
    (claim,) = hand.claim(urgency=1)
    assert hand.enqueue("k", "r").status == "unchanged"
    assert row(admin, "k")["class"] == 1
    hand.finish(claim)
    assert hand.enqueue("k", "r").status == "unchanged"
    assert row(admin, "k")["class"] == 1


def test_what_is_kept_is_not_lifted(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", urgency="catch_up")
    assert hand.enqueue("k", if_pending="keep").status == "kept"
    assert row(admin, "k")["class"] == 1


@pytest.mark.parametrize(("old", "new", "ended", "becomes"), [
    ("fresh", "catch_up", False, 0),
    ("catch_up", "fresh", False, 0),
    ("fresh", "catch_up", True, 1),
    ("catch_up", "fresh", True, 0),
])  # fmt: skip
def test_new_work_is_no_less_urgent_than_what_waits(
    hand: Hand, admin: Admin, *, old: Any, new: Any, ended: bool, becomes: int
) -> None:
    hand.enqueue("k", "r1", urgency=old)
    if ended:
        hand.finish(hand.claim(urgency=int(old == "catch_up"))[0])
    hand.enqueue("k", "r2", urgency=new)
    assert row(admin, "k")["class"] == becomes


@pytest.mark.parametrize(("wait", "revision", "waits"), [(False, "r2", False), (True, "r2", True), (True, "", False)])
def test_what_supersedes_waits_for_the_old_lease_if_it_shall(
    hand: Hand, admin: Admin, *, wait: bool, revision: str, waits: bool
) -> None:
    hand.enqueue("k", "r1" if revision else None)
    (claim,) = hand.claim()
    assert put(hand, revision, wait=wait).status == ("superseded" if revision else "replaced")
    after = row(admin, "k")
    assert (after["ready_at"] > after["created_at"] + timedelta(seconds=50)) is waits
    assert after["token"] == (None if revision else claim.token)


def test_an_expired_lease_does_not_outlive_a_new_payload(hand: Hand, admin: Admin) -> None:
    hand.enqueue("k", payload=1)
    hand.claim()
    age(admin, 61)
    assert hand.enqueue("k", payload=2).status == "superseded"
    assert row(admin, "k")["token"] is None


@pytest.mark.parametrize("facts", [0, 1, 2])
@pytest.mark.parametrize(("status", "what", "least"), [
    ("created", "enqueued", 2),
    ("replaced", "replaced", 2),
    ("superseded", "superseded", 1),
    ("requeued", "requeued", 2),
])  # fmt: skip
def test_an_insert_tells_as_much_as_its_level_says(
    hand: Hand, admin: Admin, *, facts: int, status: str, what: str, least: int
) -> None:
    if status != "created":
        hand.enqueue("k", "r1")
    if status in ("superseded", "requeued"):
        (claim,) = hand.claim()
        if status == "requeued":
            hand.finish(claim)
    assert put(hand, "r2", facts=facts).status == status
    told = admin.execute("select what from pgworker.facts").fetchall()
    assert told == ([(what,)] if facts >= least else [])
