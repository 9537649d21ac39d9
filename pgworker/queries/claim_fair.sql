-- Take ready jobs of one lane, of each tenant an equal share, with a fresh token and a lease. A paused kind gives none.
-- First the oldest job of each tenant, in a ring that begins after the tenant that was served last; then, if there are
-- fewer tenants than jobs to take, as many more of each. Jobs without any tenant, not even '', as they were enqueued when
-- the kind was not fair, are left to claim_jobs, and so is what the shares leave of the limit. Says where the ring is to
-- begin next time.
-- Locks: the picked rows, skipping locked ones; never waits.
-- Index: jobs_tenants: one probe a tenant for the walk, and one for its jobs, from the cursor on; at most `looks` tenants.
-- Fence: sets it.
with recursive now as materialized (                         -- (select at from now) can be an index condition, a bare clock_timestamp() cannot
  select clock_timestamp() as at
), paused as materialized (
  select exists (select from {kinds} k where k.kind = %(kind)s::text and k.paused_at is not null
                 and (k.paused_until is null or k.paused_until > (select at from now))) as yes
), walk as (                                                 -- a loose index scan; goes no further than whoever reads it
  select %(after_tenant)s::text collate "C" as tenant, false as wrapped, 0 as nth where not (select yes from paused)
  union all
  select coalesce(n.tenant, f.tenant), w.wrapped or n.tenant is null, w.nth + 1
  from walk w left join lateral (
    select j.tenant from {jobs} j
    where j.kind = %(kind)s::text and j.class = %(class)s::smallint and j.priority = %(priority)s::smallint and j.state = 'pending'
      and j.tenant > w.tenant
    order by j.kind, j.class, j.priority, j.tenant limit 1) n on true
  left join lateral (                                        -- behind the last one comes the first one
    select j.tenant from {jobs} j
    where j.kind = %(kind)s::text and j.class = %(class)s::smallint and j.priority = %(priority)s::smallint and j.state = 'pending'
      and j.tenant >= '' and n.tenant is null and not w.wrapped
    order by j.kind, j.class, j.priority, j.tenant limit 1) f on true
  where w.nth < %(looks)s::int
    and (coalesce(n.tenant, f.tenant) <= %(after_tenant)s::text or (n.tenant is not null and not w.wrapped))
), first as materialized (                                   -- materialized: as a subselect it may run twice and exceed the limit
  select w.tenant, w.nth, h.*
  from walk w cross join lateral (
    select j.kind, j.id, j.ready_at, j.runner,
           -- No worker could renew while the server was down: that is not an eviction.
           (j.lease_expires_at - %(ttl)s::float8 * interval '1 second' >= (select pg_postmaster_start_time())) is true as evicted
    from {jobs} j
    where j.kind = %(kind)s::text and j.class = %(class)s::smallint and j.priority = %(priority)s::smallint and j.state = 'pending'
      -- Not as j.tenant = w.tenant: then the order by would be that of jobs_ready as well, with the tenant as a filter.
      and j.tenant is not null and (j.tenant, j.ready_at, j.id) > (w.tenant, %(after_ready)s::timestamptz, %(after_id)s::bigint)
      and (j.tenant, j.ready_at) <= (w.tenant, (select at from now))
      and (j.lease_expires_at is null or (j.lease_expires_at <= (select at from now)
           -- at its limit it belongs to the reaper, which alone ends it
           and (%(max_evictions)s::int is null or j.evictions + 1 < %(max_evictions)s::int)))
      and j.cancel_requested_at is null
      and j.version <= %(version)s::smallint                 -- work of a newer release waits for a newer worker
    order by j.kind, j.class, j.priority, j.tenant, j.ready_at, j.id
    limit 1
    for no key update skip locked) h
  where w.nth > 0
  limit %(limit)s::int
), more as materialized (
  select f.nth, m.*
  from first f cross join lateral (
    select j.kind, j.id, j.ready_at, j.runner,
           (j.lease_expires_at - %(ttl)s::float8 * interval '1 second' >= (select pg_postmaster_start_time())) is true as evicted
    from {jobs} j
    where j.kind = %(kind)s::text and j.class = %(class)s::smallint and j.priority = %(priority)s::smallint and j.state = 'pending'
      and j.tenant is not null and (j.tenant, j.ready_at, j.id) > (f.tenant, f.ready_at, f.id)
      and (j.tenant, j.ready_at) <= (f.tenant, (select at from now))
      and (j.lease_expires_at is null or (j.lease_expires_at <= (select at from now)
           and (%(max_evictions)s::int is null or j.evictions + 1 < %(max_evictions)s::int)))
      and j.cancel_requested_at is null
      and j.version <= %(version)s::smallint
    order by j.kind, j.class, j.priority, j.tenant, j.ready_at, j.id
    limit (select (%(limit)s::int - 1) / nullif(count(*), 0) from first)
    for no key update skip locked) m
  limit (select %(limit)s::int - count(*) from first)
), pick as materialized (
  select kind, id, nth, runner, evicted from first union all select kind, id, nth, runner, evicted from more
), taken as (
  update {jobs} j set
    token = %(token)s::uuid, runner = %(runner)s::text, lease_epoch = j.lease_epoch + 1, lease_seconds = %(ttl)s::float8,
    lease_expires_at = clock_timestamp() + %(ttl)s::float8 * interval '1 second',
    evictions = j.evictions + pick.evicted::int
  from pick
  where j.id = pick.id and j.kind || '' = pick.kind and j.id = any(array(select pick.id from pick))   -- as in claim_jobs
  returning j.kind, j.id, j.key, j.revision, j.generation, j.token, j.attempts, j.max_attempts, j.evictions, j.lease_epoch,
            j.priority, j.class, j.ready_at, j.payload, j.runner, pick.nth, pick.evicted, pick.runner as lost_runner
), told as (
  insert into {facts} (at, job_id, generation, attempts, kind, key, revision, what, runner)
  select now.at, t.id, t.generation, t.attempts, t.kind, t.key, t.revision, f.what, f.runner
  from taken t cross join now cross join lateral (
    values ('evicted', t.lost_runner, t.evicted, 1), ('claimed', t.runner, true, 2)) as f(what, runner, holds, level)
  where %(facts)s::int > 0 and f.holds and %(facts)s::int >= f.level
), place as (
  -- Short of the limit, the walk has come to its end (reading it again goes no further), which may be that of its looks.
  select coalesce(
    case when (select count(*) from first) < %(limit)s::int then (select w.tenant from walk w where w.nth = %(looks)s::int) end,
    (select f.tenant from first f order by f.nth desc limit 1)) as tenant
)
select p.tenant, t.nth, t.kind, t.id, t.key, t.revision, t.generation, t.token, t.attempts, t.max_attempts, t.evictions, t.lease_epoch,
       -- (an instant that the driver can read)
       t.priority, t.class, greatest(t.ready_at, '0001-01-03 00:00:00+00'),
       extract(epoch from (select at from now) - greatest(t.ready_at, '0001-01-03 00:00:00+00'))::float8, t.payload::text
from place p left join taken t on true
