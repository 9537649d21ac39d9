-- Before the app's own writes join a completion: the generation of the job, if this lease is still ours. Also takes the
-- runtime's planner settings off, for the rest of the transaction, so that the app's statements are planned as it expects.
-- Locks: nothing; the finish at the end of the transaction decides.
-- Index: primary key.
-- Fence: id, key, revision, token, expiry, by the snapshot.
select (select j.generation from {jobs} j
        where j.kind = %(kind)s::text and j.id = %(id)s::bigint and j.key = %(key)s::text and j.revision = %(revision)s::text
          and j.token = %(token)s::uuid and j.lease_expires_at > clock_timestamp()),
       set_config('enable_seqscan', 'on', true), set_config('enable_bitmapscan', 'on', true), set_config('enable_sort', 'on', true),
       set_config('enable_partition_pruning', 'on', true)
