-- The schema of fairpost. Locks are taken in the order campaigns, pending, chunks, messages, suppressions, chunk_counts.
-- Columns that change at every hand-over stand in no index, so that their updates stay heap-only.

-- The two roles; the people who run it make login roles that are members of one of them.
DO $$
DECLARE
  role_name text;
BEGIN
  FOREACH role_name IN ARRAY ARRAY['fairpost_processor', 'fairpost_agent'] LOOP
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role_name) THEN
      BEGIN
        EXECUTE format('CREATE ROLE %I NOLOGIN', role_name);
      EXCEPTION WHEN duplicate_object OR unique_violation THEN
        NULL; -- another database of this cluster made it meanwhile
      END;
    END IF;
  END LOOP;
END $$;

-- The order is the rank of a state: what comes before 'sent' is not final (contract/states.py).
CREATE TYPE message_state AS ENUM (
  'planned', 'handed', 'uncertain', 'queued', 'deferred',
  'sent', 'bounced', 'expired', 'rejected', 'suppressed', 'cancelled');
CREATE TYPE campaign_state AS ENUM ('waiting', 'active', 'paused', 'cancelled');

-- One row: whether the fleet sends at all (`fairpost sending off`).
CREATE TABLE fleet (
  only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
  sending boolean NOT NULL DEFAULT true,
  changed_at timestamptz NOT NULL DEFAULT now());
INSERT INTO fleet DEFAULT VALUES;

CREATE TABLE operators (
  operator text PRIMARY KEY,
  per_minute int CHECK (per_minute > 0),
  chunk_size int NOT NULL CHECK (chunk_size > 0),
  tie_break text NOT NULL DEFAULT 'schedule' CHECK (tie_break IN ('schedule', 'rotate')),
  transport jsonb NOT NULL DEFAULT '{}',
  paused_at timestamptz,
  applied_at timestamptz NOT NULL DEFAULT now());
INSERT INTO operators (operator, chunk_size) VALUES ('other', 10000);
CREATE TABLE operator_domains (
  domain text PRIMARY KEY,
  operator text NOT NULL REFERENCES operators ON DELETE CASCADE);

-- A campaign that due e-mails named before its own event came is 'waiting' and has no content.
CREATE TABLE campaigns (
  campaign_id text PRIMARY KEY,
  state campaign_state NOT NULL DEFAULT 'waiting',
  scheduled_for timestamptz,
  finish_by timestamptz,
  held_at timestamptz,            -- a hold: only a person sets and lifts it
  held_by text,
  ended_at timestamptz,           -- nothing left to do, and nothing came for a day
  revision bigint NOT NULL DEFAULT 0, -- counts the contents that replaced one another
  applied_at timestamptz,         -- append time and offset of the last event applied
  applied_offset bigint,
  created_at timestamptz NOT NULL DEFAULT now(),
  pruned bigint NOT NULL DEFAULT 0,   -- messages whose rows are gone
  name text,
  sender text,
  reply_to text,
  unsubscribe_url text,
  templates jsonb,
  headers jsonb NOT NULL DEFAULT '{}',
  CHECK (state <> 'active' OR scheduled_for IS NOT NULL)) WITH (fillfactor = 80);
CREATE INDEX campaigns_due ON campaigns (scheduled_for) WHERE state = 'active' AND ended_at IS NULL;

-- The reservation of each due e-mail, kept for ever: what makes it once.
CREATE TABLE dispatches (
  dispatch_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  user_id text NOT NULL,
  campaign_id text NOT NULL,
  email_key text NOT NULL,
  UNIQUE (user_id, campaign_id, email_key)) WITH (fillfactor = 100);
-- How many there are, by the partition of due-emails they came from: each has one writer at a time.
CREATE TABLE dispatch_counts (
  campaign_id text NOT NULL,
  source_partition int NOT NULL,
  dispatches bigint NOT NULL,
  PRIMARY KEY (campaign_id, source_partition)) WITH (fillfactor = 50);
