-- 0001 jobs
-- Upgrade: The first schema. Creates empty tables; nothing of yours is read or locked.
-- Breaking: no
-- Transaction: yes

-- A plain sequence and not an identity column: identity on a partitioned table needs PostgreSQL 17.
create sequence {schema}.job_ids as bigint;

create table {schema}.jobs (
    -- What a claim and a finish change lies together, between what they leave alone: of an update, only the bytes from the first
    -- change to the last are written to the WAL.
    id                  bigint      not null default pg_catalog.nextval('{schema}.job_ids'),
    ready_at            timestamptz not null default pg_catalog.clock_timestamp(),
    created_at          timestamptz not null default pg_catalog.clock_timestamp(),
    generation          integer     not null default 1,          -- 1 = as inserted, +1 with each replacement
    attempts            integer     not null default 0,          -- judged failures
    max_attempts        integer,                                 -- null = as the worker's kind says
    version             smallint    not null default 1,          -- of the payload's shape
    class               smallint    not null default 0,          -- 0 fresh, 1 catch_up
    priority            smallint    not null default 0,          -- smaller runs first
    event               boolean     not null default false,      -- enqueued without a key: once it has ended nobody asks for it by name
    lease_seconds       double precision,                        -- for which the last claim asked
    lease_epoch         bigint      not null default 0,          -- rises with each claim, never otherwise
    lease_expires_at    timestamptz,
    not_before          timestamptz,                             -- until then a superseded run may go on, and its kind waits for it
    finished_at         timestamptz,
    cancel_requested_at timestamptz,
    token               uuid,                                    -- of the claim that holds the lease
    evictions           integer     not null default 0,          -- leases that ran out since the last judged outcome
    has_result          boolean     not null default false,      -- it ended with a value, kept in results for the kind's time
    state               text        not null default 'pending',
    runner              text,
    last_code           text,                                    -- of the last run without a success
    last_error          text,                                    -- class of the exception behind it, never its text
    -- Collation "C": keys and revisions are compared byte by byte, and no update of the C library can damage an index.
    kind                text collate "C" not null,
    key                 text collate "C" not null,
    revision            text collate "C" not null default '',    -- '' = none given
    tenant              text collate "C",                        -- '' = none given, null = of a kind that is not fair
    payload             jsonb,
    -- What tells rows apart goes first: with kind in front, a plan that takes the table for empty prefers either index
    -- for the other's lookups, and then reads every row of the kind. ON CONFLICT (kind, key) finds its own all the same.
    -- The kind is in both for tables that are partitioned by it.
    primary key (id, kind),
    constraint jobs_key unique (key, kind),
    constraint jobs_state check (state in ('pending', 'succeeded', 'failed', 'cancelled')),
    constraint jobs_lease check ((token is null) = (lease_expires_at is null) and (token is null or state = 'pending')),
    constraint jobs_class check (class in (0, 1)),
    constraint jobs_names check (kind <> '' and pg_catalog.octet_length(kind) <= 63
        and key <> '' and pg_catalog.octet_length(key) <= 512 and pg_catalog.octet_length(revision) <= 128
        and pg_catalog.octet_length(tenant) <= 512)
)
-- A claim, a renewal and a finish each write a new version of the row. Half-empty pages leave room for it on the same
-- page, so that these updates stay HOT: measured 46 % against 2 % at the default, and a third less WAL.
-- Autovacuum at a fiftieth of the rows, not at a fifth: most rows have ended and lie still, and what is dead belongs to the
-- few that are at work, whose index every claim walks. It may go five times as fast as by default: a vacuum reads all
-- indexes of the table, and while it does so the next dead rows gather. Statistics are left to the defaults: no statement
-- of the runtime relies on them.
with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_limit = 1000);

-- What is claimable, in the order of claims. It holds no column that a claim or a renewal changes: that keeps them HOT.
create index jobs_ready on {schema}.jobs (kind, class, priority, ready_at, id) where state = 'pending';

-- The same by tenants, for claims that are fair between them. Jobs of other kinds have no tenant, and cost nothing here.
create index jobs_tenants on {schema}.jobs (kind, class, priority, tenant, ready_at, id) where state = 'pending' and tenant is not null;

-- What has ended, oldest first: retention, and the lists and counts of failed jobs. What retention still has to do with
-- lies apart from what stays for good, so that it never reads that again. An index of its own for it would make every
-- finish a tenth dearer, and write 80 bytes more of WAL; this one writes as much as without the column.
create index jobs_ended on {schema}.jobs (kind, state, (event or (payload is not null and state <> 'failed')), finished_at, id)
    where state <> 'pending';

