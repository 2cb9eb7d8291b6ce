-- What metrics are measured from, at a cost that does not grow with the messages, nor with chunks that are done.

-- When a message's dispatch was reserved; planning takes it from `pending`. Null: planned before there was this column.
ALTER TABLE messages ADD COLUMN reserved_at timestamptz;

-- A chunk with messages on their way. Changes with the first and the last of them only, so that updates stay heap-only.
ALTER TABLE chunk_counts
  ADD COLUMN is_open boolean GENERATED ALWAYS AS (handed + uncertain + queued + deferred > 0) STORED;
CREATE INDEX chunk_counts_open ON chunk_counts (chunk_id) WHERE is_open;

CREATE INDEX campaigns_not_ended ON campaigns (campaign_id) WHERE ended_at IS NULL;
