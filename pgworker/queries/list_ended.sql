-- A page of the jobs of one kind that ended in one state, in order of their end, and which of them have the wanted code.
-- Locks: nothing.
-- Index: jobs_ended, from the cursor to `until`, at most `limit` entries of each of its parts: what is to go, what stays.
-- Fence: none, it only reads; whoever acts on it looks again.
with now as materialized (
  select coalesce(%(until)s::timestamptz, clock_timestamp()) as until
), going as materialized (
  select j.id, j.finished_at, j.last_code from {jobs} j
  where j.kind = %(kind)s::text and j.state = %(state)s::text and j.state <> 'pending'
    and (j.event or (j.payload is not null and j.state <> 'failed')) is true
    and (j.finished_at, j.id) > (%(after)s::timestamptz, %(after_id)s::bigint) and j.finished_at <= (select until from now)
  order by j.kind, j.state, j.finished_at, j.id
  limit %(limit)s::int
), staying as materialized (
  select j.id, j.finished_at, j.last_code from {jobs} j
  where j.kind = %(kind)s::text and j.state = %(state)s::text and j.state <> 'pending'
    and (j.event or (j.payload is not null and j.state <> 'failed')) is false
    and (j.finished_at, j.id) > (%(after)s::timestamptz, %(after_id)s::bigint) and j.finished_at <= (select until from now)
  order by j.kind, j.state, j.finished_at, j.id
  limit %(limit)s::int
)
select j.id, j.finished_at::text, (%(code)s::text is null or j.last_code = %(code)s::text) is true, (select until::text from now)
from (select * from going union all select * from staying) j
order by j.finished_at, j.id
limit %(limit)s::int
