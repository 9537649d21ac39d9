-- Delete the results of one kind that are older than a time to live: a page of jobs that ended so in one state, after the cursor.
-- Locks: those rows of results, skipping locked ones; never waits. The jobs stay as they are, and say that they had a result.
-- Index: jobs_ended, at most `limit` entries of each of its parts (as in list_ended); then the primary key of results, one probe a job.
-- Fence: the result's own age, compared again under its lock: a newer one of the same key stays.
with cutoff as materialized (
  select clock_timestamp() - %(ttl)s::float8 * interval '1 second' as at
), going as materialized (
  select j.kind, j.key, j.id, j.finished_at from {jobs} j
  where j.kind = %(kind)s::text and j.state = %(state)s::text and j.state <> 'pending'
    and (j.event or (j.payload is not null and j.state <> 'failed')) is true
    and (j.finished_at, j.id) > (%(after)s::timestamptz, %(after_id)s::bigint) and j.finished_at < (select at from cutoff)
  order by j.kind, j.state, j.finished_at, j.id
  limit %(limit)s::int
), staying as materialized (
  select j.kind, j.key, j.id, j.finished_at from {jobs} j
  where j.kind = %(kind)s::text and j.state = %(state)s::text and j.state <> 'pending'
    and (j.event or (j.payload is not null and j.state <> 'failed')) is false
    and (j.finished_at, j.id) > (%(after)s::timestamptz, %(after_id)s::bigint) and j.finished_at < (select at from cutoff)
  order by j.kind, j.state, j.finished_at, j.id
  limit %(limit)s::int
), page as materialized (                                    -- bounded by rows read, not by rows found
  select j.kind, j.key, j.id, j.finished_at from (select * from going union all select * from staying) j
  order by j.finished_at, j.id
  limit %(limit)s::int
), old as materialized (
  select locked.* from page p cross join lateral (
    select r.key from {results} r
    where r.kind = p.kind and r.key = p.key and r.finished_at < (select at from cutoff)
    for update skip locked) locked
), gone as (
  delete from {results} r where r.kind = %(kind)s::text and r.key = any(array(select old.key from old))
  returning r.key
)
select (select count(*) from page), (select count(*) from gone), last.finished_at::text, last.id
from (select p.finished_at, p.id from page p order by p.finished_at desc, p.id desc limit 1) as last
