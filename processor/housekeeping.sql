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

-- end_campaigns: a campaign has ended when it was cancelled, or when all its messages are final and nothing came for
-- p_idle; what comes then reopens it (plan, a new event, a person's resend). Answers how many ended now.
--
-- A planner holds the row of its campaign until it commits. So the rows are locked by a statement of its own, those that
-- are busy passed over, and looked at by the next one, which sees all that was planned.
CREATE OR REPLACE FUNCTION end_campaigns(p_idle interval) RETURNS bigint
LANGUAGE plpgsql SET search_path = fairpost, pg_temp AS $$
DECLARE
  v_since timestamptz := clock_timestamp() - p_idle;
  v_campaign_ids text[];
  v_ended bigint;
BEGIN
  SELECT array_agg(campaign_id) INTO v_campaign_ids FROM (
    SELECT campaign_id FROM campaigns
     WHERE ended_at IS NULL AND (state = 'cancelled' OR state <> 'waiting' AND scheduled_for < v_since AND applied_at < v_since)
     ORDER BY campaign_id FOR NO KEY UPDATE SKIP LOCKED) z;

  UPDATE campaigns c SET ended_at = clock_timestamp()
   WHERE campaign_id = ANY (v_campaign_ids)
     AND (state = 'cancelled'
          OR NOT EXISTS (SELECT FROM pending p WHERE p.campaign_id = c.campaign_id)
         AND NOT EXISTS (SELECT FROM chunks k JOIN chunk_counts n USING (chunk_id)
                          WHERE k.campaign_id = c.campaign_id
                            AND (greatest(k.opened_at, k.claimed_at) >= v_since
                                 OR k.planned + n.handed + n.uncertain + n.queued + n.deferred > 0)));
  GET DIAGNOSTICS v_ended = ROW_COUNT;
  RETURN v_ended;
END $$;
REVOKE ALL ON FUNCTION end_campaigns FROM PUBLIC;
GRANT EXECUTE ON FUNCTION end_campaigns TO fairpost_processor;
