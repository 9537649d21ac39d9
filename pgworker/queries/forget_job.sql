-- Delete one key's job and its result, with a fact; a run in progress loses its lease.
-- Locks: the row, unless somebody holds it (verdict busy); never waits.
-- Index: jobs_key, primary keys of jobs and results.
-- Fence: the lease as it was seen: a completion that came between has written a result that this statement cannot see.
with seen as materialized (
  select j.kind, j.id, j.lease_epoch, j.token from {jobs} j
  where j.key = %(key)s::text and j.kind || '' = %(kind)s::text  -- kind as in insert_jobs
), held as materialized (
  select locked.* from seen s cross join lateral (
    select j.kind, j.id from {jobs} j
    where j.id = s.id and j.kind || '' = s.kind and j.lease_epoch = s.lease_epoch and j.token is not distinct from s.token
    for update skip locked) locked
), gone as (
  delete from {jobs} j using held where j.id = any(array(select held.id from held)) and j.kind || '' = held.kind   -- as in claim_jobs
  returning j.id, j.kind, j.key, j.revision, j.generation, j.attempts, j.runner
), dropped as (                                              -- one without a job, too: somebody has deleted that by hand
  delete from {results} r
  where r.kind = %(kind)s::text and r.key = %(key)s::text and (exists (select from gone) or not exists (select from seen))
  returning r.key
), told as (
  insert into {facts} (at, job_id, generation, attempts, kind, key, revision, what, runner)
  select clock_timestamp(), g.id, g.generation, g.attempts, g.kind, g.key, g.revision, 'forgotten', g.runner from gone g
  where %(facts)s::int > 0
)
select case when exists (select from gone) and exists (select from seen where token is not null) then 'requested'
            when exists (select from gone) then 'done'
            when exists (select from seen) then 'busy'
            when exists (select from dropped) then 'done' else 'passed' end as verdict