create table {schema}.results (
    finished_at timestamptz not null,
    kind        text collate "C" not null,
    key         text collate "C" not null,
    revision    text collate "C" not null,
    value       jsonb       not null,
    primary key (key, kind)
)
-- Replaced in place and deleted by their age: the space is to be free for new ones before the table has grown by a fifth.
with (autovacuum_vacuum_scale_factor = 0.05);

-- The switchboard: what holds for a kind in every process. A kind without a row is not paused.
create table {schema}.kinds (
    paused_at    timestamptz,                                    -- null = not paused
    paused_until timestamptz,                                    -- null = until it is resumed
    kind         text collate "C" primary key,
    pause_code   text,
    constraint kinds_pause check (paused_at is not null or (paused_until is null and pause_code is null))
);

-- The journal: what happened to a job, written by the statement that did it.
create sequence {schema}.fact_ids as bigint;

create table {schema}.facts (
    id          bigint      not null default pg_catalog.nextval('{schema}.fact_ids'),
    at          timestamptz not null,
    xid         xid8        not null default pg_catalog.pg_current_xact_id(),  -- ids are given before commits: readers must not pass open transactions
    job_id      bigint      not null,
    generation  integer     not null,
    attempts    integer     not null,                            -- judged failures, this one included
    kind        text collate "C" not null,
    key         text collate "C" not null,
    revision    text collate "C" not null,
    what        text        not null,
    code        text,
    runner      text,                                            -- that held the lease
    primary key (id),
    constraint facts_what check (what in ('enqueued', 'replaced', 'superseded', 'requeued', 'claimed', 'succeeded', 'retried', 'parked',
        'released', 'failed', 'cancelled', 'evicted', 'retry_requested', 'rebuild_requested', 'cancel_requested', 'forgotten'))
)
-- Retention deletes from the front, where its next pass begins: dead rows there are to go soon.
with (autovacuum_vacuum_scale_factor = 0.02);

-- The history of one job.
create index facts_job on {schema}.facts (key, kind, id);

create table {schema}.runners (
    seen_at     timestamptz not null,
    started_at  timestamptz not null,
    runner      text        not null,   -- one process
    kind        text collate "C" not null,
    release     text        not null,
    status      jsonb       not null,
    primary key (runner, kind)
)
with (fillfactor = 50);

-- The derived state, defined once: what every list and count shows.
create view {schema}.job_states as
select j.kind, j.key, j.id, j.revision, j.generation,
       case when j.state <> 'pending' then j.state
            when j.token is not null and j.lease_expires_at <= pg_catalog.clock_timestamp() then 'expired'
            when j.token is not null and j.cancel_requested_at is not null then 'cancelling'
            when j.token is not null then 'running'
            when j.ready_at > pg_catalog.clock_timestamp() then 'scheduled'
            else 'ready' end as state,
       j.class, j.priority, j.tenant, j.attempts, j.max_attempts, j.evictions, j.last_code, j.last_error, j.runner,
       j.ready_at, j.lease_expires_at, j.created_at, j.finished_at
from {schema}.jobs j;

