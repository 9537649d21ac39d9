-- Let go of what has ended longer ago than it is kept, of each kind and state a page after its cursor.
-- That is events as a whole, of keyed jobs the payload, and the results of both. A keyed row stays: without its revision unchanged work
-- would be done again. So does the payload of a failed one, which may still be retried.
-- Locks: those jobs, skipping locked ones, then their results, which are locked only for as long as another deletes them; and
--   by an advisory lock each kind for this transaction, so that one process at a time does it. A kind that is another's turn
--   is passed over. Not a lock of the session: behind a pooler that would be anybody's.
-- Index: jobs_ended, of what is to go at most `limit` entries for each kind and state; then primary keys, one probe a row.
-- Fence: the state and the instant of the end, compared again under the lock: what was put back to work stays as it is.
with now as materialized (
  select clock_timestamp() as at
), input as materialized (
  select i.number, i.kind, i.state, i.after, i.after_id, now.at - i.keep * interval '1 second' as until
  from now cross join unnest(%(kinds)s::text[], %(states)s::text[], %(keeps)s::float8[], %(afters)s::timestamptz[], %(after_ids)s::bigint[])
       with ordinality as i(kind, state, keep, after, after_id, number)
  where pg_try_advisory_xact_lock(hashtextextended(%(turn)s::text || ' ' || i.kind, 0))
), page as materialized (                                    -- bounded by rows read, whatever becomes of them
  select i.number, p.* from input i cross join lateral (
    select j.kind, j.id, j.state, j.finished_at, j.event from {jobs} j
    where j.kind = i.kind and j.state = i.state and j.state <> 'pending' and (j.event or (j.payload is not null and j.state <> 'failed')) is true
      and (j.finished_at, j.id) > (i.after, i.after_id) and j.finished_at < i.until
    order by j.kind, j.state, j.finished_at, j.id
    limit %(limit)s::int) p
), doomed as materialized (
  select locked.* from page p cross join lateral (
    select j.kind, j.id from {jobs} j
    where p.event and j.id = p.id and j.kind || '' = p.kind and j.state = p.state and j.finished_at = p.finished_at
    for update skip locked) locked                           -- (an app's row that refers to the job is being written: next time)
), spared as materialized (
  select locked.* from page p cross join lateral (
    select j.kind, j.id from {jobs} j
    where not p.event and j.id = p.id and j.kind || '' = p.kind and j.state = p.state and j.finished_at = p.finished_at
    for no key update skip locked) locked
-- No joins from here on: a planner that takes the tables for empty would go through each row for each other. "is true"
-- keeps it from making one of them; the rows are looked up in a hash instead.
), gone as (
  delete from {jobs} j
  where j.id = any(array(select d.id from doomed d)) and ((j.id, j.kind) in (select d.id, d.kind from doomed d)) is true
  returning j.kind, j.key, j.state
), emptied as (
  update {jobs} j set payload = null
  where j.id = any(array(select s.id from spared s)) and ((j.id, j.kind) in (select s.id, s.kind from spared s)) is true
  returning j.kind, j.key, j.state
), ended as materialized (
  select g.kind, g.key from gone g union all select e.kind, e.key from emptied e
), dropped as (
  delete from {results} r
  where r.key = any(array(select e.key from ended e)) and ((r.key, r.kind) in (select e.key, e.kind from ended e)) is true
)
select p.number::int - 1, count(*), max(p.finished_at)::text, (pg_catalog.array_agg(p.id order by p.finished_at desc, p.id desc))[1],
       (select count(*) from gone g where g.kind = p.kind and g.state = p.state),
       (select count(*) from emptied e where e.kind = p.kind and e.state = p.state)
from page p group by p.number, p.kind, p.state
