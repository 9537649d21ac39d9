-- Retry, park, release, fail or cancel rows of an app's own table: the decision comes as columns; one verdict a row.
-- Locks, Index and Fence as in table_finish.
with input as materialized (
  select i.* from unnest(%(ids)s::bigint[], %(keys)s::{key_type}[], %(revisions)s::{revision_type}[], %(tokens)s::uuid[],
                         %(states)s::text[], %(counts)s::int[], %(delays)s::float8[], %(codes)s::text[])
       as i(id, key, revision, token, state, counts, delay, code)
), held as materialized (
  select locked.* from (select * from input order by key) i cross join lateral (
    select i.id, i.state, i.counts, i.delay, i.code, j.{key}::{key_type} as key, j.{lease_expires_at} as lease_expires_at, {j.is_pending} as pending,
           {j.cancel_requested_at} is not null as cancel_requested
    from {table} j
    where j.{key} = i.key and {is_revision} and j.{token} = i.token
    for no key update of j skip locked) locked
), now as materialized (
  select clock_timestamp() as at from (select count(*) from held) as every_lock_held
), good as materialized (
  -- a requested cancel is honoured here: pending with a request, but no lease, no claim would ever take it
  select held.*, now.at, case when held.state = 'pending' and held.cancel_requested then 'cancelled' else held.state end as outcome
  from held cross join now
  where held.pending and held.lease_expires_at > now.at
), done as (
  update {table} j set
    {code?} = coalesce(good.code, j.{code}),
    {finished_at?} = case good.outcome when 'pending' then null else good.at end,
    {evictions?} = case when good.counts > 0 then 0 else j.{evictions} end,
    {cancel_requested_at?} = null,
    {runner?} = null,
    {attempts} = {j.attempts} + good.counts,
    {ready_at} = case when good.delay is null then j.{ready_at} else good.at + good.delay * interval '1 second' end,
    {state} = case good.outcome when 'failed' then {failed} when 'cancelled' then {cancelled} else {pending} end,
    {token} = null, {lease_expires_at} = null
  from good
  where j.{key} = good.key and j.{key} = any(array(select good.key from good))   -- as in table_claim
  returning good.id, good.outcome as state
)
select i.id,
       case when d.id is not null then 'done' when h.pending then 'expired'
            when (select {j.is_pending} from {table} j where j.{key} = i.key and {is_revision} and j.{token} = i.token limit 1) then 'busy'   -- as in table_finish
            else 'lost' end as verdict,
       d.state
from input i left join done d on d.id = i.id left join held h on h.id = i.id
