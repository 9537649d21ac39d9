"""A database that means ill: what our statements must not rely on is otherwise here.

The tests' role owns nothing. Transactions are serializable by default. The search path leads to a schema of look-alikes
that may not be touched. `jobs` is partitioned by kind, so that two rows may have one ctid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from pgworker.schema import grants

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgworker.tablemap import TableMap

Connection: TypeAlias = psycopg.Connection[TupleRow]

# The kinds of the two partitions besides the default one. A test that wants equal ctids takes one kind of each.
PARTITIONS: Final = {
    "jobs_first": ("mail", "welcome_mail", "a", "alpha", "first", "k1", "kind_a"),
    "jobs_second": ("index", "index_file", "embed", "b", "beta", "second", "k2", "kind_b"),
}

# Closer matches than pg_catalog's own for arguments that a careless statement might have, and names that ours have.
_LOOK_ALIKES: Final = """
create schema evil;
create table evil.jobs (id int, trap text);
create table evil.results (id int, trap text);
create table evil.runners (id int, trap text);
create table evil.kinds (id int, trap text);
create table evil.facts (id int, trap text);
create table evil.migrations (id int, trap text);
create view evil.job_states as select 1 as trap;
create sequence evil.job_ids;
create function evil.sprung() returns text language plpgsql as
    $$ begin raise exception 'a look-alike of schema evil was reached'; end $$;
create function evil.enqueue(kind text, payload jsonb) returns text language sql as 'select evil.sprung()';
create function evil.enqueue(kind text, payload text) returns text language sql as 'select evil.sprung()';
create function evil.uuidv7() returns uuid language sql as 'select evil.sprung()::uuid';
create function evil.pg_notify(channel text, payload varchar) returns text language sql as 'select evil.sprung()';
create function evil.pg_notify(channel varchar, payload varchar) returns text language sql as 'select evil.sprung()';
create function evil.unnest(text[]) returns setof text language sql as 'select evil.sprung()';
create function evil.unnest(bigint[]) returns setof bigint language sql as 'select evil.sprung()::bigint';
create function evil.unnest(uuid[]) returns setof uuid language sql as 'select evil.sprung()::uuid';
create function evil.unnest(float8[]) returns setof float8 language sql as 'select evil.sprung()::float8';
create function evil.array_agg(bigint) returns bigint[] language sql as 'select array[evil.sprung()::bigint]';
create function evil.width_bucket(bigint, bigint[]) returns int language sql as 'select evil.sprung()::int';
create function evil.cardinality(bigint[]) returns int language sql as 'select evil.sprung()::int';
create function evil.count(bigint) returns bigint language sql as 'select evil.sprung()::bigint';
create function evil.octet_length(value varchar) returns int language sql as 'select evil.sprung()::int';
create function evil.make_interval(secs numeric) returns interval language sql as 'select evil.sprung()::interval';
create function evil.text_varchar(text, varchar) returns bool language sql as 'select evil.sprung()::bool';
create function evil.int_numeric(bigint, numeric) returns bool language sql as 'select evil.sprung()::bool';
create function evil.time_date(timestamptz, time) returns bool language sql as 'select evil.sprung()::bool';
create function evil.time_text(timestamptz, text) returns timestamptz language sql as
    'select evil.sprung()::timestamptz';
create operator evil.= (leftarg = text, rightarg = varchar, function = evil.text_varchar);
create operator evil.<> (leftarg = text, rightarg = varchar, function = evil.text_varchar);
create operator evil.= (leftarg = bigint, rightarg = numeric, function = evil.int_numeric);
create operator evil.< (leftarg = bigint, rightarg = numeric, function = evil.int_numeric);
create operator evil.<= (leftarg = timestamptz, rightarg = time, function = evil.time_date);
create operator evil.+ (leftarg = timestamptz, rightarg = text, function = evil.time_text);
"""


class Role(NamedTuple):
    """The role that the tests connect as."""

    name: str
    password: str


def poison(connection: Connection, role: Role) -> None:
    """Make the look-alikes, the bad defaults and the role; before the schema, which must withstand them too."""
    connection.execute(_LOOK_ALIKES)
    connection.execute(sql.SQL("drop role if exists {}").format(sql.Identifier(role.name)))
    connection.execute(
        sql.SQL("create role {} login password {}").format(sql.Identifier(role.name), sql.Literal(role.password))
    )
    database = sql.Identifier(connection.info.dbname)
    for setting in ("default_transaction_isolation = 'serializable'", "search_path = 'evil'"):
        connection.execute(sql.SQL("alter database {} set {}").format(database, sql.SQL(setting)))


def partition(connection: Connection, tables: TableMap) -> None:
    """Make `jobs` anew while it is empty, partitioned by kind, its indexes under the same names."""
    schema, jobs = tables.schema_identifier, tables.qualified("jobs")
    with connection.transaction():
        connection.execute("set local search_path = pg_catalog")  # so that definitions come with all names qualified
        views = connection.execute(_VIEWS, [tables.schema]).fetchall()
        indexes = connection.execute(_INDEXES, [jobs]).fetchall()
        ((storage,),) = connection.execute(_STORAGE, [jobs]).fetchall()
        statements = [
            *(f"drop view {view}" for view, _ in reversed(views)),
            f"alter table {jobs} rename to jobs_plain",
            f"create table {jobs} (like {schema}.jobs_plain including all excluding indexes) partition by list (kind)",
            f"drop table {schema}.jobs_plain",
            *(definition for (definition,) in indexes),
            *(f"create table {schema}.{name} partition of {jobs} {bound} {storage}" for name, bound in _bounds()),
            *(f"create view {view} as {definition}" for view, definition in views),
        ]
        connection.execute(";\n".join(statements).encode())


def _bounds() -> Iterator[tuple[str, str]]:
    for name, kinds in PARTITIONS.items():
        yield name, "for values in (" + ", ".join(f"'{kind}'" for kind in kinds) + ")"
    yield "jobs_default", "default"


_VIEWS: Final = """
select format('%%I.%%I', n.nspname, c.relname), rtrim(pg_get_viewdef(c.oid), '; ')
from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = %s and c.relkind = 'v' order by c.oid"""

# A partitioned table has no storage parameters; its partitions take those of the plain one.
_STORAGE: Final = """
select coalesce('with (' || array_to_string(reloptions, ', ') || ')', '') from pg_class where oid = %s::regclass"""

# The index behind a constraint comes with it.
_INDEXES: Final = """
select case when c.oid is null then pg_get_indexdef(i.indexrelid)
            else format('alter table %%s add constraint %%I %%s',
                        i.indrelid::regclass, c.conname, pg_get_constraintdef(c.oid)) end
from pg_index i left join pg_constraint c on c.conindid = i.indexrelid and c.contype in ('p', 'u')
where i.indrelid = %s::regclass order by i.indexrelid"""


def admit(connection: Connection, tables: TableMap, role: Role) -> None:
    """Give the role what a least-privileged worker needs, and what tests make later in schemas public and evil."""
    connection.execute(grants(tables, role.name).encode())
    connection.execute(
        sql.SQL(
            "grant usage on schema evil, public to {role};"
            "alter default privileges in schema evil, public grant all on tables to {role};"
            "alter default privileges in schema evil, public grant all on sequences to {role}"
        ).format(role=sql.Identifier(role.name))
    )