-- Reserved and not yet planned; planning takes the row out, and only the first planner finds it.
CREATE TABLE pending (
  dispatch_id bigint PRIMARY KEY,
  source_offset bigint NOT NULL,
  reserved_at timestamptz NOT NULL,
  source_partition int NOT NULL,
  campaign_id text NOT NULL);

-- What one server takes: up to `capacity` messages of one campaign to one operator.
CREATE TABLE chunks (
  chunk_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  opened_at timestamptz NOT NULL,
  claimed_at timestamptz,         -- of the last claim; kept when it is given back
  lease_until timestamptz,        -- of the claim that holds it
  claim_token uuid,               -- fencing: whoever writes for the chunk shows it
  number int NOT NULL,            -- gapless within the campaign, from 1
  capacity int NOT NULL,
  size int NOT NULL,
  planned int NOT NULL DEFAULT 0, -- messages to be handed over
  cursor int NOT NULL DEFAULT 0,  -- no planned message stands before this position
  sealed boolean NOT NULL DEFAULT false, -- claimed once: takes no further messages
  has_planned boolean GENERATED ALWAYS AS (planned > 0) STORED,
  instance text,                  -- who holds it; null when nobody does
  campaign_id text NOT NULL REFERENCES campaigns,
  operator text NOT NULL,
  UNIQUE (campaign_id, number),
  CHECK (size BETWEEN 0 AND capacity),
  CHECK (planned BETWEEN 0 AND size),
  CHECK (cursor BETWEEN 0 AND size),
  CHECK ((instance IS NULL) = (claim_token IS NULL)),
  CHECK ((instance IS NULL) = (lease_until IS NULL))) WITH (fillfactor = 80);
CREATE INDEX chunks_to_do ON chunks (operator, campaign_id, number) WHERE has_planned;
CREATE INDEX chunks_open ON chunks (campaign_id, operator, number) WHERE NOT sealed;
CREATE INDEX chunks_held ON chunks (operator, campaign_id) WHERE instance IS NOT NULL;

-- The mail of each planned dispatch.
CREATE TABLE messages (
  dispatch_id bigint PRIMARY KEY,
  chunk_id bigint NOT NULL,
  handed_at timestamptz,          -- of the last hand-over
  status_at timestamptz,          -- of the last line of the log that said something of it
  not_after timestamptz,
  position int NOT NULL,          -- within the chunk, from 0
  state message_state NOT NULL,
  handovers int NOT NULL DEFAULT 0,
  attempts smallint NOT NULL DEFAULT 0, -- deliveries that Postfix tried
  email text NOT NULL,
  variables jsonb NOT NULL,
  instance text,
  class text,
  dsn text,
  reply text,
  mailbox text) WITH (fillfactor = 50); -- as suppressions compare it; null: the address in ASCII lower case
CREATE UNIQUE INDEX messages_position ON messages (chunk_id, position);
-- Counts by state, beside `chunks.planned`.
CREATE TABLE chunk_counts (
  chunk_id bigint PRIMARY KEY,
  handed int NOT NULL DEFAULT 0,
  uncertain int NOT NULL DEFAULT 0,
  queued int NOT NULL DEFAULT 0,
  deferred int NOT NULL DEFAULT 0,
  sent int NOT NULL DEFAULT 0,
  bounced int NOT NULL DEFAULT 0,
  expired int NOT NULL DEFAULT 0,
  rejected int NOT NULL DEFAULT 0,
  suppressed int NOT NULL DEFAULT 0,
  cancelled int NOT NULL DEFAULT 0) WITH (fillfactor = 50);

-- Keeps the counts: whatever changes messages, the statement that does so changes them too.
CREATE FUNCTION count_messages() RETURNS trigger LANGUAGE plpgsql SET search_path = fairpost, pg_temp AS $$
DECLARE
  v_chunk_ids bigint[];
  v_states message_state[];
  v_steps bigint[];
