-- Take ready jobs of one lane, oldest first, with a fresh token and a lease. An expired lease is taken over here, too.
-- A paused kind gives none.
-- Locks: the picked rows, skipping locked ones; never waits.
-- Index: jobs_ready, from the cursor on.
-- Fence: sets it.
with now as materialized (                                   -- (select at from now) can be an index condition, a bare clock_timestamp() cannot
  select clock_timestamp() as at
), paused as materialized (
  select exists (select from {kinds} k where k.kind = %(kind)s::text and k.paused_at is not null
                 and (k.paused_until is null or k.paused_until > (select at from now))) as yes
), pick as materialized (                                    -- materialized: as a subselect it may run twice and exceed the limit
  select j.id, j.generation, j.attempts, j.key, j.revision, j.runner,
         -- No worker could renew while the server was down: that is not an eviction.
         (j.lease_expires_at - %(ttl)s::float8 * interval '1 second' >= (select pg_postmaster_start_time())) is true as evicted
  from {jobs} j
  where j.kind = %(kind)s::text and j.class = %(class)s::smallint and j.priority = %(priority)s::smallint and j.state = 'pending'
    and (j.ready_at, j.id) > (%(after_ready)s::timestamptz, %(after_id)s::bigint) and j.ready_at <= (select at from now)
    and (j.lease_expires_at is null or (j.lease_expires_at <= (select at from now)
         -- at its limit it belongs to the reaper, which alone ends it
         and (%(max_evictions)s::int is null or j.evictions + 1 < %(max_evictions)s::int)))
    and j.cancel_requested_at is null
    and not (select yes from paused)
    and j.version <= %(version)s::smallint                   -- work of a newer release waits for a newer worker
  order by j.kind, j.class, j.priority, j.ready_at, j.id
  limit %(limit)s::int
  for no key update skip locked
), taken as (
  update {jobs} j set
    token = %(token)s::uuid, runner = %(runner)s::text, lease_epoch = j.lease_epoch + 1, lease_seconds = %(ttl)s::float8,
    lease_expires_at = clock_timestamp() + %(ttl)s::float8 * interval '1 second',
    evictions = j.evictions + (j.id = any(array(select pick.id from pick where pick.evicted)))::int
  -- By id and kind: a ctid may be stale, and is not unique over partitions. By an array instead of a join, and the kind as an
  -- expression: a plan that takes the table for empty would join the whole of it, or read it by the kind in another index,
  -- when there are rows (0.5 s for 100 of 30,000).
  where j.id = any(array(select pick.id from pick)) and j.kind || '' = %(kind)s::text
  returning j.kind, j.id, j.key, j.revision, j.generation, j.token, j.attempts, j.max_attempts, j.evictions, j.lease_epoch,
            j.priority, j.class, j.ready_at, j.payload
), told as (
  insert into {facts} (at, job_id, generation, attempts, kind, key, revision, what, runner)
  select now.at, p.id, p.generation, p.attempts, %(kind)s::text, p.key, p.revision, f.what, f.runner
  from pick p cross join now cross join lateral (
    values ('evicted', p.runner, p.evicted, 1), ('claimed', %(runner)s::text, true, 2)) as f(what, runner, holds, level)
  where %(facts)s::int > 0 and f.holds and %(facts)s::int >= f.level
)
select t.kind, t.id, t.key, t.revision, t.generation, t.token, t.attempts, t.max_attempts, t.evictions, t.lease_epoch, t.priority, t.class,
       -- An instant before the year 1, in whatever time zone, is none that the driver can read, nor can it be infinite:
       -- the answer would be lost, and the leases with it.
       greatest(t.ready_at, '0001-01-03 00:00:00+00'),
       extract(epoch from (select at from now) - greatest(t.ready_at, '0001-01-03 00:00:00+00'))::float8, t.payload::text
from taken t
order by t.ready_at, t.id                                 -- the array is read in the order of its ids
