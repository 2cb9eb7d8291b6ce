"""Explaining: a message's whole life from the database, whichever of its names a person has."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from contract.database import Connection, Pool
from contract.envelope import sender_of
from contract.events import DELIVERY_LOG, PostfixLine
from processor.explaining import Life, of_dispatch, of_email, of_queue_id
from processor.suppressions import Suppression, add
from processor.tracking import Tracking
from tests.integration.conftest import (
    INSTANCE,
    Answer,
    Fairpost,
    Post,
    due,
    fetch,
    fetch_one,
    paused,
    records,
    scheduled,
)

QUEUE_ID = "4jdWPx3hz5zJLpv"


@pytest.fixture
def explain(fairpost: Fairpost) -> Callable[..., Any]:
    """Runs `fairpost log explain` beside the loop."""

    async def run(*words: str) -> Answer:
        return await asyncio.to_thread(fairpost, "log", "explain", *words)

    return run


async def life_of(pool: Pool, dispatch_id: int) -> Life:
    """What the role of the command line is told of a dispatch."""
    async with pool.connection() as connection:
        [life] = await of_dispatch(connection, dispatch_id)
    return life


async def track(post: Post, dispatch_id: int, queue_id: str, *messages: str) -> None:
    """Tracks `queue active` and these lines of a mail's log, a second apart, the last of them now."""
    lines = [
        f"from=<{sender_of(dispatch_id, 'bounces.test')}>, size=1, nrcpt=1 (queue active)",
        *messages,
    ]
    now = datetime.now(UTC)
    events = [
        PostfixLine(
            instance=INSTANCE,
            tag=f"{INSTANCE}/qmgr",
            time=(now - timedelta(seconds=len(lines) - number)).isoformat(),
            message=f"{queue_id}: {message}",
        )
        for number, message in enumerate(lines, 1)
    ]
    assert await Tracking(post.worker, UTC).track(records(events, DELIVERY_LOG), now) == []


def attempt(status: str, dsn: str, text: str) -> str:
    """A delivery's message."""
    return (
        f"to=<a@b.test>, relay=mx[192.0.2.1]:25, delay=1, delays=0/0/0/1, dsn={dsn},"
        f" status={status} ({text})"
    )


LATER = attempt("deferred", "4.2.2", "host mx said: 452 4.2.2 full (in reply to RCPT TO command)")
GONE = attempt("bounced", "5.1.1", "host mx said: 550 5.1.1 gone (in reply to RCPT TO command)")


async def test_a_whole_life(post: Post) -> None:
    """Reserved, planned, handed over, queued, deferred and bounced: each step is told, with its place and its time."""
    await post.apply(scheduled())
    [event] = await post.reserve([due(1)])
    reserved = await life_of(post.worker, event.dispatch_id)
    assert (reserved.state, reserved.chunk, reserved.email) == ("unplanned", None, None)
    assert reserved.reserved_at == event.reserved_at

    [first, dispatch_id] = await post.plan([due(2), due(3)])
    planned = await life_of(post.worker, dispatch_id)
    assert (planned.state, planned.operator, planned.chunk, planned.position) == (
        "planned",
        "other",
        1,
        1,
    )
    assert planned.chunk_opened_at is not None
    assert (planned.reserved_at, planned.handed, planned.handovers) == (None, [], 0)

    await post.hand(2)
    handed = await life_of(post.worker, dispatch_id)
    assert (handed.state, handed.instance, handed.claimed_by) == ("handed", INSTANCE, INSTANCE)
    assert [(each.at, each.instance) for each in handed.handed] == [(handed.handed_at, INSTANCE)]
    assert handed.queue_ids == []

    await track(post, dispatch_id, QUEUE_ID, LATER, GONE)
    bounced = await life_of(post.worker, dispatch_id)
    assert (bounced.state, bounced.attempts, bounced.reply_class, bounced.dsn) == (
        "bounced",
        2,
        "hard",
        "5.1.1",
    )
    assert bounced.reply == "host mx said: 550 5.1.1 gone (in reply to RCPT TO command)"
    assert [(each.queue_id, each.instance) for each in bounced.queue_ids] == [(QUEUE_ID, INSTANCE)]
    assert [each.status for each in bounced.untold] == ["queued", "deferred", "bounced"]
    assert (await life_of(post.worker, first)).queue_ids == []


