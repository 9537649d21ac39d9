-- Delete what the journal has kept for longer than that: a page of facts after an id, of whatever kinds.
-- Locks: those facts, which nobody else of ours locks, and by an advisory lock the journal for this transaction, so that one
--   process at a time does it; when it is another's turn the page is empty.
-- Index: the primary key, at most `limit` entries of it: ids rise as instants do, but for moments.
-- Fence: none; a fact never changes.
with now as materialized (
  select clock_timestamp() as at
), turn as materialized (
  select pg_try_advisory_xact_lock(hashtextextended(%(turn)s::text, 0)) as mine
), cutoff as materialized (
  select at - %(keep)s::float8 * interval '1 second' as at from now
), page as materialized (
  select f.id, f.at from {facts} f
  where f.id > %(after)s::bigint and (select mine from turn)
  order by f.id
  limit %(limit)s::int
), gone as (
  delete from {facts} f where f.id = any(array(select p.id from page p where p.at < (select at from cutoff)))
  returning f.id
)
-- Those of the future are from before the clock was set back: they stay, and tell nothing of what comes after them.
select count(*), (select count(*) from gone), max(p.id),
       coalesce(bool_or(p.at >= (select at from cutoff) and p.at <= (select at from now)), false)
from page p
