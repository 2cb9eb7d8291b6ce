-- see_fence: all of the instance's log up to the fence's line is tracked. False where there is no such fence to judge: it is
-- unknown, another instance's, judged, or was seen before.
CREATE OR REPLACE FUNCTION see_fence(p_fence_token text, p_instance text) RETURNS boolean
LANGUAGE sql SET search_path = fairpost, pg_temp AS $$
  WITH seen AS (
    UPDATE fences SET line_seen_at = clock_timestamp()
     WHERE fence_token = p_fence_token AND instance = p_instance AND line_seen_at IS NULL AND judged_at IS NULL
    RETURNING 1)
  SELECT EXISTS (SELECT FROM seen)
$$;

-- lose_evidence: a line of the instance's log could not be used. It may have told of anything that is still `handed`, so
-- that nothing can be proven of those hand-overs any more. Answers how many.
CREATE OR REPLACE FUNCTION lose_evidence(p_instance text) RETURNS bigint
LANGUAGE sql SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
  WITH open AS MATERIALIZED (
    SELECT DISTINCT k.operator, m.handed_at
      FROM claims c
      JOIN chunk_counts n ON n.chunk_id = c.chunk_id AND n.handed > 0
      JOIN chunks k ON k.chunk_id = c.chunk_id
      JOIN messages m ON m.chunk_id = c.chunk_id AND m.state = 'handed' AND m.instance = p_instance
     WHERE c.instance = p_instance
  ), doubted AS (
    SELECT h.claim_token, h.batch
      FROM open JOIN handovers h ON h.instance = p_instance AND h.operator = open.operator AND h.at = open.handed_at
     WHERE h.log_inode IS NOT NULL
     ORDER BY h.claim_token, h.batch FOR NO KEY UPDATE OF h
  ), moved AS (
    UPDATE handovers h SET log_inode = NULL FROM doubted d WHERE h.claim_token = d.claim_token AND h.batch = d.batch
    RETURNING 1
  )
  SELECT count(*) FROM moved
$$;

-- judge_fence: what becomes of the messages that a fence is to judge, and of those that an earlier one of the instance left,
-- whose line was lost. Only a message that is as it was when the fence was asked for is judged. It was never accepted, and is
-- given back, where Postfix ran on and logged to one file from its hand-over until the fence; else it is `uncertain`, as is
-- what an audit missed of mail that Postfix once had. An audit over a rotation of the log judges nothing: lines of the old
-- file may still come. Answers a row a fence that is judged now; with this one counts what earlier ones left. No row: it is
-- judged already, or not to be yet.
CREATE OR REPLACE FUNCTION judge_fence(p_fence_token text)
RETURNS TABLE (instance text, reason text, given_back int, uncertain int)
LANGUAGE plpgsql SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  v_fence fences;
  v_tokens text[];
  v_chunk_ids bigint[];
  v_candidates bigint[];
  v_group record;
  v_given_back int := 0;
  v_uncertain bigint[];
