-- Before the app's own writes join a completion, look at the row of its table.
-- 1 if this lease is still ours and the row still wanted, 0 if only the former holds; nothing if it is lost. Also takes the
-- runtime's planner settings off, for the rest of the transaction.
-- Locks: nothing; the finish at the end of the transaction decides.
-- Index: the unique one on the table's key.
-- Fence: key, revision, token, pending, expiry, by the snapshot.
select (select case when ({j.is_pending} and j.{lease_expires_at} > clock_timestamp()) is true then ({j.is_wanted} is true)::int end
        from {table} j cross join (values (%(key)s::{key_type}, %(revision)s::{revision_type}, %(token)s::uuid)) as i(key, revision, token)
        where j.{key} = i.key and {is_revision} and j.{token} = i.token),
       set_config('enable_seqscan', 'on', true), set_config('enable_bitmapscan', 'on', true), set_config('enable_sort', 'on', true),
       set_config('enable_partition_pruning', 'on', true)
