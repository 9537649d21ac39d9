-- Prolong every lease of a process, of all its kinds; one verdict a row, and whether a cancel was requested.
-- A lease without seconds is only looked at: done while it is ours, else lost; neither locked nor written.
-- Locks, Index and Fence as in finish_jobs: an expired lease stays expired, a busy row is neither renewed nor lost.
with input as materialized (
  select i.* from unnest(%(kinds)s::text[], %(ids)s::bigint[], %(keys)s::text[], %(revisions)s::text[], %(tokens)s::uuid[], %(ttls)s::float8[])
       as i(kind, id, key, revision, token, ttl)
), seen as materialized (
  select j.id, i.ttl is null as only_looked, j.cancel_requested_at is not null as cancel_requested from input i cross join lateral (
    select j.id, j.cancel_requested_at from {jobs} j
    where j.kind = i.kind and j.id = i.id and j.key = i.key and j.revision = i.revision and j.token = i.token limit 1) j
), held as materialized (
  select locked.* from (select * from input where ttl is not null order by kind, id) i cross join lateral (
    select j.kind, j.id, j.lease_expires_at, i.ttl
    from {jobs} j
    where j.kind = i.kind and j.id = i.id and j.key = i.key and j.revision = i.revision and j.token = i.token
    for no key update skip locked) locked
), now as materialized (
  select clock_timestamp() as at from (select count(*) from held) as every_lock_held
), good as materialized (
  select held.kind, held.id, now.at + held.ttl * interval '1 second' as until from held cross join now where held.lease_expires_at > now.at
), done as (
  update {jobs} j set lease_expires_at = good.until
  from good
  where j.id = good.id and j.kind || '' = good.kind and j.id = any(array(select good.id from good))   -- as in claim_jobs
  returning j.id, j.cancel_requested_at is not null as cancel_requested
)
select i.id, case when d.id is not null or s.only_looked then 'done' when h.id is not null then 'expired' when s.id is not null then 'busy' else 'lost' end as verdict,
       coalesce(d.cancel_requested, s.only_looked and s.cancel_requested, false)
from input i left join done d on d.id = i.id left join held h on h.id = i.id left join seen s on s.id = i.id
