-- Which lanes (kind, class, priority) of these kinds have unfinished jobs, and in how many seconds the first free one is due.
-- Says of each, too, whether its kind is paused.
-- Locks: nothing.
-- Index: jobs_ready; one probe a lane, then the leased rows at the lane's head.
-- Fence: none, it only reads.
with recursive now as materialized (
  select clock_timestamp() as at
), lanes as (                                                -- a loose index scan: jump from one lane to the next
  select k.kind, l.class, l.priority
  from unnest(%(kinds)s::text[]) as k(kind) cross join lateral (
    select j.class, j.priority from {jobs} j
    where j.kind = k.kind and j.state = 'pending'
    order by j.kind, j.class, j.priority limit 1) l
  union all
  select l.kind, n.class, n.priority
  from lanes l cross join lateral (
    select j.class, j.priority from {jobs} j
    where j.kind = l.kind and j.state = 'pending' and (j.class, j.priority) > (l.class, l.priority)
    order by j.kind, j.class, j.priority limit 1) n
)
select l.kind, l.class, l.priority,
       -- (a day is enough for whoever waits, and bounds what an infinite ready_at would make of the difference)
       (select extract(epoch from least(greatest(j.ready_at, n.at - interval '1 day'), n.at + interval '1 day') - n.at)::float8
        from {jobs} j cross join now n
        where j.kind = l.kind and j.class = l.class and j.priority = l.priority and j.state = 'pending'
          and (j.token is null or j.lease_expires_at <= (select at from now))
        order by j.kind, j.class, j.priority, j.ready_at, j.id limit 1) as due_in_seconds,
       exists (select from {kinds} k where k.kind = l.kind and k.paused_at is not null
               and (k.paused_until is null or k.paused_until > (select at from now))) as paused
from lanes l
order by l.kind, l.class, l.priority
