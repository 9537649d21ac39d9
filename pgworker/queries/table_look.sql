-- What an app's own table is like.
-- A row for each of its columns: its type (of a domain: the type below it), whether it may be null, whether it is a
-- composite; and of the table whether it can be locked, has a unique index on its key, and one to claim along.
-- Locks: nothing.
-- Index: the catalog's own.
-- Fence: none, it only reads.
with recursive relation as materialized (
  select c.oid, c.relkind from pg_class c where c.oid = to_regclass(%(table)s::text)
), types as (
  select a.attname::text as name, a.attnotnull as not_null, a.atttypid as type
  from relation r join pg_attribute a on a.attrelid = r.oid and a.attnum > 0
  union all
  select d.name, d.not_null or t.typnotnull, t.typbasetype
  from types d join pg_type t on t.oid = d.type and t.typtype = 'd'
), indexes as (
  select i.indisunique and i.indpred is null and i.indnkeyatts = 1 as is_unique,
         array(select a.attname::text from pg_catalog.unnest(i.indkey::int2[]) with ordinality as k(attnum, n)
               join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum order by k.n) as columns
  from relation r join pg_index i on i.indrelid = r.oid and i.indisvalid
)
select r.relkind in ('r', 'p'),
       exists (select from indexes i where i.is_unique and i.columns[1] = %(key)s::text),
       exists (select from indexes i where i.columns[1:pg_catalog.cardinality(%(claim_index)s::text[])] = %(claim_index)s::text[]),
       t.name, format_type(t.type, -1), t.not_null, exists (select from pg_type c where c.oid = t.type and c.typtype = 'c')
from relation r left join types t on not exists (select from pg_type d where d.oid = t.type and d.typtype = 'd')
