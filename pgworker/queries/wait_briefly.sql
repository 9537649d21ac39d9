-- Let a moment pass before rows that somebody held are asked for again.
-- Locks: nothing.
-- Index: none.
-- Fence: none.
select from pg_catalog.pg_sleep(%(seconds)s::float8)
