-- track: what lines of the mail logs say of messages; one batch, one round trip, one transaction.
--
-- Arrays of one length, an element a line, in the order of the log: the instance, Postfix's queue id, the dispatch (by
-- the envelope sender; null where the line has none or the mail is not ours), the state that the line tells, its time,
-- and for a refusal its class, enhanced status code and reply. Answers how many lines changed a message, by operator, state
-- and class, and for those that were sent how many seconds after they were reserved and their campaign due; and under a
-- null state how many lines wait for their queue id.
--
-- A line counts only from the message's own instance, only while the message is not final, and only if it tells more
-- than is known: a later state, or a later `deferred`. So a batch that is read again changes nothing. Deliveries that Postfix
-- tried again are counted in `retries`. The mailbox of a hard bounce is suppressed for all campaigns.
CREATE OR REPLACE FUNCTION track(
  p_instances text[], p_queue_ids text[], p_dispatch_ids bigint[], p_states message_state[], p_ats timestamptz[],
  p_classes text[], p_dsns text[], p_replies text[])
RETURNS TABLE (operator text, state message_state, class text, lines bigint, due_to_sent float8[])
LANGUAGE plpgsql SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
BEGIN
  -- An instance's lines come to one tracker. Where two have them for a moment, as when one was taken for dead, the second
  -- waits: it then finds what the first wrote, and cannot deadlock with it.
  PERFORM pg_advisory_xact_lock(hashtextextended('fairpost track ' || instance, 0))
     FROM (SELECT DISTINCT instance FROM unnest(p_instances) AS e (instance) ORDER BY instance) z;

  -- Postfix says `queue active` of foreign mail too: entered without a dispatch, its later lines are not ours to keep.
  INSERT INTO queue_ids (instance, queue_id, dispatch_id, seen_at)
  SELECT DISTINCT ON (instance, queue_id) instance, queue_id, dispatch_id, at
    FROM unnest(p_instances, p_queue_ids, p_dispatch_ids, p_states, p_ats) AS e (instance, queue_id, dispatch_id, state, at)
   WHERE state = 'queued' ORDER BY instance, queue_id, at
      ON CONFLICT (instance, queue_id) DO NOTHING;

  RETURN QUERY
  WITH line AS MATERIALIZED (
    SELECT * FROM unnest(p_instances, p_queue_ids, p_dispatch_ids, p_states, p_ats, p_classes, p_dsns, p_replies)
           WITH ORDINALITY AS e (instance, queue_id, dispatch_id, state, at, class, dsn, reply, ordinal)
  ), woken AS ( -- lines that came before their queue id
    DELETE FROM early_statuses e
     USING (SELECT DISTINCT instance, queue_id FROM line WHERE state = 'queued') q
     WHERE e.instance = q.instance AND e.queue_id = q.queue_id
    RETURNING e.*
  ), known AS MATERIALIZED (
    SELECT line.instance, coalesce(line.dispatch_id, q.dispatch_id) AS dispatch_id, line.state, line.at, line.class,
           line.dsn, line.reply, line.ordinal, line.dispatch_id IS NULL AND q.queue_id IS NULL AS early, line.queue_id
      FROM line LEFT JOIN queue_ids q ON q.instance = line.instance AND q.queue_id = line.queue_id
    UNION ALL
    SELECT w.instance, q.dispatch_id, w.state, w.at, w.class, w.dsn, w.reply,
           cardinality(p_states) + w.early_status_id, false, w.queue_id
      FROM woken w JOIN queue_ids q ON q.instance = w.instance AND q.queue_id = w.queue_id
  ), waiting AS (
    INSERT INTO early_statuses (instance, queue_id, state, at, class, dsn, reply)
    SELECT instance, queue_id, state, at, class, dsn, reply FROM known WHERE early ORDER BY ordinal
        ON CONFLICT (instance, queue_id, at, state) DO NOTHING
    RETURNING 1
  ), message AS MATERIALIZED (
    SELECT m.dispatch_id, m.state, m.status_at, m.attempts, m.instance, m.chunk_id, m.reserved_at, m.email = '' AS forgotten,
           mailbox_of(m.email, m.mailbox) AS mailbox
      FROM messages m
     WHERE m.dispatch_id = ANY (ARRAY(SELECT dispatch_id FROM known WHERE dispatch_id IS NOT NULL))
       AND m.state >= 'handed' AND m.state < 'sent'
     ORDER BY m.dispatch_id FOR NO KEY UPDATE
  ), compared AS ( -- each line beside what was known before it, the earlier lines of this batch included
    SELECT k.instance, k.dispatch_id, k.state, k.at, k.class, k.dsn, k.ordinal, m.attempts, m.chunk_id, m.reserved_at,
           CASE WHEN NOT m.forgotten THEN k.reply END AS reply,
           greatest(m.state, max(k.state) OVER earlier) AS before,
           greatest(CASE WHEN m.state = 'deferred' THEN m.status_at END,
                    max(CASE WHEN k.state = 'deferred' THEN k.at END) OVER earlier) AS deferred_at
      FROM known k JOIN message m ON m.dispatch_id = k.dispatch_id AND m.instance = k.instance
    WINDOW earlier AS (PARTITION BY k.dispatch_id ORDER BY k.ordinal ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
  ), news AS MATERIALIZED (
    SELECT *, attempts + count(*) FILTER (WHERE state IN ('deferred', 'sent', 'bounced'))
                         OVER (PARTITION BY dispatch_id ORDER BY ordinal) AS attempt
      FROM compared
     WHERE before < 'sent' AND (state > before OR state = 'deferred' AND before = 'deferred' AND at > deferred_at)
  ), changed AS (
    UPDATE messages m
       SET state = n.state, status_at = n.at, attempts = n.attempt, class = n.class, dsn = n.dsn, reply = n.reply
      FROM (SELECT DISTINCT ON (dispatch_id) * FROM news ORDER BY dispatch_id, ordinal DESC) n
     WHERE m.dispatch_id = n.dispatch_id
  ), told AS (
    INSERT INTO outbox (dispatch_id, status, at, attempt, class, dsn, reply, instance)
    SELECT dispatch_id, state, at, attempt, class, dsn, reply, instance FROM news ORDER BY ordinal
  ), suppressed AS ( -- the first stays; sorted, as whoever else writes them does
    INSERT INTO suppressions (mailbox, source, reason, since, dispatch_id, dsn, reply)
    SELECT m.mailbox, 'bounce', 'hard bounce', n.at, n.dispatch_id, n.dsn, n.reply
      FROM news n JOIN message m USING (dispatch_id)
     WHERE n.state = 'bounced' AND n.class = 'hard' AND NOT m.forgotten
     ORDER BY m.mailbox
        ON CONFLICT (mailbox, campaign_id) DO NOTHING
  ), place AS MATERIALIZED (
    SELECT k.chunk_id, k.operator, c.scheduled_for FROM chunks k JOIN campaigns c USING (campaign_id)
     WHERE k.chunk_id = ANY (ARRAY(SELECT DISTINCT chunk_id FROM news))
  ), retried AS (
    INSERT INTO retries AS r (instance, operator, at, number)
    SELECT n.instance, p.operator, date_trunc('second', n.at), count(*) FROM news n JOIN place p USING (chunk_id)
     WHERE n.attempt > 1 AND n.state IN ('deferred', 'sent', 'bounced')
     GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
        ON CONFLICT (instance, operator, at) DO UPDATE SET number = r.number + excluded.number
  )
  SELECT p.operator, n.state, n.class, count(*),
         array_agg(extract(epoch FROM n.at - greatest(n.reserved_at, p.scheduled_for))::float8)
           FILTER (WHERE n.state = 'sent' AND n.reserved_at IS NOT NULL)
    FROM news n JOIN place p USING (chunk_id) GROUP BY p.operator, n.state, n.class
  UNION ALL
  SELECT NULL, NULL, NULL, count(*), NULL FROM waiting HAVING count(*) > 0;
END $$;
REVOKE ALL ON FUNCTION track FROM PUBLIC;
GRANT EXECUTE ON FUNCTION track TO fairpost_processor;
