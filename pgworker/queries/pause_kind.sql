-- Pause a kind in all processes, or prolong its pause; a pause that lasts longer already stays as it is.
-- Locks: the kind's row; waits for another pause of it.
-- Index: primary key of kinds.
-- Fence: none needed, claims read it.
with now as materialized (
  select clock_timestamp() as at
)
insert into {kinds} as k (kind, paused_at, paused_until, pause_code)
select %(kind)s::text, now.at,
       coalesce(%(until)s::timestamptz, now.at + %(seconds)s::float8 * interval '1 second'),  -- null: until it is resumed
       %(code)s::text
from now
on conflict (kind) do update set
  paused_at = case when k.paused_until <= excluded.paused_at then excluded.paused_at
                   else coalesce(k.paused_at, excluded.paused_at) end,
  paused_until = excluded.paused_until, pause_code = excluded.pause_code
where k.paused_at is null or k.paused_until < excluded.paused_until or (k.paused_until is not null and excluded.paused_until is null)
