-- The id of one key's job.
-- Locks: nothing.
-- Index: jobs_key.
-- Fence: none, it only reads; whoever acts on it looks again.
select j.id from {jobs} j where j.key = %(key)s::text and j.kind || '' = %(kind)s::text  -- kind as in insert_jobs
