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

REVOKE ALL ON FUNCTION mailbox_of, mailbox_forms FROM PUBLIC;
GRANT EXECUTE ON FUNCTION mailbox_of, mailbox_forms TO fairpost_processor;
