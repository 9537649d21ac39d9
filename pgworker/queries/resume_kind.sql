-- End the pause of a kind; a row if there was one.
-- Locks: the kind's row; waits for a pause of it.
-- Index: primary key of kinds.
-- Fence: none needed, claims read it.
update {kinds} k set paused_at = null, paused_until = null, pause_code = null
where k.kind = %(kind)s::text and k.paused_at is not null and (k.paused_until is null or k.paused_until > clock_timestamp())
returning k.kind
