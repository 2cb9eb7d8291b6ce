-- prune_chunk: deletes the final messages of a chunk that nothing was said of since p_before, at most p_limit of them, and
-- the chunk itself when it is empty and not its campaign's last. Their number is folded into the campaign, so that its
-- books balance. Answers how many messages went. Dispatches stay: an old send event finds nothing pending.
CREATE OR REPLACE FUNCTION prune_chunk(p_chunk_id bigint, p_before timestamptz, p_limit int) RETURNS bigint
LANGUAGE plpgsql SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
DECLARE
  v_campaign_id text;
  v_pruned bigint;
BEGIN
  SELECT campaign_id INTO v_campaign_id FROM chunks WHERE chunk_id = p_chunk_id;
  PERFORM 1 FROM campaigns WHERE campaign_id = v_campaign_id FOR NO KEY UPDATE;
  PERFORM 1 FROM chunks WHERE chunk_id = p_chunk_id FOR UPDATE;

  WITH old AS (
    SELECT dispatch_id FROM messages
     WHERE chunk_id = p_chunk_id AND state >= 'sent' AND status_at < p_before
     ORDER BY dispatch_id LIMIT p_limit FOR UPDATE
  ), pruned AS (
    DELETE FROM messages m USING old WHERE m.dispatch_id = old.dispatch_id RETURNING 1
  )
  SELECT count(*) INTO v_pruned FROM pruned;
  UPDATE campaigns SET pruned = pruned + v_pruned WHERE campaign_id = v_campaign_id AND v_pruned > 0;

  DELETE FROM chunks k
   WHERE k.chunk_id = p_chunk_id AND k.instance IS NULL AND k.opened_at < p_before
     AND NOT EXISTS (SELECT FROM messages m WHERE m.chunk_id = k.chunk_id)
     AND EXISTS (SELECT FROM chunks later WHERE later.campaign_id = k.campaign_id AND later.number > k.number);
  IF FOUND THEN
    DELETE FROM claims WHERE chunk_id = p_chunk_id;
    DELETE FROM chunk_counts WHERE chunk_id = p_chunk_id;
  END IF;
  RETURN v_pruned;
END $$;
REVOKE ALL ON FUNCTION prune_chunk FROM PUBLIC;
GRANT EXECUTE ON FUNCTION prune_chunk TO fairpost_processor;

-- forget: erases what is known of a user besides the id: addresses, variables and replies of every message. What was not
-- handed over yet never is; what is still on its way tells its fate without words. Answers how many messages.
--
-- An empty address marks a message that was forgotten. Dispatches stay, so that the same e-mail is never sent again, and
-- so do suppressions, without words and with the mailbox's digest in its place: they go on to suppress.
CREATE OR REPLACE FUNCTION forget(p_user_id text) RETURNS bigint
LANGUAGE plpgsql SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
DECLARE
  v_dispatch_ids bigint[] := ARRAY(SELECT dispatch_id FROM dispatches WHERE user_id = p_user_id ORDER BY dispatch_id);
  v_campaign_ids text[] := ARRAY(SELECT campaign_id FROM dispatches WHERE user_id = p_user_id ORDER BY dispatch_id);
  v_mailboxes text[];
  v_forgotten bigint;
BEGIN
  PERFORM 1 FROM campaigns WHERE campaign_id = ANY (v_campaign_ids) ORDER BY campaign_id FOR NO KEY UPDATE;
  PERFORM 1 FROM chunks WHERE chunk_id IN (SELECT chunk_id FROM messages WHERE dispatch_id = ANY (v_dispatch_ids))
    ORDER BY chunk_id FOR NO KEY UPDATE;
  PERFORM 1 FROM messages WHERE dispatch_id = ANY (v_dispatch_ids) ORDER BY dispatch_id FOR NO KEY UPDATE;
  -- A message that was pruned has left its mailbox to what its bounce suppressed.
  v_mailboxes := ARRAY(
    SELECT mailbox_of(email, mailbox) FROM messages WHERE dispatch_id = ANY (v_dispatch_ids) AND email <> ''
    UNION SELECT mailbox FROM suppressions WHERE dispatch_id = ANY (v_dispatch_ids));
  WITH known AS (
    SELECT suppression_id FROM suppressions WHERE mailbox = ANY (v_mailboxes) ORDER BY mailbox, campaign_id FOR UPDATE
  ), gone AS (
    DELETE FROM suppressions s USING known WHERE s.suppression_id = known.suppression_id RETURNING s.*
  )
  INSERT INTO suppressions (mailbox, campaign_id, source, reason, since)
  SELECT (mailbox_forms(mailbox))[2], campaign_id, source, 'forgotten', since FROM gone ORDER BY 1, 2
      ON CONFLICT (mailbox, campaign_id) DO NOTHING;
  -- What is reserved only is planned here, without its address: the send event then finds nothing pending.
  PERFORM plan(v_dispatch_ids, v_campaign_ids, array_fill(''::text, ARRAY[cardinality(v_dispatch_ids)]),
               array_fill(''::text, ARRAY[cardinality(v_dispatch_ids)]),
               array_fill(NULL::text, ARRAY[cardinality(v_dispatch_ids)]),
               array_fill('{}'::text, ARRAY[cardinality(v_dispatch_ids)]),
               array_fill(NULL::timestamptz, ARRAY[cardinality(v_dispatch_ids)]),
               array_fill(NULL::text, ARRAY[cardinality(v_dispatch_ids)]));

  WITH cancelled AS (
    UPDATE messages SET state = 'cancelled', status_at = clock_timestamp()
     WHERE dispatch_id = ANY (v_dispatch_ids) AND state = 'planned'
    RETURNING dispatch_id, status_at
  )
  INSERT INTO outbox (dispatch_id, status, at) SELECT dispatch_id, 'cancelled', status_at FROM cancelled;
  UPDATE messages SET email = '', mailbox = NULL, variables = '{}', reply = NULL WHERE dispatch_id = ANY (v_dispatch_ids);
  GET DIAGNOSTICS v_forgotten = ROW_COUNT;
  UPDATE outbox SET reply = NULL WHERE dispatch_id = ANY (v_dispatch_ids) AND reply IS NOT NULL;
  RETURN v_forgotten;
END $$;
REVOKE ALL ON FUNCTION forget FROM PUBLIC;
GRANT EXECUTE ON FUNCTION forget TO fairpost_processor;