async def test_given_back_and_handed_again(post: Post) -> None:
    """Each hand-over that is on record is told, and each queue id that it went by."""
    await post.apply(scheduled())
    [dispatch_id] = await post.plan([due(1)])
    claim, batch = await post.hand(1)
    handover = post.handover()
    await post.owner.execute(
        "SELECT give_back(%s, %s, %s, %s)",
        (claim.chunk_id, INSTANCE, batch.handed_at, [dispatch_id]),
    )
    assert (await life_of(post.worker, dispatch_id)).state == "planned"
    await handover.write_ahead(claim, 2, 1)
    await track(post, dispatch_id, QUEUE_ID)
    await track(post, dispatch_id, "4jdWPx3hz5zJLpw", LATER)
    life = await life_of(post.worker, dispatch_id)
    assert (life.handovers, len(life.handed), life.handed[-1].at) == (2, 2, life.handed_at)
    assert {each.queue_id for each in life.queue_ids} == {QUEUE_ID, "4jdWPx3hz5zJLpw"}


async def test_fences(post: Post) -> None:
    """The fences that were to judge a message are told, and whether they have."""
    await post.apply(scheduled())
    [dispatch_id] = await post.plan([due(1)])
    await post.hand(1)
    await post.owner.execute(
        "INSERT INTO fences (fence_token, instance, reason, asked_at) VALUES ('t', %s, 'start', now())",
        (INSTANCE,),
    )
    await post.owner.execute(
        "INSERT INTO fence_messages SELECT 't', dispatch_id, handed_at FROM messages"
    )
    [fence] = (await life_of(post.worker, dispatch_id)).fences
    assert (fence.instance, fence.reason, fence.judged_at) == (INSTANCE, "start", None)


async def test_a_pruned_message(owner: Connection, worker: Pool) -> None:
    """A dispatch is kept for ever, and what is left of its message's life is told."""
    dispatch_id = await fetch_one(
        owner,
        "INSERT INTO dispatches (user_id, campaign_id, email_key) VALUES ('u', 'c', 'k') RETURNING dispatch_id",
    )
    life = await life_of(worker, dispatch_id)
    assert (life.state, life.user_id, life.email_key, life.campaign_state) == (
        "pruned",
        "u",
        "k",
        "waiting",
    )


async def test_by_queue_id(post: Post) -> None:
    """A queue id leads to its messages, one at each instance that uses it, through the index."""
    await post.apply(scheduled())
    dispatch_ids = await post.plan([due(n) for n in range(3)])
    await post.hand(3)
    await track(post, dispatch_ids[0], QUEUE_ID)
    await track(post, dispatch_ids[1], "3051914082")
    await post.owner.execute(
        "INSERT INTO queue_ids (instance, queue_id, dispatch_id, seen_at) VALUES ('postfix-b', %s, %s, now())",
        (QUEUE_ID, dispatch_ids[2]),
    )
    async with post.worker.connection() as connection:
        found = await of_queue_id(connection, QUEUE_ID)
        assert [life.dispatch_id for life in found] == [dispatch_ids[2], dispatch_ids[0]]
        [numeric] = await of_queue_id(connection, "3051914082")
        assert numeric.dispatch_id == dispatch_ids[1]


async def test_by_address(post: Post) -> None:
    """All messages to a mailbox are found, the newest first, however its address is written."""
    await post.apply(scheduled(), scheduled("d"))
    dispatch_ids = await post.plan([due(1), due(2), due(1, "d")])
    async with post.worker.connection() as connection:
        found = await of_email(connection, "USER1@Example.Test", limit=5)
        assert [life.dispatch_id for life in found] == [dispatch_ids[2], dispatch_ids[0]]
        [newest] = await of_email(connection, '"user1"@example.test', limit=1)
        assert newest.dispatch_id == dispatch_ids[2]


async def test_suppressions(post: Post) -> None:
    """What keeps mail from an address is told: of its campaign and of any, and nobody else's; a hard bounce is told too."""
    await post.apply(scheduled(), scheduled("d"))
    bounced, spared = await post.plan([due(1), due(2)])
    await post.hand(1)
    async with post.worker.connection() as connection:
        for campaign_id, reason in (("c", "asked us"), ("d", "of another campaign")):
            await add(connection, [Suppression("user1@example.test", campaign_id, reason)], "ben")
    await track(post, bounced, QUEUE_ID, GONE)
    life = await life_of(post.worker, bounced)
    assert [(each.source, each.campaign_id) for each in life.suppressions] == [
        ("person", "c"),
        ("bounce", None),
    ]
    assert life.suppressions[0].reason == "asked us"
    assert (await life_of(post.worker, spared)).suppressions == []


# ------------------------------------------------------------------ the command


