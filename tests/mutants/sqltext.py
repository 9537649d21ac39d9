"""The mutants of one SQL statement: each term of its conditions made true or false, one at a time.

An AND term becomes `true` (it asks nothing any more), an OR term becomes `false` (it lets nothing pass any more), and
a CASE branch is always and never taken. A bracketed term is changed as a whole, and inside. Conditions are those of
WHERE, ON, HAVING and WHEN, wherever they stand, and what AND or OR join elsewhere. The text stays SQL, of the same
types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias


@dataclass(frozen=True, slots=True)
class Edit:
    """One mutant: what is done, in words that outlive an edit elsewhere in the file, and the text it makes."""

    name: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Token:
    """A word, number, string, placeholder, operator or bracket."""

    text: str
    start: int
    end: int


@dataclass(slots=True)
class Group:
    """What stands in brackets, or between CASE and END; the brackets themselves are kept beside it."""

    opened: Token
    parts: list[Part] = field(default_factory=list)
    closed: Token | None = None

    @property
    def start(self) -> int:
        return self.opened.start

    @property
    def end(self) -> int:
        assert self.closed is not None
        return self.closed.end


Part: TypeAlias = Token | Group

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|--[^\n]*)
      | '(?:[^']|'')*' | "(?:[^"]|"")*"       # strings and quoted names
      | %\(\w+\)s | \{[\w.]+\??\}           # parameters, tables (and columns of an app's own)
      | \d[\w.]* | [^\W\d]\w*                 # numbers, words
      | :: | <> | != | <= | >= | \|\| | ->>? | [-+*/%<>=.,()\[\];:@#&|~^?]""",
    re.VERBOSE,
)
_OPENERS: Final = {"(": ")", "case": "end"}
_ENDS: Final = frozenset({
    "where", "join", "left", "right", "inner", "full", "cross", "natural", "group", "order", "having", "limit",
    "offset", "fetch", "for", "union", "except", "intersect", "returning", "window", "set", "using", "on", "then",
    "when", "else", "from", ",",
})  # fmt: skip
"""What ends a condition at its own depth. (`from` of IS DISTINCT FROM does not; see there.)"""


def tokens(sql: str) -> Iterator[Token]:
    """The tokens without spaces and comments; a character that fits nowhere is an error of this module."""
    at = 0
    while at < len(sql):
        match = _TOKEN.match(sql, at)
        if match is None:
            raise ValueError(f"cannot read {sql[at : at + 20]!r}")
        if match["space"] is None:
            yield Token(match[0], at, match.end())
        at = match.end()


def tree(sql: str) -> list[Part]:
    """The statement as parts of parts, by brackets and CASE ... END."""
    open_groups = [Group(Token("", 0, 0))]
    for token in tokens(sql):
        word = token.text.lower()
        if len(open_groups) > 1 and word == _OPENERS[open_groups[-1].opened.text.lower()]:
            open_groups.pop().closed = token
            continue
        if word in _OPENERS:
            group = Group(token)
            open_groups[-1].parts.append(group)
            open_groups.append(group)
        else:
            open_groups[-1].parts.append(token)
    if len(open_groups) > 1:
        raise ValueError(f"{open_groups[-1].opened.text} is never closed")
    return open_groups[0].parts


def _word(part: Part | None) -> str:
    return part.text.lower() if isinstance(part, Token) else ""


def _is_call(parts: Sequence[Part], index: int) -> bool:
    """Whether left, right and the like are a function's name here."""
    following = parts[index + 1] if index + 1 < len(parts) else None
    return isinstance(following, Group) and following.opened.text == "(" and _word(parts[index]) in ("left", "right")


def _condition_end(parts: Sequence[Part], start: int) -> int:
    for index in range(start, len(parts)):
        word = _word(parts[index])
        if word not in _ENDS or _is_call(parts, index):
            continue
        if word == "from" and index and _word(parts[index - 1]) == "distinct":
            continue
        return index
    return len(parts)


def _begins_condition(parts: Sequence[Part], index: int, *, case: bool) -> bool:
    word = _word(parts[index])
    before = _word(parts[index - 1]) if index else ""
    after = _word(parts[index + 1]) if index + 1 < len(parts) else ""
    if word == "on":
        return after != "conflict" and before != "distinct"
    if word == "when":
        return case and _word(parts[0]) == "when"  # not of CASE value WHEN value
    return word in ("where", "having")


@dataclass(frozen=True, slots=True)
class Condition:
    """A boolean expression, where it stands (the CTE, and the column of a CASE), and what begins it."""

    place: str
    clause: str
    parts: Sequence[Part]
    inner: bool = False
    """Whether it is a part of an expression: its whole is changed there."""


