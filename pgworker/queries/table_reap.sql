-- End or free rows of one lane of an app's own table: cancelled if that was requested, failed at the limit of evictions, else ready again.
-- Locks: rows whose lease has expired, or that have none and are to be cancelled; skipping locked ones; never waits.
-- Index: the table's own on ([class,] [priority,] ready_at, key) of pending rows, a page of it after the cursor.
-- Fence: none needed, an expired lease protects nobody; its token goes.
with now as materialized (
  select clock_timestamp() as at
), page as materialized (                                    -- bounded by rows read, not by rows found
  select j.{key}::{key_type} as key, j.{ready_at} as ready_at,
         (j.{token} is not null or {j.cancel_requested_at} is not null)
         and (j.{token} is null or j.{lease_expires_at} is null or j.{lease_expires_at} <= (select at from now)) as due,
         j.{token} is not null as leased
  from {table} j
  where {j.is_pending} and {j.is_wanted} and {j.urgency} = %(class)s::bigint and {j.priority} = %(priority)s::bigint
    and {after} and j.{ready_at} <= (select at from now)
  order by j.{ready_at}, j.{key}
  limit %(limit)s::int
), held as materialized (
  select locked.* from (select * from page where due) p cross join lateral (
    select j.{key}::{key_type} as key, {j.is_pending} as pending, {j.cancel_requested_at} is not null as cancel_requested, {j.evictions} as evictions,
           (j.{token} is not null
            and j.{lease_expires_at} - %(ttl)s::float8 * interval '1 second' >= (select pg_postmaster_start_time())) is true as evicted
    from {table} j
    where j.{key} = p.key and (j.{token} is not null or {j.cancel_requested_at} is not null)
      and (j.{token} is null or j.{lease_expires_at} is null or j.{lease_expires_at} <= (select at from now))
    for no key update of j skip locked) locked
), decided as materialized (
  select held.key, held.evictions + held.evicted::int as evictions,
         case when held.cancel_requested then 'cancelled'
              when held.evictions + held.evicted::int >= %(max_evictions)s::int then 'failed' else 'pending' end as outcome
  from held
  where held.pending
), done as (
  update {table} j set
    {evictions?} = decided.evictions,
    {code?} = case decided.outcome when 'failed' then 'evicted_too_often' else j.{code} end,
    {finished_at?} = case decided.outcome when 'pending' then null else (select at from now) end,
    {cancel_requested_at?} = null,
    {runner?} = null,
    {state} = case decided.outcome when 'failed' then {failed} when 'cancelled' then {cancelled} else {pending} end,
    {token} = null, {lease_expires_at} = null
  from decided
  where j.{key} = decided.key and j.{key} = any(array(select decided.key from decided))   -- as in table_claim
  returning decided.outcome
)
select (select count(*) from page), (select count(*) from done), (select count(*) from done where outcome = 'pending'),
       greatest(last.ready_at, '0001-01-03 00:00:00+00'), last.key::text, (select count(*) from page where leased)
from (select ready_at, key from page order by ready_at desc, key desc limit 1) as last
