-- What must happen whole or not at all, and what must be short: a function is one statement of its client, so a
-- client that is stopped for a minute holds no lock meanwhile.

CREATE FUNCTION new_session_id() RETURNS text LANGUAGE sql VOLATILE
RETURN substr(replace(gen_random_uuid()::text, '-', ''), 1, 16);

-- ── identity and positions ──

-- The timeline changes when a standby is promoted or a backup is recovered; `restored` for every other restore.
CREATE FUNCTION current_identity() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT to_hex((SELECT system_identifier FROM pg_control_system()))
        || '-' || ltrim(substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8), '0')
        || '-' || (SELECT restored FROM log)
$$;

-- The log's identity, noted with the last position of the one before it when it is new.
CREATE FUNCTION settle_identity() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    found text := current_identity();
    last bigint;
BEGIN
    IF NOT EXISTS (SELECT 1 FROM identities WHERE identity = found) THEN
        SELECT position INTO last FROM log FOR UPDATE;
        -- A node that lives may have an incarnation that this log lost: what it gives now lies far from all that
        -- the log before could have given, at random, because that one's own jump may be lost too.
        IF EXISTS (SELECT 1 FROM identities) THEN
            PERFORM setval(pg_get_serial_sequence('nodes', 'incarnation'),
                nextval(pg_get_serial_sequence('nodes', 'incarnation'))
                + 1000000 + floor(random() * 4294967296)::bigint);
        END IF;
        INSERT INTO identities (identity, after) VALUES (found, last) ON CONFLICT DO NOTHING;
    END IF;
    RETURN found;
END $$;

-- Say that this log was put back to an earlier state in a way that no timeline shows.
-- An administrator calls it, in a session with another search path than the nodes'.
CREATE FUNCTION mark_restored() RETURNS text LANGUAGE plpgsql SET search_path = polarnode AS $$
BEGIN
    PERFORM settle_identity();
    UPDATE log SET restored = restored + 1;
    RETURN settle_identity();
END $$;

-- Write an event at the next position. The row of `log` is locked until the transaction ends, so positions are
-- in the order of commits and a reader never meets a later one first.
CREATE FUNCTION write_event(
    p_kind text, p_key text, p_task text, p_group text, p_session text, p_outcome text,
    p_reward double precision, p_body bytea, p_at double precision, p_bytes bigint
) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    given bigint;
BEGIN
    PERFORM settle_identity();
    UPDATE log SET position = position + 1, stored = stored + p_bytes RETURNING position INTO given;
    INSERT INTO events (position, kind, key, task_id, group_id, session_id, outcome, reward, body, at, bytes)
    VALUES (given, p_kind, p_key, p_task, p_group, p_session, p_outcome, p_reward, p_body, p_at, p_bytes);
    INSERT INTO callbacks (position, task_id, url)
    SELECT given, task_id, callback_url FROM tasks
    WHERE task_id = p_task AND callback_url IS NOT NULL AND p_kind = ANY (callback_kinds);
    PERFORM pg_notify('polarnode', 'events');
    RETURN given;
END $$;

-- ── the end of a session ──

-- Whether the whole body of a session is there.
CREATE FUNCTION body_is_whole(p_session text, p_writer bigint, p_parts integer, p_bytes bigint)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT count(*) = p_parts AND coalesce(sum(octet_length(data)), 0) = p_bytes
    FROM bodies WHERE session_id = p_session AND written_by = p_writer
$$;

-- Write the end of a session and its event. The event's key makes a second call fail.
CREATE FUNCTION end_session(
    p_kind text, p_task text, p_group text, p_place integer, p_attempt integer, p_session text,
    p_writer bigint, p_outcome bytea, p_status text, p_reward double precision, p_trainable integer,
    p_staleness integer, p_turns integer, p_sampled bigint, p_identity bytea, p_parent text,
    p_at double precision, p_bytes bigint
) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO sessions (session_id, task_id, place, attempt, incarnation)
    VALUES (p_session, p_task, p_place, p_attempt, p_writer) ON CONFLICT (session_id) DO NOTHING;
    UPDATE sessions SET outcome = p_outcome, reward = p_reward, trainable = p_trainable,
        staleness = p_staleness, turns = p_turns, sampled = p_sampled, identity = p_identity,
        forked_from = p_parent, finished = p_at, written_by = p_writer, attempt = p_attempt
    WHERE session_id = p_session;
    RETURN write_event(p_kind, p_kind || ':' || p_session, p_task, p_group, p_session, p_status, p_reward,
        NULL, p_at, p_bytes);
