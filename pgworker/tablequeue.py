"""How an app's own table stands in for the jobs table: which of its columns says what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import TypeAlias, get_args

from pgworker.errors import ConfigError
from pgworker.job import State
from pgworker.tablemap import quote

StateValue: TypeAlias = str | int | bool
"""What a state column holds: text, an enum's label, a number or a truth."""

_STATES: Mapping[State, StateValue] = {state: state for state in get_args(State)}
_NO_COLUMNS = ("table", "states", "where", "payload")


@dataclass(frozen=True, slots=True)
class TableQueue:
    """An app's own table as the queue of a kind: none of its columns is renamed, none of its rows copied.

    The app inserts and changes its rows itself and says `app.notify(kind)` afterwards. Raises ConfigError for names
    and states that cannot work; whether the table fits is looked up when a worker starts. The columns without a
    default are needed; without one of the others we do without.
    """

    table: str
    """With its schema: `app.messages`."""
    _: KW_ONLY
    key: str
    """Names the thing worked on; unique, never null, of any type but an array or a composite."""
    revision: str
    """Says which version of it: a number, a hash, an instant. While it is null there is nothing to do."""
    state: str
    token: str
    """uuid, null while nobody works on the row."""
    lease_expires_at: str
    """timestamptz"""
    ready_at: str
    """timestamptz; a row is not claimed before it, and never while it is null."""
    attempts: str
    """A number: judged failures so far."""
    states: Mapping[State, StateValue] = field(default_factory=lambda: dict(_STATES), hash=False)
    """What the state column holds for each of our states; `pending` must differ from the others."""
    where: str | None = None
    """SQL condition on the row: others are neither claimed nor completed."""
    urgency: str | None = None
    """A number, never null: 0 is fresh, 1 is catch-up. Without it all rows are fresh."""
    priority: str | None = None
    """A number, never null; smaller runs first."""
    evictions: str | None = None
    """A number: workers lost in a row. Without it there is no limit to them."""
    cancel_requested_at: str | None = None
    """timestamptz; set by the app, it ends a waiting row and stops a running one."""
    runner: str | None = None
    """text: who works on the row."""
    code: str | None = None
    """text: why the row is as it is."""
    finished_at: str | None = None
    """timestamptz"""
    result: str | None = None
    """jsonb, json or text: what the handler returned. Without it that goes to `apply=` alone."""
    payload: str | tuple[str, ...] | None = None
    """What the handler gets: one column's value, or an object of several columns."""

    def __post_init__(self) -> None:
        schema, _, name = self.table.partition(".")
        if not schema or not name or "." in name:
            raise ConfigError(f"name the table with its schema, such as 'public.messages', got {self.table!r}")
        object.__setattr__(self, "states", dict(self.states))  # ours: nobody else changes it
        columns = list(self.columns.values())
        for column in (schema, name, *columns, *self.payload_columns):
            quote(column)
        twice = sorted({column for column in columns if columns.count(column) > 1})
        if twice:
            raise ConfigError(f"{self.table}: one column cannot say two things: {', '.join(twice)}")
        self._check_states()

    def _check_states(self) -> None:
        missing = [state for state in get_args(State) if state not in self.states]
        if missing or len(self.states) != len(_STATES):
            raise ConfigError(f"states gives the column's value for each of {', '.join(_STATES)}")
        for state, value in self.states.items():
            if isinstance(value, str) and "\0" in value:
                raise ConfigError(f"states: the value of {state} holds a NUL")
        if list(map(str, self.states.values())).count(str(self.states["pending"])) > 1:
            raise ConfigError("states: pending must have a value of its own, else ended rows would run again")

    @property
    def qualified(self) -> str:
        """The table's name, quoted."""
        schema, _, name = self.table.partition(".")
        return f"{quote(schema)}.{quote(name)}"

    @property
    def columns(self) -> dict[str, str]:
        """The table's columns by what they are to us; those that it has not are left out."""
        mapped = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in _NO_COLUMNS}
        return {name: column for name, column in mapped.items() if column is not None}

    @property
    def payload_columns(self) -> tuple[str, ...]:
        """The columns that make up the payload."""
        return (self.payload,) if isinstance(self.payload, str) else self.payload or ()

    @property
    def claim_index(self) -> list[str]:
        """The columns, in order, of the index along which rows are claimed."""
        return [column for column in (self.urgency, self.priority, self.ready_at, self.key) if column is not None]
