-- why_closed: why nothing may be handed over for a campaign at an operator by an instance now; null: it may.
CREATE OR REPLACE FUNCTION why_closed(p_campaign_id text, p_operator text, p_instance text) RETURNS text
LANGUAGE sql SET search_path = fairpost, pg_temp AS $$
  SELECT CASE
    WHEN c.state <> 'active' THEN c.state::text
    WHEN c.held_at IS NOT NULL THEN 'held'
    WHEN c.scheduled_for > clock_timestamp() THEN 'postponed'
    WHEN NOT (SELECT sending FROM fleet) THEN 'sending is off'
    WHEN EXISTS (SELECT FROM operators WHERE operator = p_operator AND paused_at IS NOT NULL) THEN 'operator paused'
    WHEN EXISTS (SELECT FROM instances WHERE instance = p_instance AND (paused_at IS NOT NULL OR retired_at IS NOT NULL))
      THEN 'instance paused'
  END FROM campaigns c WHERE c.campaign_id = p_campaign_id
$$;

-- why_stopped: why nothing may be handed over for a claim now, as write_ahead would say; empty: it may.
CREATE OR REPLACE FUNCTION why_stopped(p_chunk_id bigint, p_token uuid) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = fairpost, pg_temp AS $$
  SELECT coalesce(
    (SELECT CASE WHEN claim_token = p_token THEN coalesce(why_closed(campaign_id, operator, instance), '') ELSE 'lost' END
       FROM chunks WHERE chunk_id = p_chunk_id), 'lost')
$$;

-- state_unsent: what a message that no Postfix has is now. Names no search path, so that its text stands for its calls.
CREATE OR REPLACE FUNCTION state_unsent(
  p_cancelled boolean, p_not_after timestamptz, p_email text, p_suppressed boolean) RETURNS message_state
LANGUAGE sql AS $$
  SELECT CASE
    WHEN p_cancelled OR p_email = '' THEN 'cancelled' -- an empty address: the user was forgotten
    WHEN p_not_after <= clock_timestamp() THEN 'expired'
    WHEN p_suppressed THEN 'suppressed'
    ELSE 'planned' END::message_state
$$;

-- reject: what Postfix surely refused, or what could not be rendered, of messages written ahead by this instance.
CREATE OR REPLACE FUNCTION reject(
  p_instance text, p_dispatch_ids bigint[], p_handed_ats timestamptz[], p_dsns text[], p_replies text[]) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = fairpost, pg_temp AS $$
  SELECT check_login(p_instance);

  WITH refused AS (
    SELECT r.dispatch_id, r.dsn, CASE WHEN m.email <> '' THEN r.reply END AS reply
      FROM unnest(p_dispatch_ids, p_handed_ats, p_dsns, p_replies) AS r (dispatch_id, handed_at, dsn, reply)
      JOIN messages m USING (dispatch_id)
     WHERE m.state = 'handed' AND m.instance = p_instance AND m.handed_at = r.handed_at
     ORDER BY m.dispatch_id FOR NO KEY UPDATE OF m
  ), rejected AS (
    UPDATE messages m SET state = 'rejected', status_at = clock_timestamp(), dsn = r.dsn, reply = r.reply
      FROM refused r WHERE m.dispatch_id = r.dispatch_id
    RETURNING m.dispatch_id, m.status_at, m.dsn, m.reply
  ), told AS (
    INSERT INTO outbox (dispatch_id, status, at, dsn, reply, instance)
    SELECT dispatch_id, 'rejected', status_at, dsn, reply, p_instance FROM rejected
  )
  SELECT count(*) FROM rejected
$$;

