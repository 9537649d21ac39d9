-- The id of the caller's transaction, if it has written anything.
-- Locks: nothing.
-- Index: none.
-- Fence: none, it only reads.
select pg_catalog.pg_current_xact_id_if_assigned()::text
