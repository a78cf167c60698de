-- Who may do what. A node reads and writes every row, and every node's DSN therefore reads every prompt; a reader
-- sees how the fleet stands and no prompt, token or answer; only the migrator changes tables. A login is given
-- one of them by its administrator: GRANT polarnode_node TO alice.

DO $$
DECLARE
    role text;
BEGIN
    FOREACH role IN ARRAY ARRAY['polarnode_node', 'polarnode_reader', 'polarnode_migrator'] LOOP
        IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = role) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', role);
            EXCEPTION WHEN insufficient_privilege THEN
                RAISE EXCEPTION 'the role % is missing and this login may not create it: '
                    'ask an administrator for CREATE ROLE %', role, role;
            WHEN duplicate_object OR unique_violation THEN
                NULL;  -- roles are the whole server's: another database's migration was faster
            END;
        END IF;
    END LOOP;
END $$;

REVOKE ALL ON SCHEMA polarnode FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA polarnode FROM PUBLIC;
GRANT USAGE ON SCHEMA polarnode TO polarnode_node, polarnode_reader, polarnode_migrator;
GRANT CREATE ON SCHEMA polarnode TO polarnode_migrator;

GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA polarnode TO polarnode_node;
REVOKE INSERT, UPDATE, DELETE ON migrations FROM polarnode_node;
GRANT USAGE, UPDATE ON ALL SEQUENCES IN SCHEMA polarnode TO polarnode_node;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA polarnode TO polarnode_node;

GRANT SELECT ON migrations, log, identities, places, consumers, marks, weight_holders, holds TO polarnode_reader;
GRANT SELECT (incarnation, name, url, version, labels, serving, report, reading, state, sign, began, signed)
    ON nodes TO polarnode_reader;
GRANT SELECT (number, task_id, group_id, submitted, priority, requires, image, adapter, max_retries,
    early_stop_min, usable, enough, cancelled) ON tasks TO polarnode_reader;
GRANT SELECT (number, session_id, task_id, place, attempt, incarnation, forked_from, reward, trainable, staleness,
    turns, sampled, finished, retried_as) ON sessions TO polarnode_reader;
GRANT SELECT (position, kind, key, task_id, group_id, session_id, outcome, reward, at, bytes)
    ON events TO polarnode_reader;
GRANT SELECT (number, model, adapter, version, at, shared, current, counted) ON weights TO polarnode_reader;
GRANT SELECT (position, task_id, leased_until) ON callbacks TO polarnode_reader;
