"""The statements over an app's own table: queries/table_*.sql with that table's names in them. Sends nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, cast
from uuid import UUID

from pgworker.job import Claim
from pgworker.outcome import Settlement, Success
from pgworker.statements import (
    BEGINNING,
    Answer,
    Cursor,
    Due,
    Lane,
    Reaped,
    Renewal,
    Row,
    Statement,
    after_ready,
    due,
    fence_of,
    read_answers,
    read_claims,
    read_page,
    read_renewals,
    read_rows,
    template,
)
from pgworker.tablemap import TableMap, quote
from pgworker.tablequeue import StateValue, TableQueue

_PLACE: Final = re.compile(r"\{([\w.]+)\}")
_OPTIONAL_LINE: Final = re.compile(r"^[^\n]*\{(\w+)\?\}[^\n]*\n", re.MULTILINE)
_UNMAPPED: Final = {
    "urgency": "0::smallint",
    "priority": "0::smallint",
    "evictions": "0",
    "cancel_requested_at": "null::timestamptz",
}
"""What stands for a column that the table has not, where it is read."""
_COUNTED: Final = ("attempts", "evictions")

_ids = itertools.count(1)
"""A claim of such a table is told from others by a number that this process gives it."""


@dataclass(frozen=True, slots=True)
class OwnTable:
    """An app's table, and the types of its columns: all that the texts of its statements depend on."""

    queue: TableQueue
    key_type: str
    revision_type: str
    state_type: str
    result_type: str | None = None


def literal(value: StateValue) -> str:
    """A constant of the statement's own text: as a parameter, no plan could use the index of the pending rows."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return ("E" if "\\" in text else "") + "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _payload(queue: TableQueue) -> str:
    """Not by way of jsonb, which refuses what json may hold: one such row would fail each claim that meets it."""
    if isinstance(queue.payload, str):
        return f"to_json(j.{quote(queue.payload)})::text"
    pairs = [f"'{column}', j.{quote(column)}" for column in queue.payload_columns]
    return f"json_build_object({', '.join(pairs)})::text" if pairs else "null::text"


def _is_revision(column: str, type_: str) -> str:
    """Compared as text, byte by byte, unless a session's settings have a say in the text."""
    return f'j.{column}::text collate "C" = i.revision' if type_ == "text" else f"j.{column} = i.revision"


def _is_behind(columns: Mapping[str, str]) -> str:
    """Whether j is of a later lane than l: of columns alone, as a constant among them would keep it off the index."""
    lane = [name for name in ("urgency", "priority") if name in columns]
    ours = ", ".join(f"j.{columns[name]}" for name in lane)
    return f"({ours}) > ({', '.join(f'l.{name}' for name in lane)})" if lane else "false"


def _places(table: OwnTable) -> dict[str, str]:
    """What stands for each place of a template. `{j.name}` is the value of a column in the row j."""
    queue = table.queue
    columns = {name: quote(column) for name, column in queue.columns.items()}
    values = {f"j.{name}": f"j.{column}" for name, column in columns.items()}
    values |= {f"j.{name}": constant for name, constant in _UNMAPPED.items() if name not in columns}
    values |= {f"j.{name}": f"coalesce(j.{columns[name]}, 0)" for name in _COUNTED if name in columns}
    states = {state: f"{literal(value)}::{table.state_type}" for state, value in queue.states.items()}
    own = {
        # not cast: nor is the constant in the condition of the app's index, which must be seen to be the same
        "j.is_pending": f"j.{columns['state']} = {literal(queue.states['pending'])}",
        "j.is_wanted": f"({queue.where}\n)" if queue.where else "true",  # (it may end in a comment)
    }
    return {
        **columns,
        **values,
        **{name: text.replace("%", "%%") for name, text in (states | own).items()},
        "table": queue.qualified,
        "j.payload": _payload(queue),
        "j.is_behind": _is_behind(columns),
        "is_revision": _is_revision(columns["revision"], table.revision_type),
        "key_type": table.key_type,
        "revision_type": table.revision_type,
        "result_type": table.result_type or "",
    }


@cache
def _render(name: str, table: OwnTable, tables: TableMap | None = None, *, after: str = "true") -> bytes:
    """The text of queries/<name>.sql for this table. A line that sets a column which it has not is left out."""
    places = _places(table) | {"after": after, "kinds": tables.qualified("kinds") if tables else ""}
    mapped = table.queue.columns
    text = _OPTIONAL_LINE.sub(lambda line: line[0].replace("?}", "}") if line[1] in mapped else "", template(name))
    return _PLACE.sub(lambda place: places[place[1]], text).encode()


