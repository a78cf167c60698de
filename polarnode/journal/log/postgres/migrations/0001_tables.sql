-- The tables of the log that the nodes of a fleet share.
--
-- What is agreed among nodes is a row here: which incarnation of a node holds a place, which session filled it,
-- and at which position of the log its event stands. Turns of live sessions stay on their node's own disk.
-- JSON that may hold an agent's text is kept as bytes: the types text and jsonb refuse the character U+0000.

-- One row. `position` is the number of the last event; it is a row and not a sequence, because it must go on
-- where retention deleted every event, and because its lock makes positions follow the order of commits.
CREATE TABLE log (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    restored bigint NOT NULL DEFAULT 0,          -- raised by mark_restored()
    position bigint NOT NULL DEFAULT 0,
    pruned bigint NOT NULL DEFAULT 0,            -- the last event that retention deleted
    stored bigint NOT NULL DEFAULT 0,            -- bytes of the events that are kept
    callbacks_expired bigint NOT NULL DEFAULT 0
);
INSERT INTO log DEFAULT VALUES;

-- What this log was called, and the position after which it has been called so. A promoted standby and a restored
-- backup are other logs: a cursor names the one it was read from.
CREATE TABLE identities (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    identity text NOT NULL UNIQUE,
    after bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- A start of a node's process. `sign` is raised each second while it lives.
CREATE TABLE nodes (
    incarnation bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL,
    url text NOT NULL DEFAULT '',
    certificate text NOT NULL DEFAULT '',        -- SHA-256 of a self-signed one
    version text NOT NULL DEFAULT '',            -- of polarnode
    labels jsonb NOT NULL DEFAULT '{}',
    serving jsonb NOT NULL DEFAULT '{}',         -- version by adapter; '' is the base
    report jsonb NOT NULL DEFAULT '{}',          -- figures for people
    reading jsonb NOT NULL DEFAULT '{}',         -- how many streams each consumer has open here
    load real,                                   -- how full it is, 0 to 1; null: it begins no sessions
    state text NOT NULL DEFAULT 'alive' CHECK (state IN ('alive', 'lost', 'left', 'replaced')),
    sign bigint NOT NULL DEFAULT 0,
    began timestamptz NOT NULL DEFAULT clock_timestamp(),
    signed timestamptz NOT NULL DEFAULT clock_timestamp()  -- for people: silence is not judged by this clock
) WITH (fillfactor = 50);                        -- a sign is a new version of its row: it stays on its page
CREATE INDEX nodes_by_name ON nodes (name);

CREATE TABLE tasks (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id text NOT NULL UNIQUE,
    group_id text NOT NULL,
    idempotency_key text UNIQUE,
    submitted double precision NOT NULL,
    spec bytea NOT NULL,
    priority integer NOT NULL,
    requires jsonb NOT NULL,
    image text NOT NULL,
    adapter text NOT NULL,
    by_caller boolean NOT NULL,                  -- its callers run its sessions, and take its places by name
    max_retries integer NOT NULL,
    early_stop_min integer,
    usable integer NOT NULL DEFAULT 0,
    enough boolean NOT NULL DEFAULT false,       -- its group needs no more sessions
    finished boolean NOT NULL DEFAULT false,
    cancelled double precision,
    callback_url text,
    callback_kinds text[] NOT NULL DEFAULT '{}'
) WITH (fillfactor = 80);
CREATE INDEX tasks_by_group ON tasks (group_id);
CREATE INDEX tasks_by_name ON tasks (task_id COLLATE "C");  -- the runs of one name, by their bytes
CREATE INDEX tasks_to_end ON tasks (number) WHERE (cancelled IS NOT NULL OR enough) AND NOT finished;

-- A place of a task, which one session fills. `session_id` is the session that has it, or had it last.
CREATE TABLE places (
    task_id text NOT NULL REFERENCES tasks (task_id) ON DELETE CASCADE,
    place integer NOT NULL,
    priority integer NOT NULL,                   -- of its task, as its number, for the order of the queue
    number bigint NOT NULL,
    state text NOT NULL DEFAULT 'queued' CHECK (state IN ('queued', 'running', 'over')),
    session_id text NOT NULL,
    attempt integer NOT NULL DEFAULT -1,         -- -1 before the first claim
    retries integer NOT NULL DEFAULT 0,          -- attempts that were lost and counted
    spent boolean NOT NULL DEFAULT false,        -- lost once more than its task allows: who claims it ends it
    incarnation bigint,
    PRIMARY KEY (task_id, place)
) WITH (fillfactor = 70);
CREATE INDEX places_queued ON places (priority DESC, number, place) WHERE state = 'queued' AND NOT spent;
CREATE INDEX places_spent ON places (number, place) WHERE state = 'queued' AND spent;
CREATE INDEX places_running ON places (incarnation) WHERE state = 'running';

CREATE TABLE sessions (
    number bigint GENERATED ALWAYS AS IDENTITY,
    session_id text PRIMARY KEY,
    task_id text NOT NULL,                       -- '' for a capture
    place integer NOT NULL,
    attempt integer NOT NULL DEFAULT 0,
    incarnation bigint,
    identity bytea,
    forked_from text,                            -- the parent's session
    outcome bytea,
    reward double precision,
    trainable integer,
    staleness integer,
    turns integer NOT NULL DEFAULT 0,
    sampled bigint NOT NULL DEFAULT 0,
    finished double precision,
    retried_as text,
    written_by bigint                            -- whose body it is
);
CREATE INDEX sessions_by_task ON sessions (task_id, place, attempt);
CREATE INDEX sessions_by_parent ON sessions (forked_from) WHERE forked_from IS NOT NULL;

-- The packed trajectory is part 0, its turns are the parts after it. Written before the session is finished, and
-- under its writer's incarnation: two processes that have one session never mix their parts. Already compact.
CREATE TABLE bodies (
    session_id text NOT NULL,
    written_by bigint NOT NULL,
    part integer NOT NULL,
    data bytea NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (session_id, written_by, part)
);
ALTER TABLE bodies ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE INDEX bodies_by_time ON bodies (at) WHERE part = 0;

CREATE TABLE events (
    position bigint PRIMARY KEY,
    kind text NOT NULL,
    key text NOT NULL UNIQUE,
    task_id text NOT NULL,
    group_id text NOT NULL,
    session_id text,
    outcome text,
    reward double precision,
    body bytea,
    at double precision NOT NULL,
    bytes bigint NOT NULL                        -- of its body, that of a trajectory included
);
CREATE INDEX events_by_task ON events (task_id, position);
CREATE INDEX events_by_group ON events (group_id, position);

CREATE TABLE consumers (
    name text PRIMARY KEY,
    position bigint NOT NULL,
    moved double precision NOT NULL,
    heard double precision NOT NULL
) WITH (fillfactor = 50);

-- When every consumer that is waited for had acknowledged up to a position.
CREATE TABLE marks (position bigint PRIMARY KEY, at double precision NOT NULL);

-- Versions in the order in which they were brought. Nodes of several models share a log: each model has its own
-- names and its own current version.
CREATE TABLE weights (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    model text NOT NULL,                         -- the label `model` of the nodes that serve it
    adapter text NOT NULL,                       -- '' is the base
    version text NOT NULL,
    at double precision NOT NULL,
    body bytea NOT NULL,
    shared boolean NOT NULL DEFAULT false,       -- its files are in a storage that outlives every node
    current boolean NOT NULL DEFAULT false,
    counted boolean NOT NULL DEFAULT false,      -- it is or was the current one
    UNIQUE (model, version)
);
CREATE UNIQUE INDEX weights_current ON weights (model, adapter) WHERE current;

CREATE TABLE weight_holders (
    number bigint NOT NULL REFERENCES weights ON DELETE CASCADE,
    incarnation bigint NOT NULL,
    PRIMARY KEY (number, incarnation)
);

-- Generation that a trainer holds. Nodes that join while it is held follow it as long as one of those is alive
-- that were there when it was held: as with a node alone, what nobody continues ends with the processes.
CREATE TABLE holds (
    model text PRIMARY KEY,                      -- '' is every model that has no row of its own
    mode text,                                   -- NULL: this model goes on where all are held
    among bigint NOT NULL                        -- the last incarnation that was there
);

-- What a trainer does on several nodes by several requests, of which each may come to another node: an update of
-- the weights, by its id, and a process group, by its name.
CREATE TABLE transfers (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    model text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('update', 'group')),
    name text NOT NULL,
    body jsonb NOT NULL,                         -- who takes part
    UNIQUE (model, kind, name)
);

