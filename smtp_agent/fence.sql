-- take_over: an agent's start. The chunks of its predecessor are nobody's: what the predecessor still had under way is over
-- before this is, and what comes after finds its claim lost. Answers how many.
CREATE OR REPLACE FUNCTION take_over(p_instance text) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = fairpost, pg_temp AS $$
  SELECT check_login(p_instance);

  WITH freed AS (
    UPDATE chunks k SET instance = NULL, claim_token = NULL, lease_until = NULL
      FROM (SELECT chunk_id FROM chunks WHERE instance = p_instance ORDER BY chunk_id FOR NO KEY UPDATE) mine
     WHERE k.chunk_id = mine.chunk_id AND k.instance = p_instance
    RETURNING 1)
  SELECT count(*) FROM freed
$$;

-- ask_fence: a fence, and the messages that it is to judge: those that the instance was handed and that its Postfix's queue
-- (p_listed) does not hold. An audit takes those handed over at least p_age ago, and those that Postfix once had. What an
-- earlier fence still is to judge is judged with this one at the latest. Answers how many.
CREATE OR REPLACE FUNCTION ask_fence(
  p_fence_token text, p_instance text, p_reason text, p_postfix_started_at timestamptz, p_inode bigint, p_listed bigint[],
  p_age interval) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
  SELECT check_login(p_instance);

  INSERT INTO fences (fence_token, instance, reason, asked_at, postfix_started_at, inode_before)
  VALUES (p_fence_token, p_instance, p_reason, clock_timestamp(), p_postfix_started_at, p_inode);

  WITH doubtful AS (
    INSERT INTO fence_messages (fence_token, dispatch_id, handed_at)
    SELECT p_fence_token, m.dispatch_id, m.handed_at
      FROM claims c
      JOIN chunk_counts n ON n.chunk_id = c.chunk_id
       AND n.handed + CASE p_reason WHEN 'audit' THEN n.queued + n.deferred ELSE 0 END > 0
      JOIN messages m ON m.chunk_id = c.chunk_id
       AND (m.state = 'handed' OR p_reason = 'audit' AND m.state IN ('queued', 'deferred'))
     WHERE c.instance = p_instance AND m.instance = p_instance
       AND m.handed_at <= clock_timestamp() - p_age
       AND NOT EXISTS (SELECT FROM unnest(p_listed) AS l (dispatch_id) WHERE l.dispatch_id = m.dispatch_id)
       AND NOT EXISTS (SELECT FROM fence_messages w JOIN fences f USING (fence_token)
                        WHERE w.dispatch_id = m.dispatch_id AND w.handed_at = m.handed_at
                          AND f.instance = p_instance AND f.judged_at IS NULL)
    RETURNING 1)
  SELECT count(*) FROM doubtful
$$;

-- confirm_fence: Postfix has logged the fence's line; what its master and its log were after it.
CREATE OR REPLACE FUNCTION confirm_fence(
  p_fence_token text, p_instance text, p_postfix_started_at timestamptz, p_inode bigint) RETURNS boolean
LANGUAGE sql SECURITY DEFINER SET search_path = fairpost, pg_temp AS $$
  SELECT check_login(p_instance);

  WITH confirmed AS (
    UPDATE fences
       SET confirmed_at = clock_timestamp(), inode_after = p_inode,
           postfix_started_at = CASE WHEN postfix_started_at = p_postfix_started_at THEN postfix_started_at END
     WHERE fence_token = p_fence_token AND instance = p_instance AND confirmed_at IS NULL
    RETURNING 1)
  SELECT EXISTS (SELECT FROM confirmed)
$$;

REVOKE ALL ON FUNCTION take_over, ask_fence, confirm_fence FROM PUBLIC;
GRANT EXECUTE ON FUNCTION take_over, ask_fence, confirm_fence TO fairpost_agent;
