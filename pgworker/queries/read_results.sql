-- What these jobs are now: state, revision and generation, code; and the value of those that have succeeded with one, with its age.
-- Locks: nothing.
-- Index: jobs_key, then the primary key of results; one probe a key, whatever the statistics say (lateral with a limit).
-- Fence: none, it only reads. A row of results counts only if the job, in the same snapshot, has succeeded and says that it
--   has one, of equal revision: what an earlier revision or a raced delete left there is not this job's.
select i.kind, i.key, j.id, j.revision, j.generation, j.state, j.last_code, j.last_error, j.has_result, r.value,
       extract(epoch from clock_timestamp() - r.finished_at)::float8
from unnest(%(kinds)s::text[], %(keys)s::text[]) as i(kind, key)
cross join lateral (
  select j.id, j.revision, j.generation, j.state, j.last_code, j.last_error, j.has_result and j.state = 'succeeded' as has_result
  from {jobs} j where j.key = i.key and j.kind || '' = i.kind limit 1) j  -- kind as in insert_jobs
left join lateral (
  select r.value::text as value, r.finished_at from {results} r
  where j.has_result and r.kind = i.kind and r.key = i.key and r.revision = j.revision limit 1) r on true
