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
    select p.number, j.kind, j.id from {jobs} j
    where p.event and j.id = p.id and j.kind || '' = p.kind and j.state = p.state and j.finished_at = p.finished_at
    for update skip locked) locked                           -- (an app's row that refers to the job is being written: next time)
), spared as materialized (
  select locked.* from page p cross join lateral (
    select p.number, j.kind, j.id from {jobs} j
    where not p.event and j.id = p.id and j.kind || '' = p.kind and j.state = p.state and j.finished_at = p.finished_at
    for no key update skip locked) locked
), gone as (
  delete from {jobs} j using doomed d
  where j.id = d.id and j.kind || '' = d.kind and j.id = any(array(select doomed.id from doomed))   -- as in claim_jobs
  returning d.number, j.kind, j.key
), emptied as (
  update {jobs} j set payload = null from spared s
  where j.id = s.id and j.kind || '' = s.kind and j.id = any(array(select spared.id from spared))   -- as in claim_jobs
  returning s.number, j.kind, j.key
), ended as materialized (
  select g.kind, g.key from gone g union all select e.kind, e.key from emptied e
), dropped as (
  delete from {results} r using ended e
  where r.kind = e.kind and r.key = e.key and r.key = any(array(select ended.key from ended))   -- as in claim_jobs
)
select p.number::int - 1, count(*), max(p.finished_at)::text, (array_agg(p.id order by p.finished_at desc, p.id desc))[1],
       (select count(*) from gone g where g.number = p.number), (select count(*) from emptied e where e.number = p.number)
from page p group by p.number
