-- The kinds that are paused.
-- Locks: nothing.
-- Index: none; the table has a row a kind.
-- Fence: none, it only reads.
select k.kind, k.paused_at,
       case when k.paused_until < '9999-12-30 00:00:00+00' then k.paused_until end,  -- later is for ever: no driver reads it
       coalesce(k.pause_code, '')
from {kinds} k
where k.paused_at is not null and (k.paused_until is null or k.paused_until > clock_timestamp())
order by k.kind collate "C"