-- Enqueue from SQL: triggers, psql, other languages. The same rules as App.enqueue, one job a call, in your transaction.
-- Locks: the row of (kind, key) until you commit, and only if it changes. `wake` sends a NOTIFY at your commit, which
-- makes busy committers wait for each other: leave it off where many commit, workers find the job within a second anyway.
create function {schema}.enqueue(
    kind text, payload jsonb default 'null', key text default null, revision text default null,
    delay interval default '0', priority integer default 0, urgency text default 'fresh',
    if_pending text default 'replace', wake boolean default false, tenant text default '', out job_key text, out status text
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $enqueue$
#variable_conflict use_column
declare
    want    {schema}.jobs;
    seen    {schema}.jobs;
    put     {schema}.jobs;
    random  text := gen_random_uuid()::text;
    millis  text := lpad(to_hex((extract(epoch from clock_timestamp()) * 1000)::bigint), 12, '0');
begin
    if enqueue.kind is null or enqueue.kind !~ '^[A-Za-z0-9_.:-]{1,63}$' then
        raise exception 'pgworker: kind must match [A-Za-z0-9_.:-]{1,63}' using errcode = 'invalid_parameter_value';
    elsif octet_length(enqueue.key) not between 1 and 512 then
        raise exception 'pgworker: key must have 1 to 512 bytes' using errcode = 'invalid_parameter_value';
    elsif octet_length(enqueue.revision) not between 1 and 128 then
        raise exception 'pgworker: revision must have 1 to 128 bytes' using errcode = 'invalid_parameter_value';
    elsif enqueue.revision is not null and enqueue.key is null then
        raise exception 'pgworker: a revision needs a key' using errcode = 'invalid_parameter_value';
    elsif octet_length(enqueue.tenant) > 512 then
        raise exception 'pgworker: tenant must have at most 512 bytes' using errcode = 'invalid_parameter_value';
    elsif coalesce(enqueue.urgency, '') not in ('fresh', 'catch_up') then
        raise exception 'pgworker: urgency must be fresh or catch_up' using errcode = 'invalid_parameter_value';
    elsif coalesce(enqueue.if_pending, '') not in ('replace', 'keep') then
        raise exception 'pgworker: if_pending must be replace or keep' using errcode = 'invalid_parameter_value';
    elsif enqueue.priority not between -32767 and 32767 then
        raise exception 'pgworker: priority must be -32767 to 32767' using errcode = 'invalid_parameter_value';
    elsif enqueue.delay < '0' or not isfinite(enqueue.delay) then
        raise exception 'pgworker: delay must not be negative or infinite' using errcode = 'invalid_parameter_value';
    end if;

    want.kind := enqueue.kind;
    want.revision := coalesce(enqueue.revision, '');
    want.class := (enqueue.urgency = 'catch_up')::int;
    -- An event has no key of its own: a time-ordered UUID (version 7) keeps the index compact.
    want.key := coalesce(enqueue.key, substr(millis, 1, 8) || '-' || substr(millis, 9) || '-7' || substr(random, 16));
    job_key := want.key;

    for round in 1 .. 5 loop
        select j.* into seen from {schema}.jobs j where j.kind = want.kind and j.key = want.key;
        if found and seen.revision = want.revision and want.revision <> '' then
            if want.class < seen.class and seen.state = 'pending' and seen.token is null then
                update {schema}.jobs j set class = want.class
                where j.kind = want.kind and j.id = seen.id and j.revision = want.revision and j.state = 'pending';
            end if;
            status := 'unchanged';
            return;
        elsif found and seen.state = 'pending' and enqueue.if_pending = 'keep' then
            status := 'kept';
            return;
        end if;

        insert into {schema}.jobs as j (kind, key, event, revision, tenant, class, priority, ready_at, payload)
        values (want.kind, want.key, enqueue.key is null, want.revision, enqueue.tenant, want.class, coalesce(enqueue.priority, 0),
                clock_timestamp() + coalesce(enqueue.delay, '0'), coalesce(enqueue.payload, 'null'))
        on conflict (kind, key) do update set
            event = excluded.event, revision = excluded.revision, generation = j.generation + 1, payload = excluded.payload, version = 1,
            tenant = excluded.tenant,
            class = case when j.state = 'pending' then least(j.class, excluded.class) else excluded.class end,
            priority = excluded.priority, max_attempts = null, ready_at = greatest(excluded.ready_at, j.not_before),
            state = 'pending', attempts = 0, evictions = 0, last_code = null, last_error = null,
            cancel_requested_at = null, finished_at = null,
            (token, lease_expires_at, runner) = (select j.token, j.lease_expires_at, j.runner
                where j.revision = excluded.revision and j.lease_expires_at > clock_timestamp())
        where (j.revision <> excluded.revision or excluded.revision = '')
          and (enqueue.if_pending = 'replace' or j.state <> 'pending')
        returning j.* into put;
        if found then
            status := case when put.generation = 1 then 'created'
                           when seen.state <> 'pending' then 'requeued'
                           when put.token is null and (seen.token is not null or put.lease_epoch <> seen.lease_epoch) then 'superseded'
                           else 'replaced' end;
            if status = 'superseded' then
                insert into {schema}.facts (at, job_id, generation, attempts, kind, key, revision, what)
                values (clock_timestamp(), put.id, put.generation, 0, put.kind, put.key, put.revision, status);
            end if;
            if enqueue.wake and put.ready_at <= clock_timestamp() then
                perform pg_notify({channel}, 'r:' || want.kind);
            end if;
            if enqueue.wake and status = 'superseded' then
                perform pg_notify({channel}, 'c:' || want.kind);
            end if;
            return;
        end if;
        -- Another transaction has just put the same revision (or, with keep, any pending work): look again.
    end loop;
    raise exception 'pgworker: (kind, key) kept changing while it was enqueued; try again' using errcode = 'serialization_failure';
end
$enqueue$;
