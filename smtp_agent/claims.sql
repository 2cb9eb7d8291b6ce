-- claim_chunk: the next chunk for a lane, by fair share; no row when there is none.
--
-- Candidates are the chunks of the operator with something planned, that are full or older than a second or were claimed
-- before, that nobody holds under a live lease, and whose campaign is active, not held, and due. Order: fewest instances
-- now working for the campaign at this operator, [where the operator's tie_break is 'rotate': longest without a claim,]
-- scheduled_for, number. A claim seals the chunk.
--
-- The lock makes one claim at a time at an operator, and is a statement of its own: the next one's snapshot must come
-- after the wait, else two claimers break the order.
CREATE OR REPLACE FUNCTION claim_chunk(p_operator text, p_instance text, p_lease interval)
RETURNS TABLE (chunk_id bigint, claim_token uuid, campaign_id text, number int, planned int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost, pg_temp SET enable_seqscan = off
SET lock_timeout = '500ms' AS $$
#variable_conflict use_column
DECLARE
  v_now timestamptz;
  v_rotate boolean;
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('fairpost claim ' || p_operator, 0));
  v_now := clock_timestamp();

  SELECT tie_break = 'rotate' INTO v_rotate FROM operators
   WHERE operator = p_operator AND paused_at IS NULL AND (SELECT sending FROM fleet)
     AND NOT EXISTS (SELECT FROM instances WHERE instance = p_instance AND (paused_at IS NOT NULL OR retired_at IS NOT NULL));
  IF NOT FOUND THEN
    RETURN;
  END IF;

  RETURN QUERY
  WITH busy AS MATERIALIZED (
    SELECT campaign_id, count(DISTINCT instance) AS cnt FROM chunks
     WHERE operator = p_operator AND instance IS NOT NULL AND lease_until > v_now
     GROUP BY campaign_id
  ), pick AS MATERIALIZED (
    SELECT first.chunk_id
      FROM campaigns c
      CROSS JOIN LATERAL (
        SELECT k.chunk_id, k.number FROM chunks k
         WHERE k.operator = p_operator AND k.campaign_id = c.campaign_id AND k.has_planned
           AND (k.instance IS NULL OR k.lease_until <= v_now)
           AND (k.sealed OR k.size = k.capacity OR k.opened_at <= v_now - interval '1 second')
         ORDER BY k.number LIMIT 1) first
      LEFT JOIN busy ON busy.campaign_id = c.campaign_id
      LEFT JOIN claim_turns t ON v_rotate AND t.operator = p_operator AND t.campaign_id = c.campaign_id
     WHERE c.state = 'active' AND c.ended_at IS NULL AND c.held_at IS NULL AND c.scheduled_for <= v_now
     ORDER BY coalesce(busy.cnt, 0), t.claimed_at NULLS FIRST, c.scheduled_for, first.number, first.chunk_id
     LIMIT 1
  ), claimed AS (
    UPDATE chunks k
       SET instance = p_instance, claim_token = gen_random_uuid(), claimed_at = v_now, lease_until = v_now + p_lease,
           sealed = true
      FROM pick WHERE k.chunk_id = pick.chunk_id AND (k.instance IS NULL OR k.lease_until <= v_now)
    RETURNING k.chunk_id, k.claim_token, k.campaign_id, k.number, k.planned
  ), turn AS (
    INSERT INTO claim_turns (operator, campaign_id, claimed_at)
    SELECT p_operator, campaign_id, v_now FROM claimed
        ON CONFLICT (operator, campaign_id) DO UPDATE SET claimed_at = excluded.claimed_at
  )
  SELECT * FROM claimed;
END $$;

-- renew_lease: false when the claim is lost; then nothing more may be sent for it.
CREATE OR REPLACE FUNCTION renew_lease(p_chunk_id bigint, p_token uuid, p_lease interval) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = fairpost, pg_temp AS $$
  WITH renewed AS (
    UPDATE chunks SET lease_until = clock_timestamp() + p_lease
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
-- to one machine and one queue directory.
CREATE OR REPLACE FUNCTION register_instance(
  p_instance text, p_machine_id text, p_queue_directory text, p_version text, p_starting boolean) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
DECLARE
  v_now timestamptz := clock_timestamp();
  v_row instances;
BEGIN
  INSERT INTO instances AS i (instance, machine_id, queue_directory, version, started_at, seen_at)
  VALUES (p_instance, p_machine_id, p_queue_directory, p_version, v_now, v_now)
      ON CONFLICT (instance) DO UPDATE
     SET seen_at = v_now, version = p_version,
         started_at = CASE WHEN p_starting THEN v_now ELSE i.started_at END
   WHERE i.machine_id = p_machine_id AND i.queue_directory = p_queue_directory AND i.retired_at IS NULL
  RETURNING * INTO v_row;
  IF FOUND THEN
    RETURN NULL;
  END IF;
  SELECT * INTO v_row FROM instances WHERE instance = p_instance;
  IF v_row.retired_at IS NOT NULL THEN
    RETURN format('instance %s was retired at %s', p_instance, v_row.retired_at);
  END IF;
  RETURN format('instance %s belongs to machine %s, queue %s', p_instance, v_row.machine_id, v_row.queue_directory);
END $$;

REVOKE ALL ON FUNCTION claim_chunk, renew_lease, release_chunk, register_instance FROM PUBLIC;
GRANT EXECUTE ON FUNCTION claim_chunk, renew_lease, release_chunk, register_instance TO fairpost_agent;