END $$;

-- Fill a place: `now`, `already` by this session, or `another` has it. `again`: it is the last of its task, and
-- the caller must bring the group's and the task's events. `body`: not all of the body is here. `unknown`: the
-- log does not have the task.
CREATE FUNCTION finish_place(
    p_task text, p_place integer, p_session text, p_attempt integer, p_incarnation bigint,
    p_outcome bytea, p_status text, p_reward double precision, p_trainable integer, p_staleness integer,
    p_turns integer, p_sampled bigint, p_identity bytea, p_parent text, p_at double precision,
    p_usable boolean, p_parts integer, p_bytes bigint, p_group_event bytea, p_task_event bytea
) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    task tasks;
    held places;
    open bigint;
BEGIN
    SELECT * INTO task FROM tasks WHERE task_id = p_task FOR UPDATE;
    IF NOT FOUND THEN RETURN 'unknown'; END IF;
    SELECT * INTO held FROM places WHERE task_id = p_task AND place = p_place FOR UPDATE;
    IF held.state = 'over' THEN
        RETURN CASE WHEN held.session_id = p_session THEN 'already' ELSE 'another' END;
    END IF;
    -- The fence. The session holds the place; or it was taken from it and nobody has it since; or the log lost
    -- the claim with its old primary.
    IF NOT (
        (held.state = 'running' AND held.session_id = p_session AND held.incarnation = p_incarnation)
        OR (held.state = 'queued' AND (held.session_id = p_session OR held.attempt < p_attempt))
    ) THEN
        RETURN 'another';
    END IF;
    IF EXISTS (SELECT 1 FROM sessions WHERE session_id = p_session AND outcome IS NOT NULL) THEN
        RETURN 'another';  -- it was published as an attempt
    END IF;
    IF NOT body_is_whole(p_session, p_incarnation, p_parts, p_bytes) THEN RETURN 'body'; END IF;
    SELECT count(*) INTO open FROM places WHERE task_id = p_task AND place <> p_place AND state <> 'over';
    IF open = 0 AND p_group_event IS NULL THEN RETURN 'again'; END IF;

    UPDATE places SET state = 'over', session_id = p_session, attempt = p_attempt, incarnation = p_incarnation
    WHERE task_id = p_task AND place = p_place;
    IF held.session_id <> p_session THEN
        UPDATE sessions SET retried_as = p_session WHERE session_id = held.session_id;
    END IF;
    PERFORM end_session('trajectory', p_task, task.group_id, p_place, p_attempt, p_session, p_incarnation,
        p_outcome, p_status, p_reward, p_trainable, p_staleness, p_turns, p_sampled, p_identity, p_parent,
        p_at, p_bytes);
    IF p_usable THEN
        UPDATE tasks SET usable = usable + 1,
            enough = enough OR coalesce(usable + 1 >= early_stop_min, false)
        WHERE task_id = p_task;
        IF NOT task.enough AND coalesce(task.usable + 1 >= task.early_stop_min, false) THEN
            PERFORM pg_notify('polarnode', 'orders');
        END IF;
    END IF;
    IF open = 0 THEN
        UPDATE tasks SET finished = true WHERE task_id = p_task;
        PERFORM write_event('group', 'group:' || p_task, p_task, task.group_id, NULL, NULL, NULL,
            p_group_event, p_at, octet_length(p_group_event));
        PERFORM write_event('task', 'task:' || p_task, p_task, task.group_id, NULL, NULL, NULL,
            p_task_event, p_at, octet_length(p_task_event));
    END IF;
    RETURN CASE WHEN open = 0 THEN 'last' ELSE 'now' END;
END $$;