def look_at(queue: TableQueue) -> Statement[list[Row]]:
    """What the catalog says of the table; see queries/table_look.sql."""
    parameters = {"table": queue.qualified, "key": queue.key, "claim_index": queue.claim_index}
    return Statement("table_look", template("table_look").encode(), parameters, list)


def survey_table(table: OwnTable, tables: TableMap, kind: str) -> Statement[list[Due]]:
    """The lanes that have unfinished rows, in the order in which they are to be claimed."""
    return Statement("table_survey", _render("table_survey", table, tables), {"kind": kind}, read_rows(due))


def claim_rows(
    table: OwnTable,
    tables: TableMap,
    lane: Lane,
    *,
    limit: int,
    token: UUID,
    runner: str,
    ttl_seconds: float,
    max_evictions: int | None,
) -> Statement[list[Claim]]:
    """Take up to `limit` ready rows of a lane, in its order, under a token that was never used before."""
    parameters: dict[str, object] = {
        "kind": lane.kind,
        "class": lane.urgency,
        "priority": lane.priority,
        "limit": limit,
        "token": token,
        "ttl": ttl_seconds,
        "max_evictions": max_evictions if table.queue.evictions is not None else None,
    }
    if table.queue.runner is not None:
        parameters["runner"] = runner
    return Statement("table_claim", _render("table_claim", table, tables), parameters, _read_claims(lane.kind))


def _read_claims(kind: str) -> Callable[[Sequence[Row]], list[Claim]]:
    return lambda rows: read_claims([(kind, next(_ids), *row) for row in rows])


def finish_rows(table: OwnTable, finished: Sequence[tuple[Claim, Success]]) -> Statement[dict[int, Answer]]:
    """Succeed these rows and store their values where the table has a column for them; answers by the claims' ids."""
    parameters = fence_of([claim for claim, _ in finished])
    parameters |= {"results": [success.value for _, success in finished]}
    return Statement("table_finish", _render("table_finish", table), parameters, read_answers)


def settle_rows(table: OwnTable, settled: Sequence[tuple[Claim, Settlement]]) -> Statement[dict[int, Answer]]:
    """Retry, park, release, fail or cancel these rows; answers by the claims' ids."""
    parameters = fence_of([claim for claim, _ in settled]) | {
        "states": [settlement.state for _, settlement in settled],
        "counts": [int(settlement.counts) for _, settlement in settled],
        "delays": [settlement.delay_seconds for _, settlement in settled],
        "codes": [settlement.code for _, settlement in settled],
    }
    return Statement("table_settle", _render("table_settle", table), parameters, read_answers)


def renew_rows(table: OwnTable, leases: Sequence[tuple[Claim, float | None]]) -> Statement[dict[int, Renewal]]:
    """Prolong these leases, each to its own seconds from now; without seconds only look. Answers by the claims' ids."""
    parameters = fence_of([claim for claim, _ in leases]) | {"ttls": [ttl_seconds for _, ttl_seconds in leases]}
    return Statement("table_renew", _render("table_renew", table), parameters, read_renewals)


def reap_rows(
    table: OwnTable, lane: Lane, *, limit: int, ttl_seconds: float, max_evictions: int | None, after: Cursor
) -> Statement[Reaped]:
    """Read up to `limit` due rows of a lane after the cursor, and end or free those that no claim may take.

    Nothing to do for a table that tells neither evictions nor cancel requests: claims take expired leases over.
    """
    queue = table.queue
    if queue.evictions is None and queue.cancel_requested_at is None:
        return Statement("table_reap", b"select where false", {}, read_page)
    parameters: dict[str, object] = {
        "class": lane.urgency,
        "priority": lane.priority,
        "limit": limit,
        "ttl": ttl_seconds,
        "max_evictions": max_evictions if queue.evictions is not None else None,
    }
    if after == BEGINNING:  # (there is no least key to begin with, whatever its type is)
        return Statement("table_reap", _render("table_reap", table), parameters, read_page)
    parameters |= {"after_ready": after_ready(after), "after_key": after[1]}
    behind = (
        f"(j.{quote(queue.ready_at)}, j.{quote(queue.key)})"
        f" > (%(after_ready)s::timestamptz, %(after_key)s::{table.key_type})"
    )
    return Statement("table_reap", _render("table_reap", table, after=behind), parameters, read_page)


def check_row(table: OwnTable, claim: Claim) -> Statement[int | None]:
    """The claim's generation if it still owns its row, another if that is no longer wanted; see check_fence."""
    return Statement(
        "table_check",
        _render("table_check", table),
        {"key": claim.key, "revision": claim.revision, "token": claim.token},
        lambda rows: cast("int | None", rows[0][0]),
    )
