-- Which lanes (class, priority) of an app's own table have unfinished rows, and in how many seconds the first free one is due.
-- Says of each, too, whether the kind is paused, and how long it has taken to see. The lanes behind the first thousand of a
-- class show when those are empty.
-- Locks: nothing.
-- Index: the table's own on ([class,] [priority,] ready_at, key) of pending rows; one probe a lane, then the leased rows at its head.
-- Fence: none, it only reads.
with recursive now as materialized (
  select clock_timestamp() as at
), lanes as (                                                -- a loose index scan; a table without lanes has constants for them
  -- Two walks, of a thousand lanes at most: fresh rows, and all others. (A number too high for a class is catch-up.)
  select l.urgency, l.priority, c.highest, 1 as nth
  from (values ('-9223372036854775808'::bigint, 0::bigint), (1, 9223372036854775807)) as c(lowest, highest) cross join lateral (
    select {j.urgency} as urgency, {j.priority} as priority from {table} j
    where {j.is_pending} and {j.is_wanted} and {j.urgency} between c.lowest and c.highest
    order by {j.urgency}, {j.priority} limit 1) l
  union all
  select n.urgency, n.priority, l.highest, l.nth + 1
  from lanes l cross join lateral (
    select {j.urgency} as urgency, {j.priority} as priority from {table} j
    where {j.is_pending} and {j.is_wanted} and {j.is_behind} and {j.urgency} <= l.highest
    order by {j.urgency}, {j.priority} limit 1) n
  where l.nth < 1000
)
select %(kind)s::text, l.urgency, l.priority,
       -- (a day is enough for whoever waits, and bounds what an infinite ready_at would make of the difference)
       (select extract(epoch from least(greatest(j.{ready_at}, (select at from now) - interval '1 day'), (select at from now) + interval '1 day')
                                  - (select at from now))::float8
        from {table} j
        where {j.is_pending} and {j.is_wanted} and {j.urgency} = l.urgency and {j.priority} = l.priority
          and j.{ready_at} is not null and j.{revision} is not null and {j.cancel_requested_at} is null
          and (j.{token} is null or j.{lease_expires_at} is null or j.{lease_expires_at} <= (select at from now))
        order by j.{ready_at}, j.{key} limit 1) as due_in_seconds,
       exists (select from {kinds} k where k.kind = %(kind)s::text and k.paused_at is not null
               and (k.paused_until is null or k.paused_until > (select at from now))) as paused,
       extract(epoch from clock_timestamp() - (select at from now))::float8 as seconds
from lanes l
order by l.urgency, l.priority