-- Events that the receiver of a task's callback has not accepted yet.
CREATE TABLE callbacks (
    position bigint PRIMARY KEY,
    task_id text NOT NULL,
    url text NOT NULL,
    leased_until timestamptz NOT NULL DEFAULT '-infinity',
    lease bigint NOT NULL DEFAULT 0
);
CREATE INDEX callbacks_by_url ON callbacks (url, task_id, position);  -- who leases steps through it
CREATE INDEX callbacks_by_task ON callbacks (task_id);                -- who prunes asks for its tasks

-- Scores that are given to sessions that were over.
CREATE TABLE evaluations (
    evaluation_id text PRIMARY KEY,
    idempotency_key text UNIQUE,
    submitted double precision NOT NULL,
    spec bytea NOT NULL,
    incarnation bigint                           -- of the node that evaluates
);
CREATE TABLE evaluated (
    number bigint GENERATED ALWAYS AS IDENTITY,
    evaluation_id text NOT NULL REFERENCES evaluations (evaluation_id) ON DELETE CASCADE,
    session_id text NOT NULL,
    n integer,
    position bigint,
    reward double precision,
    error text,
    PRIMARY KEY (evaluation_id, session_id)
);
CREATE INDEX evaluated_by_session ON evaluated (session_id, n);
CREATE INDEX evaluated_by_position ON evaluated (position);
CREATE INDEX evaluated_pending ON evaluated (evaluation_id) WHERE n IS NULL AND error IS NULL;

-- Events come and go: vacuum runs when a twentieth of a table is dead, and not only at a fifth.
ALTER TABLE events SET (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.05);
ALTER TABLE bodies SET (autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE places SET (autovacuum_vacuum_scale_factor = 0.05);
ALTER TABLE nodes SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
ALTER TABLE log SET (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500, fillfactor = 10);
