-- reserve: the reservation of one block of due e-mails, one round trip and one transaction.
--
-- Arrays of one length, an element a due e-mail. Answers which of them are to be emitted, and under which dispatch:
-- those that this block reserved, and those whose dispatch is still pending, if they are the same record redelivered
-- or the reservation is over a minute old. An event may stand in a block more than once; one of them is answered.
-- Raises FP001 while sending is off for the fleet.
--
-- Blocks are inserted in the order of the key, so that two workers with the same block cannot deadlock. What was
-- already pending is read back by a statement of its own, whose snapshot is taken after any wait for another worker's
-- commit: within one statement such an event would be lost.
--
-- Every access is by key. Without the setting a plan made while the tables are small, and kept, would scan them later.
CREATE OR REPLACE FUNCTION reserve(
  p_user_ids text[], p_campaign_ids text[], p_email_keys text[], p_partitions int[], p_offsets bigint[])
RETURNS TABLE (ordinal int, dispatch_id bigint, reserved_at timestamptz, won boolean)
LANGUAGE plpgsql SET search_path = fairpost, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  v_now timestamptz := clock_timestamp();
  v_ordinals int[];
  v_won bigint[];
BEGIN
  IF NOT (SELECT sending FROM fleet) THEN
    RAISE EXCEPTION 'sending is off' USING ERRCODE = 'FP001';
  END IF;

  WITH due AS (
    SELECT DISTINCT ON (user_id, campaign_id, email_key) *
      FROM unnest(p_user_ids, p_campaign_ids, p_email_keys, p_partitions, p_offsets)
           WITH ORDINALITY AS e (user_id, campaign_id, email_key, source_partition, source_offset, ordinal)
     ORDER BY user_id, campaign_id, email_key, source_partition, source_offset
  ), reserved AS (
    INSERT INTO dispatches (user_id, campaign_id, email_key)
    SELECT user_id, campaign_id, email_key FROM due ORDER BY user_id, campaign_id, email_key
        ON CONFLICT (user_id, campaign_id, email_key) DO NOTHING
    RETURNING dispatch_id, user_id, campaign_id, email_key
  ), won AS (
    SELECT dispatch_id, campaign_id, source_partition, source_offset, ordinal
      FROM reserved JOIN due USING (user_id, campaign_id, email_key)
  ), counted AS (
    INSERT INTO dispatch_counts (campaign_id, source_partition, dispatches)
    SELECT campaign_id, source_partition, count(*)
      FROM won GROUP BY campaign_id, source_partition ORDER BY campaign_id, source_partition
        ON CONFLICT (campaign_id, source_partition)
        DO UPDATE SET dispatches = dispatch_counts.dispatches + excluded.dispatches
  ), entered AS (
    INSERT INTO pending (dispatch_id, campaign_id, source_partition, source_offset, reserved_at)
    SELECT dispatch_id, campaign_id, source_partition, source_offset, v_now FROM won
  )
  SELECT array_agg(ordinal::int), array_agg(dispatch_id) INTO v_ordinals, v_won FROM won;

  RETURN QUERY SELECT w.ordinal, w.dispatch_id, v_now, true FROM unnest(v_ordinals, v_won) AS w (ordinal, dispatch_id);
  IF cardinality(v_won) = cardinality(p_user_ids) THEN
    RETURN;
  END IF;

  RETURN QUERY
  SELECT DISTINCT ON (d.dispatch_id) e.ordinal::int, d.dispatch_id, p.reserved_at, false
    FROM unnest(p_user_ids, p_campaign_ids, p_email_keys, p_partitions, p_offsets)
         WITH ORDINALITY AS e (user_id, campaign_id, email_key, source_partition, source_offset, ordinal)
    JOIN dispatches d USING (user_id, campaign_id, email_key)
    JOIN pending p ON p.dispatch_id = d.dispatch_id
   WHERE d.dispatch_id <> ALL (coalesce(v_won, '{}'))
     AND ((p.source_partition, p.source_offset) = (e.source_partition, e.source_offset)
          OR p.reserved_at < v_now - interval '1 minute')
   ORDER BY d.dispatch_id, e.source_partition, e.source_offset;
END $$;
REVOKE ALL ON FUNCTION reserve FROM PUBLIC;
GRANT EXECUTE ON FUNCTION reserve TO fairpost_processor;
