-- These name no search path, so that Postgres puts their text in place of their calls: they run for every message.

-- mailbox_of: the address of a message in the form in which suppressions compare addresses; both as `messages` has them.
CREATE OR REPLACE FUNCTION mailbox_of(p_email text, p_mailbox text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
  SELECT coalesce(p_mailbox, lower(p_email COLLATE "C"))
$$;

-- mailbox_forms: what may stand for a mailbox in `suppressions`: the mailbox, and its digest where a user was forgotten.
CREATE OR REPLACE FUNCTION mailbox_forms(p_mailbox text) RETURNS text[]
LANGUAGE sql STABLE AS $$
  SELECT ARRAY[p_mailbox, 'sha256:' || encode(sha256(convert_to(p_mailbox, 'UTF8')), 'hex')]
$$;

-- suppressing: what keeps a campaign's mail from a mailbox.
CREATE OR REPLACE FUNCTION suppressing(p_mailbox text, p_campaign_id text) RETURNS SETOF suppressions
LANGUAGE sql STABLE AS $$
  SELECT * FROM suppressions
   WHERE mailbox = ANY (mailbox_forms(p_mailbox)) AND (campaign_id IS NULL OR campaign_id = p_campaign_id)
$$;

REVOKE ALL ON FUNCTION mailbox_of, mailbox_forms, suppressing FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mailbox_of, mailbox_forms, suppressing TO fairpost_processor;
