-- An instance belongs to the login role under which its agent first started: no other agent acts in its name.
ALTER TABLE instances ADD COLUMN login name;

-- What an agent reads of hand-overs is when and how many there were. The claims' tokens are for those who hold them.
REVOKE SELECT ON handovers FROM fairpost_agent;
GRANT SELECT (instance, operator, at, positions) ON handovers TO fairpost_agent;
