-- The kinds that are paused.
-- Locks: nothing.
-- Index: none; the table has a row a kind.
-- Fence: none, it only reads.
select k.kind, k.paused_at, nullif(k.paused_until, 'infinity'), coalesce(k.pause_code, '')
from {kinds} k
where k.paused_at is not null and (k.paused_until is null or k.paused_until > clock_timestamp())
order by k.kind collate "C"
