"""Hostile data in the database: every command that shows it shows it, and a terminal obeys none of it."""

import asyncio
import json

from msgspec.structs import replace

from contract.events import Template
from tests.integration.conftest import Fairpost, Post, due, fetch_one, scheduled

ESCAPES = "\x1b[2J\x9b31m\x07\r\n\t\u202e\u2028'; DROP TABLE messages; --\\"
"""What clears a screen, colours it, rings, begins a line, turns the writing, and ends a statement."""
CAMPAIGN = f"c{ESCAPES}"
USER = f"u{ESCAPES}"
EMAIL_KEY = f"k{ESCAPES}"

ARRANGE = """
UPDATE messages SET state = 'handed', handed_at = now(), instance = %(hostile)s;
UPDATE messages SET state = 'uncertain', status_at = now(), attempts = 1, class = 'hard', dsn = '5.1.1', reply = %(hostile)s;
INSERT INTO instances (instance, machine_id, queue_directory, started_at, seen_at, version)
VALUES (%(hostile)s, %(hostile)s, %(hostile)s, now(), now(), %(hostile)s);
INSERT INTO queue_ids (instance, queue_id, dispatch_id, seen_at)
SELECT %(hostile)s, %(hostile)s, dispatch_id, now() FROM messages;
INSERT INTO suppressions (mailbox, source, reason, since, reply, campaign_id)
VALUES ('user1@example.test', 'import', %(hostile)s, now(), %(hostile)s, %(campaign)s);
UPDATE campaigns SET held_at = now(), held_by = %(hostile)s, ended_at = now();
INSERT INTO audit (at, actor, action, subject) SELECT changed_at, %(hostile)s, 'sending.on', 'fleet' FROM fleet"""

READING = [
    ("audit",),
    ("campaigns", "list"),
    ("campaigns", "show", CAMPAIGN),
    ("dispatches", USER),
    ("dispatches", "--unplanned"),
    ("instances", "list"),
    ("log", "explain", "user1@example.test"),
    ("operators", "list"),
    ("sending", "status"),
    ("suppressions", "list"),
    ("suppressions", "check", "user1@example.test", "--campaign", CAMPAIGN),
    ("uncertain", "list"),
]


async def arrange(post: Post) -> None:
    """One message of which all that others name is hostile, and one that is reserved only."""
    template = Template(subject="s", text="t")
    await post.apply(scheduled(CAMPAIGN, name=ESCAPES, templates={EMAIL_KEY: template}))
    email = due(1, CAMPAIGN, email_key=EMAIL_KEY)
    await post.plan([replace(email, user_id=USER)])
    await post.reserve([replace(email, user_id=f"{USER}2")])
    values = {"hostile": ESCAPES, "campaign": CAMPAIGN}
    for statement in ARRANGE.split(";"):
        await post.owner.execute(statement.encode(), values)


async def test_a_terminal_obeys_nothing_in_the_database(post: Post, fairpost: Fairpost) -> None:
    """Whatever names, replies and reasons hold, each listing shows them escaped, as a table and as JSON that says the same."""
    await arrange(post)
    for words in READING:
        for options in ((), ("--json",)):
            said = await asyncio.to_thread(fairpost, *words, *options)
            text = (said.out + said.err.encode()).decode()
            assert said.code in (0, 1), (words, text)
            assert text.replace("\n", "").isprintable(), (words, options)
            assert not any(line.startswith("'; DROP") for line in text.splitlines()), words
            # A table folds what is long, an escape too.
            assert "DROP" in text or "\\x1b" in text or words[0] == "operators", (words, options)
            if options:
                json.loads(said.out)
    listed = json.loads((await asyncio.to_thread(fairpost, "campaigns", "list", "--json")).out)
    assert [campaign["campaign_id"] for campaign in listed] == [CAMPAIGN]
    assert await fetch_one(post.owner, "SELECT count(*) FROM messages") == 1
