-- Which lanes (kind, class, priority) of these kinds have unfinished jobs, and in how many seconds the first free one is due.
-- Says of each, too, where that one is if it is due, whether its kind is paused, and how long it has taken to see. The lanes
-- behind the first thousand of a class show when those are empty.
-- Locks: nothing.
-- Index: jobs_ready; one probe a lane, then the leased rows at the lane's head.
-- Fence: none, it only reads.
with recursive now as materialized (
  select clock_timestamp() as at
), lanes as (                                                -- a loose index scan: jump from one lane to the next
  -- Of each class the first thousand: a walk over lanes without number would pass the deadline, and nothing be claimed at all.
  select k.kind, c.class, l.priority, 1 as nth
  from pg_catalog.unnest(%(kinds)s::text[]) as k(kind) cross join (values (0::smallint), (1::smallint)) as c(class) cross join lateral (
    select j.priority from {jobs} j
    where j.kind = k.kind and j.class = c.class and j.state = 'pending'
    order by j.kind, j.class, j.priority limit 1) l
  union all
  select l.kind, l.class, n.priority, l.nth + 1
  from lanes l cross join lateral (
    select j.priority from {jobs} j
    where j.kind = l.kind and j.class = l.class and j.priority > l.priority and j.state = 'pending'
    order by j.kind, j.class, j.priority limit 1) n
  where l.nth < 1000
)
select l.kind, l.class, l.priority,
       f.due_in_seconds,
       exists (select from {kinds} k where k.kind = l.kind and k.paused_at is not null
               and (k.paused_until is null or k.paused_until > n.at)) as paused,
       extract(epoch from clock_timestamp() - n.at)::float8 as seconds,
       -- (an instant that the driver can read)
       case when f.ready_at <= n.at then greatest(f.ready_at, '0001-01-03 00:00:00+00') end, f.id
from lanes l cross join now n left join lateral (
  select j.id, j.ready_at,
         -- (a day is enough for whoever waits, and bounds what an infinite ready_at would make of the difference)
         extract(epoch from least(greatest(j.ready_at, n.at - interval '1 day'), n.at + interval '1 day') - n.at)::float8 as due_in_seconds
  from {jobs} j
  where j.kind = l.kind and j.class = l.class and j.priority = l.priority and j.state = 'pending'
    and (j.token is null or j.lease_expires_at <= (select at from now))
  order by j.kind, j.class, j.priority, j.ready_at, j.id limit 1) f on true
order by l.kind, l.class, l.priority
