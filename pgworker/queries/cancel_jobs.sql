-- Cancel pending jobs of one kind, and their facts; one verdict a row. A job that runs is only asked to stop (verdict
-- requested); one whose lease has run out is ended here, as the reaper would.
-- Locks: the rows that it changes, in id order, skipping locked ones (verdict busy); never waits.
-- Index: primary key, one probe a row (as in finish_jobs).
-- Fence: the state and the lease, as of the lock, compared after the last one was taken; changed since it was seen: busy.
with input as materialized (
  select %(kind)s::text as kind, i.id from unnest(%(ids)s::bigint[]) as i(id)
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
  select held.kind, held.id, held.runner, now.at, (held.lease_expires_at > now.at) is not true as free
  from held cross join now
  where held.state = 'pending' and (held.cancel_requested_at is null or (held.lease_expires_at > now.at) is not true)
), done as (
  update {jobs} j set
    state = case when good.free then 'cancelled' else j.state end,
    finished_at = case when good.free then good.at end,
    cancel_requested_at = case when not good.free then good.at end,
    (token, lease_expires_at, runner) = (select j.token, j.lease_expires_at, j.runner where not good.free)
  from good
  where j.id = good.id and j.kind || '' = good.kind and j.id = any(array(select good.id from good))   -- as in claim_jobs
  returning j.id, j.kind, j.key, j.revision, j.generation, j.attempts, good.free, good.runner, good.at
), told as (
  insert into {facts} (at, job_id, generation, attempts, kind, key, revision, what, runner)
  select d.at, d.id, d.generation, d.attempts, d.kind, d.key, d.revision,
         case when d.free then 'cancelled' else 'cancel_requested' end, d.runner
  from done d
  where %(facts)s::int > 0
)
select i.id, case when d.free then 'done' when d.id is not null then 'requested' when s.wanted then 'busy' else 'passed' end as verdict
from input i left join done d on d.id = i.id left join seen s on s.id = i.id
