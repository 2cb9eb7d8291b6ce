-- send_again: a person's word that messages of a chunk are to be sent after all, at most p_limit of them: those that are
-- p_from, `uncertain` or `rejected`, are planned again where they stand, or what they have become meanwhile. A null
-- p_dispatch_ids, p_instance or p_reason (a part of the reply) stands for all. What became so after p_until, or is so no
-- longer, is left alone, and of what was rejected also that which has no address: it never can be sent. Answers how many
-- became what; they are on record as the actor's.
--
-- Runs with its owner's rights, as it needs state_unsent, which neither side may call.
CREATE OR REPLACE FUNCTION send_again(
  p_chunk_id bigint, p_from message_state, p_dispatch_ids bigint[], p_instance text, p_reason text, p_until timestamptz,
  p_actor text, p_limit int)
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
  -- As a planner does, so that end_campaigns passes it over until this commits: what is rejected keeps none from its end.
  SELECT state = 'cancelled' INTO v_cancelled FROM campaigns WHERE campaign_id = v_campaign_id FOR NO KEY UPDATE;
  UPDATE campaigns SET ended_at = NULL WHERE campaign_id = v_campaign_id AND ended_at IS NOT NULL;
  PERFORM 1 FROM chunks WHERE chunk_id = p_chunk_id FOR NO KEY UPDATE;

  WITH meant AS (
    SELECT dispatch_id,
           state_unsent(v_cancelled, not_after, email, EXISTS (
             SELECT FROM suppressing(mailbox_of(email, mailbox), v_campaign_id))) AS state
      FROM messages
     WHERE chunk_id = p_chunk_id AND state = p_from AND status_at <= p_until
       AND (p_from = 'uncertain' OR p_from = 'rejected' AND email <> '')
       AND (p_dispatch_ids IS NULL OR dispatch_id = ANY (p_dispatch_ids))
       AND (p_instance IS NULL OR instance = p_instance)
       AND (p_reason IS NULL OR strpos(reply, p_reason) > 0)
     ORDER BY dispatch_id LIMIT p_limit FOR NO KEY UPDATE
  ), moved AS (
    UPDATE messages m
       SET state = w.state, class = NULL, dsn = NULL, reply = NULL, handed_at = NULL, instance = NULL,
           status_at = CASE WHEN w.state <> 'planned' THEN clock_timestamp() END
      FROM meant w WHERE m.dispatch_id = w.dispatch_id
    RETURNING m.dispatch_id, m.position, m.state, m.status_at
  ), told AS (
    INSERT INTO outbox (dispatch_id, status, at)
    SELECT dispatch_id, state, status_at FROM moved WHERE state <> 'planned'
  )
  SELECT array_agg(dispatch_id ORDER BY dispatch_id), array_agg(state), min(position) FILTER (WHERE state = 'planned')
    INTO v_dispatch_ids, v_states, v_first FROM moved;
  IF v_dispatch_ids IS NULL THEN
    RETURN;
  END IF;

  UPDATE chunks SET cursor = v_first WHERE chunk_id = p_chunk_id AND cursor > v_first;
  INSERT INTO audit (actor, action, subject, details)
  VALUES (p_actor, CASE p_from WHEN 'rejected' THEN 'campaign.retry_rejected' ELSE 'uncertain.resend' END, v_campaign_id,
          jsonb_build_object('dispatch_ids', v_dispatch_ids));
  RETURN QUERY SELECT state, count(*) FROM unnest(v_states) AS z (state) GROUP BY state;
END $$;
REVOKE ALL ON FUNCTION send_again FROM PUBLIC;
GRANT EXECUTE ON FUNCTION send_again TO fairpost_processor;
