-- End or free the expired leases of one lane: cancelled if that was requested, failed at the limit of evictions, else ready again.
-- A lease that ends later than a claim could ask for was granted before the clock was set back: it is shortened.
-- Locks: expired rows, skipping locked ones; never waits.
-- Index: jobs_ready, a page of it after the cursor; leased rows are always due, so it stops at the present.
-- Fence: none needed, an expired lease protects nobody; its token goes.
with now as materialized (
  select clock_timestamp() as at
), page as materialized (                                    -- bounded by rows read, not by rows found
  select j.kind, j.id, j.ready_at, j.lease_expires_at, j.lease_seconds from {jobs} j
  where j.kind = %(kind)s::text and j.class = %(class)s::smallint and j.priority = %(priority)s::smallint and j.state = 'pending'
    and (j.ready_at, j.id) > (%(after_ready)s::timestamptz, %(after_id)s::bigint) and j.ready_at <= (select at from now)
  order by j.kind, j.class, j.priority, j.ready_at, j.id
  limit %(limit)s::int
), shortened as (
  update {jobs} j set lease_expires_at = (select at from now) + too_long.lease_seconds * interval '1 second'
  from (
    select locked.* from page p cross join lateral (
      select j.kind, j.id, j.lease_seconds from {jobs} j
      where j.id = p.id and j.kind || '' = p.kind
        and j.lease_expires_at > (select at from now) + (j.lease_seconds + 1) * interval '1 second'
      for no key update skip locked) locked
    where p.lease_expires_at > (select at from now) + (p.lease_seconds + 1) * interval '1 second') as too_long
  where j.id = too_long.id and j.kind || '' = too_long.kind
), gone as materialized (
  select locked.* from page p cross join lateral (
    select j.kind, j.id, j.runner, (j.lease_expires_at - %(ttl)s::float8 * interval '1 second' >= (select pg_postmaster_start_time())) is true as evicted
    from {jobs} j
    where j.id = p.id and j.kind || '' = p.kind and j.lease_expires_at <= (select at from now)
    for no key update skip locked) locked
  where p.lease_expires_at <= (select at from now)
), done as (
  update {jobs} j set
    evictions = j.evictions + gone.evicted::int, token = null, lease_expires_at = null, runner = null,
    state = case when j.cancel_requested_at is not null then 'cancelled'
                 when j.evictions + gone.evicted::int >= %(max_evictions)s::int then 'failed' else 'pending' end,
    last_code = case when j.cancel_requested_at is null and j.evictions + gone.evicted::int >= %(max_evictions)s::int
                     then 'evicted_too_often' else j.last_code end,
    last_error = case when j.cancel_requested_at is null and j.evictions + gone.evicted::int >= %(max_evictions)s::int
                      then null else j.last_error end,
    finished_at = case when j.cancel_requested_at is not null or j.evictions + gone.evicted::int >= %(max_evictions)s::int
                       then (select at from now) end,
    cancel_requested_at = null
  from gone
  where j.id = gone.id and j.kind || '' = gone.kind and j.id = any(array(select gone.id from gone))   -- as in claim_jobs
  returning j.id, j.kind, j.key, j.revision, j.generation, j.attempts, j.state, j.last_code, gone.evicted, gone.runner
), told as (
  insert into {facts} (at, job_id, generation, attempts, kind, key, revision, what, code, runner)
  select now.at, d.id, d.generation, d.attempts, d.kind, d.key, d.revision, f.what, f.code, d.runner
  from done d cross join now cross join lateral (values ('evicted', null, d.evicted),
    ('failed', d.last_code, d.state = 'failed'), ('cancelled', null, d.state = 'cancelled')) as f(what, code, holds)
  where %(facts)s::int > 0 and f.holds
)
select (select count(*) from page), (select count(*) from done), (select count(*) from done where state = 'pending'),
       greatest(last.ready_at, '0001-01-03 00:00:00+00'), last.id, (select count(*) from page where lease_expires_at is not null)
from (select ready_at, id from page order by ready_at desc, id desc limit 1) as last