def conditions(
    parts: Sequence[Part], place: str = "main", clause: str = "value", *, case: bool = False
) -> Iterator[Condition]:
    """All conditions of a statement: those of its clauses, and what else AND or OR join, in brackets or a column."""
    here, end = clause, 0
    for index, part in enumerate(parts):
        here = here if index < end else clause
        if isinstance(part, Group) and part.opened.text == "(":
            cte = _cte_name(parts, index)
            yield from conditions(part.parts, cte or place, "value" if cte else here)
        elif isinstance(part, Group):
            column = _column(parts, index)
            yield from conditions(part.parts, f"{place}.{column}" if column else place, here, case=True)
        elif _begins_condition(parts, index, case=case):
            here, end = _word(part), _condition_end(parts, index + 1)
            yield Condition(place, here, parts[index + 1 : end])
    for value in _values(parts, case=case):
        yield Condition(place, clause, value, inner=True)


_VALUE_ENDS: Final = _ENDS | {"select", "as", "by", "case"}


def _values(parts: Sequence[Part], *, case: bool) -> Iterator[Sequence[Part]]:
    """The expressions at this depth that no clause begins and in which AND or OR join terms."""
    start = index = 0
    while index <= len(parts):
        ended = index == len(parts) or _word(parts[index]) in _VALUE_ENDS
        if ended and max(len(_split(parts[start:index], word)) for word in ("and", "or")) > 1:
            yield parts[start:index]
        if index < len(parts) and _begins_condition(parts, index, case=case):
            index = _condition_end(parts, index + 1) - 1
            ended = True
        index += 1
        start = index if ended else start


def _column(parts: Sequence[Part], index: int) -> str:
    """The column that a CASE is the value of: `column = case ... end` or `case ... end as column`."""
    before = parts[index - 2 : index] if index > 1 else ()
    if before and _word(before[1]) == "=":
        return _word(before[0])
    after = parts[index + 1 : index + 3]
    return _word(after[1]) if len(after) > 1 and _word(after[0]) == "as" else ""


def _cte_name(parts: Sequence[Part], index: int) -> str | None:
    """The name before AS [NOT] [MATERIALIZED] (...)."""
    at = index - 1
    while at > 0 and _word(parts[at]) in ("not", "materialized"):
        at -= 1
    if at > 0 and _word(parts[at]) == "as":
        name = parts[at - 1]
        if isinstance(name, Group) and at > 1:  # name (columns) as (...)
            name = parts[at - 2]
        return name.text if isinstance(name, Token) else None
    return None


def _split(parts: Sequence[Part], word: str) -> list[Sequence[Part]]:
    """The operands of AND or OR at this depth; the AND of BETWEEN is none of them."""
    operands: list[list[Part]] = [[]]
    between = False
    for part in parts:
        if _word(part) == "between":
            between = True
        if _word(part) == word and not between:
            operands.append([])
            continue
        if _word(part) == "and":
            between = False
        operands[-1].append(part)
    return list(operands)


@dataclass(frozen=True, slots=True)
class Change:
    """A term, and the truth value put in its place."""

    parts: Sequence[Part]
    value: str


def _changes(parts: Sequence[Part]) -> Iterator[Change]:
    """The changes of the terms that AND and OR join at this depth; those in brackets are conditions of their own."""
    alternatives = _split(parts, "or")
    for alternative in alternatives:
        if len(alternatives) > 1:
            yield Change(alternative, "false")
        terms = _split(alternative, "and")
        for term in terms if len(terms) > 1 else ():
            yield Change(term, "true")


def _whole(condition: Condition) -> Iterator[Change]:
    """The changes of a condition as one: what its own terms do not do already, and for a CASE the opposite, too."""
    alternatives, terms = len(_split(condition.parts, "or")), len(_split(condition.parts, "and"))
    if condition.inner:
        return
    if alternatives == terms == 1 or (condition.clause == "when" and alternatives > 1):
        yield Change(condition.parts, "true")
    if condition.clause == "when" and alternatives == 1:
        yield Change(condition.parts, "false")


_SHOWN: Final = 110


def shortened(name: str) -> str:
    """The name of a change, cut in its middle where it is long."""
    return name if len(name) <= _SHOWN else f"{name[: _SHOWN // 2]} ... {name[-_SHOWN // 2 + 5 :]}"


def _shown(sql: str, change: Change) -> str:
    """The term in one line, without comments, parameters short."""
    text, last = "", change.parts[0].start
    for token in tokens(sql[change.parts[0].start : change.parts[-1].end]):
        start = change.parts[0].start + token.start
        text += (" " if start > last else "") + token.text
        last = start + len(token.text)
    return re.sub(r"%\((\w+)\)s(::\w+(\[\])?)?", r":\1", text)


def mutants(sql: str) -> Iterator[Edit]:
    """All mutants of a statement, in its order, named apart; comments and all else stay as they are."""
    seen: dict[str, int] = {}
    for condition in conditions(tree(sql)):
        for change in (*_whole(condition), *_changes(condition.parts)):
            start, end = change.parts[0].start, change.parts[-1].end
            if sql[start:end].lower() in ("true", "false"):
                continue
            name = f"{condition.place} {condition.clause}: {shortened(_shown(sql, change))} -> {change.value}"
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                name += f" #{seen[name]}"
            yield Edit(name, sql.count("\n", 0, start) + 1, f"{sql[:start]}{change.value}{sql[end:]}")
