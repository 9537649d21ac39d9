-- Prolong leases on an app's own table; one verdict a row, and whether a cancel was requested.
-- A lease without seconds is only looked at: done while it is ours, else lost; neither locked nor written.
-- Locks, Index and Fence as in table_finish: an expired lease stays expired, a busy row is neither renewed nor lost.
with input as materialized (
  select i.* from unnest(%(ids)s::bigint[], %(keys)s::{key_type}[], %(revisions)s::{revision_type}[], %(tokens)s::uuid[], %(ttls)s::float8[])
       as i(id, key, revision, token, ttl)
), held as materialized (
  select locked.* from (select * from input where ttl is not null order by key) i cross join lateral (
    select i.id, i.ttl, j.{key}::{key_type} as key, j.{lease_expires_at} as lease_expires_at, {j.is_pending} as pending,
           {j.cancel_requested_at} is not null as cancel_requested
    from {table} j
    where j.{key} = i.key and {is_revision} and j.{token} = i.token
    for no key update of j skip locked) locked
), now as materialized (
  select clock_timestamp() as at from (select count(*) from held) as every_lock_held
), good as materialized (
  select held.id, held.key, held.cancel_requested, now.at + held.ttl * interval '1 second' as until
  from held cross join now
  where held.pending and held.lease_expires_at > now.at
), done as (
  update {table} j set {lease_expires_at} = good.until
  from good
  where j.{key} = good.key and j.{key} = any(array(select good.key from good))   -- as in table_claim
  returning good.id, good.cancel_requested
)
select i.id, case when d.id is not null then 'done' when h.pending then 'expired' when s.pending is not true then 'lost'
                  when i.ttl is null then 'done' else 'busy' end as verdict,
       coalesce(d.cancel_requested, i.ttl is null and s.cancel_requested, false)
from input i left join done d on d.id = i.id left join held h on h.id = i.id left join lateral (
  select {j.is_pending} as pending, {j.cancel_requested_at} is not null as cancel_requested from {table} j
  where h.id is null                                         -- as in renew_leases
    and j.{key} = i.key and {is_revision} and j.{token} = i.token
  limit 1) s on true
