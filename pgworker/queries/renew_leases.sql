-- Prolong every lease of a process, of all its kinds; one verdict a row, and whether a cancel was requested.
-- A lease without seconds is only looked at: done while it is ours, else lost; neither locked nor written.
-- Locks, Index and Fence as in finish_jobs: an expired lease stays expired, a busy row is neither renewed nor lost.
with input as materialized (
  select i.* from unnest(%(kinds)s::text[], %(ids)s::bigint[], %(keys)s::text[], %(revisions)s::text[], %(tokens)s::uuid[], %(ttls)s::float8[])
       as i(kind, id, key, revision, token, ttl)
), held as materialized (
  select locked.* from (select * from input where ttl is not null order by kind, id) i cross join lateral (
    select j.kind, j.id, j.lease_expires_at, i.ttl
    from {jobs} j
    where j.kind = i.kind and j.id = i.id and j.key = i.key and j.revision = i.revision and j.token = i.token
    for no key update skip locked) locked
), now as materialized (
  select clock_timestamp() as at from (select count(*) from held) as every_lock_held
), good as materialized (
  select held.kind, held.id, held.ttl from held cross join now where held.lease_expires_at > now.at
), ids as materialized (                                     -- for an update without a join, see claim_jobs; sorted, to find an id by halving
  select pg_catalog.array_agg(good.id order by good.id) as good, pg_catalog.array_agg(good.ttl order by good.id) as ttls from good
), done as (
  update {jobs} j set lease_expires_at = (select at from now)
    + (select ttls from ids)[pg_catalog.width_bucket(j.id, (select good from ids))] * interval '1 second'
  where j.id = any((select good from ids)::bigint[]) and ((j.id, j.kind) in (select good.id, good.kind from good)) is true   -- as in prune_jobs
  returning j.id, j.cancel_requested_at is not null as cancel_requested
)
select i.id, case when d.id is not null then 'done' when h.id is not null then 'expired' when s.id is null then 'lost'
                  when i.ttl is null then 'done' else 'busy' end as verdict,
       coalesce(d.cancel_requested, i.ttl is null and s.cancel_requested, false)
from input i left join done d on d.id = i.id left join held h on h.id = i.id left join lateral (
  select j.id, j.cancel_requested_at is not null as cancel_requested from {jobs} j
  where h.id is null                                         -- by the snapshot, unlocked: of those that were not locked above
    and j.kind = i.kind and j.id = i.id and j.key = i.key and j.revision = i.revision and j.token = i.token limit 1) s on true
