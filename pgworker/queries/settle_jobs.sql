-- Retry, park, release, fail or cancel jobs of one kind: the decision comes as columns; facts with it; one verdict a row.
-- Locks, Index and Fence as in finish_jobs.
with input as materialized (
  select %(kind)s::text as kind, i.*
  from unnest(%(ids)s::bigint[], %(keys)s::text[], %(revisions)s::text[], %(tokens)s::uuid[], %(generations)s::int[],
              %(states)s::text[], %(counts)s::int[], %(delays)s::float8[], %(codes)s::text[], %(errors)s::text[])
       as i(id, key, revision, token, generation, state, counts, delay, code, error)
), held as materialized (
  select locked.* from (select * from input order by kind, id) i cross join lateral (
    select j.kind, j.id, j.lease_expires_at, j.runner, j.generation = i.generation as current, i.state, i.counts, i.delay, i.code, i.error
    from {jobs} j
    where j.kind = i.kind and j.id = i.id and j.key = i.key and j.revision = i.revision and j.token = i.token
    for no key update skip locked) locked
), now as materialized (
  select clock_timestamp() as at from (select count(*) from held) as every_lock_held
), decided as materialized (                                 -- a payload that came meanwhile is new work: it waits, whatever became of the old
  select held.kind, held.id, held.current, held.runner, held.counts, now.at,
         case when held.current then held.state else 'pending' end as state,
         case when held.current then held.delay end as delay,
         case when held.current then held.code end as code, held.error
  from held cross join now where held.lease_expires_at > now.at
), done as (
  update {jobs} j set
    -- a requested cancel is honoured here: pending with a request, but no lease, neither a claim nor the reaper would ever see it
    state = case when decided.state = 'pending' and j.cancel_requested_at is not null then 'cancelled' else decided.state end,
    finished_at = case when decided.state <> 'pending' or j.cancel_requested_at is not null then decided.at end,
    attempts = case when decided.current then j.attempts + decided.counts else j.attempts end,
    evictions = case when decided.counts > 0 then 0 else j.evictions end,
    ready_at = case when decided.delay is null then j.ready_at else decided.at + decided.delay * interval '1 second' end,
    last_code = coalesce(decided.code, j.last_code),
    last_error = case when decided.code is null then j.last_error else decided.error end,
    token = null, lease_expires_at = null, runner = null, cancel_requested_at = null
  from decided
  where j.id = decided.id and j.kind || '' = decided.kind and j.id = any(array(select decided.id from decided))   -- as in claim_jobs
  returning j.id, j.kind, j.key, j.revision, j.generation, j.attempts, j.state, decided.current, decided.counts, decided.code,
            decided.runner, decided.at
), told as (
  insert into {facts} (at, job_id, generation, attempts, kind, key, revision, what, code, runner)
  select d.at, d.id, d.generation, d.attempts, d.kind, d.key, d.revision, f.what, d.code, d.runner
  from done d cross join lateral (
    select case when d.state <> 'pending' then d.state when not d.current then 'superseded' when d.counts > 0 then 'retried'
                when d.code is not null then 'parked' else 'released' end as what) f
  where %(facts)s::int > 0 and %(facts)s::int >= case f.what when 'released' then 2 else 1 end
)
select i.id,
       case when d.id is not null then 'done' when h.id is not null then 'expired'
            when (select true from {jobs} j where j.kind = i.kind and j.id = i.id and j.key = i.key and j.revision = i.revision   -- as in finish_jobs
                  and j.token = i.token limit 1) then 'busy'
            else 'lost' end as verdict,
       d.state
from input i left join done d on d.id = i.id left join held h on h.id = i.id
