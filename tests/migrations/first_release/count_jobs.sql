-- Jobs by kind and derived state, counted up to a bound; and the age of the oldest that is ready.
-- Locks: nothing.
-- Index: jobs_ready and jobs_ended, at most `bound` entries for each kind and stored state.
-- Fence: none, it only reads.
with recursive now as materialized (
  select clock_timestamp() as at
), names as (                                                -- a loose scan over both indexes' first column
  select least((select j.kind from {jobs} j where j.state = 'pending' order by j.kind limit 1),
               (select j.kind from {jobs} j where j.state <> 'pending' order by j.kind limit 1)) as kind
  union all
  select least((select j.kind from {jobs} j where j.state = 'pending' and j.kind > k.kind order by j.kind limit 1),
               (select j.kind from {jobs} j where j.state <> 'pending' and j.kind > k.kind order by j.kind limit 1))
  from names k where k.kind is not null
), bounded as (
  select p.* from names k cross join lateral (
    select j.kind, case when j.token is not null and j.lease_expires_at <= now.at then 'expired'
                        when j.token is not null then 'running'
                        when j.ready_at > now.at then 'scheduled' else 'ready' end as state, j.ready_at
    from {jobs} j cross join now where j.kind = k.kind and j.state = 'pending'
    order by j.kind, j.class, j.priority, j.ready_at limit %(bound)s::int) p
  union all
  select e.* from names k cross join (values ('succeeded'), ('failed'), ('cancelled')) as s(state) cross join lateral (
    select j.kind, j.state, null::timestamptz from {jobs} j
    where j.kind = k.kind and j.state = s.state and j.state <> 'pending' limit %(bound)s::int) e
)
select b.kind, b.state, count(*), extract(epoch from (select at from now) - min(b.ready_at) filter (where b.state = 'ready'))::float8
from bounded b
group by b.kind, b.state
order by b.kind collate "C", b.state
