"""The audit: every command that changes something writes who, when and what; nothing changes it, and no address is in it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from contract.database import Connection
from contract.events import DEAD_LETTERS, DELIVERY_LOG, DUE_EMAILS
from processor.audit import Act, Action, Selection, list_audit, record
from processor.cli import cli
from processor.cli.session import actor
from processor.consuming import Record
from processor.dead_letters import dead_letter
from processor.emitting import Emission
from processor.operators import pause_operator
from processor.publishing import Publisher
from processor.retention import forget
from processor.settings import ProcessorSettings
from processor.suppressions import add, read_suppression
from smtp_agent.handover import Refusal
from testbed.ports import reserve_port
from tests.conftest import Database, TestTopics
from tests.integration.conftest import (
    START,
    Answer,
    Fairpost,
    Post,
    due,
    fetch,
    fetch_one,
    scheduled,
)

READS = {
    "audit",
    "campaigns export",
    "campaigns list",
    "campaigns preview",
    "campaigns show",
    "completion",
    "dead-letters list",
    "dead-letters show",
    "dispatches",
    "instances list",
    "log classify",
    "log explain",
    "log parse",
    "operators list",
    "sending status",
    "status",
    "suppressions check",
    "suppressions list",
    "topics check",
    "tracker",
    "uncertain list",
    "worker",
}
"""Commands that change nothing, or whose work is nobody's in person."""

CHANGES: dict[str, tuple[str, Action]] = {
    "migrate": ("--database {owner}", Action.MIGRATE),
    "topics create": ("--replication 1 --partitions 1", Action.TOPICS_CREATE),
    "topics accept": ("--yes", Action.TOPICS_ACCEPT),
    "operators apply": ("{directory}/operators.toml", Action.OPERATORS_APPLY),
    "operators pause": ("gmail", Action.OPERATOR_PAUSE),
    "operators resume": ("gmail", Action.OPERATOR_RESUME),
    "sending off": ("", Action.SENDING_OFF),
    "sending on": ("", Action.SENDING_ON),
    "publish campaign": ("{directory}/spring.toml", Action.CAMPAIGN_PUBLISH),
    "publish due-emails": ("{directory}/contacts.csv", Action.DUE_EMAILS_PUBLISH),
    "dead-letters republish": ("0:0 --yes", Action.DEAD_LETTERS_REPUBLISH),
    "campaigns test": ("c --to me@shop.test", Action.CAMPAIGN_TEST),
    "campaigns pause": ("c", Action.CAMPAIGN_HOLD),
    "campaigns resume": ("c", Action.CAMPAIGN_LIFT),
    "campaigns retry-rejected": ("c --yes", Action.CAMPAIGN_RETRY_REJECTED),
    "instances pause": ("postfix-a", Action.INSTANCE_PAUSE),
    "instances resume": ("postfix-a", Action.INSTANCE_RESUME),
    "instances retire": ("postfix-a --force", Action.INSTANCE_RETIRE),
    "uncertain resend": ("{lost[0]} --yes", Action.UNCERTAIN_RESEND),
    "uncertain drop": ("{lost[1]} --yes", Action.UNCERTAIN_DROP),
    "instances adopt": ("postfix-a", Action.INSTANCE_ADOPT),
    "suppressions add": ("ann@shop.test", Action.SUPPRESSION_ADD),
    "suppressions import": ("{directory}/left.csv", Action.SUPPRESSION_IMPORT),
    "suppressions remove": ("ann@shop.test", Action.SUPPRESSION_REMOVE),
    "prune": ("--older-than 90d", Action.PRUNE),
    "forget": ("user1 --yes", Action.FORGET),
    "campaigns cancel": ("c --yes", Action.CAMPAIGN_CANCEL),
}
"""The other commands, in an order in which each has something to do: its words, and what is then on record."""

