"""A worker of the first release, still running while the schema is that of today: old and new share the rows.

tests/migrations/first_release holds the statements as the first migration shipped them. They are never edited: what a
later migration does must leave them working, or be marked as breaking.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import psycopg
import pytest

from pgworker.tablemap import TableMap
from tests.handles import Hand, result, row

Admin: TypeAlias = psycopg.Connection[Any]
FIRST = Path(__file__).parent / "first_release"
BEGINNING = datetime.min.replace(tzinfo=UTC)


class OldWorker:
    """Sends the first release's statements, with the parameters and columns that they had."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def send(self, name: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        text = (FIRST / f"{name}.sql").read_text(encoding="utf-8")
        lines = [line.split("--")[0] for line in text.splitlines()]
        sql = "\n".join(lines)
        for table in ("jobs", "results", "runners", "kinds", "facts"):
            sql = sql.replace(f"{{{table}}}", TableMap().qualified(table))
        cursor = self.connection.execute(sql.encode(), parameters)
        return cursor.fetchall() if cursor.description else []

    def enqueue(self, key: str, revision: str, payload: str = "1") -> str:
        rows = self.send(
            "insert_jobs",
            {
                "kind": "work",
                "keys": [key],
                "events": [False],
                "revisions": [revision],
                "classes": [0],
                "priorities": [0],
                "delays": [0.0],
                "ready_ats": [None],
                "max_attempts": [None],
                "tenants": [None],
                "payloads": [payload],
                "version": 1,
                "keep": False,
                "wait": False,
                "facts": 2,
            },
        )
        return str(rows[0][1])

    def lanes(self) -> list[tuple[Any, ...]]:
        return [found[:3] for found in self.send("survey_lanes", {"kinds": ["work"]})]

    def claim(self, token: UUID, *, limit: int = 1, ttl: float = 60.0) -> list[tuple[Any, ...]]:
        return self.send(
            "claim_jobs",
            {
                "kind": "work",
                "class": 0,
                "priority": 0,
                "limit": limit,
                "token": token,
                "runner": "old",
                "ttl": ttl,
                "max_evictions": 5,
                "version": 1,
                "after_ready": BEGINNING,
                "after_id": -1,
                "facts": 2,
            },
        )

    @staticmethod
    def fence(claimed: tuple[Any, ...]) -> dict[str, Any]:
        _, id_, key, revision, generation, token, *_ = claimed
        return {
            "ids": [id_],
            "keys": [key],
            "revisions": [revision],
            "tokens": [token],
            "generations": [generation],
            "kind": "work",
        }

    def finish(self, claimed: tuple[Any, ...], value: str | None) -> str:
        return str(self.send("finish_jobs", self.fence(claimed) | {"results": [value], "facts": 2})[0][1])

    def settle(self, claimed: tuple[Any, ...], state: str, code: str | None, delay: float | None) -> str:
        decision = {"states": [state], "counts": [1], "delays": [delay], "codes": [code], "errors": [None], "facts": 2}
        return str(self.send("settle_jobs", self.fence(claimed) | decision)[0][1])

    def renew(self, claimed: tuple[Any, ...]) -> str:
        return str(self.send("renew_leases", self.fence(claimed) | {"kinds": ["work"], "ttls": [60.0]})[0][1])

    def reap(self) -> tuple[Any, ...]:
        lane = {"kind": "work", "class": 0, "priority": 0}
        bounds = {"limit": 100, "ttl": 60.0, "max_evictions": 5, "after_ready": BEGINNING, "after_id": -1, "facts": 2}
        return self.send("reap_expired", lane | bounds)[0]


@pytest.fixture
def old(hand: Hand) -> OldWorker:
    return OldWorker(hand.connection)


def test_the_first_release_does_a_whole_job_on_todays_schema(old: OldWorker, admin: Admin) -> None:
    assert old.enqueue("k", "r1") == "created"
    assert old.lanes() == [("work", 0, 0)]
    token = uuid4()
    (claimed,) = old.claim(token)
    assert claimed[5] == token
    assert old.renew(claimed) == "done"
    assert old.finish(claimed, '"value"') == "done"
    stored = result(admin, "k")
    assert stored is not None
    assert (stored["value"], row(admin, "k")["state"]) == ("value", "succeeded")


def test_the_first_release_retries_fails_and_reaps_on_todays_schema(old: OldWorker, admin: Admin) -> None:
    old.enqueue("k", "r1")
    (claimed,) = old.claim(uuid4())
    assert old.settle(claimed, "pending", "handler_failed", 0.0) == "done"
    (claimed,) = old.claim(uuid4(), ttl=0.0)
    assert old.finish(claimed, None) == "expired"
    assert old.reap()[1] == 1
    (claimed,) = old.claim(uuid4())
    assert old.settle(claimed, "failed", "handler_failed", None) == "done"
    assert row(admin, "k")["state"] == "failed"


def test_old_and_new_workers_take_over_from_each_other(old: OldWorker, hand: Hand, admin: Admin) -> None:
    old.enqueue("from old", "r1")
    hand.enqueue("from new", "r1")
    (new_claim,) = hand.claim()
    (old_claim,) = old.claim(uuid4())
    assert {new_claim.key, old_claim[2]} == {"from old", "from new"}
    assert hand.finish(new_claim, "1").verdict == old.finish(old_claim, "1") == "done"
    hand.enqueue("k", "r1")
    (stale,) = old.claim(uuid4())
    assert hand.enqueue("k", "r2").status == "superseded"  # a new producer supersedes an old worker's run
    assert old.finish(stale, '"stale"') == old.renew(stale) == "lost"
    assert result(admin, "k") is None


def test_the_copy_is_whole(old: OldWorker) -> None:
    frozen = {path.stem for path in FIRST.glob("*.sql")}
    assert frozen >= {
        "insert_jobs",
        "survey_lanes",
        "claim_jobs",
        "finish_jobs",
        "settle_jobs",
        "renew_leases",
        "reap_expired",
    }
    parameters = {"runner": "old", "kinds": ["work"], "statuses": ["{}"], "release": "0.1.0"}
    assert old.send("report_runners", parameters) == []
    assert [found[:3] for found in old.send("list_runners", {})] == [("old", "work", "0.1.0")]
    old.send("forget_runners", {"runner": "old"})
    assert old.send("list_runners", {}) == []
    old.enqueue("k", "r1")
    assert [found[:3] for found in old.send("count_jobs", {"bound": 10})] == [("work", "ready", 1)]
