-- Which lanes (class, priority) of an app's own table have unfinished rows, and in how many seconds the first free one is due.
-- Says of each, too, whether the kind is paused.
-- Locks: nothing.
-- Index: the table's own on ([class,] [priority,] ready_at, key) of pending rows; one probe a lane, then the leased rows at its head.
-- Fence: none, it only reads.
with recursive now as materialized (
  select clock_timestamp() as at
), lanes as (                                                -- a loose index scan; a table without lanes has constants for them
  (select {j.urgency} as class, {j.priority} as priority from {table} j
   where {j.is_pending} and {j.is_wanted}
   order by {j.urgency}, {j.priority} limit 1)
  union all
  select n.class, n.priority
  from lanes l cross join lateral (
    select {j.urgency} as class, {j.priority} as priority from {table} j
    where {j.is_pending} and {j.is_wanted} and ({j.urgency}, {j.priority}) > (l.class, l.priority)
    order by {j.urgency}, {j.priority} limit 1) n
)
select %(kind)s::text, l.class, l.priority,
       -- (a day is enough for whoever waits, and bounds what an infinite ready_at would make of the difference)
       (select extract(epoch from least(greatest(j.{ready_at}, (select at from now) - interval '1 day'), (select at from now) + interval '1 day')
                                  - (select at from now))::float8
        from {table} j
        where {j.is_pending} and {j.is_wanted} and {j.urgency} = l.class and {j.priority} = l.priority
          and j.{ready_at} is not null and j.{revision} is not null and {j.cancel_requested_at} is null
          and (j.{token} is null or j.{lease_expires_at} is null or j.{lease_expires_at} <= (select at from now))
        order by j.{ready_at}, j.{key} limit 1) as due_in_seconds,
       exists (select from {kinds} k where k.kind = %(kind)s::text and k.paused_at is not null
               and (k.paused_until is null or k.paused_until > (select at from now))) as paused
from lanes l
order by l.class, l.priority
