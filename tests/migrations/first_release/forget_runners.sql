-- A process that stops takes its runners' rows with it.
-- Locks: its own rows.
-- Index: primary key of runners.
-- Fence: none, it is news only.
delete from {runners} r where r.runner = %(runner)s::text
