"""What an enqueue does to a key that is known already: the whole table, through each of the three doors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import psycopg
import pytest

from pgworker import App, NewJob
from tests.handles import FAIL, RETRY, Hand, result, row

Admin: TypeAlias = psycopg.Connection[Any]
Enqueue: TypeAlias = Callable[..., str]
"""(key, revision, payload, urgency=, if_pending=) -> status."""


@pytest.fixture(params=["async", "sync", "sql"])
async def enqueue(request: pytest.FixtureRequest, app: App, hand: Hand) -> Any:
    """The same enqueue through the async door, the sync door and the SQL function."""
    app.declare("work")

    async def by_app(key: str, revision: str | None, payload: object, **options: Any) -> str:
        return (await app.enqueue("work", payload, key=key, revision=revision, **options)).status

    async def by_sync(key: str, revision: str | None, payload: object, **options: Any) -> str:
        return app.sync.enqueue("work", payload, key=key, revision=revision, **options).status

    async def by_sql(key: str, revision: str | None, payload: object, **options: Any) -> str:
        found = hand.connection.execute(
            "select status from pgworker.enqueue('work', %(payload)s::jsonb, key => %(key)s, revision => %(revision)s,"
            " urgency => %(urgency)s, if_pending => %(if_pending)s, priority => %(priority)s)",
            {
                "payload": json.dumps(payload),
                "key": key,
                "revision": revision,
                "urgency": options.get("urgency", "fresh"),
                "if_pending": options.get("if_pending", "replace"),
                "priority": options.get("priority", 0),
            },
        ).fetchone()
        assert found is not None
        return str(found[0])

    yield {"async": by_app, "sync": by_sync, "sql": by_sql}[request.param]
    app.sync.close()


COUNTERS = ("attempts", "evictions", "last_code", "last_error", "cancel_requested_at")


def _pending(hand: Hand, admin: Admin, revision: str | None) -> None:
    hand.enqueue("k", revision, "old")


def _retried(hand: Hand, admin: Admin, revision: str | None) -> None:
    hand.enqueue("k", revision, "old")
    hand.settle(hand.claim()[0], RETRY)
    admin.execute("update pgworker.jobs set evictions = 3, last_error = 'ValueError'")


def _running(hand: Hand, admin: Admin, revision: str | None) -> None:
    hand.enqueue("k", revision, "old")
    hand.claim()
    admin.execute(
        "update pgworker.jobs set attempts = 2, evictions = 3, last_code = 'handler_failed', last_error = 'ValueError'"
    )


def _cancel_requested(hand: Hand, admin: Admin, revision: str | None) -> None:
    _running(hand, admin, revision)
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")


def _succeeded(hand: Hand, admin: Admin, revision: str | None) -> None:
    hand.enqueue("k", revision, "old")
    hand.finish(hand.claim()[0], '"old result"')


def _failed(hand: Hand, admin: Admin, revision: str | None) -> None:
    hand.enqueue("k", revision, "old")
    hand.settle(hand.claim()[0], FAIL)


def _cancelled(hand: Hand, admin: Admin, revision: str | None) -> None:
    _cancel_requested(hand, admin, revision)
    admin.execute(
        "update pgworker.jobs set state = 'cancelled', token = null, lease_expires_at = null,"
        " cancel_requested_at = null, finished_at = clock_timestamp()"
    )


STATES = {
    "pending": _pending,
    "retried": _retried,
    "running": _running,
    "cancel_requested": _cancel_requested,
    "succeeded": _succeeded,
    "failed": _failed,
    "cancelled": _cancelled,
}


@pytest.mark.contract("A15")
@pytest.mark.ruling("2.2")
@pytest.mark.parametrize("state", STATES)
async def test_the_same_revision_changes_no_byte(hand: Hand, admin: Admin, enqueue: Any, state: str) -> None:
    STATES[state](hand, admin, "r1")
    if state not in ("pending", "retried"):  # what waits may rise to fresh, and that alone
        admin.execute("update pgworker.jobs set class = 1")
    before = (row(admin, "k"), result(admin, "k"))
    assert await enqueue("k", "r1", "new") == "unchanged"
    assert (row(admin, "k"), result(admin, "k")) == before


@pytest.mark.contract("A12", "A13")
@pytest.mark.ruling("2.2")
@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("pending", "replaced"),
        ("retried", "replaced"),
        ("running", "superseded"),
        ("cancel_requested", "superseded"),
        ("succeeded", "requeued"),
        ("failed", "requeued"),
        ("cancelled", "requeued"),
    ],
)
async def test_a_new_revision_makes_the_row_new_work(
    hand: Hand, admin: Admin, enqueue: Any, state: str, status: str
) -> None:
    STATES[state](hand, admin, "r1")
    before = row(admin, "k")
    assert await enqueue("k", "r2", "new") == status
    after = row(admin, "k")
    assert (after["state"], after["revision"], after["payload"]) == ("pending", "r2", "new")
    assert after["generation"] == before["generation"] + 1
    assert (after["token"], after["lease_expires_at"], after["runner"], after["finished_at"]) == (None,) * 4
    assert [after[name] for name in COUNTERS] == [0, 0, None, None, None]
    (claim,) = hand.claim()  # ready at once
    assert claim.payload == '"new"'
    if state == "succeeded":  # the old answer stays until the new one is there, and says whose it is
        kept = result(admin, "k")
        assert kept is not None
        assert (kept["revision"], kept["value"]) == ("r1", "old result")


@pytest.mark.ruling("2.2")
@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("pending", "replaced"),
        ("retried", "replaced"),
        ("succeeded", "requeued"),
        ("failed", "requeued"),
        ("cancelled", "requeued"),
    ],
)
async def test_without_a_revision_the_latest_payload_wins(
    hand: Hand, admin: Admin, enqueue: Any, state: str, status: str
) -> None:
    STATES[state](hand, admin, None)
    assert await enqueue("k", None, "new") == status
    after = row(admin, "k")
    assert (after["state"], after["payload"]) == ("pending", "new")
    assert [after[name] for name in COUNTERS] == [0, 0, None, None, None]
    assert len(hand.claim()) == 1


@pytest.mark.ruling("2.2")
@pytest.mark.parametrize(("before", "now"), [("r1", "r2"), (None, None)])
async def test_the_options_are_those_of_the_last_enqueue(
    hand: Hand, admin: Admin, enqueue: Any, before: str | None, now: str | None
) -> None:
    hand.enqueue("k", before, "old", priority=5, max_attempts=2, delay=3600)
    admin.execute("update pgworker.jobs set version = 2")
    assert await enqueue("k", now, "new", priority=-5) == "replaced"
    after = row(admin, "k")
    assert (after["priority"], after["max_attempts"], after["version"]) == (-5, None, 1)
    assert [claim.payload for claim in hand.claim(priority=-5)] == ['"new"']  # ready at once


@pytest.mark.field("L21")
@pytest.mark.ruling("2.2")
@pytest.mark.parametrize("state", ["running", "cancel_requested"])
async def test_without_a_revision_a_running_attempt_keeps_its_lease_and_the_row_runs_once_more(
    hand: Hand, admin: Admin, enqueue: Any, state: str
) -> None:
    hand.enqueue("k", None, "old")
    (holder,) = hand.claim()
    if state == "cancel_requested":
        admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")
    for index in range(5):
        assert await enqueue("k", None, f"new {index}") == "replaced"
    during = row(admin, "k")
    assert (during["token"], during["runner"]) == (holder.token, "by hand")
    assert during["cancel_requested_at"] is None
    assert hand.claim() == []  # one owner at a time
    answer = hand.finish(holder, '"of the old payload"')
    assert (answer.verdict, answer.state) == ("done", "pending")
    assert result(admin, "k") is None
    (claim,) = hand.claim()
    assert claim.payload == '"new 4"'
    assert hand.finish(claim, '"of the new"').state == "succeeded"
    assert hand.claim() == []


@pytest.mark.ruling("2.2")
async def test_a_failure_of_a_run_whose_payload_was_replaced_counts_for_nothing(
    hand: Hand, admin: Admin, enqueue: Any
) -> None:
    hand.enqueue("k", None, "old")
    (holder,) = hand.claim()
    await enqueue("k", None, "new")
    answer = hand.settle(holder, FAIL)
    assert (answer.verdict, answer.state) == ("done", "pending")
    after = row(admin, "k")
    assert (after["attempts"], after["last_code"]) == (0, None)
    assert len(hand.claim()) == 1


@pytest.mark.ruling("2.2")
@pytest.mark.parametrize("state", STATES)
async def test_keep_leaves_work_alone_that_has_not_ended(hand: Hand, admin: Admin, enqueue: Any, state: str) -> None:
    STATES[state](hand, admin, "r1")
    before = row(admin, "k")
    ended = before["state"] != "pending"
    assert await enqueue("k", "r2", "new", if_pending="keep") == ("requeued" if ended else "kept")
    assert (row(admin, "k") == before) is not ended


@pytest.mark.contract("A69")
@pytest.mark.ruling("2.2")
@pytest.mark.parametrize(("revision", "status"), [("r1", "unchanged"), ("r2", "replaced")])
async def test_a_live_edit_promotes_waiting_catch_up_work_and_nothing_demotes_it(
    hand: Hand, admin: Admin, enqueue: Any, revision: str, status: str
) -> None:
    hand.enqueue("k", "r1", "old", urgency="catch_up")
    assert await enqueue("k", revision, "new", urgency="fresh") == status
    assert row(admin, "k")["class"] == 0
    await enqueue("k", "r3", "newer", urgency="catch_up")
    assert row(admin, "k")["class"] == 0


@pytest.mark.ruling("2.2")
@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
@pytest.mark.parametrize("revision", ["r1", None])
async def test_work_that_had_ended_is_as_urgent_as_its_new_enqueue_says(
    hand: Hand, admin: Admin, enqueue: Any, state: str, revision: str | None
) -> None:
    STATES[state](hand, admin, revision)
    assert row(admin, "k")["class"] == 0
    assert await enqueue("k", revision and "r2", "new", urgency="catch_up") == "requeued"
    assert row(admin, "k")["class"] == 1


@pytest.mark.contract("A11")
async def test_keys_and_revisions_are_opaque_and_byte_exact(hand: Hand, admin: Admin, enqueue: Any) -> None:
    assert await enqueue("é/ß %s {} \\ ' \"", "7", 1) == "created"
    assert await enqueue("e\u0301/ß %s {} \\ ' \"", "7", 1) == "created"  # looks the same, is another key
    assert await enqueue("é/ß %s {} \\ ' \"", "07", 2) == "replaced"  # another text is another revision, not a number
    assert await enqueue("é/ß %s {} \\ ' \"", "sha256:a_b", 3) == "replaced"
    assert await enqueue("é/ß %s {} \\ ' \"", "7", 4) == "replaced"  # an old one that comes late is a new one
    assert await enqueue("é/ß %s {} \\ ' \"", "7", 5) == "unchanged"
    assert row(admin, "é/ß %s {} \\ ' \"")["revision"] == "7"
    assert {claim.revision for claim in hand.claim(10)} == {"7"}


@pytest.mark.contract("A10")
async def test_one_row_for_each_key(admin: Admin, enqueue: Any) -> None:
    await enqueue("k", None, 1)
    await enqueue("k", None, 2)
    await enqueue("other", None, 3)
    counted = admin.execute("select count(*) from pgworker.jobs").fetchone()
    assert counted == (2,)


@pytest.mark.ruling("2.6")
async def test_of_equal_keys_in_one_call_the_last_wins(app: App, hand: Hand, admin: Admin) -> None:
    app.declare("work")
    jobs = [NewJob(1, "a", "r1"), NewJob(2, "b", "r1"), NewJob(3, "a", "r2"), NewJob(4, "a", "r3")]
    put = await app.enqueue_many("work", jobs)
    assert [each.status for each in put] == ["replaced", "created", "replaced", "created"]
    assert row(admin, "a")["payload"] == 4
    again = await app.enqueue_many("work", [NewJob(9, "b", "r1"), NewJob(9, "b", "r1")])
    assert [each.status for each in again] == ["replaced", "unchanged"]
    assert [claim.key for claim in hand.claim(10)] == ["b", "a"]  # in the order of the call
