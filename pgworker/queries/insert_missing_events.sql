-- Put those events of insert_events that are not there, when nobody knows whether it was committed.
-- It adds nothing to what is there: not to what was written without an answer, nor to what has run meanwhile.
-- Their facts are written with them.
-- A column that has its default in all rows is sent as an empty array, for which unnest gives nulls.
-- Locks: its own new rows.
-- Index: jobs_key, which refuses a key that is there; none is searched.
-- Fence: none, the rows are new.
with now as materialized (
  select clock_timestamp() as at
), put as (
  insert into {jobs} as j (kind, key, event, class, priority, ready_at, created_at, max_attempts, version, tenant, payload)
  select %(kind)s::text, t.key, true, coalesce(t.class, 0), coalesce(t.priority, 0),
         -- as in insert_jobs: jobs of one call stay in its order, whatever their ids are
         coalesce(t.ready_at, now.at + coalesce(t.delay, 0) * interval '1 second' + t.ord * interval '1 microsecond'),
         now.at, t.max_attempts, %(version)s::smallint, t.tenant, t.payload::jsonb
  from now cross join unnest(%(keys)s::text[], %(classes)s::smallint[], %(priorities)s::smallint[], %(delays)s::float8[],
                             %(ready_ats)s::timestamptz[], %(max_attempts)s::int[], %(tenants)s::text[], %(payloads)s::text[]) with ordinality
       as t(key, class, priority, delay, ready_at, max_attempts, tenant, payload, ord)
  on conflict (kind, key) do nothing
  returning j.id, j.key
), told as (
  insert into {facts} (at, job_id, generation, attempts, kind, key, revision, what)
  select now.at, p.id, 1, 0, %(kind)s::text, p.key, '', 'enqueued' from put p cross join now where %(facts)s::int >= 2
)
select pg_current_xact_id_if_assigned()::text from (select count(*) from put) counted  -- read once all are in
