-- Say that these runners of one process live, and how they fare; forget those not heard of for a day.
-- Locks: the process's own rows, and rows of the long dead, skipping locked ones.
-- Index: primary key of runners; the table has a row a runner.
-- Fence: none, it is news only.
with gone as (
  delete from {runners} r using (
    select d.runner, d.kind from {runners} d where d.seen_at < clock_timestamp() - interval '1 day'
    for update skip locked) dead
  where r.runner = dead.runner and r.kind = dead.kind
)
insert into {runners} as r (runner, kind, started_at, seen_at, release, status)
select %(runner)s::text, i.kind, clock_timestamp(), clock_timestamp(), %(release)s::text, i.status::jsonb
from unnest(%(kinds)s::text[], %(statuses)s::text[]) as i(kind, status)
order by i.kind collate "C"
on conflict (runner, kind) do update set seen_at = excluded.seen_at, status = excluded.status
