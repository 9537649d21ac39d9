"""The tables of the docs say what the code says: they leave nothing out, and add nothing."""

from __future__ import annotations

import dataclasses
import inspect
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import psycopg
import pytest

from pgworker import App, Job, outcome
from pgworker.cli.errors import EXIT_CODES, Code
from pgworker.policy import PRESETS, Policy
from pgworker.retry import Backoff
from tests.docs.markdown import codes, prose, table
from tests.handles import FAIL, Hand

if TYPE_CHECKING:
    from collections.abc import Callable

Admin: TypeAlias = psycopg.Connection[Any]


def first_column(page: str, heading: str) -> list[str]:
    """The names in the first cell of each row."""
    return [name for row in table(page, heading)[1:] for name in codes(row[0])]


def parameters(function: Callable[..., object]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


# --- enqueue.md -----------------------------------------------------------------------------------------------------


def test_every_argument_of_enqueue_is_told_with_its_default() -> None:
    named = first_column("docs/enqueue.md", "Arguments")
    assert set(named) == parameters(App.enqueue)
    assert set(named) == parameters(type(App().sync).enqueue)
    signature = inspect.signature(App.enqueue).parameters
    for row in table("docs/enqueue.md", "Arguments")[1:]:
        default = signature[codes(row[0])[0]].default
        if default not in {None, inspect.Parameter.empty}:
            assert row[1].strip("`").strip('"') == str(default), row


def test_every_argument_of_the_sql_function_is_told_with_its_type(admin: Admin) -> None:
    found = admin.execute(
        "select a.name, format_type(a.type, null) from pg_proc p,"
        " unnest(p.proargnames, p.proallargtypes, p.proargmodes) with ordinality as a(name, type, mode, ord)"
        " where p.oid = 'pgworker.enqueue'::regproc and a.mode = 'i' order by a.ord"
    ).fetchall()
    rows = table("docs/enqueue.md", "From SQL")[1:]
    assert [(codes(row[0])[0], codes(row[1])[0]) for row in rows] == found


def _waits(hand: Hand, admin: Admin) -> None:
    """As it was enqueued."""


def _runs(hand: Hand, admin: Admin) -> None:
    hand.claim()


def _cancel_requested(hand: Hand, admin: Admin) -> None:
    hand.claim()
    admin.execute("update pgworker.jobs set cancel_requested_at = clock_timestamp()")


def _lease_has_run_out(hand: Hand, admin: Admin) -> None:
    hand.claim()
    admin.execute("update pgworker.jobs set lease_expires_at = clock_timestamp() - interval '1 second'")


def _succeeded(hand: Hand, admin: Admin) -> None:
    hand.finish(hand.claim()[0], "1")


def _failed(hand: Hand, admin: Admin) -> None:
    hand.settle(hand.claim()[0], FAIL)


def _cancelled(hand: Hand, admin: Admin) -> None:
    hand.settle(hand.claim()[0], dataclasses.replace(FAIL, state="cancelled"))


ROWS: dict[str, Callable[[Hand, Admin], None] | None] = {
    "is not there": None,
    "waits": _waits,
    "runs": _runs,
    "runs, cancel requested": _cancel_requested,
    "lease has run out": _lease_has_run_out,
    "succeeded": _succeeded,
    "failed": _failed,
    "cancelled": _cancelled,
}
COLUMNS = {
    "same revision": ("r1", "r1"),
    "new revision": ("r1", "r2"),
    "no revision, before or now": (None, None),
}
AGAIN = table("docs/enqueue.md", "Enqueued again")


@pytest.mark.ruling("2.2")
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("found", ROWS)
def test_an_enqueue_does_what_the_table_says(found: str, column: str, hand: Hand, admin: Admin) -> None:
    (row,) = (row for row in AGAIN[1:] if row[0] == found)
    says = codes(row[AGAIN[0].index(column)])[0]
    before, now = COLUMNS[column]
    make = ROWS[found]
    if make is not None:
        hand.enqueue("k", before, "old")
        make(hand, admin)
    assert hand.enqueue("k", now, "new").status == says


def test_the_table_has_no_other_rows_and_columns() -> None:
    assert [row[0] for row in AGAIN[1:]] == list(ROWS)
    assert AGAIN[0][1:] == list(COLUMNS)


# --- handlers.md ----------------------------------------------------------------------------------------------------


def test_every_part_of_a_job_is_told() -> None:
    public = {field.name for field in dataclasses.fields(Job)} | {
        name for name, _ in inspect.getmembers(Job, lambda value: isinstance(value, property))
    }
    assert set(first_column("docs/handlers.md", "What it gets")) == public


def test_every_instruction_is_told_with_its_arguments() -> None:
    told = {name for name in first_column("docs/handlers.md", "What it returns") if "(" in name}
    assert {name.partition("(")[0] for name in told} == {kind.__name__ for kind in outcome.Instruction.__args__}
    for name in told:
        kind = getattr(outcome, name.partition("(")[0])
        arguments = name.partition("(")[2].rstrip(")").split(", ")
        assert [argument.partition("=")[0] for argument in arguments] == [
            field.name for field in dataclasses.fields(kind)
        ], name


def test_every_code_that_we_write_is_told() -> None:
    ours = {value for name, value in vars(outcome).items() if name.isupper() and isinstance(value, str)}
    section = prose("docs/handlers.md").partition("### Codes that pgworker writes itself")[2].partition("\n## ")[0]
    told = {code for code in codes(section) if code.replace("_", "").isalpha() and code.islower() and "_" in code}
    assert told == ours


def test_every_option_of_a_kind_is_told() -> None:
    assert set(first_column("docs/handlers.md", "Options of a kind")) == parameters(App.kind) - {"name"}


def seconds(value: timedelta | None, *, otherwise: str) -> str:
    return otherwise if value is None else f"{value.total_seconds():g} s"


def spread(backoff: Backoff) -> str:
    signs = {"symmetric": "±", "additive": "+"}
    return f"{signs[backoff.jitter]} {backoff.spread * 100:g} %" if backoff.jitter in signs else backoff.jitter


def as_told(policy: Policy) -> dict[str, str]:
    return {
        "concurrency": str(policy.concurrency),
        "poll": seconds(policy.poll, otherwise=""),
        "timeout": seconds(policy.timeout, otherwise="none"),
        "lease": seconds(policy.lease.ttl, otherwise=""),
        "renewed each": seconds(policy.lease.heartbeat, otherwise="never"),
        "max_attempts": str(policy.max_attempts),
        "backoff from": seconds(policy.backoff.base, otherwise=""),
        "up to": seconds(policy.backoff.cap, otherwise=""),
        "spread": spread(policy.backoff),
        "stop": policy.stop.mode,
        "within": seconds(policy.stop.grace, otherwise=""),
        "panic": policy.panic,
        "facts": policy.facts,
    }


def test_every_preset_is_told_as_it_is() -> None:
    heading, *rows = table("docs/handlers.md", "Presets")
    for column, preset in enumerate(heading[1:], start=1):
        told = {row[0]: row[column] for row in rows}
        assert told == as_told(PRESETS[codes(preset)[0]]), preset
    assert [codes(preset)[0] for preset in heading[1:]] == list(PRESETS)
    for policy in PRESETS.values():  # what the table leaves out is the same in all of them
        assert (policy.batch, policy.window, policy.max_evictions) == (64, timedelta(seconds=0.25), 5)


# --- operations.md --------------------------------------------------------------------------------------------------


def test_every_exit_code_is_told_in_the_words_of_the_help() -> None:
    told = {int(row[0]): row[1].replace("`", "") for row in table("docs/operations.md", "Exit codes")[1:]}
    assert set(told) == {int(code) for code in Code}
    assert [line for code, line in told.items() if f"  {code}  {line}\n" not in EXIT_CODES] == []


# --- schema.md ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jobs", "results", "runners", "migrations"])
def test_every_column_is_told_with_its_type(name: str, admin: Admin) -> None:
    found = admin.execute(
        "select attname, format_type(atttypid, null) from pg_attribute"
        " where attrelid = %s::regclass and attnum > 0 and not attisdropped order by attnum",
        [f"pgworker.{name}"],
    ).fetchall()
    assert [(codes(row[0])[0], codes(row[1])[0]) for row in table("docs/schema.md", name)[1:]] == found


def test_every_relation_is_told(admin: Admin) -> None:
    found = admin.execute(
        "select relname from pg_class where relnamespace = 'pgworker'::regnamespace and relkind in ('r', 'p', 'v')"
        " and not relispartition"
    ).fetchall()
    page = prose("docs/schema.md")
    assert [name for (name,) in found if f"\n## {name}\n" not in page] == []


def test_every_derived_state_is_told(admin: Admin) -> None:
    (text,) = admin.execute("select pg_get_viewdef('pgworker.job_states'::regclass)").fetchone() or ("",)
    told = {codes(row[0])[0]: codes(row[1])[0] for row in table("docs/schema.md", "job_states")[1:]}
    derived = {state for state, stored in told.items() if state != stored}
    assert derived == set(re.findall(r"'(\w+)'::text", text)) - {"pending"}
    assert set(told.values()) == {"pending", "succeeded", "failed", "cancelled"}