FILES = {
    "operators.toml": '[[operator]]\nname = "gmail"\ndomains = ["gmail.test"]\nper_minute = 350\n',
    "spring.toml": (
        'campaign_id = "spring"\nname = "Spring"\nsender = "news@shop.test"\nscheduled_for = 2026-12-01T08:00:00Z\n'
        '[templates.offer]\nsubject = "Hi"\ntext = "Hello {{ name }}"\n'
    ),
    "contacts.csv": "user_id,email,campaign_id,email_key,name\nu1,ann@shop.test,spring,offer,Ann\nu2,bad,spring,offer,B\n",
    "left.csv": "email\nben@shop.test\ncem@shop.test\n",
}


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The words that name each command that is no group."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the files stand that commands are given."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


async def run(fairpost: Fairpost, *words: str) -> Answer:
    """A command, outside this event loop."""
    return await asyncio.to_thread(fairpost, *words)


async def prepare(post: Post, settings: ProcessorSettings) -> list[int]:
    """A rejected message, a dead letter, and two messages at an instance whose agent is not seen again: their dispatches."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(3)])
    _, batch = await post.hand(3)
    assert batch.handed_at is not None
    rejected, *lost = (recipient.dispatch_id for recipient in batch.recipients)
    await post.handover().reject([Refusal(rejected, batch.handed_at, None, "a template")])
    async with post.agent.connection() as connection:
        await connection.execute(
            "SELECT register_instance('postfix-a', 'machine', '/q', '0.1', true)"
        )
    record = Record(settings.topic(DUE_EMAILS), 0, 17, START, b"{}", b"k")
    letter = Emission(settings.topic(DEAD_LETTERS), DUE_EMAILS, dead_letter(record, "why"))
    assert Publisher(settings.brokers).publish([letter]) == [None]
    return lost


async def test_every_command_that_changes_something_is_on_record(
    post: Post,
    database: Database,
    settings: ProcessorSettings,
    fairpost: Fairpost,
    directory: Path,
) -> None:
    """Each command of the command line either changes nothing, or makes an entry with who did what; none is forgotten."""
    assert set(commands(cli)) == READS | CHANGES.keys()
    assert not READS & CHANGES.keys()
    assert {action for _, action in CHANGES.values()} == set(Action)
    lost = [0, 0]
    for command, (words, action) in CHANGES.items():
        if command == "migrate":
            await post.owner.execute(
                "UPDATE schema_files SET digest = '' WHERE file LIKE '%%fences%%'"
            )
        if command == "topics accept":
            values = (settings.topic(DELIVERY_LOG), 7)
            await post.owner.execute("INSERT INTO topics VALUES (%s, %s)", values)
        if command == "operators apply":
            lost = await prepare(post, settings)
        if command == "instances adopt":
            await post.owner.execute("UPDATE instances SET seen_at = seen_at - interval '1 hour'")
        before = await fetch_one(post.owner, "SELECT coalesce(max(audit_id), 0) FROM audit")
        filled = [
            word.format(owner=database.owner, directory=directory, lost=lost)
            for word in words.split()
        ]
        answer = await run(fairpost, *command.split(), *filled)
        assert answer.code == (1 if command == "publish due-emails" else 0), (command, answer)
        entries = await fetch(
            post.owner, "SELECT DISTINCT actor, action FROM audit WHERE audit_id > %s", before
        )
        assert entries == [(actor(), action)], command
    assert "shop.test" not in await fetch_one(
        post.owner, "SELECT string_agg(audit::text, ' ') FROM audit"
    )


async def test_what_a_producers_file_did(
    topics: TestTopics,
    owner: Connection,
    fairpost: Fairpost,
    directory: Path,
) -> None:
    """Of what was published stands how much, of which campaign, and from which file; a refused row counts for nothing."""
    await run(fairpost, "publish", "campaign", str(directory / "spring.toml"))
    await run(fairpost, "publish", "due-emails", str(directory / "contacts.csv"))
    file = str(directory / "contacts.csv")
    assert await fetch(owner, "SELECT action, subject, details FROM audit ORDER BY audit_id") == [
        (
            "campaign.publish",
            "spring",
            {"type": "campaign.scheduled", "file": str(directory / "spring.toml")},
        ),
        ("due_emails.publish", "spring", {"published": 1, "file": file}),
    ]
    assert len(topics.values(DUE_EMAILS)) == 1


@pytest.mark.usefixtures("topics")
async def test_what_kafka_took_counts_though_the_database_is_away(
    fairpost: Fairpost,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Publishing works without the database, and says in a line that it is not on record."""
    port = reserve_port()
    monkeypatch.setenv("FAIRPOST_DATABASE", f"host=127.0.0.1 port={port} dbname=x user=x")
    answer = await run(fairpost, "publish", "campaign", str(directory / "spring.toml"))
    assert answer.code == 0
    complaint, done = answer.err.splitlines()
    assert complaint.startswith("audit: not on record: database: ")
    assert done == "published campaign.scheduled of spring"