-- Publish a session that fills no place: a capture, or an attempt whose place another session has. `now`,
-- `already`, or `body`.
CREATE FUNCTION publish_session(
    p_kind text, p_task text, p_group text, p_place integer, p_attempt integer, p_session text,
    p_writer bigint, p_outcome bytea, p_status text, p_reward double precision, p_trainable integer,
    p_staleness integer, p_turns integer, p_sampled bigint, p_identity bytea, p_parent text,
    p_at double precision, p_parts integer, p_bytes bigint
) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM sessions WHERE session_id = p_session FOR UPDATE;
    IF EXISTS (SELECT 1 FROM sessions WHERE session_id = p_session AND outcome IS NOT NULL) THEN
        RETURN 'already';
    END IF;
    IF NOT body_is_whole(p_session, p_writer, p_parts, p_bytes) THEN RETURN 'body'; END IF;
    PERFORM end_session(p_kind, p_task, p_group, p_place, p_attempt, p_session, p_writer, p_outcome, p_status,
        p_reward, p_trainable, p_staleness, p_turns, p_sampled, p_identity, p_parent, p_at, p_bytes);
    RETURN 'now';
EXCEPTION WHEN unique_violation THEN
    RETURN 'already';  -- another process published it in the same moment
END $$;

-- Give a place back: to the queue, or (`p_keep`) to another attempt of the same incarnation. With `p_counts` it
-- uses up one of the task's retries. The new session; '' where it is queued or must be ended; NULL where the
-- place was no longer this session's.
CREATE FUNCTION put_back_place(
    p_task text, p_place integer, p_session text, p_incarnation bigint, p_counts boolean, p_keep boolean
) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    task tasks;
    held places;
    fresh text := '';
    lost_once_more boolean;
BEGIN
    SELECT * INTO task FROM tasks WHERE task_id = p_task FOR UPDATE;
    SELECT * INTO held FROM places WHERE task_id = p_task AND place = p_place FOR UPDATE;
    IF held.state IS DISTINCT FROM 'running' OR held.session_id <> p_session
        OR held.incarnation <> p_incarnation THEN
        RETURN NULL;
    END IF;
    lost_once_more := p_counts AND held.retries >= task.max_retries;
    IF p_keep AND NOT lost_once_more AND NOT held.spent AND NOT task.enough AND task.cancelled IS NULL THEN
        fresh := new_session_id();
        INSERT INTO sessions (session_id, task_id, place, attempt, incarnation)
        VALUES (fresh, p_task, p_place, held.attempt + 1, p_incarnation);
        UPDATE sessions SET retried_as = fresh WHERE session_id = p_session;
        UPDATE places SET session_id = fresh, attempt = attempt + 1, retries = retries + p_counts::integer
        WHERE task_id = p_task AND place = p_place;
        RETURN fresh;
    END IF;
    UPDATE places SET state = 'queued', incarnation = NULL, spent = spent OR lost_once_more,
        retries = retries + p_counts::integer
    WHERE task_id = p_task AND place = p_place;
    PERFORM pg_notify('polarnode', 'places');
    RETURN '';
END $$;

-- ── rewards that are given later ──

