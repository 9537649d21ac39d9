-- Succeed rows of an app's own table, their results with them; one verdict a row.
-- Locks: rows that are still ours, in key order, skipping locked ones (verdict busy); never waits.
-- Index: the unique one on the table's key, one probe a row whatever the statistics say (lateral).
-- Fence: key, revision, token, pending, and the expiry, compared after the last lock was taken.
with input as materialized (
  select i.* from unnest(%(ids)s::bigint[], %(keys)s::{key_type}[], %(revisions)s::{revision_type}[], %(tokens)s::uuid[], %(results)s::text[])
       as i(id, key, revision, token, result)
), held as materialized (
  select locked.* from (select * from input order by key) i cross join lateral (
    select i.id, i.result, j.{key}::{key_type} as key, j.{lease_expires_at} as lease_expires_at, {j.is_pending} as pending, {j.is_wanted} is true as wanted,
           {j.cancel_requested_at} is not null as cancel_requested
    from {table} j
    where j.{key} = i.key and {is_revision} and j.{token} = i.token
    for no key update of j skip locked) locked
), now as materialized (                                     -- after the last lock by data dependence; a plan could read the clock before it
  select clock_timestamp() as at from (select count(*) from held) as every_lock_held
), good as materialized (                                    -- a row that is no longer wanted is given back, and this result dropped
  select held.*, now.at, case when held.wanted then 'succeeded' when held.cancel_requested then 'cancelled' else 'pending' end as outcome
  from held cross join now
  where held.pending and held.lease_expires_at > now.at
), done as (
  update {table} j set
    {result?} = case good.outcome when 'succeeded' then good.result::{result_type} else j.{result} end,
    {code?} = case good.outcome when 'succeeded' then null else j.{code} end,
    {finished_at?} = case good.outcome when 'pending' then null else good.at end,
    {evictions?} = 0,
    {cancel_requested_at?} = null,
    {runner?} = null,
    {state} = case good.outcome when 'succeeded' then {succeeded} when 'cancelled' then {cancelled} else {pending} end,
    {token} = null, {lease_expires_at} = null
  from good
  where j.{key} = good.key and j.{key} = any(array(select good.key from good))   -- as in table_claim
  returning good.id, good.outcome as state
)
select i.id,
       case when d.id is not null then 'done' when h.pending then 'expired'
            -- By the snapshot, unlocked, and for these few only: tells busy from lost. What is pending is told, not asked for: a
            -- condition would let a plan read the index of all pending rows instead.
            when (select {j.is_pending} from {table} j where j.{key} = i.key and {is_revision} and j.{token} = i.token limit 1) then 'busy'
            else 'lost' end as verdict,
       d.state
from input i left join done d on d.id = i.id left join held h on h.id = i.id
