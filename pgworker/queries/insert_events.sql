-- Put events: jobs of one kind, each with a key that was made for it and that no other row can have.
-- Sent again, it fails, if it was committed the first time: then it is insert_missing_events that is to be sent.
-- It writes no facts. A column that has its default in all rows is sent as an empty array, for which unnest gives nulls.
-- Nothing here costs by the row that need not: with ON CONFLICT and a CTE for facts 20,000 took the server 103 ms of CPU
-- and not 79, and 48 bytes more of WAL each. By COPY, in binary, it was 66: a tenth of the whole call, with the client's
-- part, and no reason to have a second way for each driver.
-- Locks: its own new rows.
-- Index: jobs_key, which refuses a key that is there; none is searched.
-- Fence: none, the rows are new.
with now as materialized (
  select clock_timestamp() as at
), put as (
  insert into {jobs} (kind, key, event, class, priority, ready_at, created_at, max_attempts, version, tenant, payload)
  select %(kind)s::text, t.key, true, coalesce(t.class, 0), coalesce(t.priority, 0),
         -- as in insert_jobs: jobs of one call stay in its order, whatever their ids are
         coalesce(t.ready_at, now.at + coalesce(t.delay, 0) * interval '1 second' + t.ord * interval '1 microsecond'),
         now.at, t.max_attempts, %(version)s::smallint, t.tenant, t.payload::jsonb
  from now cross join unnest(%(keys)s::text[], %(classes)s::smallint[], %(priorities)s::smallint[], %(delays)s::float8[],
                             %(ready_ats)s::timestamptz[], %(max_attempts)s::int[], %(tenants)s::text[], %(payloads)s::text[]) with ordinality
       as t(key, class, priority, delay, ready_at, max_attempts, tenant, payload, ord)
)
select pg_current_xact_id()::text