async def test_for_people(post: Post, explain: Callable[..., Any]) -> None:
    """A life is told line by line in its order, and its last line says what to do next."""
    await post.apply(scheduled())
    [dispatch_id] = await post.plan([due(1)])
    await post.hand(1)
    await track(post, dispatch_id, QUEUE_ID, LATER)
    told = await explain(str(dispatch_id))
    assert (told.code, told.err) == (0, "")
    head, *lines = told.out.decode().splitlines()
    assert head == f"dispatch {dispatch_id}: hello of c for user1 <user1@example.test>"
    assert [line[2:12].strip() for line in lines] == [
        "planned",
        "handed",
        "queue id",
        "state",
        "reply",
        "not told",
        "next",
    ]
    assert f"{QUEUE_ID} at {INSTANCE}" in lines[2]
    assert "452 4.2.2 full" in lines[4]
    assert f"the Postfix of {INSTANCE} tries again" in lines[-1]


async def test_as_json(post: Post, explain: Callable[..., Any]) -> None:
    """`--json` is one array with all that is known, by any name; standard error says when there is more."""
    await post.apply(scheduled(), scheduled("d"))
    dispatch_ids = await post.plan([due(1), due(1, "d")])
    await post.apply(paused("d"))
    by_id = await explain(str(dispatch_ids[1]), "--json")
    assert (by_id.code, by_id.err) == (0, "")
    [life] = msgspec.json.decode(by_id.out)
    assert set(life) == {*Life.__struct_fields__, "next"}
    assert (life["dispatch_id"], life["campaign_state"]) == (dispatch_ids[1], "paused")
    assert "campaign.resumed of d" in life["next"]
    by_email = await explain("user1@example.test", "--json", "--limit", "1")
    assert msgspec.json.decode(by_email.out) == [life]
    assert by_email.err == (
        "log: the newest 1 messages that go by user1@example.test: see --limit\n"
    )


async def test_a_long_look(post: Post, explain: Callable[..., Any]) -> None:
    """Where looking for an address takes a while, a line says so before."""
    await post.owner.execute(
        "UPDATE pg_class SET reltuples = 2000000 WHERE oid = 'messages'::regclass"
    )
    told = await explain("ann@shop.test")
    assert (told.code, told.out) == (1, b"")
    assert told.err.startswith("log: looking for ann@shop.test among about 2,000,000 messages\n")


async def test_what_is_unknown(post: Post, explain: Callable[..., Any]) -> None:
    """A name that leads nowhere is one line that says what may be wrong, and exit code 1."""
    await post.owner.execute(
        "INSERT INTO queue_ids (instance, queue_id, seen_at) VALUES ('postfix-a', '4F5A91C0B5', now())"
    )
    for words, complaint in (
        (("4711",), "dispatch 4711: there is none; if it is a queue id, add --queue-id\n"),
        (("9" * 19,), f"dispatch {'9' * 19}: there is none; if it is a queue id, add --queue-id\n"),
        (("--queue-id", "4711"), "queue id '4711': no log has told of it, "),
        (("4F5A91C0B5",), "queue id '4F5A91C0B5': of postfix-a, mail that is not fairpost's\n"),
        (("9" * 5000,), "queue id '99"),
        (("nobody@example.test",), "nobody@example.test: no message to it, "),
        (("",), "queue id '': "),
    ):
        told = await explain(*words)
        assert (told.code, told.out) == (1, b"")
        assert told.err.startswith(complaint)
        assert told.err.count("\n") == 1


async def test_indexes_lead_there(post: Post) -> None:
    """By dispatch and by queue id no table that grows with the mail is read from end to end."""
    from processor import explaining  # noqa: PLC0415

    await post.apply(scheduled())
    dispatch_ids = await post.plan([due(n) for n in range(20)])
    await post.owner.execute("SET enable_seqscan = off")
    for query, value in (
        (explaining._LIVES, dispatch_ids[:1]),  # noqa: SLF001
        (explaining._HANDED, dispatch_ids[:1]),  # noqa: SLF001
        (explaining._QUEUE_IDS, dispatch_ids[:1]),  # noqa: SLF001
        (explaining._FENCES, dispatch_ids[:1]),  # noqa: SLF001
        (explaining._SUPPRESSIONS, dispatch_ids[:1]),  # noqa: SLF001
        (explaining._OF_QUEUE_ID, QUEUE_ID),  # noqa: SLF001
    ):
        plan = "\n".join(line for (line,) in await fetch(post.owner, f"EXPLAIN {query}", value))
        for table in (
            "dispatches",
            "messages",
            "pending",
            "handovers",
            "queue_ids",
            "fence_messages",
            "suppressions",
        ):
            assert f"Seq Scan on {table}" not in plan, plan
