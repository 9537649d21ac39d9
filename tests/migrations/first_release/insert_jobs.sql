-- Put jobs of one kind, each under the rules of its key: new, same revision, new revision, or no revision (latest wins).
-- Their facts are written with them.
-- Locks: only rows that really change, in key order: two bulk calls with the same keys cannot deadlock.
-- Index: jobs_key.
-- Fence: none; a new revision is what fences running attempts off.
with now as materialized (
  select clock_timestamp() as at
), input as materialized (                                   -- the last of equal keys wins; callers collapse them anyway
  -- A column that has its default in all rows is sent as an empty array, for which unnest gives nulls.
  select distinct on (t.key collate "C") %(kind)s::text as kind, t.key, coalesce(t.event, false) as event, coalesce(t.revision, '') as revision,
         coalesce(t.class, 0::smallint) as class, coalesce(t.priority, 0::smallint) as priority, coalesce(t.delay, 0) as delay,
         t.ready_at, t.max_attempts, t.tenant, t.payload, t.ord
  from unnest(%(keys)s::text[], %(events)s::bool[], %(revisions)s::text[], %(classes)s::smallint[], %(priorities)s::smallint[], %(delays)s::float8[],
              %(ready_ats)s::timestamptz[], %(max_attempts)s::int[], %(tenants)s::text[], %(payloads)s::text[]) with ordinality
       as t(key, event, revision, class, priority, delay, ready_at, max_attempts, tenant, payload, ord)
  order by t.key collate "C", t.ord desc
), looked as materialized (                                  -- a plain read: an unchanged key takes no lock, no WAL, no id
  -- Each row carries on what was seen of it: joined to itself, as the planner guesses ten rows, 20,000 took 6 s.
  select i.*, j.id, j.state, j.class as old_class, j.lease_epoch, j.leased,
         coalesce(i.revision <> '' and j.revision = i.revision, false) as unchanged,
         coalesce(%(keep)s::bool and j.state = 'pending', false) as kept
  from input i left join lateral (
    select j.id, j.revision, j.state, j.class, j.lease_epoch, j.token is not null as leased
    -- (kind as an expression: as in claim_jobs)
    from {jobs} j where j.key = i.key and j.kind || '' = i.kind limit 1) j on true
), rising as materialized (                                  -- a live edit promotes waiting catch-up work; a locked row is left as it is
  select j.id from looked l cross join lateral (
    select j.id from {jobs} j
    where j.id = l.id and j.kind || '' = l.kind and j.revision = l.revision and j.state = 'pending' and j.token is null
      and j.class > l.class
    for no key update skip locked) j
  where l.unchanged and l.old_class > l.class and l.state = 'pending'
), risen as (
  update {jobs} j set class = 0 where j.id = any(array(select rising.id from rising)) and j.kind || '' = %(kind)s::text
), put as (
  insert into {jobs} as j (kind, key, event, revision, class, priority, ready_at, created_at, max_attempts, version, tenant, payload)
  select i.kind, i.key, i.event, i.revision, i.class, i.priority,
         -- one microsecond apart: jobs of one call stay in its order, although they are inserted in key order
         coalesce(i.ready_at, now.at + i.delay * interval '1 second' + i.ord * interval '1 microsecond'),
         now.at, i.max_attempts, %(version)s::smallint, i.tenant, i.payload::jsonb
  from looked i cross join now
  where not (i.unchanged or i.kept)
  order by i.key collate "C"
  on conflict (kind, key) do update set
    event = excluded.event,  -- an event's key that is enqueued by its name is a key like others
    revision = excluded.revision, generation = j.generation + 1, payload = excluded.payload, version = excluded.version,
    class = case when j.state = 'pending' then least(j.class, excluded.class) else excluded.class end,
    priority = excluded.priority, max_attempts = excluded.max_attempts, tenant = excluded.tenant,
    -- A kind whose runs must not overlap waits for the end of the lease that is taken away, also if that is superseded in its turn.
    -- A lease that ends later than was asked for is from before the clock was set back: see reap_expired.
    -- (greatest and least ignore a null)
    (not_before, ready_at) = (select b.at, greatest(excluded.ready_at, b.at) from (
      select case when %(wait)s::bool and j.revision <> excluded.revision and j.token is not null
                  then greatest(j.not_before, least(j.lease_expires_at, (select at from now) + j.lease_seconds * interval '1 second'))
                  else j.not_before end as at) b),
    state = 'pending', attempts = 0, evictions = 0, last_code = null, last_error = null, cancel_requested_at = null, finished_at = null,
    -- Without revisions a running attempt keeps its lease; its finish sees the new generation and makes the row wait again.
    -- (one reading of the clock for the three: a lease that ends between two would leave a token without an expiry)
    (token, lease_expires_at, runner) = (select j.token, j.lease_expires_at, j.runner
      where j.revision = excluded.revision and j.lease_expires_at > clock_timestamp())
  where (j.revision <> excluded.revision or excluded.revision = '') and (not %(keep)s::bool or j.state <> 'pending')
  returning j.key, j.id, j.generation, j.token, j.lease_epoch, j.revision
), answered as (
  select put.*, case when put.generation = 1 then 'created'
                     when l.state <> 'pending' then 'requeued'
                     when put.token is null and (l.leased or put.lease_epoch <> l.lease_epoch) then 'superseded'
                     else 'replaced' end as status
  from put left join looked l on l.key = put.key
), told as (
  insert into {facts} (at, job_id, generation, attempts, kind, key, revision, what)
  select now.at, a.id, a.generation, 0, %(kind)s::text, a.key, a.revision, case a.status when 'created' then 'enqueued' else a.status end
  from answered a cross join now
  where %(facts)s::int > 0 and %(facts)s::int >= case a.status when 'superseded' then 1 else 2 end
)
select a.key, a.status, 'pending' as state, pg_current_xact_id_if_assigned()::text as transaction from answered a
union all
select l.key, case when l.unchanged then 'unchanged' else 'kept' end, l.state, null
from looked l where l.unchanged or l.kept
-- A key in neither: another transaction has put the same revision meanwhile. Send those keys once more: a new snapshot sees it.
