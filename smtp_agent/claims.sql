-- check_login: refuses who is connected to speak for an instance that registered with another login. So an agent's login
-- that was stolen changes nothing of what other instances have. The processor judges the fences of all.
CREATE OR REPLACE FUNCTION check_login(p_instance text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = fairpost, pg_temp AS $$
BEGIN
  IF EXISTS (SELECT FROM instances WHERE instance = p_instance AND login <> session_user)
     AND NOT pg_has_role(session_user, 'fairpost_processor', 'MEMBER') THEN
    RAISE insufficient_privilege USING MESSAGE = format('instance %s has another login than %s', p_instance, session_user);
  END IF;
END $$;

-- next_chunk: which chunk of an operator is next by fair share at that time; null when there is none.
--
-- Candidates are the chunks of the operator with something planned, that are full or older than a second or were claimed
-- before, that nobody holds under a live lease, and whose campaign is active, not held, and due. Order: fewest instances
-- now working for the campaign at this operator, [with p_rotate: longest without a claim,] scheduled_for, number.
--
-- It walks the campaigns in that order and stops at the first that has a candidate, and those equal to it.
CREATE OR REPLACE FUNCTION next_chunk(p_operator text, p_at timestamptz, p_rotate boolean, p_but bigint[]) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
BEGIN
  RETURN (
    WITH held AS MATERIALIZED (
      SELECT campaign_id, instance FROM chunks
       WHERE operator = p_operator AND instance IS NOT NULL AND lease_until > p_at
    ), busy AS MATERIALIZED (
      SELECT campaign_id, count(DISTINCT instance) AS instances FROM held GROUP BY campaign_id
    ), due AS (
      SELECT c.campaign_id, coalesce(busy.instances, 0) AS instances, t.claimed_at, c.scheduled_for
        FROM campaigns c
        LEFT JOIN busy USING (campaign_id)
        LEFT JOIN claim_turns t ON p_rotate AND t.operator = p_operator AND t.campaign_id = c.campaign_id
       WHERE c.state = 'active' AND c.ended_at IS NULL AND c.held_at IS NULL AND c.scheduled_for <= p_at
       ORDER BY instances, claimed_at NULLS FIRST, scheduled_for
    )
    SELECT chunk_id
      FROM (
        SELECT first.chunk_id, first.number
          FROM due
          CROSS JOIN LATERAL (
            SELECT k.chunk_id, k.number FROM chunks k
             WHERE k.operator = p_operator AND k.campaign_id = due.campaign_id AND k.has_planned
               AND (k.instance IS NULL OR k.lease_until <= p_at)
               AND (k.sealed OR k.size = k.capacity OR k.opened_at <= p_at - interval '1 second')
               AND k.chunk_id <> ALL (p_but)
             ORDER BY k.number LIMIT 1) first
         ORDER BY instances, claimed_at NULLS FIRST, scheduled_for
         FETCH FIRST ROW WITH TIES) equal
     ORDER BY number, chunk_id LIMIT 1);
END $$;

-- longest_lease: of a claim that is not renewed, whatever an agent asks for.
CREATE OR REPLACE FUNCTION longest_lease() RETURNS interval LANGUAGE sql IMMUTABLE AS $$ SELECT interval '10 minutes' $$;

-- claim_chunk: the next chunk for a lane, which is sealed with it; no row when there is none. At a chunk's first claim
-- `waited` is the time since it was open and its campaign due.
--
-- The lock makes one claim at a time at an operator, and is a statement of its own: the next one's snapshot must come
-- after the wait, else two claimers break the order. A row that somebody else locks for long is passed over, so that it
-- does not hold up the others; one that changed meanwhile is looked at anew.
--
-- The lock is held until the commit, which need not wait for the disk: a claim that is lost in a crash of the server is as
-- if it had never been, and no write-ahead for it can be durable before it is.
CREATE OR REPLACE FUNCTION claim_chunk(p_operator text, p_instance text, p_lease interval)
RETURNS TABLE (chunk_id bigint, claim_token uuid, campaign_id text, number int, planned int, waited interval)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost, pg_temp SET enable_seqscan = off
SET lock_timeout = '500ms' AS $$
#variable_conflict use_column
DECLARE
  v_now timestamptz;
  v_rotate boolean;
  v_chunk_id bigint;
  v_locked bigint[] := '{}';
BEGIN
  PERFORM check_login(p_instance);
  PERFORM set_config('synchronous_commit', 'off', true);
  PERFORM pg_advisory_xact_lock(hashtextextended('fairpost claim ' || p_operator, 0));
  SELECT tie_break = 'rotate' INTO v_rotate FROM operators
   WHERE operator = p_operator AND paused_at IS NULL AND (SELECT sending FROM fleet)
     AND NOT EXISTS (SELECT FROM instances WHERE instance = p_instance AND (paused_at IS NOT NULL OR retired_at IS NOT NULL));
  IF NOT FOUND THEN
    RETURN;
  END IF;

  PERFORM set_config('lock_timeout', '100ms', true);
  LOOP
    v_now := clock_timestamp();
    v_chunk_id := next_chunk(p_operator, v_now, v_rotate, v_locked);
    IF v_chunk_id IS NULL THEN
      RETURN;
    END IF;
    BEGIN
      RETURN QUERY
      WITH claimed AS (
        UPDATE chunks k
           SET instance = p_instance, claim_token = gen_random_uuid(), claimed_at = v_now,
               lease_until = v_now + least(p_lease, longest_lease()),
               sealed = true
          FROM chunks former JOIN campaigns c USING (campaign_id)
         WHERE k.chunk_id = v_chunk_id AND k.has_planned AND (k.instance IS NULL OR k.lease_until <= v_now)
           AND former.chunk_id = v_chunk_id
        RETURNING k.chunk_id, k.claim_token, k.campaign_id, k.number, k.planned,
                  CASE WHEN former.claimed_at IS NULL THEN v_now - greatest(k.opened_at, c.scheduled_for) END AS waited
      ), turn AS (
        INSERT INTO claim_turns (operator, campaign_id, claimed_at)
        SELECT p_operator, campaign_id, v_now FROM claimed
            ON CONFLICT (operator, campaign_id) DO UPDATE SET claimed_at = excluded.claimed_at
      ), held AS (
        INSERT INTO claims (instance, chunk_id) SELECT p_instance, chunk_id FROM claimed ON CONFLICT DO NOTHING
      )
      SELECT * FROM claimed;
      IF FOUND THEN
        RETURN;
      END IF;
    EXCEPTION WHEN lock_not_available THEN
      v_locked := v_locked || v_chunk_id;
    END;
  END LOOP;
END $$;

-- renew_lease: false when the claim is lost; then nothing more may be sent for it.
CREATE OR REPLACE FUNCTION renew_lease(p_chunk_id bigint, p_token uuid, p_lease interval) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = fairpost, pg_temp AS $$
  WITH renewed AS (
    UPDATE chunks SET lease_until = clock_timestamp() + least(p_lease, longest_lease())
     WHERE chunk_id = p_chunk_id AND claim_token = p_token RETURNING 1)
  SELECT EXISTS (SELECT FROM renewed)
$$;

-- release_chunk: ends a claim; what is still planned in the chunk can be claimed again at once.
CREATE OR REPLACE FUNCTION release_chunk(p_chunk_id bigint, p_token uuid) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = fairpost, pg_temp AS $$
  WITH released AS (
    UPDATE chunks SET instance = NULL, claim_token = NULL, lease_until = NULL
     WHERE chunk_id = p_chunk_id AND claim_token = p_token RETURNING 1)
  SELECT EXISTS (SELECT FROM released)
$$;

-- register_instance: an agent's start, and its sign of life; answers what is wrong, null when nothing is. A name belongs
-- to one machine, one queue directory and one login: those of the first agent that starts under it, or after it was adopted
-- (then the machine is '', and no login is bound).
CREATE OR REPLACE FUNCTION register_instance(
  p_instance text, p_machine_id text, p_queue_directory text, p_version text, p_starting boolean) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
DECLARE
  v_now timestamptz := clock_timestamp();
  v_row instances;
BEGIN
  INSERT INTO instances AS i (instance, machine_id, queue_directory, version, login, started_at, seen_at)
  VALUES (p_instance, p_machine_id, p_queue_directory, p_version, session_user, v_now, v_now)
      ON CONFLICT (instance) DO UPDATE
     SET seen_at = v_now, version = p_version, machine_id = p_machine_id, queue_directory = p_queue_directory,
         login = session_user,
         started_at = CASE WHEN p_starting THEN v_now ELSE i.started_at END
   WHERE i.retired_at IS NULL
     AND (i.machine_id = p_machine_id AND i.queue_directory = p_queue_directory AND i.login = session_user
          OR i.machine_id = '' AND p_starting)
  RETURNING * INTO v_row;
  IF FOUND THEN
    RETURN NULL;
  END IF;
  SELECT * INTO v_row FROM instances WHERE instance = p_instance;
  IF v_row.retired_at IS NOT NULL THEN
    RETURN format('instance %s was retired at %s', p_instance, v_row.retired_at);
  END IF;
  IF v_row.machine_id = '' THEN
    RETURN format('instance %s was adopted: it is bound by the next agent that starts', p_instance);
  END IF;
  IF v_row.login <> session_user THEN
    RETURN format('instance %s belongs to login %s', p_instance, v_row.login);
  END IF;
  RETURN format('instance %s belongs to machine %s, queue %s', p_instance, v_row.machine_id, v_row.queue_directory);
END $$;

REVOKE ALL ON FUNCTION check_login, longest_lease, next_chunk, claim_chunk, renew_lease, release_chunk, register_instance FROM PUBLIC;
GRANT EXECUTE ON FUNCTION claim_chunk, renew_lease, release_chunk, register_instance TO fairpost_agent;
