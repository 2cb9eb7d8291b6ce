-- resolve_uncertain: a person's word on uncertain messages of a chunk, at most p_limit of them: with p_drop they become
-- `cancelled` and are never sent; else they are planned again where they stand, or what they have become meanwhile. A null
-- p_dispatch_ids or p_instance stands for all. What became uncertain after p_until, or is no longer so, is left alone.
-- Answers how many became what; they are on record as the actor's.
--
-- Runs with its owner's rights, as it needs state_unsent, which neither side may call.
CREATE OR REPLACE FUNCTION resolve_uncertain(
  p_chunk_id bigint, p_dispatch_ids bigint[], p_instance text, p_until timestamptz, p_drop boolean, p_actor text, p_limit int)
RETURNS TABLE (state message_state, messages bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  v_campaign_id text;
  v_cancelled boolean;
  v_dispatch_ids bigint[];
  v_states message_state[];
  v_first int;
BEGIN
  SELECT campaign_id INTO v_campaign_id FROM chunks WHERE chunk_id = p_chunk_id;
  UPDATE campaigns SET ended_at = NULL WHERE campaign_id = v_campaign_id AND ended_at IS NOT NULL AND NOT p_drop;
  PERFORM 1 FROM chunks WHERE chunk_id = p_chunk_id FOR NO KEY UPDATE;
  SELECT state = 'cancelled' INTO v_cancelled FROM campaigns WHERE campaign_id = v_campaign_id;

  WITH doubtful AS (
    SELECT dispatch_id,
           CASE WHEN p_drop THEN 'cancelled'
                ELSE state_unsent(v_cancelled, not_after, email, EXISTS (
                  SELECT FROM suppressing(mailbox_of(email, mailbox), v_campaign_id))) END AS state,
           CASE WHEN p_drop AND email <> '' THEN 'dropped by ' || p_actor END AS reply
      FROM messages
     WHERE chunk_id = p_chunk_id AND state = 'uncertain' AND status_at <= p_until
       AND (p_dispatch_ids IS NULL OR dispatch_id = ANY (p_dispatch_ids))
       AND (p_instance IS NULL OR instance = p_instance)
     ORDER BY dispatch_id LIMIT p_limit FOR NO KEY UPDATE
  ), moved AS (
    UPDATE messages m
       SET state = d.state, class = NULL, dsn = NULL, reply = d.reply,
           handed_at = CASE WHEN p_drop THEN m.handed_at END,
           instance = CASE WHEN p_drop THEN m.instance END,
           status_at = CASE WHEN d.state <> 'planned' THEN clock_timestamp() END
      FROM doubtful d WHERE m.dispatch_id = d.dispatch_id
    RETURNING m.dispatch_id, m.position, m.state, m.status_at, m.reply
  ), told AS (
    INSERT INTO outbox (dispatch_id, status, at, reply)
    SELECT dispatch_id, state, status_at, reply FROM moved WHERE state <> 'planned'
  )
  SELECT array_agg(dispatch_id ORDER BY dispatch_id), array_agg(state), min(position) FILTER (WHERE state = 'planned')
    INTO v_dispatch_ids, v_states, v_first FROM moved;
  IF v_dispatch_ids IS NULL THEN
    RETURN;
  END IF;

  UPDATE chunks SET cursor = v_first WHERE chunk_id = p_chunk_id AND cursor > v_first;
  INSERT INTO audit (actor, action, subject, details)
  VALUES (p_actor, CASE WHEN p_drop THEN 'uncertain.drop' ELSE 'uncertain.resend' END, v_campaign_id,
          jsonb_build_object('dispatch_ids', v_dispatch_ids));
  RETURN QUERY SELECT state, count(*) FROM unnest(v_states) AS z (state) GROUP BY state;
END $$;
REVOKE ALL ON FUNCTION resolve_uncertain FROM PUBLIC;
GRANT EXECUTE ON FUNCTION resolve_uncertain TO fairpost_processor;
