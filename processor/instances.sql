-- retire_chunk: what a retired instance had of a chunk, at most p_limit messages of it: they become `uncertain`, as nobody
-- can ask its Postfix any more, and its claim is nobody's. Answers how many messages.
--
-- A write-ahead that saw the instance before it was retired holds the chunk's lock: what it wrote is seen here, and the
-- next one is refused. An adoption waits for this, or this finds the instance retired no longer and does nothing.
CREATE OR REPLACE FUNCTION retire_chunk(p_instance text, p_chunk_id bigint, p_limit int) RETURNS bigint
LANGUAGE plpgsql SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
DECLARE
  v_moved bigint;
BEGIN
  PERFORM 1 FROM instances WHERE instance = p_instance AND retired_at IS NOT NULL FOR SHARE;
  IF NOT FOUND THEN
    RETURN 0;
  END IF;
  PERFORM 1 FROM chunks WHERE chunk_id = p_chunk_id FOR NO KEY UPDATE;
  UPDATE chunks SET instance = NULL, claim_token = NULL, lease_until = NULL
   WHERE chunk_id = p_chunk_id AND instance = p_instance;

  WITH lost AS (
    SELECT dispatch_id FROM messages
     WHERE chunk_id = p_chunk_id AND instance = p_instance AND state IN ('handed', 'queued', 'deferred')
     ORDER BY dispatch_id LIMIT p_limit FOR NO KEY UPDATE
  ), moved AS (
    UPDATE messages m
       SET state = 'uncertain', status_at = clock_timestamp(), class = NULL, dsn = NULL,
           reply = 'instance ' || p_instance || ' was retired'
      FROM lost WHERE m.dispatch_id = lost.dispatch_id
    RETURNING m.dispatch_id, m.status_at, m.attempts, m.reply
  ), told AS (
    INSERT INTO outbox (dispatch_id, status, at, attempt, reply, instance)
    SELECT dispatch_id, 'uncertain', status_at, attempts, reply, p_instance FROM moved
  )
  SELECT count(*) INTO v_moved FROM moved;
  RETURN v_moved;
END $$;
REVOKE ALL ON FUNCTION retire_chunk FROM PUBLIC;
GRANT EXECUTE ON FUNCTION retire_chunk TO fairpost_processor;
