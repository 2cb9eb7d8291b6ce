-- sweep: what is still planned in some chunks of cancelled campaigns becomes `cancelled`, at most p_chunks of them a
-- call, so that neither planning nor claims wait long. Waits for nobody: a chunk that another has locked is passed over.
-- Answers how many messages; 0: none is left but in such chunks.
CREATE OR REPLACE FUNCTION sweep(p_chunks int) RETURNS bigint
LANGUAGE plpgsql SET search_path = fairpost, pg_temp AS $$
DECLARE
  v_chunk_ids bigint[];
  v_swept bigint;
BEGIN
  SELECT array_agg(chunk_id) INTO v_chunk_ids FROM (
    SELECT k.chunk_id FROM chunks k JOIN campaigns c USING (campaign_id)
     WHERE c.state = 'cancelled' AND k.has_planned
     ORDER BY k.chunk_id LIMIT p_chunks FOR NO KEY UPDATE OF k SKIP LOCKED) z;

  WITH swept AS (
    UPDATE messages m SET state = 'cancelled', status_at = clock_timestamp()
      FROM (SELECT dispatch_id FROM messages
             WHERE chunk_id = ANY (v_chunk_ids) AND state = 'planned'
             ORDER BY dispatch_id FOR NO KEY UPDATE) p
     WHERE m.dispatch_id = p.dispatch_id
    RETURNING m.dispatch_id, m.status_at
  ), told AS (
    INSERT INTO outbox (dispatch_id, status, at) SELECT dispatch_id, 'cancelled', status_at FROM swept
  )
  SELECT count(*) INTO v_swept FROM swept;
  RETURN v_swept;
END $$;
REVOKE ALL ON FUNCTION sweep FROM PUBLIC;
GRANT EXECUTE ON FUNCTION sweep TO fairpost_processor;