BEGIN
  IF TG_OP = 'INSERT' THEN
    SELECT array_agg(chunk_id), array_agg(state), array_agg(step) INTO v_chunk_ids, v_states, v_steps
      FROM (SELECT chunk_id, state, count(*) AS step FROM entered GROUP BY chunk_id, state) z;
  ELSIF TG_OP = 'DELETE' THEN
    SELECT array_agg(chunk_id), array_agg(state), array_agg(step) INTO v_chunk_ids, v_states, v_steps
      FROM (SELECT chunk_id, state, -count(*) AS step FROM departed GROUP BY chunk_id, state) z;
  ELSE
    SELECT array_agg(chunk_id), array_agg(state), array_agg(step) INTO v_chunk_ids, v_states, v_steps
      FROM (SELECT chunk_id, state, sum(step)::bigint AS step
              FROM (SELECT chunk_id, state, 1 AS step FROM entered UNION ALL SELECT chunk_id, state, -1 FROM departed) moved
             GROUP BY chunk_id, state HAVING sum(step) <> 0) z;
  END IF;
  IF v_chunk_ids IS NULL THEN
    RETURN NULL;
  END IF;

  UPDATE chunks k SET planned = k.planned + z.step
    FROM (SELECT k.chunk_id, m.step
            FROM chunks k JOIN unnest(v_chunk_ids, v_states, v_steps) AS m (chunk_id, state, step) USING (chunk_id)
           WHERE m.state = 'planned' ORDER BY k.chunk_id FOR NO KEY UPDATE OF k) z
   WHERE k.chunk_id = z.chunk_id;

  WITH step AS (
    SELECT chunk_id,
           coalesce(sum(step) FILTER (WHERE state = 'handed'), 0) AS handed,
           coalesce(sum(step) FILTER (WHERE state = 'uncertain'), 0) AS uncertain,
           coalesce(sum(step) FILTER (WHERE state = 'queued'), 0) AS queued,
           coalesce(sum(step) FILTER (WHERE state = 'deferred'), 0) AS deferred,
           coalesce(sum(step) FILTER (WHERE state = 'sent'), 0) AS sent,
           coalesce(sum(step) FILTER (WHERE state = 'bounced'), 0) AS bounced,
           coalesce(sum(step) FILTER (WHERE state = 'expired'), 0) AS expired,
           coalesce(sum(step) FILTER (WHERE state = 'rejected'), 0) AS rejected,
           coalesce(sum(step) FILTER (WHERE state = 'suppressed'), 0) AS suppressed,
           coalesce(sum(step) FILTER (WHERE state = 'cancelled'), 0) AS cancelled
      FROM unnest(v_chunk_ids, v_states, v_steps) AS m (chunk_id, state, step)
     WHERE state <> 'planned' GROUP BY chunk_id
  ), locked AS (
    SELECT step.* FROM chunk_counts c JOIN step USING (chunk_id) ORDER BY c.chunk_id FOR NO KEY UPDATE OF c
  )
  UPDATE chunk_counts c
     SET handed = c.handed + l.handed, uncertain = c.uncertain + l.uncertain, queued = c.queued + l.queued,
         deferred = c.deferred + l.deferred, sent = c.sent + l.sent, bounced = c.bounced + l.bounced,
         expired = c.expired + l.expired, rejected = c.rejected + l.rejected,
         suppressed = c.suppressed + l.suppressed, cancelled = c.cancelled + l.cancelled
    FROM locked l WHERE c.chunk_id = l.chunk_id;
  RETURN NULL;
END $$;
CREATE TRIGGER count_inserted AFTER INSERT ON messages REFERENCING NEW TABLE AS entered
  FOR EACH STATEMENT EXECUTE FUNCTION count_messages();
CREATE TRIGGER count_updated AFTER UPDATE ON messages REFERENCING OLD TABLE AS departed NEW TABLE AS entered
  FOR EACH STATEMENT EXECUTE FUNCTION count_messages();