-- write_ahead: the next messages of a claimed chunk become `handed` before any of them is given to Postfix.
--
-- Answers at least one row. Outcomes: `batch` (one row a message; a row without one: ask for the next batch), `empty`
-- (nothing is planned any more), `lost` (the claim is another's), or why nothing may be handed over now. Asked again
-- with the same batch number it checks again and answers the same messages: a reply lost on the way loses nothing. Who
-- asks again has given none of them to Postfix, so where the answer is now no, they are given back. `handovers` counts
-- how often a message was written ahead, this time included.
--
-- The chunk is locked by a statement of its own; all that follows sees what was committed while this waited.
CREATE OR REPLACE FUNCTION write_ahead(
  p_chunk_id bigint, p_token uuid, p_batch int, p_limit int, p_postfix_started_at timestamptz, p_log_inode bigint)
RETURNS TABLE (outcome text, revision bigint, handed_at timestamptz, dispatch_id bigint, user_id text, email_key text,
               email text, variables jsonb, handovers int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  v_chunk chunks;
  v_written handovers;
  v_closed text;
  v_revision bigint;
  v_now timestamptz;
  v_positions int[];
  v_last int;
BEGIN
  SELECT * INTO v_chunk FROM chunks WHERE chunk_id = p_chunk_id FOR NO KEY UPDATE;
  SELECT h.* INTO v_written FROM handovers h WHERE h.claim_token = p_token AND h.batch = p_batch;
  v_closed := CASE WHEN v_chunk.claim_token IS DISTINCT FROM p_token THEN 'lost'
                   ELSE why_closed(v_chunk.campaign_id, v_chunk.operator, v_chunk.instance) END;
  IF v_closed IS NOT NULL THEN
    PERFORM give_back(p_chunk_id, v_written.instance, v_written.at, ARRAY(
      SELECT m.dispatch_id FROM messages m WHERE m.chunk_id = p_chunk_id AND m.position = ANY (v_written.positions)));
    RETURN QUERY SELECT v_closed, NULL::bigint, NULL::timestamptz, NULL::bigint, NULL, NULL, NULL, NULL::jsonb, NULL::int;
    RETURN;
  END IF;
  SELECT c.revision INTO v_revision FROM campaigns c WHERE c.campaign_id = v_chunk.campaign_id;
  v_now := v_written.at;
  v_positions := v_written.positions;

  IF v_written.batch IS NULL THEN
    v_now := clock_timestamp();
    WITH next AS MATERIALIZED (
      SELECT m.dispatch_id, m.position,
             state_unsent(false, m.not_after, m.email, EXISTS (
               SELECT FROM suppressing(mailbox_of(m.email, m.mailbox), v_chunk.campaign_id))) AS state
        FROM messages m
       WHERE m.chunk_id = p_chunk_id AND m.position >= v_chunk.cursor AND m.state = 'planned'
       ORDER BY m.position LIMIT p_limit
    ), moved AS (
      UPDATE messages m
         SET state = CASE next.state WHEN 'planned' THEN 'handed' ELSE next.state END,
             handed_at = CASE next.state WHEN 'planned' THEN v_now END,
             status_at = CASE WHEN next.state <> 'planned' THEN v_now END,
             handovers = m.handovers + CASE next.state WHEN 'planned' THEN 1 ELSE 0 END,
             instance = CASE next.state WHEN 'planned' THEN v_chunk.instance END
        FROM next WHERE m.dispatch_id = next.dispatch_id
      RETURNING m.dispatch_id, m.position, m.state
    ), told AS (
      INSERT INTO outbox (dispatch_id, status, at) SELECT dispatch_id, state, v_now FROM moved WHERE state <> 'handed'
    )
    SELECT max(position), array_agg(position ORDER BY position) FILTER (WHERE state = 'handed')
      INTO v_last, v_positions FROM moved;

    UPDATE chunks SET cursor = coalesce(v_last + 1, size) WHERE chunk_id = p_chunk_id;
    IF v_positions IS NOT NULL THEN
      INSERT INTO handovers (claim_token, batch, chunk_id, instance, operator, at, positions, postfix_started_at, log_inode)
      VALUES (p_token, p_batch, p_chunk_id, v_chunk.instance, v_chunk.operator, v_now, v_positions, p_postfix_started_at,
              p_log_inode);
    ELSE
      RETURN QUERY SELECT CASE WHEN v_last IS NULL THEN 'empty' ELSE 'batch' END,
                          v_revision, v_now, NULL::bigint, NULL, NULL, NULL, NULL::jsonb, NULL::int;
      RETURN;
    END IF;
  END IF;

  RETURN QUERY
  SELECT 'batch', v_revision, v_now, m.dispatch_id, d.user_id, d.email_key, m.email, m.variables,
         m.handovers::int
    FROM messages m JOIN dispatches d USING (dispatch_id)
   WHERE m.chunk_id = p_chunk_id AND m.position = ANY (v_positions) AND m.state = 'handed' AND m.handed_at = v_now
   ORDER BY m.position;
  IF NOT FOUND THEN
    RETURN QUERY SELECT 'batch', v_revision, v_now, NULL::bigint, NULL, NULL, NULL, NULL::jsonb, NULL::int;
  END IF;
END $$;

-- give_back: messages written ahead that Postfix surely does not have are planned again where they stand, or what they
-- have become meanwhile. Needs no claim: they are this instance's until it says so.
CREATE OR REPLACE FUNCTION give_back(p_chunk_id bigint, p_instance text, p_handed_at timestamptz, p_dispatch_ids bigint[])
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
DECLARE
  v_campaign_id text;
  v_cancelled boolean;
  v_first int;
  v_moved bigint;
BEGIN
  PERFORM check_login(p_instance);
  SELECT campaign_id, c.state = 'cancelled' INTO v_campaign_id, v_cancelled
    FROM chunks k JOIN campaigns c USING (campaign_id) WHERE k.chunk_id = p_chunk_id FOR NO KEY UPDATE OF k;

  WITH mine AS (
    SELECT m.dispatch_id,
           state_unsent(v_cancelled, m.not_after, m.email, EXISTS (
             SELECT FROM suppressing(mailbox_of(m.email, m.mailbox), v_campaign_id))) AS state
      FROM messages m
     WHERE m.dispatch_id = ANY (p_dispatch_ids) AND m.chunk_id = p_chunk_id
       AND m.state = 'handed' AND m.instance = p_instance AND m.handed_at = p_handed_at
     ORDER BY m.dispatch_id FOR NO KEY UPDATE
  ), moved AS (
    UPDATE messages m
       SET state = mine.state, handed_at = NULL, instance = NULL,
           status_at = CASE WHEN mine.state <> 'planned' THEN clock_timestamp() END
      FROM mine WHERE m.dispatch_id = mine.dispatch_id
    RETURNING m.dispatch_id, m.position, m.state, m.status_at
  ), told AS (
    INSERT INTO outbox (dispatch_id, status, at)
    SELECT dispatch_id, state, status_at FROM moved WHERE state <> 'planned'
  )
  SELECT count(*), min(position) FILTER (WHERE state = 'planned') INTO v_moved, v_first FROM moved;
  UPDATE chunks SET cursor = least(cursor, v_first) WHERE chunk_id = p_chunk_id AND v_first < cursor;
  RETURN v_moved;
END $$;

REVOKE ALL ON FUNCTION why_closed, why_stopped, state_unsent, reject, write_ahead, give_back FROM PUBLIC;
GRANT EXECUTE ON FUNCTION why_stopped, reject, write_ahead, give_back TO fairpost_agent;
GRANT EXECUTE ON FUNCTION give_back TO fairpost_processor; -- for fences