-- Write the reward event of an evaluated session, once for each evaluation. `p_body` is its JSON up to the number
-- of the session's reward, which is given here. False where the evaluation does not wait for the session.
CREATE FUNCTION write_reward(
    p_evaluation text, p_session text, p_task text, p_group text, p_reward double precision, p_error text,
    p_at double precision, p_body bytea
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    fresh integer;
    body bytea;
    at_position bigint;
BEGIN
    PERFORM 1 FROM evaluated
    WHERE evaluation_id = p_evaluation AND session_id = p_session AND n IS NULL AND error IS NULL FOR UPDATE;
    IF NOT FOUND THEN RETURN false; END IF;
    PERFORM 1 FROM sessions WHERE session_id = p_session AND outcome IS NOT NULL FOR UPDATE;
    IF NOT FOUND THEN
        UPDATE evaluated SET error = 'session ' || p_session || ' was pruned while it was evaluated'
        WHERE evaluation_id = p_evaluation AND session_id = p_session;
        RETURN false;
    END IF;
    SELECT coalesce(max(n), 0) + 1 INTO fresh FROM evaluated WHERE session_id = p_session;
    body := p_body || convert_to(fresh || '}', 'UTF8');
    at_position := write_event('reward', 'reward:' || p_session || ':' || fresh, p_task, p_group, p_session,
        NULL, p_reward, body, p_at, octet_length(body));
    UPDATE evaluated SET n = fresh, position = at_position, reward = p_reward, error = p_error
    WHERE evaluation_id = p_evaluation AND session_id = p_session;
    RETURN true;
END $$;

-- ── retention ──

-- Delete the events up to a position with all that only they need. `p_pruned` is where retention stood when the
-- caller chose the position: another node may have been faster. False where it was.
CREATE FUNCTION forget_events(p_upto bigint, p_pruned bigint) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    expired bigint;
    freed bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock(7046029254386353132)  -- of this function; the number means nothing
        OR p_pruned <> (SELECT pruned FROM log) THEN
        RETURN false;
    END IF;
    DELETE FROM bodies WHERE session_id IN (
        SELECT session_id FROM events WHERE position <= p_upto AND kind IN ('trajectory', 'attempt'));
    -- a capture has no task, and no later event
    DELETE FROM sessions WHERE session_id IN (
            SELECT session_id FROM events WHERE position <= p_upto AND kind IN ('trajectory', 'attempt'))
        AND NOT EXISTS (SELECT 1 FROM tasks WHERE tasks.task_id = sessions.task_id);
    -- an attempt may be published after the last event of its task: its session goes with that event
    DELETE FROM sessions WHERE task_id IN (SELECT task_id FROM events WHERE position <= p_upto AND kind = 'task')
        AND NOT EXISTS (SELECT 1 FROM events
            WHERE events.task_id = sessions.task_id AND events.session_id = sessions.session_id
                AND position > p_upto);
    DELETE FROM tasks WHERE task_id IN (SELECT task_id FROM events WHERE position <= p_upto AND kind = 'task');
    DELETE FROM evaluations WHERE evaluation_id IN (SELECT evaluation_id FROM evaluated WHERE position <= p_upto)
        AND NOT EXISTS (SELECT 1 FROM evaluated
            WHERE evaluated.evaluation_id = evaluations.evaluation_id
                AND (position > p_upto OR (n IS NULL AND error IS NULL)));
    DELETE FROM callbacks WHERE position <= p_upto;
    GET DIAGNOSTICS expired = ROW_COUNT;
    DELETE FROM marks WHERE position <= p_upto;
    WITH gone AS (DELETE FROM events WHERE position <= p_upto RETURNING bytes)
    SELECT coalesce(sum(bytes), 0) INTO freed FROM gone;
    UPDATE log SET pruned = p_upto, stored = stored - freed,
        callbacks_expired = callbacks_expired + expired;  -- last: finishing waits for it
    RETURN true;
END $$;

-- ── weights ──

-- Make a version the current one of its adapter, if so many nodes that are alive have its files, or a shared
-- storage has.
CREATE FUNCTION serve_version(p_model text, p_version text, p_holders integer)
RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    wanted weights;
BEGIN
    SELECT * INTO wanted FROM weights WHERE model = p_model AND version = p_version;
    IF wanted.current THEN
        RETURN true;  -- each node says so of each version: it is no news
    END IF;
    LOCK TABLE weights IN SHARE ROW EXCLUSIVE MODE;
    SELECT * INTO wanted FROM weights WHERE model = p_model AND version = p_version;
    IF NOT FOUND OR NOT (wanted.shared OR p_holders <= (
        SELECT count(*) FROM weight_holders JOIN nodes USING (incarnation)
        WHERE weight_holders.number = wanted.number AND nodes.state = 'alive')) THEN
        RETURN false;
    END IF;
    -- what was brought before the current one does not come after it, also where it finds its holders later
    IF EXISTS (SELECT 1 FROM weights
        WHERE model = p_model AND adapter = wanted.adapter AND current AND number > wanted.number) THEN
        RETURN false;
    END IF;
    DELETE FROM weight_holders USING weights before  -- nobody takes files of a version before the current one
        WHERE weight_holders.number = before.number AND before.model = p_model
        AND before.adapter = wanted.adapter AND before.number < wanted.number;
    UPDATE weights SET current = false
        WHERE model = p_model AND adapter = wanted.adapter AND current AND number <> wanted.number;
    UPDATE weights SET current = true, counted = true WHERE number = wanted.number;
    PERFORM pg_notify('polarnode', 'weights');
    RETURN true;
END $$;
