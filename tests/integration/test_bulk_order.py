"""Bulk enqueues of the same keys, from two sessions that name them in opposite orders."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from pgworker import NewJob
from tests.handles import hand

Admin = psycopg.Connection[Any]

KEYS = [f"k{number:03}" for number in range(200)]


def deadlocks(admin: Admin) -> int:
    admin.execute("select pg_stat_clear_snapshot()")
    found = admin.execute("select deadlocks from pg_stat_database where datname = current_database()").fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.ruling("2.6")
@pytest.mark.parametrize("revisions", [0, 1], ids=["latest wins", "revisions"])
def test_two_bulk_enqueues_in_opposite_key_order_never_deadlock(dsn: str, admin: Admin, revisions: int) -> None:
    before = deadlocks(admin)
    errors: list[str] = []
    together = threading.Barrier(2)

    def enqueue(name: str, keys: list[str]) -> None:
        mine = hand(dsn)
        with mine.connection:
            for number in range(25):
                revision = f"{name}{number}" if revisions else None
                together.wait(20)
                try:
                    mine.enqueue_many([NewJob(name, key, revision) for key in keys])
                except psycopg.Error as error:
                    errors.append(f"{type(error).__name__} {error.sqlstate}")

    threads = [
        threading.Thread(target=enqueue, args=["up", KEYS]),
        threading.Thread(target=enqueue, args=["down", KEYS[::-1]]),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert deadlocks(admin) == before
    assert admin.execute("select count(*), count(distinct key), min(generation) from pgworker.jobs").fetchone() == (
        len(KEYS), len(KEYS), 50,
    )  # fmt: skip
