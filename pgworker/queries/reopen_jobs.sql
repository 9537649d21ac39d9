-- Put ended jobs of one kind back to work, as if they had just been enqueued, and their facts; one verdict a row.
-- The generation stays, which counts replacements: an ended row has no token, so nobody holds it. So does the old result.
-- Locks: the rows that it reopens, in id order, skipping locked ones (verdict busy); never waits.
-- Index: primary key, one probe a row (as in finish_jobs).
-- Fence: the state, as of the lock; what has changed since it was seen is busy, too: ask again.
with input as materialized (
  select %(kind)s::text as kind, i.id from pg_catalog.unnest(%(ids)s::bigint[]) as i(id)
), seen as materialized (                                    -- by the snapshot, unlocked: tells busy from passed
  select j.* from input i cross join lateral (
    select j.kind, j.id, j.payload is null as pruned,
           (j.state = any(%(states)s::text[]) and (%(code)s::text is null or j.last_code = %(code)s::text)) is true as wanted
    from {jobs} j where j.id = i.id and j.kind || '' = i.kind limit 1) j
), held as materialized (
  select locked.* from (select * from seen where wanted order by kind, id) s cross join lateral (
    select j.kind, j.id, j.attempts,
           (j.state = any(%(states)s::text[]) and (%(code)s::text is null or j.last_code = %(code)s::text)
            and j.payload is not null) is true as wanted
    from {jobs} j where j.id = s.id and j.kind || '' = s.kind
    for no key update skip locked) locked
), now as materialized (                                     -- after the last lock, by data dependence
  select clock_timestamp() as at from (select count(*) from held) as every_lock_held
), done as (
  update {jobs} j set
    state = 'pending', ready_at = greatest(now.at, j.not_before), attempts = 0, evictions = 0, last_code = null, last_error = null,
    finished_at = null, cancel_requested_at = null
  from held cross join now
  where held.wanted and j.id = held.id and j.kind || '' = held.kind and j.id = any(array(select held.id from held))   -- as in claim_jobs
  returning j.id, j.kind, j.key, j.revision, j.generation, held.attempts, now.at
), told as (
  insert into {facts} (at, job_id, generation, attempts, kind, key, revision, what)
  select d.at, d.id, d.generation, d.attempts, d.kind, d.key, d.revision, %(what)s::text from done d
  where %(facts)s::int > 0
)
select i.id, case when d.id is not null then 'done' when s.wanted and s.pruned then 'pruned' when s.wanted then 'busy'
                  else 'passed' end as verdict
from input i left join done d on d.id = i.id left join seen s on s.id = i.id