CREATE TRIGGER count_deleted AFTER DELETE ON messages REFERENCING OLD TABLE AS departed
  FOR EACH STATEMENT EXECUTE FUNCTION count_messages();

-- When each campaign was last claimed at an operator, for `tie_break = 'rotate'`.
CREATE TABLE claim_turns (
  operator text NOT NULL,
  campaign_id text NOT NULL,
  claimed_at timestamptz NOT NULL,
  PRIMARY KEY (operator, campaign_id)) WITH (fillfactor = 50);

-- One Postfix and its agent; the row binds the name to a machine, a queue and the agent's login.
CREATE TABLE instances (
  instance text PRIMARY KEY,
  machine_id text NOT NULL,
  queue_directory text NOT NULL,
  started_at timestamptz NOT NULL,
  seen_at timestamptz NOT NULL,
  paused_at timestamptz,
  retired_at timestamptz,
  version text NOT NULL,
  login text) WITH (fillfactor = 50); -- of Postgres; null: adopted, the next agent that starts binds it
-- What was given to Postfix when: the write-ahead of each batch, and the window that pacing starts from.
CREATE TABLE handovers (
  claim_token uuid NOT NULL,
  batch int NOT NULL,             -- within the claim, from 1
  chunk_id bigint NOT NULL,
  at timestamptz NOT NULL,
  log_inode bigint,               -- of Postfix's log; null in the minute after a rotation
  postfix_started_at timestamptz, -- of the master process then running; another: Postfix was restarted
  instance text NOT NULL,
  operator text NOT NULL,
  positions int[] NOT NULL,
  PRIMARY KEY (claim_token, batch));
CREATE INDEX handovers_recent ON handovers (instance, operator, at);
CREATE INDEX handovers_age ON handovers USING brin (at);

-- Which instances ever held a chunk: where to look for the messages that an instance may have.
CREATE TABLE claims (
  instance text NOT NULL,
  chunk_id bigint NOT NULL,
  PRIMARY KEY (instance, chunk_id)) WITH (fillfactor = 100);
CREATE INDEX claims_of_chunk ON claims (chunk_id);
-- Deliveries that Postfix tried again, by the second: the pace takes them off what may be handed over.
CREATE TABLE retries (
  instance text NOT NULL,
  operator text NOT NULL,
  at timestamptz NOT NULL,
  number int NOT NULL,
  PRIMARY KEY (instance, operator, at)) WITH (fillfactor = 50);

-- A fence asked for. It is judged once its line was read and the agent has confirmed it, with what is known by then.
CREATE TABLE fences (
  fence_token text PRIMARY KEY,
  instance text NOT NULL,
  reason text NOT NULL CHECK (reason IN ('start', 'doubt', 'restart', 'audit')),
  asked_at timestamptz NOT NULL,
  postfix_started_at timestamptz, -- of the one master that ran from before the listings to after the line; null: none did
  inode_before bigint,            -- of Postfix's log before the listings and after the line; null after a rotation
  inode_after bigint,
  confirmed_at timestamptz,       -- when the agent stored what held after the line
  line_seen_at timestamptz,       -- when all of the log up to the line was tracked
  judged_at timestamptz,
  given_back int,                 -- messages that Postfix never accepted
  uncertain int);
CREATE INDEX fences_unjudged ON fences (instance, asked_at) WHERE judged_at IS NULL;
CREATE INDEX fences_recent ON fences (instance, asked_at);
-- The messages that a fence is to judge: Postfix's queue did not hold them.
CREATE TABLE fence_messages (
  fence_token text NOT NULL REFERENCES fences ON DELETE CASCADE,
  dispatch_id bigint NOT NULL,
  handed_at timestamptz NOT NULL,
  PRIMARY KEY (fence_token, dispatch_id));
CREATE INDEX fence_messages_of ON fence_messages (dispatch_id);