BEGIN
  -- Two judgements of an instance lock its fences in one order: one of them waits, and finds what it came for judged.
  SELECT * INTO v_fence FROM fences WHERE fence_token = p_fence_token;
  v_tokens := ARRAY(SELECT fence_token FROM fences
                     WHERE instance = v_fence.instance AND judged_at IS NULL AND asked_at <= v_fence.asked_at
                     ORDER BY asked_at, fence_token FOR UPDATE);
  SELECT * INTO v_fence FROM fences
   WHERE fence_token = p_fence_token AND judged_at IS NULL AND confirmed_at IS NOT NULL AND line_seen_at IS NOT NULL;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  IF v_fence.reason = 'audit' AND (v_fence.inode_before = v_fence.inode_after) IS NOT TRUE THEN
    v_tokens := ARRAY[p_fence_token];
    DELETE FROM fence_messages WHERE fence_token = p_fence_token;
  END IF;

  -- Every lock before the first change, in the order of all: chunks, messages, counts.
  v_chunk_ids := ARRAY(
    SELECT DISTINCT m.chunk_id FROM fence_messages w JOIN messages m USING (dispatch_id, handed_at)
     WHERE w.fence_token = ANY (v_tokens) AND m.instance = v_fence.instance AND m.state IN ('handed', 'queued', 'deferred'));
  PERFORM 1 FROM chunks WHERE chunk_id = ANY (v_chunk_ids) ORDER BY chunk_id FOR NO KEY UPDATE;
  v_candidates := ARRAY(
    SELECT m.dispatch_id
      FROM fence_messages w JOIN fences f USING (fence_token) JOIN messages m USING (dispatch_id, handed_at)
     WHERE w.fence_token = ANY (v_tokens) AND m.instance = v_fence.instance
       AND (m.state = 'handed'
            OR f.reason = 'audit' AND m.state IN ('queued', 'deferred')
               AND f.inode_before = v_fence.inode_before AND f.inode_before = v_fence.inode_after)
     ORDER BY m.dispatch_id FOR NO KEY UPDATE OF m);
  PERFORM 1 FROM chunk_counts WHERE chunk_id = ANY (v_chunk_ids) ORDER BY chunk_id FOR NO KEY UPDATE;

  FOR v_group IN
    SELECT m.chunk_id, m.handed_at, array_agg(m.dispatch_id) AS dispatch_ids
      FROM messages m
      JOIN chunks k USING (chunk_id)
      JOIN handovers h ON h.instance = v_fence.instance AND h.operator = k.operator AND h.at = m.handed_at
       AND h.chunk_id = m.chunk_id AND m.position = ANY (h.positions)
     WHERE m.dispatch_id = ANY (v_candidates) AND m.state = 'handed'
       AND h.postfix_started_at = v_fence.postfix_started_at
       AND h.log_inode = v_fence.inode_before AND h.log_inode = v_fence.inode_after
     GROUP BY m.chunk_id, m.handed_at ORDER BY m.chunk_id, m.handed_at
  LOOP
    v_given_back := v_given_back
      + give_back(v_group.chunk_id, v_fence.instance, v_group.handed_at, v_group.dispatch_ids)::int;
  END LOOP;

  WITH moved AS (
    UPDATE messages SET state = 'uncertain', status_at = clock_timestamp(), class = NULL, dsn = NULL, reply = NULL
     WHERE dispatch_id = ANY (v_candidates) AND instance = v_fence.instance AND state IN ('handed', 'queued', 'deferred')
    RETURNING dispatch_id, status_at, attempts
  ), told AS (
    INSERT INTO outbox (dispatch_id, status, at, attempt, instance)
    SELECT dispatch_id, 'uncertain', status_at, attempts, v_fence.instance FROM moved
  )
  SELECT coalesce(array_agg(dispatch_id), '{}') INTO v_uncertain FROM moved;

  -- Why a message is uncertain is kept for as long as its fence is.
  DELETE FROM fence_messages w
   WHERE w.fence_token = ANY (v_tokens) AND NOT EXISTS (SELECT FROM unnest(v_uncertain) AS u (id) WHERE u.id = w.dispatch_id);
  UPDATE fences
     SET judged_at = clock_timestamp(),
         given_back = CASE fence_token WHEN p_fence_token THEN v_given_back ELSE 0 END,
         uncertain = CASE fence_token WHEN p_fence_token THEN cardinality(v_uncertain) ELSE 0 END
   WHERE fence_token = ANY (v_tokens);
  RETURN QUERY SELECT instance, reason, given_back, uncertain FROM fences WHERE fence_token = ANY (v_tokens) ORDER BY asked_at;
END $$;
REVOKE ALL ON FUNCTION see_fence, lose_evidence, judge_fence FROM PUBLIC;
GRANT EXECUTE ON FUNCTION see_fence, lose_evidence, judge_fence TO fairpost_processor;
