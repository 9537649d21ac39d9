-- Succeed jobs of one kind, their results and facts with them; one verdict a row.
-- Locks: rows that are still ours, in id order, skipping locked ones (verdict busy); never waits.
-- Index: primary key, one probe a row whatever the statistics say (lateral; the kind comes from the input, no term on state).
-- Fence: id, key, revision, token (a token implies pending), and the expiry, compared after the last lock was taken.
with input as materialized (
  select %(kind)s::text as kind, i.*
  from unnest(%(ids)s::bigint[], %(keys)s::text[], %(revisions)s::text[], %(tokens)s::uuid[], %(generations)s::int[],
              %(results)s::text[]) as i(id, key, revision, token, generation, result)
), held as materialized (
  select locked.* from (select * from input order by kind, id) i cross join lateral (
    select j.kind, j.id, j.lease_expires_at, j.has_result, j.runner, j.generation = i.generation as current, i.result
    from {jobs} j
    where j.kind = i.kind and j.id = i.id and j.key = i.key and j.revision = i.revision and j.token = i.token
    for no key update skip locked) locked
), now as materialized (                                     -- after the last lock by data dependence; a plan could read the clock before it
  select clock_timestamp() as at from (select count(*) from held) as every_lock_held
), good as materialized (
  select distinct on (held.id) held.*, now.at from held cross join now where held.lease_expires_at > now.at order by held.id
), ids as materialized (                                     -- for updates without a join, see claim_jobs; sorted, to find an id by halving
  select pg_catalog.array_agg(good.id order by good.id) filter (where good.current) as current,
         pg_catalog.array_agg(good.id order by good.id) filter (where not good.current) as outdated,
         coalesce(pg_catalog.array_agg(good.id order by good.id) filter (where good.result is not null), array[]::bigint[]) as valued
  from good
), ended as (
  update {jobs} j set
    state = 'succeeded', finished_at = (select at from now),
    has_result = ((select valued from ids)[pg_catalog.width_bucket(j.id, (select valued from ids))] = j.id) is true,
    token = null, lease_expires_at = null, runner = null, cancel_requested_at = null, evictions = 0, last_code = null, last_error = null
  where j.id = any((select current from ids)::bigint[]) and j.kind || '' = %(kind)s::text
  returning j.id, j.key, j.revision, j.generation, j.attempts, j.state
), reopened as (                                             -- a payload that came while this run was under way (no revision) is
  update {jobs} j set                                        -- new work: the row waits again, this result is dropped
    state = case when j.cancel_requested_at is not null then 'cancelled' else 'pending' end,
    finished_at = case when j.cancel_requested_at is not null then (select at from now) end,
    token = null, lease_expires_at = null, runner = null, cancel_requested_at = null, evictions = 0
  where j.id = any((select outdated from ids)::bigint[]) and j.kind || '' = %(kind)s::text
  returning j.id, j.key, j.revision, j.generation, j.attempts, j.state
), done as materialized (
  select d.*, good.kind, good.current, good.result, good.has_result as had_result, good.runner, good.at
  from (select * from ended union all select * from reopened) d join good on good.id = d.id
), kept as (
  insert into {results} as r (kind, key, revision, value, finished_at)
  select d.kind, d.key, d.revision, d.result::jsonb, d.at from done d
  where d.current and d.result is not null
  order by d.key collate "C"
  on conflict (kind, key) do update set revision = excluded.revision, value = excluded.value, finished_at = excluded.finished_at
), dropped as (                                              -- a success without a value leaves no older one behind
  delete from {results} r
  where r.kind = %(kind)s::text and r.key = any(array(select d.key from done d where d.current and d.result is null and d.had_result))
), told as (
  insert into {facts} (at, job_id, generation, attempts, kind, key, revision, what, runner)
  select d.at, d.id, d.generation, d.attempts, d.kind, d.key, d.revision, case d.state when 'pending' then 'superseded' else d.state end, d.runner
  from done d
  where %(facts)s::int > 0 and %(facts)s::int >= case d.state when 'succeeded' then 2 else 1 end
)
select i.id,
       case when d.id is not null then 'done' when h.id is not null then 'expired'
            -- By the snapshot, unlocked: tells busy from lost. A scalar is asked for these few only; EXISTS might read the whole table.
            when (select true from {jobs} j where j.kind = i.kind and j.id = i.id and j.key = i.key and j.revision = i.revision
                  and j.token = i.token limit 1) then 'busy'
            else 'lost' end as verdict,
       d.state
from input i left join done d on d.id = i.id left join held h on h.id = i.id
