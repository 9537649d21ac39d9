from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from pgworker.errors import ConfigError, SchemaError
from pgworker.schema import files, grants, migrations, parse, render
from pgworker.schema.files import Migration, fill
from pgworker.tablemap import TableMap

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "-- 0002 more\n-- Upgrade: one line\n--          and another.\n-- Breaking: yes\n-- Transaction: no\n"
MADE = re.compile(
    r"^(?:(?:create (?:or replace )?|alter )(?:table|view|function|sequence)|create (?:unique )?index .*? on"
    r"|insert into|update|delete from|comment on \w+)\s+(?:if (?:not )?exists )?(\S+)",
    re.MULTILINE | re.DOTALL,
)


@pytest.fixture(params=migrations(), ids=lambda migration: migration.title)
def shipped(request: pytest.FixtureRequest) -> Migration:
    return request.param  # type: ignore[no-any-return]


def test_a_header_says_what_an_operator_must_know() -> None:
    migration = parse("0002_more.sql", HEADER + "select 1;\n")
    assert (migration.number, migration.name, migration.title) == (2, "more", "0002 more")
    assert migration.note == "one line and another."
    assert migration.breaking
    assert not migration.transactional
    assert migration.sql == HEADER + "select 1;\n"


@pytest.mark.parametrize(
    ("file_name", "text"),
    [
        ("0003_more.sql", HEADER),
        ("0002_less.sql", HEADER),
        ("0002_more.sql", "\n" + HEADER),
        ("0002_more.sql", HEADER.replace("0002", "2")),
        ("0002_more.sql", HEADER.replace("Upgrade: one line", "Upgrade:")),
        ("0002_more.sql", HEADER.replace("-- Breaking: yes\n", "")),
        ("0002_more.sql", HEADER.replace("Breaking: yes", "Breaking: maybe")),
        ("0002_more.sql", HEADER.replace("-- Transaction: no\n", "")),
    ],
)
def test_a_header_in_another_form_is_refused(file_name: str, text: str) -> None:
    with pytest.raises(SchemaError, match=f"migration {file_name}"):
        parse(file_name, text)


def test_the_checksum_tells_every_change_of_the_text() -> None:
    assert parse("0002_more.sql", HEADER).checksum != parse("0002_more.sql", HEADER + " ").checksum


def test_only_known_tokens_are_replaced() -> None:
    text = "{schema}.jobs {channel} {schema_name} {8} {1,63} {other} {{schema}}"
    assert fill(text, TableMap("my jobs"), {"{other}": "{schema}"}) == (
        "\"my jobs\".jobs 'pgworker_my jobs' 'my jobs' {8} {1,63} {schema} {\"my jobs\"}"
    )


def test_a_schema_name_that_could_end_a_function_body_is_refused() -> None:
    for name in ("a$$b", "a$enqueue$"):
        with pytest.raises(ConfigError, match="dollar quote"):
            migrations()[0].rendered(TableMap(name))
    assert '"a$b".jobs' in migrations()[0].rendered(TableMap("a$b"))


@pytest.mark.parametrize(
    "names", [[], ["0002_more.sql"], ["0001_jobs.sql", "0003_last.sql"], ["0001_jobs.sql", "0001_other.sql"]]
)
def test_an_installation_without_all_its_migrations_says_so(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "migrations"
    folder.mkdir()
    for name in names:
        number, _, rest = name.removesuffix(".sql").partition("_")
        (folder / name).write_text(HEADER.replace("0002 more", f"{number} {rest}"))
    (folder / "README.md").write_text("is no migration")
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    with pytest.raises(SchemaError, match="install it again"):
        files.migrations.__wrapped__()


def test_the_migrations_of_an_installed_package_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "migrations").mkdir()
    (tmp_path / "migrations" / "0001_jobs.sql").write_text(HEADER.replace("0002 more", "0001 jobs"))
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    assert files.migrations.__wrapped__()[0].note == "one line and another."


def test_shipped_files_keep_to_the_rules(shipped: Migration) -> None:
    code = "\n".join(line.partition("--")[0] for line in shipped.sql.splitlines())
    assert shipped.sql.isascii(), "a client encoding must not matter"
    assert "\r" not in shipped.sql
    assert set(re.findall(r"\{[a-z_]*\}", shipped.sql)) <= {"{schema}", "{schema_name}", "{channel}"}
    comments = [line.partition("--")[2] for line in shipped.sql.splitlines()]
    assert not any("{schema" in comment for comment in comments), "a name with a line break in it would end the comment"
    assert not re.search(r"\b(extension|tablespace|superuser|public)\b", code, re.IGNORECASE)
    assert not re.search(r"\b(begin|commit|rollback)\s*;", code, re.IGNORECASE), "the transaction is migrate's"
    assert not re.search(r"\bnow\(\)", code), "frozen in a caller's transaction"


def test_shipped_files_qualify_what_they_make(shipped: Migration) -> None:
    made = MADE.findall(re.sub(r"\$(\w*)\$.*?\$\1\$", "", shipped.sql, flags=re.DOTALL))
    assert made
    assert [name for name in made if not name.startswith("{schema}.")] == []


def test_only_a_file_outside_a_transaction_works_concurrently_and_then_holds_one_statement(shipped: Migration) -> None:
    code = re.sub(r"--.*", "", shipped.sql)
    assert ("concurrently" in code.lower()) != shipped.transactional
    assert shipped.transactional or code.strip().count(";") == 1


def test_the_script_names_each_migration_and_its_note() -> None:
    script = render(TableMap(), migrations())
    for migration in migrations():
        assert f"-- {migration.title}: {migration.note}\ndo $" in script
        assert migration.checksum in script
    assert render(TableMap(), ()).count("\n") == 1


def test_a_schema_name_cannot_leave_the_comment_that_names_it() -> None:
    assert render(TableMap("a\ndrop"), ()).count("\n") == 1


def test_a_file_outside_a_transaction_is_a_statement_of_its_own_in_the_script() -> None:
    script = render(
        TableMap(),
        [parse("0002_more.sql", HEADER + "create index concurrently if not exists x on {schema}.jobs (id);\n")],
    )
    assert '\ncreate index concurrently if not exists x on "pgworker".jobs (id);\n' in script
    assert "\n\\set ON_ERROR_STOP on\n" in script, "plain psql would record what has failed"


def test_grants_give_no_right_to_change_the_schema() -> None:
    script = grants(TableMap("my jobs"), "the worker")
    assert all(line.endswith(' to "the worker";') for line in script.splitlines())
    assert 'grant usage on schema "my jobs" to "the worker";' in script
    assert not re.search(r"\b(all|create|truncate|references|trigger)\b", script)
    with pytest.raises(ConfigError):
        grants(TableMap(), 'x"; drop table y; --')
