"""The schema that a fresh database gets: what a migration changes shows as a diff of golden_catalog.txt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from pgworker.schema import apply, migrate, migrations
from tests.databases import TABLES
from tests.migrations import catalog

if TYPE_CHECKING:
    from tests.databases import MakeDsn

GOLDEN: Final = Path(__file__).with_name("golden_catalog.txt")
ACTUAL: Final = Path(__file__).parents[1] / "out" / GOLDEN.name

CHANGES: Final = (
    "alter table pgworker.jobs add column note text",
    "alter table pgworker.jobs alter column attempts drop not null",
    "alter table pgworker.jobs alter column attempts set default 1",
    "alter table pgworker.jobs alter column payload set storage external",
    "alter table pgworker.jobs set (fillfactor = 90)",
    "alter table pgworker.jobs drop constraint jobs_class",
    "alter table pgworker.jobs replica identity full",
    "alter sequence pgworker.job_ids increment 2",
    "alter function pgworker.enqueue reset search_path",
    "create index on pgworker.jobs (runner)",
    "create type pgworker.mood as enum ('good')",
    "create domain pgworker.small as int",
    "create policy mine on pgworker.jobs using (true)",
    "create trigger mine before update on pgworker.jobs execute function suppress_redundant_updates_trigger()",
    "create operator pgworker.=== (leftarg = text, rightarg = text, function = texteq)",
    "create or replace view pgworker.job_states as select *, 1 as one from (table pgworker.job_states) s",
    "create rule nothing as on delete to pgworker.jobs do instead nothing",
    "comment on table pgworker.jobs is 'x'",
    "grant select on pgworker.jobs to public",
    "revoke execute on function pgworker.enqueue from public",
)


def test_a_fresh_schema_is_the_golden_one(make_dsn: MakeDsn) -> None:
    with psycopg.connect(make_dsn(migrated=True), autocommit=True) as conn:
        actual = catalog.lines(conn)
    if actual != GOLDEN.read_text("utf-8").splitlines():
        ACTUAL.parent.mkdir(exist_ok=True)
        ACTUAL.write_text("\n".join([*actual, ""]), "utf-8")
        pytest.fail(f"the schema has changed; if that is meant, copy {ACTUAL} over {GOLDEN} and read the diff")


def test_an_upgraded_schema_is_the_fresh_one(make_dsn: MakeDsn, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations()
    with psycopg.connect(make_dsn(), autocommit=True) as conn:
        for count in range(1, len(known) + 1):
            monkeypatch.setattr(apply, "migrations", lambda upto=count: known[:upto])
            assert migrate(conn, TABLES) == (known[count - 1],)
        assert catalog.lines(conn) == GOLDEN.read_text("utf-8").splitlines()


def test_the_catalog_tells_every_kind_of_change(make_dsn: MakeDsn) -> None:
    with psycopg.connect(make_dsn(migrated=True)) as conn:
        before = catalog.lines(conn)
        for change in CHANGES:
            conn.execute(change.encode())
            assert catalog.lines(conn) != before, change
            conn.rollback()
        assert catalog.lines(conn) == before
