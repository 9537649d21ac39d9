-- Take ready rows of one lane of an app's own table, oldest first, with a fresh token and a lease, expired leases' rows, too.
-- A paused kind gives none.
-- Locks: the picked rows, skipping locked ones; never waits.
-- Index: the table's own on ([class,] [priority,] ready_at, key) of pending rows, then the unique one on its key.
-- Fence: sets it.
with now as materialized (
  select clock_timestamp() as at
), paused as materialized (
  select exists (select from {kinds} k where k.kind = %(kind)s::text and k.paused_at is not null
                 and (k.paused_until is null or k.paused_until > (select at from now))) as yes
), pick as materialized (                                    -- materialized: as a subselect it may run twice and exceed the limit
  select j.{key}::{key_type} as key,
         -- No worker could renew while the server was down: that is not an eviction.
         (j.{token} is not null
          and j.{lease_expires_at} - %(ttl)s::float8 * interval '1 second' >= (select pg_postmaster_start_time())) is true as evicted
  from {table} j
  where {j.is_pending} and {j.is_wanted} and {j.urgency} = %(class)s::bigint and {j.priority} = %(priority)s::bigint
    and j.{ready_at} <= (select at from now)
    -- (an app that changes a row may clear any part of the lease)
    and (j.{token} is null or j.{lease_expires_at} is null or (j.{lease_expires_at} <= (select at from now)
         and (%(max_evictions)s::int is null or {j.evictions} + 1 < %(max_evictions)s::int)))
    and j.{revision} is not null and {j.cancel_requested_at} is null
    and not (select yes from paused)
  order by j.{ready_at}, j.{key}
  limit %(limit)s::int
  for no key update of j skip locked
), taken as (
  update {table} j set
    {evictions?} = {j.evictions} + p.evicted::int,
    {runner?} = %(runner)s::text,
    {token} = %(token)s::uuid,
    {lease_expires_at} = clock_timestamp() + %(ttl)s::float8 * interval '1 second'
  from (select pick.*, row_number() over () as ord from pick) p
  -- (the array has each row probed for: of a limit that it does not know, a plan expects so much that it joins the whole table)
  where j.{key} = p.key and j.{key} = any(array(select pick.key from pick))
  returning p.ord, j.{key}::text as key, j.{revision}::text as revision, j.{token} as token, {j.attempts} as attempts, {j.evictions} as evictions,
            {j.priority} as priority, {j.urgency} as class, j.{ready_at} as ready_at, {j.payload} as payload
)
select t.key, t.revision, 1 as generation, t.token, t.attempts, null::int as max_attempts, t.evictions, 0 as lease_epoch, t.priority, t.class,
       greatest(t.ready_at, '0001-01-03 00:00:00+00'),       -- an instant that the driver can read
       extract(epoch from (select at from now) - greatest(t.ready_at, '0001-01-03 00:00:00+00'))::float8, t.payload
from taken t
order by t.ord
