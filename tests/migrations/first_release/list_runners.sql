-- The runners that were heard of lately, and how long ago.
-- Locks: nothing.
-- Index: none; the table has a row a runner.
-- Fence: none, it only reads.
select r.runner, r.kind, r.release, extract(epoch from clock_timestamp() - r.seen_at)::float8,
       extract(epoch from r.seen_at - r.started_at)::float8, r.status::text
from {runners} r
order by r.kind collate "C", r.runner
