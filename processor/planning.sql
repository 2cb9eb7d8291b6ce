-- plan: one block of send events becomes messages in chunks; one round trip and one transaction.
--
-- Arrays of one length, an element a send event: its dispatch, campaign, address and the address's domain, its mailbox
-- as suppressions compare it (or null: the address in ASCII lower case), variables (JSON text), not_after (or null), and
-- why it cannot be planned (or null: then it can). Answers the dispatches that this call planned and the state that each
-- was given: a dispatch that is not pending (planned before, or reserved for another campaign) is left out.
--
-- A message is appended to the open chunk of its campaign and operator, and the next chunk is opened where that is
-- full. One whose campaign is cancelled, that is past its not_after or that cannot be planned takes its place in the
-- chunk too, in its final state, so that every dispatch is counted in one way.
CREATE OR REPLACE FUNCTION plan(
  p_dispatch_ids bigint[], p_campaign_ids text[], p_emails text[], p_domains text[], p_mailboxes text[],
  p_variables text[], p_not_afters timestamptz[], p_reasons text[])
RETURNS TABLE (dispatch_id bigint, state message_state)
LANGUAGE plpgsql SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  v_now timestamptz;
BEGIN
  INSERT INTO campaigns (campaign_id)
  SELECT DISTINCT campaign_id FROM pending WHERE dispatch_id = ANY (p_dispatch_ids) ORDER BY campaign_id
      ON CONFLICT (campaign_id) DO NOTHING;

  -- Serialises the planners of a campaign. What follows sees what they committed while this waited.
  PERFORM 1 FROM campaigns WHERE campaign_id = ANY (p_campaign_ids) ORDER BY campaign_id FOR NO KEY UPDATE;
  UPDATE campaigns SET ended_at = NULL WHERE campaign_id = ANY (p_campaign_ids) AND ended_at IS NOT NULL;
  v_now := clock_timestamp();

  RETURN QUERY
  WITH event AS MATERIALIZED (
    SELECT DISTINCT ON (dispatch_id, campaign_id) *
      FROM unnest(p_dispatch_ids, p_campaign_ids, p_emails, p_domains, p_mailboxes, p_variables, p_not_afters, p_reasons)
           WITH ORDINALITY
           AS e (dispatch_id, campaign_id, email, domain, mailbox, variables, not_after, reason, ordinal)
     ORDER BY dispatch_id, campaign_id, ordinal
  ), first AS (
    DELETE FROM pending p USING event
     WHERE p.dispatch_id = event.dispatch_id AND p.campaign_id = event.campaign_id RETURNING event.*, p.reserved_at
  ), placed AS MATERIALIZED (
    SELECT first.*, o.operator, o.chunk_size,
           CASE WHEN reason IS NOT NULL THEN 'rejected'
                WHEN c.state = 'cancelled' THEN 'cancelled'
                WHEN not_after <= v_now THEN 'expired'
                ELSE 'planned' END::message_state AS state,
           row_number() OVER (PARTITION BY campaign_id, o.operator ORDER BY ordinal) - 1 AS nth
      FROM first
      JOIN campaigns c USING (campaign_id)
      LEFT JOIN operator_domains d USING (domain)
      JOIN operators o ON o.operator = coalesce(d.operator, 'other')
  ), needed AS (
    SELECT campaign_id, operator, max(chunk_size) AS chunk_size, count(*)::int AS n
      FROM placed GROUP BY campaign_id, operator ORDER BY campaign_id, operator
  ), tail AS MATERIALIZED ( -- the chunk to append to; a claim that seals it meanwhile takes it out of the answer
    SELECT needed.*, open.chunk_id, coalesce(open.size, 0) AS size,
           least(n, coalesce(open.capacity - open.size, 0)) AS fits
      FROM needed LEFT JOIN LATERAL (
        SELECT k.chunk_id, k.size, k.capacity FROM chunks k
         WHERE k.campaign_id = needed.campaign_id AND k.operator = needed.operator AND NOT k.sealed
         ORDER BY k.number DESC LIMIT 1 FOR NO KEY UPDATE) open ON open.size < open.capacity
  ), opened AS (
    INSERT INTO chunks (campaign_id, operator, number, capacity, size, opened_at)
    SELECT campaign_id, operator,
           (SELECT coalesce(max(number), 0) FROM chunks x WHERE x.campaign_id = tail.campaign_id)
             + row_number() OVER (PARTITION BY campaign_id ORDER BY operator, k),
           chunk_size, least(chunk_size, n - fits - k * chunk_size),
           v_now
      FROM tail CROSS JOIN generate_series(0, (n - fits - 1) / chunk_size) k WHERE n > fits
    RETURNING chunk_id, campaign_id, operator, number
  ), uncounted AS (
    INSERT INTO chunk_counts (chunk_id) SELECT chunk_id FROM opened
  ), fresh AS (
    SELECT *, row_number() OVER (PARTITION BY campaign_id, operator ORDER BY number) - 1 AS k FROM opened
  ), grown AS (
    UPDATE chunks k SET size = k.size + fits FROM tail WHERE k.chunk_id = tail.chunk_id
  ), message AS MATERIALIZED (
    SELECT placed.*,
           CASE WHEN nth < fits THEN tail.chunk_id ELSE fresh.chunk_id END AS chunk_id,
           CASE WHEN nth < fits THEN size + nth ELSE (nth - fits) % tail.chunk_size END AS position
      FROM placed
      JOIN tail USING (campaign_id, operator)
      LEFT JOIN fresh ON fresh.campaign_id = placed.campaign_id AND fresh.operator = placed.operator
                     AND nth >= fits AND fresh.k = (nth - fits) / tail.chunk_size
  ), stored AS (
    INSERT INTO messages (dispatch_id, chunk_id, position, state, email, mailbox, variables, not_after, reserved_at, reply,
                          status_at)
    SELECT dispatch_id, chunk_id, position, state, email, mailbox, variables::jsonb, not_after, reserved_at, reason,
           CASE WHEN state <> 'planned' THEN v_now END
      FROM message
  ), told AS (
    INSERT INTO outbox (dispatch_id, status, at, reply)
    SELECT dispatch_id, state, v_now, reason FROM message WHERE state <> 'planned'
  )
  SELECT message.dispatch_id, message.state FROM message;
