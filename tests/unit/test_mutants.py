"""The generators of mutants: what they change, what they leave alone, and that every reason to live names a mutant."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.mutants import catalogue, pycode, sqltext
from tests.mutants.catalogue import CODE, QUERIES, groups, mutants_of


def sql_names(text: str) -> list[str]:
    return [edit.name for edit in sqltext.mutants(text)]


def test_each_and_term_is_taken_away_and_each_or_term() -> None:
    text = "select from t where a = 1 and (b is null or c > 2) and d"
    assert sql_names(text) == [
        "main where: a = 1 -> true",
        "main where: (b is null or c > 2) -> true",
        "main where: d -> true",
        "main where: b is null -> false",
        "main where: c > 2 -> false",
    ]
    assert [edit.text for edit in sqltext.mutants(text)][3] == "select from t where a = 1 and (false or c > 2) and d"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("select from t where a", ["main where: a -> true"]),
        ("select from t where true", []),
        (
            "select from t where a between 1 and 2 and b",
            ["main where: a between 1 and 2 -> true", "main where: b -> true"],
        ),
        (
            "select from t where a = 'x and y' -- and z\n and b",
            ["main where: a = 'x and y' -> true", "main where: b -> true"],
        ),
        (
            "select from t where not (a or b)",
            ["main where: not (a or b) -> true", "main where: a -> false", "main where: b -> false"],
        ),
        (
            "select from a join b on a.x = b.x left join c on true where d",
            ["main on: a.x = b.x -> true", "main where: d -> true"],
        ),
        (
            "insert into t as j select 1 where x on conflict (k) do update set a = 1 where j.b and c",
            ["main where: x -> true", "main where: j.b -> true", "main where: c -> true"],
        ),
        ("select distinct on (a) b from t where c order by a", ["main where: c -> true"]),
        (
            "select from t where left(a, 1) = 'x' and b is distinct from c limit 1",
            ["main where: left(a, 1) = 'x' -> true", "main where: b is distinct from c -> true"],
        ),
        (
            "with x as materialized (select from t where a) select from x where b",
            ["x where: a -> true", "main where: b -> true"],
        ),
        (
            "update t set s = case when a then 1 when b and c then 2 else 3 end where d",
            [
                "main.s when: a -> true",
                "main.s when: a -> false",
                "main.s when: b and c -> false",
                "main.s when: b -> true",
                "main.s when: c -> true",
                "main where: d -> true",
            ],
        ),
        ("select case x when 1 then 2 end as y from t where z", ["main where: z -> true"]),
        ("select count(*) filter (where a) from t", ["main where: a -> true"]),
        (
            "select (a and b) is true as x, coalesce(c or d, false), e from t where (f and g) is not true",
            [
                "main value: a -> true",
                "main value: b -> true",
                "main value: c -> false",
                "main value: d -> false",
                "main where: f -> true",
                "main where: g -> true",
                "main where: (f and g) is not true -> true",
            ],
        ),
        ("select a and b as x from t", ["main value: a -> true", "main value: b -> true"]),
        (
            "select from t where a and exists (select from u where u.b = t.b)",
            [
                "main where: a -> true",
                "main where: exists (select from u where u.b = t.b) -> true",
                "main where: u.b = t.b -> true",
            ],
        ),
        (
            "select from t where k = %(kind)s::text and i = any(%(ids)s::bigint[])",
            ["main where: k = :kind -> true", "main where: i = any(:ids) -> true"],
        ),
        (
            "select from t where a and b union all select from t where a",
            ["main where: a -> true", "main where: b -> true", "main where: a -> true #2"],
        ),
    ],
)
def test_what_counts_as_a_term(text: str, names: list[str]) -> None:
    assert sorted(sql_names(text)) == sorted(names)


def test_what_is_no_sql_is_refused() -> None:
    with pytest.raises(ValueError, match="never closed"):
        list(sqltext.mutants("select (1"))
    with pytest.raises(ValueError, match="cannot read"):
        list(sqltext.mutants("select $x$"))


@pytest.mark.parametrize("group", groups())
def test_the_mutants_of_a_file_differ_from_it_and_from_each_other(group: str) -> None:
    mutants = list(mutants_of(group))
    original = (CODE[group].path if group in CODE else QUERIES / f"{group}.sql").read_text(encoding="utf-8")
    texts = [original, *(mutant.text for mutant in mutants)]
    assert len(set(texts)) == len(texts)
    assert len({mutant.id for mutant in mutants}) == len(mutants)
    assert mutants or not re.search(r"\bwhere\b", re.sub(r"--.*", "", original))


def python_names(body: str) -> list[str]:
    return [edit.name.partition(": ")[2] for edit in pycode.mutants(f"def f():\n    {body}\n", ["f"])]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("return a < b", ["a < b: < -> <="]),
        ("return a and b", ["a -> True", "b -> True"]),
        ("return not a or b < c", ["not a -> False", "b < c -> False", "b < c: < -> <="]),
        ("if a: raise E('no')", ["a -> not a"]),
        ("return min(a + 1, b)", ["min -> max", "a + 1: + -> -", "return min(a + 1, b): 1 -> 2"]),
        (
            "return S('x', counts=True)",
            ["return S('x', counts=True): no counts=True", "return S('x', counts=True): 'x' -> \"mutant\""],
        ),
        (
            "return x in ('a', 'b')",
            ["x in ('a', 'b'): in -> not in", "('a', 'b') without 'a'", "('a', 'b') without 'b'"],
        ),
        ("_log.warning('x', 1)", []),
    ],
)
def test_what_counts_as_a_change_of_code(body: str, names: list[str]) -> None:
    assert sorted(python_names(body)) == sorted(names)


@pytest.mark.parametrize(
    ("text", "left"),
    [("X = ('a', 'b')", {"X = ('b',)", "X = ('a',)"}), ("X = {1: 2, 3: 4}", {"X = {3: 4}", "X = {1: 2}"})],
)
def test_an_element_is_taken_away_with_its_comma(text: str, left: set[str]) -> None:
    made = {ast.unparse(ast.parse(edit.text)) for edit in pycode.mutants(text, ["X"])}
    assert left <= made


def test_a_definition_that_is_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match="no definition of g"):
        list(pycode.mutants("def f(): pass", ["g"]))


def test_every_reason_to_live_names_a_mutant() -> None:
    there = {mutant.id for group in groups() for mutant in mutants_of(group)}
    assert set(catalogue.reasons()) - there == set()


def test_every_test_of_a_decision_exists() -> None:
    for code in CODE.values():
        for path in code.tests:
            assert Path(catalogue.ROOT / path).exists(), path
