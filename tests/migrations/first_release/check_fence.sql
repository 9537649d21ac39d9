-- Before the app's own writes join a completion: is this lease still ours? Also takes the runtime's planner settings off,
-- for the rest of the transaction, so that the app's statements are planned as the app expects.
-- Locks: nothing; the finish at the end of the transaction decides.
-- Index: primary key.
-- Fence: id, key, revision, token, expiry, by the snapshot.
select coalesce((
         select j.lease_expires_at > clock_timestamp() from {jobs} j
         where j.kind = %(kind)s::text and j.id = %(id)s::bigint and j.key = %(key)s::text and j.revision = %(revision)s::text
           and j.token = %(token)s::uuid), false),
       set_config('enable_seqscan', 'on', true), set_config('enable_bitmapscan', 'on', true), set_config('enable_sort', 'on', true)