END $$;
REVOKE ALL ON FUNCTION plan FROM PUBLIC;
GRANT EXECUTE ON FUNCTION plan TO fairpost_processor;

-- replan: planned messages go to the operator that their domain belongs to now. Arrays of one length: dispatches and
-- their domains. Answers how many moved; one that was handed over meanwhile stays where it is.
--
-- A message is taken out of its chunk and planned anew, in one transaction: its place stays empty.
CREATE OR REPLACE FUNCTION replan(p_dispatch_ids bigint[], p_domains text[]) RETURNS bigint
LANGUAGE plpgsql SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
DECLARE
  v_chunk_ids bigint[] := ARRAY(SELECT DISTINCT chunk_id FROM messages WHERE dispatch_id = ANY (p_dispatch_ids));
  v_dispatch_ids bigint[];
  v_campaign_ids text[];
  v_emails text[];
  v_domains text[];
  v_mailboxes text[];
  v_variables text[];
  v_not_afters timestamptz[];
  v_reserved_ats timestamptz[];
BEGIN
  PERFORM 1 FROM campaigns WHERE campaign_id IN (SELECT campaign_id FROM chunks WHERE chunk_id = ANY (v_chunk_ids))
    ORDER BY campaign_id FOR NO KEY UPDATE;
  PERFORM 1 FROM chunks WHERE chunk_id = ANY (v_chunk_ids) ORDER BY chunk_id FOR NO KEY UPDATE;

  SELECT array_agg(m.dispatch_id), array_agg(k.campaign_id), array_agg(m.email), array_agg(p.domain),
         array_agg(m.mailbox), array_agg(m.variables::text), array_agg(m.not_after), array_agg(m.reserved_at)
    INTO v_dispatch_ids, v_campaign_ids, v_emails, v_domains, v_mailboxes, v_variables, v_not_afters, v_reserved_ats
    FROM unnest(p_dispatch_ids, p_domains) AS p (dispatch_id, domain)
    JOIN messages m USING (dispatch_id) JOIN chunks k USING (chunk_id)
   WHERE m.state = 'planned';
  DELETE FROM messages WHERE dispatch_id = ANY (v_dispatch_ids);
  INSERT INTO pending (dispatch_id, campaign_id, source_partition, source_offset, reserved_at)
  SELECT dispatch_id, campaign_id, -1, -1, coalesce(reserved_at, clock_timestamp())
    FROM unnest(v_dispatch_ids, v_campaign_ids, v_reserved_ats) AS p (dispatch_id, campaign_id, reserved_at);
  RETURN (SELECT count(*) FROM plan(v_dispatch_ids, v_campaign_ids, v_emails, v_domains, v_mailboxes, v_variables,
                                    v_not_afters, array_fill(NULL::text, ARRAY[coalesce(cardinality(v_dispatch_ids), 0)])));
END $$;
REVOKE ALL ON FUNCTION replan FROM PUBLIC;
GRANT EXECUTE ON FUNCTION replan TO fairpost_processor;
