"""A schema of the database as lines of text: what a golden file holds and what two databases are compared by.

Postgres' own dumps differ between versions of the server; this reads the same from PostgreSQL 14 to 18.
"""

from __future__ import annotations

import re
from typing import Final

import psycopg

_LINES: Final = (
    # Whatever lies in the schema, of kinds that the other lines know nothing of too.
    """select pg_describe_object(classid, objid, 0) from pg_depend
       where refclassid = 'pg_namespace'::regclass and refobjid = %(schema)s::regnamespace
         and classid <> 'pg_type'::regclass""",
    """select format('relation %%s: kind %%s, persistence %%s, options %%s, replica identity %%s, row security %%s, '
                  'rights %%s', relname, relkind, relpersistence, coalesce(reloptions::text, '-'), relreplident,
              relrowsecurity, coalesce(relacl::text, '-'))
       from pg_class where relnamespace = %(schema)s::regnamespace""",
    """select format('column %%s %%s %%s: %%s%%s%%s%%s, storage %%s%%s%%s', c.relname, lpad(row_number() over (
                  partition by c.oid order by a.attnum)::text, 2, '0'), a.attname, format_type(a.atttypid, a.atttypmod),
              ' collate ' || nullif(l.collname, 'default'), case when a.attnotnull then ' not null' end,
              ' default ' || pg_get_expr(d.adbin, d.adrelid), a.attstorage,
              ', identity ' || nullif(a.attidentity::text, ''), ', generated ' || nullif(a.attgenerated::text, ''))
       from pg_class c join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
       left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
       left join pg_collation l on l.oid = a.attcollation
       where c.relnamespace = %(schema)s::regnamespace and c.relkind in ('r', 'p', 'v', 'm', 'c')""",
    # From 18 on, not null is a constraint too; the columns tell it.
    """select format('constraint %%s %%s: %%s, valid %%s', conrelid::regclass, conname, pg_get_constraintdef(oid),
              convalidated)
       from pg_constraint where connamespace = %(schema)s::regnamespace and contype <> 'n'""",
    """select format('index %%s: valid %%s, options %%s', pg_get_indexdef(i.indexrelid), i.indisvalid,
              coalesce(c.reloptions::text, '-'))
       from pg_index i join pg_class c on c.oid = i.indexrelid where c.relnamespace = %(schema)s::regnamespace""",
    """select format('sequence %%s: %%s, start %%s, step %%s, from %%s to %%s, cache %%s, cycle %%s',
              seqrelid::regclass, format_type(seqtypid, null), seqstart, seqincrement, seqmin, seqmax, seqcache,
              seqcycle)
       from pg_sequence join pg_class on oid = seqrelid where relnamespace = %(schema)s::regnamespace""",
    """select format('view %%s: %%s', oid::regclass, pg_get_viewdef(oid, true))
       from pg_class where relnamespace = %(schema)s::regnamespace and relkind in ('v', 'm')""",
    """select format('function %%s(%%s) returns %%s: language %%s, volatile %%s, parallel %%s, strict %%s, '
                  'definer %%s, set %%s, rights %%s, body %%s', p.oid::regproc, pg_get_function_arguments(p.oid),
              pg_get_function_result(p.oid), l.lanname, p.provolatile, p.proparallel, p.proisstrict, p.prosecdef,
              p.proconfig, coalesce(p.proacl::text, '-'), p.prosrc)
       from pg_proc p join pg_language l on l.oid = p.prolang where p.pronamespace = %(schema)s::regnamespace""",
    """select format('type %%s: kind %%s, base %%s%%s, values %%s', t.oid::regtype, t.typtype, t.typbasetype::regtype,
              case when t.typnotnull then ' not null' end,
              (select array_agg(e.enumlabel order by e.enumsortorder) from pg_enum e where e.enumtypid = t.oid))
       from pg_type t where t.typnamespace = %(schema)s::regnamespace and t.typtype in ('d', 'e', 'r')""",
    """select format('rule %%s', pg_get_ruledef(r.oid)) from pg_rewrite r join pg_class c on c.oid = r.ev_class
       where c.relnamespace = %(schema)s::regnamespace and r.rulename <> '_RETURN'""",
    """select pg_describe_object('pg_policy'::regclass, p.oid, 0) from pg_policy p join pg_class c on c.oid = p.polrelid
       where c.relnamespace = %(schema)s::regnamespace""",
    """select format('trigger %%s', pg_get_triggerdef(t.oid)) from pg_trigger t join pg_class c on c.oid = t.tgrelid
       where c.relnamespace = %(schema)s::regnamespace and not t.tgisinternal""",
    """select format('comment %%s: %%s', pg_describe_object(classoid, objoid, objsubid), description)
       from pg_description where classoid = 'pg_class'::regclass
         and objoid in (select oid from pg_class where relnamespace = %(schema)s::regnamespace)""",
)


def lines(conn: psycopg.Connection, schema: str = "pgworker") -> list[str]:
    """Describe every object of a schema in sorted entries of a line, or of as many as a function or a view has."""
    quoted = f'"{schema}"'
    with conn.transaction():
        conn.execute("set local search_path = pg_catalog, pg_temp")
        found = [text for query in _LINES for (text,) in conn.execute(query, {"schema": quoted}).fetchall()]
    # Until 15 the text of a view names the table of each column, from 16 on only where there are several.
    entries = sorted(_plain_view(entry) if entry.startswith("view ") else entry for entry in found)
    return [line.rstrip() for line in "\n".join(entries).splitlines()]


def _plain_view(entry: str) -> str:
    return re.sub(r"\b[a-z]\.(?=[a-z_]+)", "", entry)
