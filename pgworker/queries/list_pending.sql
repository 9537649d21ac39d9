-- A page of the pending jobs of one lane, in its order, and which of them have no cancel request yet that somebody will see.
-- Locks: nothing.
-- Index: jobs_ready, from the cursor on, at most `limit` entries.
-- Fence: none, it only reads; whoever acts on it looks again.
select j.id, j.ready_at::text, j.cancel_requested_at is null or (j.lease_expires_at > clock_timestamp()) is not true
from {jobs} j
where j.kind = %(kind)s::text and j.class = %(class)s::smallint and j.priority = %(priority)s::smallint and j.state = 'pending'
  and (j.ready_at, j.id) > (%(after)s::timestamptz, %(after_id)s::bigint)
order by j.kind, j.class, j.priority, j.ready_at, j.id
limit %(limit)s::int
