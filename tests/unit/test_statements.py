"""The statements as texts: each says what it locks and how it is fenced, and gets just the parameters it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import resources
from typing import Any
from uuid import uuid4

import pytest

from pgworker import fairness, operations, presence, statements
from pgworker.job import Claim
from pgworker.outcome import Settlement, Success
from pgworker.statements import BEGINNING, Insert, Lane, Statement
from pgworker.tablemap import TableMap

TABLES = TableMap("odd name")
LANE = Lane("work", 0, 0)
CLAIM = Claim("work", 1, "k", "r", 1, uuid4(), 0, None, 0, 1, 0, 0, datetime.now(UTC), 0.0, "1")
FILES = sorted(path.name for path in resources.files("pgworker.queries").iterdir() if path.name.endswith(".sql"))

BUILT: dict[str, Statement[Any]] = {
    statement.name: statement
    for statement in (
        statements.insert_jobs(TABLES, "work", [Insert("k", "r", 0, 0, 0.0, None, None, "1")], version=1, keep=False),
        statements.insert_events(TABLES, "work", [Insert("k", "", 0, 0, 0.0, None, None, "1")], version=1),
        statements.insert_missing_events(TABLES, "work", [Insert("k", "", 0, 0, 0.0, None, None, "1")], version=1),
        statements.survey_lanes(TABLES, ["work"]),
        statements.claim_jobs(
            TABLES, LANE, limit=1, token=uuid4(), runner="r", ttl_seconds=1.0, max_evictions=None, version=1
        ),
        fairness.claim_fair(
            TABLES, LANE, limit=1, token=uuid4(), runner="r", ttl_seconds=1.0, max_evictions=None, version=1
        ),
        statements.finish_jobs(TABLES, "work", [(CLAIM, Success("1"))]),
        statements.settle_jobs(TABLES, "work", [(CLAIM, Settlement("pending", None))]),
        statements.renew_leases(TABLES, [(CLAIM, 1.0)]),
        statements.reap_expired(TABLES, LANE, limit=1, ttl_seconds=1.0, max_evictions=5, after=BEGINNING),
        statements.check_fence(TABLES, CLAIM),
        presence.report_runners(TABLES, "r", {"work": "{}"}, release="1"),
        presence.forget_runners(TABLES, "r"),
        presence.list_runners(TABLES),
        operations.count_jobs(TABLES, bound=1),
        operations.find_job(TABLES, "work", "k"),
        operations.list_ended(TABLES, "work", "failed", after=operations.BEGINNING, until=None, code=None, limit=1),
        operations.list_pending(TABLES, LANE, after=operations.BEGINNING, limit=1),
        operations.reopen_jobs(TABLES, "work", [1], states=["failed"], what="retry_requested", code=None, facts=1),
        operations.cancel_jobs(TABLES, "work", [1], facts=1),
        operations.forget_job(TABLES, "work", "k", facts=1),
        operations.pause_kind(TABLES, "work", None, "paused"),
        operations.resume_kind(TABLES, "work"),
        operations.list_pauses(TABLES),
        operations.count_lag(TABLES, None),
        operations.wait_briefly(TABLES, 0.01),
        operations.current_transaction(TABLES),
        operations.read_results(TABLES, [("work", "k")]),
        operations.prune_jobs(TABLES, [operations.Shelf("work", "succeeded", 1.0)], limit=1),
        operations.prune_facts(TABLES, keep_seconds=1.0, after=0, limit=1),
        operations.expire_results(TABLES, operations.Shelf("work", "succeeded", 1.0), limit=1),
    )
}


def text(name: str) -> str:
    return resources.files("pgworker.queries").joinpath(name).read_text(encoding="utf-8")


def header(name: str) -> Iterator[str]:
    for line in text(name).splitlines():
        if not line.startswith("--"):
            return
        yield line


@pytest.mark.parametrize("name", FILES)
def test_each_file_begins_with_what_it_does_locks_reads_and_is_fenced_by(name: str) -> None:
    lines = list(header(name))
    assert re.match(r"-- [A-Z].*[.?]", lines[0])
    said = " ".join(lines)
    for topic in ("Locks", "Index", "Fence"):
        assert topic in said


def test_each_file_has_its_builder() -> None:
    # (those of an app's own table: test_table_statements.py)
    assert {f"{name}.sql" for name in BUILT} == {name for name in FILES if not name.startswith("table_")}


@pytest.mark.parametrize("name", BUILT)
def test_a_statement_is_given_just_the_parameters_that_it_names(name: str) -> None:
    sql = BUILT[name].sql.decode()
    assert set(re.findall(r"%\((\w+)\)s", sql)) == set(BUILT[name].parameters)


@pytest.mark.parametrize("name", BUILT)
def test_a_statement_is_rendered_without_comments_and_qualified_by_its_schema(name: str) -> None:
    sql = BUILT[name].sql.decode()
    assert "--" not in sql
    assert "{" not in sql
    assert ('"odd name".' in sql) == (name not in {"wait_briefly", "current_transaction"})
    for table in ("jobs", "results", "runners", "kinds", "facts"):
        assert not re.search(rf"\b(from|join|into|update)\s+{table}\b", sql), "a table without its schema"


@pytest.mark.parametrize("name", BUILT)
def test_no_clock_is_read_that_stands_still_in_a_transaction(name: str) -> None:
    sql = BUILT[name].sql.decode()
    assert not re.search(r"\b(now|transaction_timestamp|localtimestamp|current_timestamp)\s*\(\)", sql)
    assert "current_timestamp" not in sql


@pytest.mark.ruling("0.3")
@pytest.mark.parametrize("name", ["finish_jobs", "settle_jobs", "renew_leases"])
def test_a_fenced_statement_names_the_whole_fence_and_never_waits(name: str) -> None:
    sql = re.sub(r"\s+", " ", BUILT[name].sql.decode())
    held = sql[sql.index("held as materialized") : sql.index("now as materialized")]
    for part in ("j.id = i.id", "j.key = i.key", "j.revision = i.revision", "j.token = i.token", "skip locked"):
        assert part in held
    assert "from (select count(*) from held)" in sql, "the clock must be read after the locks, by dependence"
    assert "lease_expires_at > now.at" in sql


def test_an_identifier_that_cannot_be_quoted_safely_is_refused() -> None:
    for name in ("", 'a"b', "a'b", "a%b", "a{b}", "a\\b", "x" * 64, "a\0"):
        with pytest.raises(ValueError, match="identifier"):
            TableMap(name)


def test_a_long_schema_name_has_a_channel_of_its_own_that_fits() -> None:
    long = [TableMap("s" * 62 + end) for end in "ab"]
    assert len({tables.channel for tables in long}) == 2
    assert all(len(tables.channel) <= 63 for tables in long)
    assert TableMap().channel == "pgworker_pgworker"