async def test_what_changes_nothing_is_not_on_record(post: Post, fairpost: Fairpost) -> None:
    """A second pause, or what is asked of something unknown, makes no entry."""
    await post.apply(scheduled())
    for words in (
        ("operators", "resume", "other"),
        ("campaigns", "resume", "c"),
        ("campaigns", "pause", "nobody"),
        ("operators", "pause", "nobody"),
        ("instances", "pause", "nobody"),
        ("sending", "on"),
        ("suppressions", "remove", "ann@shop.test"),
        ("uncertain", "drop", "4711", "--yes"),
        ("campaigns", "retry-rejected", "c", "--yes"),
        ("campaigns", "preview", "c", "--to", "me@shop.test"),
    ):
        await run(fairpost, *words)
    assert await fetch(post.owner, "SELECT action, subject FROM audit") == []
    for _ in range(2):
        await run(fairpost, "operators", "pause", "other")
        await run(fairpost, "campaigns", "pause", "c")
    assert await fetch(post.owner, "SELECT action FROM audit ORDER BY audit_id") == [
        ("operator.pause",),
        ("campaign.hold",),
    ]


async def test_a_change_that_fails_is_not_on_record(post: Post) -> None:
    """An entry stands and falls with the transaction of its change."""
    async with (
        post.worker.connection() as connection,
        connection.transaction(force_rollback=True),
    ):
        await pause_operator(connection, "other", "ann")
    assert await fetch(post.owner, "SELECT FROM audit") == []
    assert await fetch(post.owner, "SELECT FROM operators WHERE paused_at IS NOT NULL") == []


async def test_applied_operators_stand_there_with_what_they_were(
    post: Post, fairpost: Fairpost, directory: Path
) -> None:
    """Of an applied file only what it changed is on record, as it was before and is now."""
    file = directory / "operators.toml"
    await run(fairpost, "operators", "apply", str(file))
    file.write_text(file.read_text().replace("350", "300"))
    await run(fairpost, "operators", "apply", str(file))
    file.write_text('[[operator]]\nname = "gmx"\ndomains = ["gmx.test"]\n')
    await run(fairpost, "operators", "apply", str(file))
    first, second, third = (
        row[0] for row in await fetch(post.owner, "SELECT details FROM audit ORDER BY audit_id")
    )
    assert first["gmail"]["before"] is None
    assert first["gmail"]["after"]["domains"] == ["gmail.test"]
    assert second.keys() == {"gmail"}
    assert [second["gmail"][when]["per_minute"] for when in ("before", "after")] == [350, 300]
    assert third["gmail"]["after"] is None
    assert third["gmx"]["before"] is None


# ------------------------------------------------------------------ the listing


async def listed(fairpost: Fairpost, *words: str) -> list[dict[str, Any]]:
    """What `fairpost audit --json` lists."""
    answer = await run(fairpost, "audit", "--json", *words)
    assert answer.code == 0, answer.err
    rows: list[dict[str, Any]] = msgspec.json.decode(answer.out)
    return rows