-- Which dispatch a queue id of an instance carries; null: mail that is not ours.
CREATE TABLE queue_ids (
  dispatch_id bigint,
  seen_at timestamptz NOT NULL,
  instance text NOT NULL,
  queue_id text NOT NULL,
  PRIMARY KEY (instance, queue_id));
CREATE INDEX queue_ids_age ON queue_ids USING brin (seen_at);
-- Lines whose queue id is not known yet.
CREATE TABLE early_statuses (
  early_status_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at timestamptz NOT NULL,
  received_at timestamptz NOT NULL DEFAULT now(),
  state message_state NOT NULL,
  instance text NOT NULL,
  queue_id text NOT NULL,
  class text,
  dsn text,
  reply text,
  UNIQUE (instance, queue_id, at, state));

-- Mailboxes that get no mail, in the form in which addresses are compared (contract/addresses.py), or that form's digest
-- where the user was forgotten (mailbox_forms). The order of the ids is that in which they were stored.
CREATE TABLE suppressions (
  suppression_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  since timestamptz NOT NULL,
  dispatch_id bigint,             -- whose mail bounced
  mailbox text COLLATE "C" NOT NULL,
  campaign_id text,               -- null: all campaigns
  source text NOT NULL CHECK (source IN ('bounce', 'person', 'import')),
  reason text NOT NULL,
  dsn text,
  reply text,
  UNIQUE NULLS NOT DISTINCT (mailbox, campaign_id));
CREATE INDEX suppressions_of_dispatch ON suppressions (dispatch_id) WHERE dispatch_id IS NOT NULL;

-- What delivery-status is still to be told; a row goes when the broker has acknowledged it.
CREATE TABLE outbox (
  event_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  dispatch_id bigint NOT NULL,
  at timestamptz NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  status message_state NOT NULL,
  attempt smallint NOT NULL DEFAULT 0,
  class text,
  dsn text,
  reply text,
  instance text) WITH (autovacuum_vacuum_scale_factor = 0.01);

-- What people did, and when.
CREATE TABLE audit (
  audit_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at timestamptz NOT NULL DEFAULT now(),
  actor text NOT NULL,
  action text NOT NULL,
  subject text NOT NULL,
  details jsonb NOT NULL DEFAULT '{}');

-- How many partitions a topic had when it was first read, where promises rest on their number.
CREATE TABLE topics (
  topic text PRIMARY KEY,
  partitions int NOT NULL CHECK (partitions > 0),
  recorded_at timestamptz NOT NULL DEFAULT now());

-- The processor reads and writes its tables; it makes and drops none, and forgets no dispatch.
GRANT SELECT ON ALL TABLES IN SCHEMA fairpost TO fairpost_processor;
GRANT INSERT ON dispatches, audit TO fairpost_processor;
GRANT INSERT, UPDATE ON campaigns, chunks, chunk_counts, dispatch_counts, topics TO fairpost_processor;
GRANT INSERT, UPDATE, DELETE ON operators, messages, retries TO fairpost_processor;
GRANT INSERT, DELETE ON operator_domains, pending, outbox, early_statuses, queue_ids, suppressions TO fairpost_processor;
GRANT UPDATE ON instances, fences TO fairpost_processor;
GRANT UPDATE (reply) ON outbox TO fairpost_processor;
GRANT UPDATE (source, reason) ON suppressions TO fairpost_processor;
GRANT UPDATE (log_inode) ON handovers TO fairpost_processor;
GRANT UPDATE (sending, changed_at) ON fleet TO fairpost_processor;
GRANT DELETE ON chunks, chunk_counts, claims, handovers, fences, fence_messages TO fairpost_processor;
-- An agent reads what it sends and how fast, and writes nothing but through the functions granted to it.
GRANT SELECT ON operators, operator_domains, campaigns, retries, schema_files TO fairpost_agent;
GRANT SELECT (instance, operator, at, positions) ON handovers TO fairpost_agent; -- not the tokens of others' claims
GRANT USAGE ON SCHEMA fairpost TO fairpost_processor, fairpost_agent;
