"""Arrays that travel as literals: Postgres reads from them what Python wrote."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import psycopg
import pytest

from pgworker.db import Element, array_literal
from tests.chaos.audit import Admin

ONE, OTHER = UUID(int=1), UUID(int=2**127)
HOSTILE = ["", " ", "NULL", "null", '"', "\\", '\\"', "a,b", "{}", "{1,2}", " x ", "é\n\t", "'", "%s", "\\0", "\x01"]


@pytest.mark.parametrize(
    ("of", "values"),
    [
        ("text", []),
        ("text", HOSTILE),
        ("text", [*HOSTILE, None, *HOSTILE]),
        ("text", [None, None]),
        *(("text", [text] * 3) for text in HOSTILE),
        *(("text", [text, None, text, "b"]) for text in HOSTILE),
        ("bigint", [1, 2, 2, -(2**63), 2**63 - 1]),
        ("bigint", [7, 7, 7]),
        ("bigint", [1, None, 1]),
        ("float8", [0.0, -0.5, 1e300, 5e-324, float("inf"), 60.0, 60]),
        ("float8", [60.0, None, 60.0, 30.0]),
        ("uuid", [ONE, ONE, OTHER, ONE]),
        ("uuid", [OTHER, OTHER]),
        ("uuid", [ONE, None]),
    ],
)
def test_postgres_reads_what_was_written(admin: Admin, of: str, values: Sequence[Element]) -> None:
    row = admin.execute(f"select %s::{of}[]".encode(), [array_literal(values)]).fetchone()
    assert row == (values,)


@pytest.mark.parametrize("values", [["a\0b", "c"], ["a", "b\0"], ["\0", "\0\0"]])
def test_a_nul_is_refused_as_it_would_give_one_value_to_another(values: Sequence[Element]) -> None:
    with pytest.raises(psycopg.DataError):
        array_literal(values)
