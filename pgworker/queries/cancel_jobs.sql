-- Cancel pending jobs of one kind, and their facts; one verdict a row. A job that runs is only asked to stop (verdict
-- requested); one whose lease has run out is ended here, as the reaper would.
-- Locks: the rows that it changes, in id order, skipping locked ones (verdict busy); never waits.
-- Index: primary key, one probe a row (as in finish_jobs).
-- Fence: the state and the lease, as of the lock, compared after the last one was taken; changed since it was seen: busy.
with input as materialized (
  select %(kind)s::text as kind, i.id from pg_catalog.unnest(%(ids)s::bigint[]) as i(id)
), seen as materialized (                                    -- by the snapshot, unlocked: tells busy from passed
  select j.* from input i cross join lateral (
    select j.kind, j.id,
           j.state = 'pending' and (j.cancel_requested_at is null or (j.lease_expires_at > clock_timestamp()) is not true) as wanted
    from {jobs} j where j.id = i.id and j.kind || '' = i.kind limit 1) j
), held as materialized (
  select locked.* from (select * from seen where wanted order by kind, id) s cross join lateral (
    select j.kind, j.id, j.state, j.lease_expires_at, j.cancel_requested_at, j.runner
    from {jobs} j where j.id = s.id and j.kind || '' = s.kind
    for no key update skip locked) locked
), now as materialized (                                     -- after the last lock, by data dependence
  select clock_timestamp() as at from (select count(*) from held) as every_lock_held
), good as materialized (
  select held.id, held.runner, (held.lease_expires_at > now.at) is not true as free
  from held cross join now
  where held.state = 'pending' and (held.cancel_requested_at is null or (held.lease_expires_at > now.at) is not true)
), ended as (                                              -- (by an array instead of a join, and the kind: as in claim_jobs)
  update {jobs} j set
    state = 'cancelled', finished_at = (select at from now), cancel_requested_at = null, token = null, lease_expires_at = null, runner = null
  where j.id = any(array(select good.id from good where good.free)) and j.kind || '' = %(kind)s::text
  returning j.id, j.key, j.revision, j.generation, j.attempts
), asked as (
  update {jobs} j set cancel_requested_at = (select at from now)
  where j.id = any(array(select good.id from good where not good.free)) and j.kind || '' = %(kind)s::text
  returning j.id, j.key, j.revision, j.generation, j.attempts
), done as (
  select e.*, 'done' as verdict, 'cancelled' as what from ended e
  union all
  select a.*, 'requested', 'cancel_requested' from asked a
), told as (
  insert into {facts} (at, job_id, generation, attempts, kind, key, revision, what, runner)
  select now.at, d.id, d.generation, d.attempts, %(kind)s::text, d.key, d.revision, d.what, good.runner
  from done d join good on good.id = d.id cross join now
  where %(facts)s::int > 0
)
select i.id, coalesce(d.verdict, case when s.wanted then 'busy' else 'passed' end) as verdict
from input i left join done d on d.id = i.id left join seen s on s.id = i.id
