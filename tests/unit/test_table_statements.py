"""An app's own table as a value, and the texts of its statements."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from typing import Any
from uuid import uuid4

import pytest

from pgworker import ConfigError, TableQueue
from pgworker.job import Claim
from pgworker.outcome import Settlement, Success
from pgworker.statements import BEGINNING, Lane, Statement, finish_jobs, renew_leases, settle_jobs
from pgworker.tablemap import TableMap
from pgworker.tablestatements import (
    OwnTable,
    check_row,
    claim_rows,
    finish_rows,
    look_at,
    reap_rows,
    renew_rows,
    settle_rows,
    survey_table,
)

TABLES = TableMap("odd name")
LANE = Lane("work", 0, 0)
CLAIM = Claim("work", 1, "k", "r", 1, uuid4(), 0, None, 0, 0, 0, 0, datetime.now(UTC), 0.0, None)
BARE = TableQueue(
    "app.rows",
    key="c key",
    revision="c revision",
    state="c state",
    token="c token",
    lease_expires_at="c lease",
    ready_at="c ready",
    attempts="c attempts",
)
FULL = replace(
    BARE,
    states={"pending": "it's", "succeeded": 1, "failed": True, "cancelled": "100% \\"},
    where="body not like '%{x}%'",
    urgency="c urgency",
    priority="c priority",
    evictions="c evictions",
    cancel_requested_at="c cancel",
    runner="c runner",
    code="c code",
    finished_at="c finished",
    result="c result",
    payload=("c body", "c title"),
)


def built(queue: TableQueue) -> dict[str, Statement[Any]]:
    table = OwnTable(queue, "bigint", "text", "text", "jsonb" if queue.result else None)
    made: list[Statement[Any]] = [
        survey_table(table, TABLES, "work"),
        claim_rows(table, TABLES, LANE, limit=1, token=uuid4(), runner="r", ttl_seconds=1.0, max_evictions=5),
        finish_rows(table, [(CLAIM, Success("1"))]),
        settle_rows(table, [(CLAIM, Settlement("pending", None))]),
        renew_rows(table, [(CLAIM, 1.0)]),
        check_row(table, CLAIM),
        look_at(queue),
    ]
    if queue is FULL:
        made.append(reap_rows(table, LANE, limit=1, ttl_seconds=1.0, max_evictions=5, after=BEGINNING))
        later = reap_rows(table, LANE, limit=1, ttl_seconds=1.0, max_evictions=5, after=(datetime.now(UTC), "9"))
        made.append(replace(later, name="table_reap, later"))
    return {statement.name: statement for statement in made}


CASES = [(queue, name) for queue in (BARE, FULL) for name in built(queue)]


def cases(function: Any) -> Any:
    ids = [f"{'bare' if queue is BARE else 'full'}-{name}" for queue, name in CASES]
    return pytest.mark.parametrize(("queue", "name"), CASES, ids=ids)(function)


def test_each_file_of_such_a_table_has_its_builder() -> None:
    files = {path.name for path in resources.files("pgworker.queries").iterdir() if path.name.startswith("table_")}
    assert {f"{name}.sql" for name in built(FULL) if "," not in name} == files


@cases
def test_a_statement_is_given_just_the_parameters_that_it_names(queue: TableQueue, name: str) -> None:
    statement = built(queue)[name]
    assert set(re.findall(r"%\((\w+)\)s", statement.sql.decode())) == set(statement.parameters)


@cases
def test_a_statement_is_rendered_whole(queue: TableQueue, name: str) -> None:
    sql = built(queue)[name].sql.decode()
    assert "--" not in sql
    assert not re.search(r"[{}?]", sql.replace("'%%{x}%%'", ""))
    assert not re.search(r"(?<!%)%(?![%(])", sql), "a percent sign that the driver would take for a parameter"
    if name != "table_look":
        assert '"app"."rows"' in sql


@cases
def test_no_clock_is_read_that_stands_still_in_a_transaction(queue: TableQueue, name: str) -> None:
    sql = built(queue)[name].sql.decode()
    assert not re.search(r"\b(now|transaction_timestamp|localtimestamp|current_timestamp)\s*\(\)", sql)
    assert "current_timestamp" not in sql


@pytest.mark.contract("A3")
@pytest.mark.ruling("0.2")
@pytest.mark.parametrize("name", ["table_finish", "table_settle", "table_renew"])
def test_a_fenced_statement_is_that_of_the_jobs_table_but_for_the_identity(name: str) -> None:
    """The same steps in the same order: held (the fence, skip locked), now (after the locks), good, done."""
    jobs: dict[str, Statement[Any]] = {
        "table_finish": finish_jobs(TABLES, "work", [(CLAIM, Success("1"))]),
        "table_settle": settle_jobs(TABLES, "work", [(CLAIM, Settlement("pending", None))]),
        "table_renew": renew_leases(TABLES, [(CLAIM, 1.0)]),
    }
    ours = steps(jobs[name])
    for queue in (BARE, FULL):
        theirs = steps(built(queue)[name])
        assert list(theirs) == ["input", "held", "now", "good", "done"]
        order = ["good" if step == "decided" else step for step in ours if step in {*theirs, "decided"}]
        assert order == list(theirs)
        assert theirs["now"] == ours["now"]
        for step in (ours["held"], theirs["held"]):
            assert re.search(
                r"\) i cross join lateral \( select .* for no key update (of j )?skip locked\) locked", step
            )


def steps(statement: Statement[Any]) -> dict[str, str]:
    """The parts of a statement by name, in order."""
    parts = re.split(r"(?:^with|\)\s*,) (\w+) as (?:materialized )?\(", " ".join(statement.sql.decode().split()))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", ["table_finish", "table_settle", "table_renew"])
def test_the_fence_names_key_revision_token_and_pending(name: str) -> None:
    text = " ".join(built(FULL)[name].sql.decode().split())
    held = text[text.index("held as materialized") : text.index("now as materialized")]
    for part in (
        'j."c key" = i.key',
        'j."c revision"::text collate "C" = i.revision',
        'j."c token" = i.token',
        "j.\"c state\" = 'it''s' as pending",
    ):
        assert part in held
    assert "where held.pending and held.lease_expires_at > now.at" in text


def test_a_table_without_a_column_is_not_told_to_set_it() -> None:
    for statement in built(BARE).values():
        assert not re.search(
            "c (result|code|finished|evictions|cancel|runner|urgency|priority)", statement.sql.decode()
        )
    assert "'it''s'" in built(FULL)["table_claim"].sql.decode()
    assert "E'100%% \\\\'::text" in built(FULL)["table_settle"].sql.decode()


def test_leases_on_equal_tables_are_renewed_together() -> None:
    one, same = OwnTable(FULL, "bigint", "text", "text"), OwnTable(replace(FULL), "bigint", "text", "text")
    assert (one, hash(one)) == (same, hash(same))
    assert one != OwnTable(replace(FULL, states={**FULL.states, "failed": 9}), "bigint", "text", "text")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"table": "rows"}, "with its schema"),
        ({"table": "a.b.c"}, "with its schema"),
        ({"table": ".b"}, "with its schema"),
        ({"key": 'a"b'}, "identifier"),
        ({"payload": ("a'b",)}, "identifier"),
        ({"token": "c key"}, "one column cannot say two things: c key"),
        ({"states": {"pending": "a"}}, "for each of pending, succeeded, failed, cancelled"),
        (
            {"states": {"pending": 1, "succeeded": "1", "failed": 2, "cancelled": 3}},
            "pending must have a value of its own",
        ),
        ({"states": {"pending": "a\0", "succeeded": "b", "failed": "c", "cancelled": "d"}}, "NUL"),
    ],
)
def test_a_table_that_cannot_work_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        replace(BARE, **change)


def test_states_are_a_copy() -> None:
    states: dict[Any, Any] = {"pending": "a", "succeeded": "b", "failed": "c", "cancelled": "c"}
    queue = replace(BARE, states=states)
    states["pending"] = "c"
    assert queue.states["pending"] == "a"
