-- drop_uncertain: a person's word that uncertain messages of a chunk, at most p_limit of them, are never to be sent: they
-- become `cancelled`. A null p_dispatch_ids or p_instance stands for all. What became uncertain after p_until, or is no
-- longer so, is left alone. Answers how many became what; they are on record as the actor's.
CREATE OR REPLACE FUNCTION drop_uncertain(
  p_chunk_id bigint, p_dispatch_ids bigint[], p_instance text, p_until timestamptz, p_actor text, p_limit int)
RETURNS TABLE (state message_state, messages bigint)
LANGUAGE plpgsql SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  v_dispatch_ids bigint[];
BEGIN
  PERFORM 1 FROM chunks WHERE chunk_id = p_chunk_id FOR NO KEY UPDATE;

  WITH doubtful AS (
    SELECT dispatch_id FROM messages
     WHERE chunk_id = p_chunk_id AND state = 'uncertain' AND status_at <= p_until
       AND (p_dispatch_ids IS NULL OR dispatch_id = ANY (p_dispatch_ids))
       AND (p_instance IS NULL OR instance = p_instance)
     ORDER BY dispatch_id LIMIT p_limit FOR NO KEY UPDATE
  ), dropped AS (
    UPDATE messages m
       SET state = 'cancelled', class = NULL, dsn = NULL, status_at = clock_timestamp(),
           reply = CASE WHEN m.email <> '' THEN 'dropped by ' || p_actor END
      FROM doubtful d WHERE m.dispatch_id = d.dispatch_id
    RETURNING m.dispatch_id, m.status_at, m.reply
  ), told AS (
    INSERT INTO outbox (dispatch_id, status, at, reply)
    SELECT dispatch_id, 'cancelled', status_at, reply FROM dropped
  )
  SELECT array_agg(dispatch_id ORDER BY dispatch_id) INTO v_dispatch_ids FROM dropped;
  IF v_dispatch_ids IS NULL THEN
    RETURN;
  END IF;

  INSERT INTO audit (actor, action, subject, details)
  SELECT p_actor, 'uncertain.drop', campaign_id, jsonb_build_object('dispatch_ids', v_dispatch_ids)
    FROM chunks WHERE chunk_id = p_chunk_id;
  RETURN QUERY SELECT 'cancelled'::message_state, cardinality(v_dispatch_ids)::bigint;
END $$;
REVOKE ALL ON FUNCTION drop_uncertain FROM PUBLIC;
GRANT EXECUTE ON FUNCTION drop_uncertain TO fairpost_processor;