async def test_the_listing(post: Post, fairpost: Fairpost) -> None:
    """Entries come the newest first, and are narrowed by who, action, subject, time and number, alone or together."""
    async with post.worker.connection() as connection:
        await record(
            connection, "ann", Act(Action.CAMPAIGN_HOLD, "c"), Act(Action.CAMPAIGN_LIFT, "c")
        )
        await record(connection, "ben", Act(Action.CAMPAIGN_HOLD, "d", {"why": "x" * 500}))
        await post.owner.execute("UPDATE audit SET at = '2026-05-01T12:00:00Z' WHERE actor = 'ann'")
    rows = await listed(fairpost)
    assert [(row["actor"], row["action"], row["subject"]) for row in rows] == [
        ("ben", "campaign.hold", "d"),
        ("ann", "campaign.lift", "c"),
        ("ann", "campaign.hold", "c"),
    ]
    assert rows[1]["at"] == "2026-05-01T12:00:00Z"
    assert rows[0]["details"] == {"why": "x" * 500}
    for words, expected in (
        (("--who", "ann"), [1, 2]),
        (("--action", "campaign.hold"), [0, 2]),
        (("--subject", "c"), [1, 2]),
        (("--subject", "c", "--action", "campaign.hold"), [2]),
        (("--since", "2026-05-01T12:00:01Z"), [0]),
        (("--since", "2026-05-01T14:00:00+02:00"), [0, 1, 2]),
        (("--limit", "2"), [0, 1]),
        (("--who", "nobody"), []),
    ):
        assert await listed(fairpost, *words) == [rows[n] for n in expected], words
    table = await run(fairpost, "audit", "--limit", "2")
    lines = table.out.decode().splitlines()
    assert lines[0].split() == ["at", "who", "action", "subject", "details"]
    assert "ben" in lines[1]
    assert "x" * 200 not in table.out.decode()
    assert table.err == "audit: the newest 2; see more with --limit\n"


@pytest.mark.parametrize(
    "words", [("--limit", "0"), ("--since", "yesterday"), ("--action", "nonsense"), ("c",)]
)
def test_wrong_usage(fairpost: Fairpost, words: tuple[str, ...]) -> None:
    """What makes no sense is exit code 2, before the database is asked."""
    answer = fairpost("audit", *words)
    assert (answer.code, answer.out) == (2, b"")
    assert answer.err.startswith("Usage: ")


async def test_who_knows_an_address_finds_what_was_said_of_it(
    post: Post, fairpost: Fairpost
) -> None:
    """An entry on an address holds its digest; the address, however written, finds it, also when its user is forgotten."""
    async with post.worker.connection() as connection:
        await add(connection, [read_suppression("Ann@Shop.test", reason="by phone")], "ann")
        await post.apply(scheduled())
        await post.plan([due(1, email="ann@shop.test")])
        await forget(connection, "user1", "ben")
    found = await listed(fairpost, "--subject", "ANN@shop.test")
    assert [(row["actor"], row["action"]) for row in found] == [("ann", "suppression.add")]
    assert found[0]["subject"].startswith("sha256:")
    whole = await fetch_one(post.owner, "SELECT string_agg(audit::text, ' ') FROM audit")
    assert "shop.test" not in whole.lower()


async def test_a_terminal_obeys_nothing_that_stands_there(post: Post, fairpost: Fairpost) -> None:
    """A subject that somebody else named is shown, its control characters spelt out."""
    async with post.worker.connection() as connection:
        await record(connection, "ann", Act(Action.CAMPAIGN_HOLD, "c\x1b]0;owned\x07"))
        assert len(await list_audit(connection, Selection(), limit=10)) == 1
    shown = (await run(fairpost, "audit")).out
    assert b"\x1b" not in shown
    assert b"\\x1b]0;owned\\x07" in shown


def test_who_is_at_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind sudo a person stays who they are; a user without a name is called by number."""
    monkeypatch.setenv("SUDO_USER", "ann")
    assert actor() == "ann"
    monkeypatch.delenv("SUDO_USER")
    monkeypatch.setenv("LOGNAME", "ben")
    assert actor() == "ben"
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000_000)
    assert actor() == "uid 4000000000"
