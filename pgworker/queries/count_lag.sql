-- What waits, by kind and class: pending and ready jobs, each counted up to a bound, and the age of the oldest that is ready.
-- Locks: nothing.
-- Index: jobs_ready; one probe a lane, at most `bound` entries for each kind and class, and the leased rows at a lane's head.
-- Fence: none, it only reads.
with recursive now as materialized (
  select clock_timestamp() as at
), lanes as (                                                -- a loose index scan: jump from one lane to the next
  select l.* from (
    select j.kind, j.class, j.priority from {jobs} j
    where j.state = 'pending' and j.kind >= coalesce(%(kind)s::text, '')
    order by j.kind, j.class, j.priority limit 1) l
  where %(kind)s::text is null or l.kind = %(kind)s::text
  union all
  select n.* from lanes l cross join lateral (
    select j.kind, j.class, j.priority from {jobs} j
    where j.state = 'pending' and (j.kind, j.class, j.priority) > (l.kind, l.class, l.priority)
    order by j.kind, j.class, j.priority limit 1) n
  where %(kind)s::text is null or n.kind = %(kind)s::text
), classes as (
  select l.kind, l.class, min((
    select greatest(j.ready_at, '0001-01-03 00:00:00+00') from {jobs} j
    where j.kind = l.kind and j.class = l.class and j.priority = l.priority and j.state = 'pending'
      and j.ready_at <= (select at from now) and (j.token is null or j.lease_expires_at <= (select at from now))
    order by j.kind, j.class, j.priority, j.ready_at limit 1)) as oldest
  from lanes l group by l.kind, l.class
)
select c.kind, c.class, p.pending, r.ready, extract(epoch from (select at from now) - c.oldest)::float8
from classes c cross join lateral (
  select count(*) as pending from (
    select from lanes l cross join lateral (
      select from {jobs} j where j.kind = l.kind and j.class = l.class and j.priority = l.priority and j.state = 'pending'
      order by j.kind, j.class, j.priority, j.ready_at limit %(bound)s::int) j
    where l.kind = c.kind and l.class = c.class limit %(bound)s::int) bounded) p
cross join lateral (
  select count(*) as ready from (
    select from lanes l cross join lateral (
      select from {jobs} j
      where j.kind = l.kind and j.class = l.class and j.priority = l.priority and j.state = 'pending'
        and j.ready_at <= (select at from now) and (j.token is null or j.lease_expires_at <= (select at from now))
      order by j.kind, j.class, j.priority, j.ready_at limit %(bound)s::int) j
    where l.kind = c.kind and l.class = c.class limit %(bound)s::int) bounded) r
order by c.kind collate "C", c.class
