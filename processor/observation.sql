-- What is measured of the whole installation, again and again. Counts are kept, not counted: a row a chunk, and only of
-- chunks that are not done, so that it costs the same at ten and at ten million messages. Other joins than row by row
-- would read all chunks there ever were.

-- count_by_operator: chunks with something planned, and messages that are not final, of each operator.
--
-- `held`: under a live lease. `claimable`: a lane could have it now, by what next_chunk and claim_chunk look at. `waiting`:
-- all others: their campaign, their operator or the fleet does not send now, or they were opened just now.
CREATE OR REPLACE FUNCTION count_by_operator()
RETURNS TABLE (operator text, held bigint, claimable bigint, waiting bigint,
               planned bigint, handed bigint, uncertain bigint, queued bigint, deferred bigint)
LANGUAGE sql STABLE SET search_path = fairpost, pg_temp SET enable_seqscan = off SET enable_mergejoin = off
SET enable_hashjoin = off AS $$
  WITH to_do AS (
    SELECT k.operator, k.planned,
           k.instance IS NOT NULL AND k.lease_until > clock_timestamp() AS held,
           c.state = 'active' AND c.ended_at IS NULL AND c.held_at IS NULL AND c.scheduled_for <= clock_timestamp()
             AND o.paused_at IS NULL AND (SELECT sending FROM fleet)
             AND (k.sealed OR k.size = k.capacity OR k.opened_at <= clock_timestamp() - interval '1 second') AS sends
      FROM chunks k JOIN campaigns c USING (campaign_id) JOIN operators o USING (operator)
     WHERE k.has_planned
  ), to_do_by_operator AS (
    SELECT operator, sum(planned)::bigint AS planned, count(*) FILTER (WHERE held) AS held,
           count(*) FILTER (WHERE sends AND NOT held) AS claimable,
           count(*) FILTER (WHERE NOT sends AND NOT held) AS waiting
      FROM to_do GROUP BY operator
  ), under_way_by_operator AS (
    SELECT k.operator, sum(n.handed)::bigint AS handed, sum(n.uncertain)::bigint AS uncertain,
           sum(n.queued)::bigint AS queued, sum(n.deferred)::bigint AS deferred
      FROM chunk_counts n JOIN chunks k USING (chunk_id)
     WHERE n.is_open GROUP BY k.operator
  )
  SELECT operator, coalesce(held, 0), coalesce(claimable, 0), coalesce(waiting, 0),
         coalesce(planned, 0), coalesce(handed, 0), coalesce(uncertain, 0), coalesce(queued, 0), coalesce(deferred, 0)
    FROM operators LEFT JOIN to_do_by_operator USING (operator) LEFT JOIN under_way_by_operator USING (operator)
$$;

-- count_campaigns: those that have not ended, by state; one under a hold is `held`.
CREATE OR REPLACE FUNCTION count_campaigns() RETURNS TABLE (state text, campaigns bigint)
LANGUAGE sql STABLE SET search_path = fairpost, pg_temp SET enable_seqscan = off SET enable_mergejoin = off
SET enable_hashjoin = off AS $$
  SELECT CASE WHEN held_at IS NOT NULL THEN 'held' ELSE state::text END, count(*)
    FROM campaigns WHERE ended_at IS NULL GROUP BY 1
$$;

-- most_active: the p_limit campaigns that have not ended and were claimed last, each with its dispatches.
CREATE OR REPLACE FUNCTION most_active(p_limit int) RETURNS TABLE (campaign_id text, dispatches bigint)
LANGUAGE sql STABLE SET search_path = fairpost, pg_temp SET enable_seqscan = off SET enable_mergejoin = off
SET enable_hashjoin = off AS $$
  SELECT c.campaign_id,
         (SELECT coalesce(sum(d.dispatches), 0)::bigint FROM dispatch_counts d WHERE d.campaign_id = c.campaign_id)
    FROM (
      SELECT c.campaign_id
        FROM campaigns c
        LEFT JOIN LATERAL (
          SELECT max(t.claimed_at) AS at FROM operators o JOIN claim_turns t USING (operator)
           WHERE t.campaign_id = c.campaign_id) claimed ON true
       WHERE c.ended_at IS NULL
       ORDER BY claimed.at DESC NULLS LAST, c.scheduled_for DESC NULLS LAST, c.campaign_id
       LIMIT p_limit) c
$$;

-- count_by_campaign: messages of these campaigns by operator and state; reads a row for each of their chunks.
CREATE OR REPLACE FUNCTION count_by_campaign(p_campaign_ids text[])
RETURNS TABLE (campaign_id text, operator text, planned bigint, handed bigint, uncertain bigint, queued bigint,
               deferred bigint, sent bigint, bounced bigint, expired bigint, rejected bigint, suppressed bigint,
               cancelled bigint)
LANGUAGE sql STABLE SET search_path = fairpost, pg_temp SET enable_seqscan = off SET enable_mergejoin = off
SET enable_hashjoin = off AS $$
  SELECT campaign_id, operator, sum(planned), sum(handed), sum(uncertain), sum(queued), sum(deferred), sum(sent),
         sum(bounced), sum(expired), sum(rejected), sum(suppressed), sum(cancelled)
    FROM chunks JOIN chunk_counts USING (chunk_id)
   WHERE campaign_id = ANY (p_campaign_ids) GROUP BY campaign_id, operator
$$;

REVOKE ALL ON FUNCTION count_by_operator, count_campaigns, most_active, count_by_campaign FROM PUBLIC;
GRANT EXECUTE ON FUNCTION count_by_operator, count_campaigns, most_active, count_by_campaign TO fairpost_processor;
