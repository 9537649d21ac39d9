"""How our statements become those of drivers that count their parameters, and whose adapters are loaded when."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer

from pgworker.adapters import async_caller, numbered, sync_caller
from pgworker.operations import current_transaction
from pgworker.statements import Insert, Statement, insert_jobs, read_nothing
from pgworker.tablemap import TableMap


def statement(sql: str, **parameters: object) -> Statement[None]:
    return Statement("test", sql.encode(), parameters, read_nothing)


@pytest.mark.parametrize(
    ("sql", "text", "values"),
    [
        ("select 1", "select 1", ()),
        ("select %(a)s::text", "select $1::text", ("A",)),
        ("select %(b)s::int, %(a)s, %(b)s", "select $1::int, $2, $1", ("B", "A")),
        ("select %(a)s%%%(b)s", "select $1%$2", ("A", "B")),
        ("select '100 %%', '%%(a)s', '%%s', '%%%%'", "select '100 %', '%(a)s', '%s', '%%'", ()),
        ("select '$1', $$it's %(a)s$$, '?', ':x', a::text", "select '$1', $$it's $1$$, '?', ':x', a::text", ("A",)),
        ('select "we""ird$2" -- ? \n, %(a)s', 'select "we""ird$2" -- ? \n, $1', ("A",)),
        ("select E'\\\\' || %(a)s || 'é\u2028'", "select E'\\\\' || $1 || 'é\u2028'", ("A",)),
        ("", "", ()),
    ],
)
def test_named_parameters_are_numbered_and_all_else_is_left_as_it_is(
    sql: str, text: str, values: tuple[object, ...]
) -> None:
    assert numbered(statement(sql, a="A", b="B")) == (text, values)


@pytest.mark.parametrize("sql", ["100 % of", "50%", "%s", "%b", "%(a)b", "%(a)", "%(a", "%", "%\n", "%%%"])
def test_a_percent_sign_that_means_nothing_is_an_error(sql: str) -> None:
    with pytest.raises(ValueError, match="a percent sign at"):
        numbered(statement(sql, a=1))


def test_a_parameter_that_is_not_given_is_an_error() -> None:
    with pytest.raises(KeyError, match="missing"):
        numbered(statement("select %(missing)s", a=1))


TEXTS = st.text(st.sampled_from("ab $1?:'\"\\é{}()s-\n")).map(lambda text: text.replace("%", "%%"))


@given(st.lists(st.one_of(TEXTS, st.just("%%"), st.sampled_from(["%(a)s", "%(b)s", "%(c c)s"]))))
def test_the_text_is_psycopgs_own_translation(pieces: list[str]) -> None:
    sql = "".join(pieces)
    parameters = {"a": "A", "b": "B", "c c": "C"}
    query = PostgresQuery(Transformer())
    query.convert(sql.encode(), parameters)
    text, values = numbered(statement(sql, **parameters))
    assert text.encode() == query.query
    assert [str(value).encode() for value in values] == list(query.params or ())


def test_our_own_statements_are_numbered_whatever_they_carry() -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    job = Insert("k %(keys)s $1", "r", 0, -1, 0.5, at, None, '{"a": "%s"}')
    made = insert_jobs(TableMap("we$1rd ?:s"), "work", [job], version=1, keep=False, wait=True, facts=0)
    text, values = numbered(made)
    assert "%(" not in text
    assert '"we$1rd ?:s"."jobs"' in text
    assert len(values) == len(made.parameters)
    assert ["k %(keys)s $1"] in values
    assert numbered(current_transaction(TableMap())) == ("select pg_catalog.pg_current_xact_id_if_assigned()::text", ())


# --- which adapter --------------------------------------------------------------------------------------------------


def test_no_connection_is_no_caller() -> None:
    assert async_caller(None) is None
    assert sync_caller(None) is None


@pytest.mark.ruling("1.41")
def test_no_other_package_is_imported_before_its_connections_are_met() -> None:
    script = """
        import sys
        import pgworker
        from pgworker.adapters import sync_caller

        def loaded():
            packages = ("sqlalchemy", "asyncpg", "django", "greenlet", "psycopg2", "pgworker.contrib")
            return sorted(name for name in sys.modules if name.startswith(packages))

        for wrong in (object(), "dsn"):
            try:
                sync_caller(wrong)
            except TypeError:
                pass
        assert loaded() == []
        from sqlalchemy.orm import Session
        assert "pgworker.contrib.sqlalchemy" not in loaded()
        sync_caller(Session())
        assert [name for name in loaded() if not name.startswith("sqlalchemy")] == [
            "pgworker.contrib", "pgworker.contrib.sqlalchemy"
        ]
        assert not [name for name in loaded() if name.startswith("sqlalchemy.ext.asyncio")]
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.ruling("1.41")
@pytest.mark.parametrize("name", ["sqlalchemy", "asyncpg", "django"])
def test_an_adapter_may_be_imported_by_hand(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import pgworker.contrib.{name}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
