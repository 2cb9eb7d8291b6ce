"""Uncertain messages: shown with what is known, resent or dropped by a person's word only, and each on record."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from contract.database import Connection
from contract.states import MessageState
from processor.cli.session import actor
from processor.housekeeping import sweep_all
from processor.instances import retire_instance
from processor.observation import observe
from processor.operators import replan_moved
from processor.resending import BLOCK
from processor.retention import forget
from processor.tracking import Tracking
from processor.uncertain import (
    Selection,
    UncertainMessage,
    Verdict,
    count_uncertain,
    list_uncertain,
    resolve,
)
from tests.integration.conftest import (
    INSTANCE,
    START,
    Answer,
    Fairpost,
    Post,
    cancelled,
    due,
    fetch,
    fetch_one,
    scheduled,
)
from tests.integration.test_tracking import deferred, queued, sent, track

OTHER = "postfix-b"
EVERYTHING = Selection()

Refusals = Callable[[], list[str]]


async def lose(post: Post, number: int, instance: str = INSTANCE) -> list[int]:
    """Hands the next messages over to an instance whose host is then gone for good; their dispatches by position."""
    _, batch = await post.hand(number, instance)
    await give_up(post, instance)
    return [recipient.dispatch_id for recipient in batch.recipients]


async def give_up(post: Post, instance: str = INSTANCE) -> None:
    """The host of an instance is gone for good."""
    async with post.agent.connection() as connection:
        await connection.execute(
            "SELECT register_instance(%s, 'machine', '/q', '0.1', true)", (instance,)
        )
    async with post.worker.connection() as connection:
        await retire_instance(connection, instance, "ann", force=True)


async def uncertain(post: Post, number: int) -> list[int]:
    """As many messages of a campaign, all uncertain."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(number)])
    return await lose(post, number)


async def shown(
    post: Post, selection: Selection = EVERYTHING, limit: int = 100
) -> list[UncertainMessage]:
    """What the command line lists."""
    async with post.worker.connection() as connection:
        return await list_uncertain(connection, selection, limit=limit)


async def say(
    post: Post, verdict: Verdict, selection: Selection = EVERYTHING, until: datetime | None = None
) -> Counter[MessageState]:
    """A person's word on what is uncertain now, under the role of the command line."""
    async with post.worker.connection() as connection:
        found = await count_uncertain(connection, selection)
        return await resolve(connection, selection, verdict, until=until or found.at, actor="ann")


async def told_since(post: Post, event_id: int) -> list[tuple[Any, ...]]:
    """Dispatch, status and reply of what the outbox was given after an event."""
    return await fetch(
        post.owner,
        "SELECT dispatch_id, status, reply FROM told WHERE event_id > %s ORDER BY dispatch_id",
        event_id,
    )


async def last_event(post: Post) -> int:
    """The last event that the outbox was given."""
    number: int = await fetch_one(post.owner, "SELECT coalesce(max(event_id), 0) FROM told")
    return number


# ------------------------------------------------------------------ listing


async def test_what_is_known_of_each(post: Post) -> None:
    """An uncertain message is shown with its user, campaign, address, instance, times and why; the oldest comes first."""
    await post.apply(scheduled(), scheduled("d"))
    await post.plan([due(1)])
    await post.plan([due(2, "d")])
    [first] = await lose(post, 1)
    [second] = await lose(post, 1, OTHER)
    rows = await shown(post)
    assert [
        (r.dispatch_id, r.user_id, r.campaign_id, r.email_key, r.email, r.instance, r.why)
        for r in rows
    ] == [
        (
            first,
            "user1",
            "c",
            "hello",
            "user1@example.test",
            INSTANCE,
            f"instance {INSTANCE} was retired",
        ),
        (
            second,
            "user2",
            "d",
            "hello",
            "user2@example.test",
            OTHER,
            f"instance {OTHER} was retired",
        ),
    ]
    assert rows[0].handed_at < rows[0].since <= rows[1].handed_at < rows[1].since
    assert [r.handovers for r in rows] == [1, 1]
    assert await shown(post, limit=1) == rows[:1]
    assert await shown(post, Selection(instance=OTHER)) == rows[1:]
    assert await shown(post, Selection(campaign_id="c")) == rows[:1]
    assert await shown(post, Selection(campaign_id="c", instance=OTHER)) == []


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("audit", "neither in the queue of its Postfix nor in its log (audit)"),
        (
            "start",
            "handed over before Postfix was restarted, its log rotated or a line of it lost (fence: start)",
        ),
    ],
)
async def test_a_fence_that_could_not_tell(post: Post, reason: str, why: str) -> None:
    """Where a fence made a message uncertain, it is said which, until something else is known of it."""
    await post.apply(scheduled())
    await post.plan([due(1)])
    _, batch = await post.hand(1)
    [dispatch_id] = [recipient.dispatch_id for recipient in batch.recipients]
    await post.owner.execute("UPDATE messages SET state = 'uncertain', status_at = now()")
    await post.owner.execute(
        "INSERT INTO fences (fence_token, instance, reason, asked_at, judged_at) VALUES ('t', %s, %s, now(), now())",
        (INSTANCE, reason),
    )
    await post.owner.execute(
        "INSERT INTO fence_messages SELECT 't', dispatch_id, handed_at FROM messages"
    )
    assert [row.why for row in await shown(post)] == [why]
    await track(Tracking(post.worker, UTC), queued(dispatch_id))
    await give_up(post)
    assert [row.why for row in await shown(post)] == [f"instance {INSTANCE} was retired"]


async def test_a_forgotten_users_address_is_not_shown(post: Post) -> None:
    """Of a user who was forgotten meanwhile no address is there to show."""
    await uncertain(post, 1)
    async with post.worker.connection() as connection:
        await forget(connection, "user0", "ann")
    assert [row.email for row in await shown(post)] == [""]


# ------------------------------------------------------------------ nothing by itself


async def test_nothing_is_resent_by_itself(post: Post) -> None:
    """Whatever keeps house, an uncertain message stays what it is, and no lane is given it."""
    ids = await uncertain(post, 3)
    async with post.worker.connection() as connection:
        await sweep_all(connection)
        await replan_moved(connection)
        await observe(connection)
    assert await post.claims(OTHER).claim("other") is None
    assert await post.states() == dict.fromkeys(ids, "uncertain")


async def test_a_line_that_comes_late_resolves(post: Post) -> None:
    """What the log of its instance tells overwrites `uncertain`, and a person's word then changes nothing."""
    first, second, third = await uncertain(post, 3)
    tracking = Tracking(post.worker, UTC)
    await track(tracking, queued(first), queued(second), queued(third, instance=OTHER))
    await track(tracking, sent(first), deferred(second, 9), sent(third, instance=OTHER))
    assert await say(post, Verdict.RESEND) == {MessageState.PLANNED: 1}
    assert await post.states() == {first: "sent", second: "deferred", third: "planned"}


# ------------------------------------------------------------------ resend


async def test_what_is_resent(post: Post) -> None:
    """A message is planned again where it stands, is told of no more than that, and is handed over once more by another."""
    ids = await uncertain(post, 3)
    before = await last_event(post)
    assert await say(post, Verdict.RESEND, Selection(dispatch_ids=ids[1:])) == {
        MessageState.PLANNED: 2
    }
    assert await post.states() == {ids[0]: "uncertain", ids[1]: "planned", ids[2]: "planned"}
    assert await fetch(
        post.owner,
        "SELECT DISTINCT instance, handed_at, status_at, reply FROM messages WHERE state = 'planned'",
    ) == [(None, None, None, None)]
    assert await told_since(post, before) == []
    _, batch = await post.hand(2, OTHER)
    assert [recipient.dispatch_id for recipient in batch.recipients] == ids[1:]
    assert set(batch.handovers.values()) == {2}
    assert await fetch(
        post.owner,
        "SELECT actor, action, subject, details FROM audit WHERE action LIKE 'uncertain%%'",
    ) == [("ann", "uncertain.resend", "c", {"dispatch_ids": sorted(ids[1:])})]


async def test_a_lane_at_work_finds_what_is_resent(post: Post) -> None:
    """A lane that holds the chunk already is given the message in its place, before what comes after it."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(6)])
    first, _ = await lose(post, 2)
    claim, _ = await post.hand(2, OTHER)
    await say(post, Verdict.RESEND, Selection(dispatch_ids=[first]))
    batch = await post.handover(OTHER).write_ahead(claim, 2, 2)
    assert len(batch.recipients) == 2
    assert batch.recipients[0].dispatch_id == first


async def test_what_a_message_has_become_meanwhile(post: Post) -> None:
    """Resent, one that is suppressed, expired or forgotten becomes that, is told, and is never handed over."""
    late = datetime(2999, 1, 1, tzinfo=UTC)
    await post.apply(scheduled())
    await post.plan([due(n, not_after=late) for n in range(4)])
    ids = await lose(post, 4)
    users = {row.dispatch_id: row for row in await shown(post)}
    suppressed, expired, forgotten, well = ids
    await post.owner.execute(
        "INSERT INTO suppressions (mailbox, source, reason, since) VALUES (%s, 'person', 'no more', now())",
        (users[suppressed].email,),
    )
    await post.owner.execute(
        "UPDATE messages SET not_after = %s WHERE dispatch_id = %s", (START, expired)
    )
    async with post.worker.connection() as connection:
        await forget(connection, users[forgotten].user_id, "ann")
    before = await last_event(post)
    assert await say(post, Verdict.RESEND) == {
        MessageState.SUPPRESSED: 1,
        MessageState.EXPIRED: 1,
        MessageState.CANCELLED: 1,
        MessageState.PLANNED: 1,
    }
    assert await post.states() == {
        suppressed: "suppressed",
        expired: "expired",
        forgotten: "cancelled",
        well: "planned",
    }
    assert await told_since(post, before) == sorted(
        [
            (suppressed, "suppressed", None),
            (expired, "expired", None),
            (forgotten, "cancelled", None),
        ]
    )


async def test_a_cancelled_campaign(post: Post) -> None:
    """What is resent of a campaign that was cancelled becomes `cancelled`."""
    ids = await uncertain(post, 2)
    await post.apply(cancelled())
    before = await last_event(post)
    assert await say(post, Verdict.RESEND) == {MessageState.CANCELLED: 2}
    assert await told_since(post, before) == [(d, "cancelled", None) for d in sorted(ids)]


async def test_a_campaign_that_ended(post: Post) -> None:
    """A campaign that counted as ended can be claimed again for what is resent of it."""
    ids = await uncertain(post, 1)
    await post.owner.execute("UPDATE campaigns SET ended_at = now()")
    await say(post, Verdict.RESEND)
    _, batch = await post.hand(1, OTHER)
    assert [recipient.dispatch_id for recipient in batch.recipients] == ids


# ------------------------------------------------------------------ drop


async def test_what_is_dropped(post: Post) -> None:
    """A message is `cancelled` for good, with the word of who said so; no line of the log changes that."""
    first, second, third = await uncertain(post, 3)
    users = {row.dispatch_id: row.user_id for row in await shown(post)}
    async with post.worker.connection() as connection:
        await forget(connection, users[second], "ann")
    before = await last_event(post)
    assert await say(post, Verdict.DROP, Selection(dispatch_ids=[first, second])) == {
        MessageState.CANCELLED: 2
    }
    assert await told_since(post, before) == sorted(
        [(first, "cancelled", "dropped by ann"), (second, "cancelled", None)]
    )
    await track(Tracking(post.worker, UTC), *map(queued, (first, third)), sent(first), sent(third))
    assert await post.states() == {first: "cancelled", second: "cancelled", third: "sent"}
    assert (
        await fetch_one(post.owner, "SELECT reply FROM messages WHERE dispatch_id = %s", first)
        == "dropped by ann"
    )
    assert await fetch(
        post.owner,
        "SELECT actor, action, subject, details FROM audit WHERE action LIKE 'uncertain%%'",
    ) == [("ann", "uncertain.drop", "c", {"dispatch_ids": sorted([first, second])})]


# ------------------------------------------------------------------ which are meant


@pytest.mark.parametrize("verdict", list(Verdict))
async def test_only_what_is_meant(post: Post, verdict: Verdict) -> None:
    """A word on an instance, a campaign or both leaves the others' messages as they are."""
    await post.apply(scheduled(), scheduled("d"))
    await post.plan([due(n) for n in range(4)])
    await post.plan([due(n, "d") for n in range(4)])
    mine = [*await lose(post, 2), *await lose(post, 2, OTHER)]
    theirs = [*await lose(post, 2, "postfix-c"), *await lose(post, 2, "postfix-d")]
    campaign = {row.dispatch_id: row.campaign_id for row in await shown(post)}
    instance = {row.dispatch_id: row.instance for row in await shown(post)}
    meant = Selection(instance=OTHER, campaign_id=campaign[mine[2]])
    assert sum((await say(post, verdict, meant)).values()) == 2
    assert {row.dispatch_id for row in await shown(post)} == {*mine[:2], *theirs}
    left = theirs[0]
    meant = Selection(campaign_id=campaign[left])
    await say(post, verdict, meant)
    assert {campaign[row.dispatch_id] for row in await shown(post)} == {"c", "d"} - {campaign[left]}
    last = (await shown(post))[0].instance
    await say(post, verdict, Selection(instance=last))
    assert last not in {instance[row.dispatch_id] for row in await shown(post)}


async def test_what_becomes_uncertain_after_the_question(post: Post) -> None:
    """A person answers for what was there when the question was asked; what came since is left alone."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(4)])
    first = await lose(post, 2)
    async with post.worker.connection() as connection:
        asked = await count_uncertain(connection, EVERYTHING)
    assert asked.number == 2
    second = await lose(post, 2, OTHER)
    assert await say(post, Verdict.DROP, until=asked.at) == {MessageState.CANCELLED: 2}
    assert await post.states() == dict.fromkeys(first, "cancelled") | dict.fromkeys(
        second, "uncertain"
    )


async def test_a_second_word_changes_nothing(post: Post) -> None:
    """Said again, or of messages that are none, a word changes nothing and is not on record."""
    ids = await uncertain(post, 2)
    await say(post, Verdict.RESEND)
    states = await post.states()
    for verdict in Verdict:
        for selection in (EVERYTHING, Selection(dispatch_ids=[*ids, 999_999])):
            assert await say(post, verdict, selection) == {}
    assert await post.states() == states
    assert (
        await fetch_one(post.owner, "SELECT count(*) FROM audit WHERE action LIKE 'uncertain%%'")
        == 1
    )


async def test_killed_halfway(post: Post) -> None:
    """More than a block is done in small transactions; killed after the first, a second run does the rest, each once."""
    await post.apply(scheduled())
    number = 2 * BLOCK + 1
    for first in range(0, number, BLOCK):
        await post.plan([due(n) for n in range(first, min(first + BLOCK, number))])
    await lose(post, number)

    def killed(done: int) -> None:
        assert done == BLOCK
        raise KeyboardInterrupt

    async with post.worker.connection() as connection:
        found = await count_uncertain(connection, EVERYTHING)
        with pytest.raises(KeyboardInterrupt):
            await resolve(
                connection, EVERYTHING, Verdict.RESEND, until=found.at, actor="ann", seen=killed
            )
    assert Counter((await post.states()).values()) == {"planned": BLOCK, "uncertain": BLOCK + 1}
    assert await say(post, Verdict.RESEND) == {MessageState.PLANNED: BLOCK + 1}
    assert len((await post.hand(number, OTHER))[1].recipients) == number


async def test_beside_everything_else(post: Post, refusals: Refusals) -> None:
    """Beside lanes, planning, tracking, a cancellation with its sweep, and another person, nothing deadlocks or is lost."""
    await post.owner.execute("UPDATE operators SET chunk_size = 50")
    await post.apply(scheduled(), scheduled("d"))
    await post.plan([due(n, "cd"[n % 2]) for n in range(400)])
    for claim, _ in [await post.hand(25) for _ in range(8)]:
        await post.claims().release(claim)
    await give_up(post)
    ids = [row.dispatch_id for row in await shown(post, limit=1_000)]
    assert len(ids) == 200
    tracking = Tracking(post.worker, UTC)

    async def read_on() -> None:
        for start in range(0, 200, 20):
            await track(tracking, *map(queued, ids[start : start + 20]))

    async def hand_on() -> None:
        claims, handover = post.claims(OTHER), post.handover(OTHER)
        for number in range(6):
            await post.plan([due(1_000 + 10 * number + n, "d") for n in range(10)])
            if (claim := await claims.claim("other")) is not None:
                await handover.write_ahead(claim, 1, 30)
                await claims.release(claim)

    async def cancel() -> None:
        await post.apply(cancelled())
        async with post.worker.connection() as connection:
            await sweep_all(connection)

    await asyncio.gather(
        read_on(),
        hand_on(),
        cancel(),
        say(post, Verdict.RESEND, Selection(instance=INSTANCE)),
        say(post, Verdict.DROP, Selection(campaign_id="d")),
        say(post, Verdict.RESEND, Selection(dispatch_ids=ids[::3])),
    )
    assert [line for line in refusals() if "deadlock" in line] == []
    states = await post.states()
    assert len(states) == 460
    async with post.worker.connection() as connection:
        await sweep_all(connection)
    assert set((await post.states()).values()) <= {"planned", "handed", "queued", "cancelled"}


# ------------------------------------------------------------------ the commands


async def run(fairpost: Fairpost, *words: str, stdin: str = "") -> Answer:
    """Runs `fairpost uncertain` beside the loop."""
    return await asyncio.to_thread(fairpost, "uncertain", *words, stdin=stdin)


async def test_the_listing(post: Post, fairpost: Fairpost) -> None:
    """The listing says what to do, and how many there are beyond its limit; JSON has every field."""
    nothing = await run(fairpost, "list", "--json")
    assert (nothing.code, nothing.out, nothing.err) == (0, b"[]\n", "uncertain: 0 messages\n")
    await uncertain(post, 3)
    answer = await run(fairpost, "list", "--limit", "2", "--json", "--campaign", "c")
    rows = msgspec.json.decode(answer.out)
    assert [row.keys() for row in rows] == [set(UncertainMessage.__struct_fields__)] * 2
    first, second = answer.err.splitlines()
    assert first == "uncertain: 3 messages, the oldest 2 shown: see --limit"
    assert "`fairpost uncertain resend DISPATCH`" in second
    table = await run(fairpost, "list", "--instance", INSTANCE)
    assert table.out.count(b"was retired") == 3
    assert b"user0@example.test" in table.out
    assert (await run(fairpost, "list", "--instance", OTHER, "--json")).out == b"[]\n"


async def test_a_word_on_named_ones(post: Post, fairpost: Fairpost) -> None:
    """Named dispatches are resent or dropped; what is no longer uncertain is counted; who it was is on record."""
    ids = await uncertain(post, 4)
    names = [str(dispatch_id) for dispatch_id in ids]
    answer = await run(fairpost, "resend", *names[:2], names[0], "999999", "--yes")
    assert (answer.code, answer.out, answer.err) == (
        0,
        b"",
        "uncertain: 2 messages planned again, 1 left alone, being no longer uncertain\n",
    )
    answer = await run(fairpost, "drop", *names[1:3], "--yes")
    assert answer.err == ("uncertain: 1 message dropped, 1 left alone, being no longer uncertain\n")
    assert await post.states() == dict(
        zip(ids, ["planned", "planned", "cancelled", "uncertain"], strict=True)
    )
    await post.apply(cancelled())
    answer = await run(fairpost, "resend", names[3], "--yes")
    assert answer.err == "uncertain: 0 messages planned again, 1 cancelled\n"
    assert await fetch(
        post.owner,
        "SELECT actor, action FROM audit WHERE action LIKE 'uncertain%%' ORDER BY audit_id",
    ) == [(actor(), f"uncertain.{verdict}") for verdict in ("resend", "drop", "resend")]


@pytest.mark.parametrize(("stdin", "done"), [("y\n", True), ("n\n", False), ("", False)])
@pytest.mark.parametrize(
    "words",
    [("--all",), ("--instance", INSTANCE), ("--campaign", "c", "--instance", INSTANCE)],
    ids=" ".join,
)
@pytest.mark.parametrize("verdict", list(Verdict))
async def test_it_asks_first(
    post: Post,
    fairpost: Fairpost,
    verdict: Verdict,
    words: Sequence[str],
    stdin: str,
    *,
    done: bool,
) -> None:
    """Without `--yes` a person is asked with the number of messages, and a closed input is no yes."""
    await uncertain(post, 3)
    answer = await run(fairpost, verdict, *words, stdin=stdin)
    assert " 3 messages " in answer.err
    assert "[y/N]" in answer.err
    assert (answer.code == 0) == done
    assert ("uncertain" not in (await post.states()).values()) == done


async def test_nothing_to_ask_for(post: Post, fairpost: Fairpost) -> None:
    """Where nothing is uncertain nobody is asked."""
    await post.apply(scheduled())
    assert (await run(fairpost, "drop", "--all")).err == "uncertain: 0 messages dropped\n"


@pytest.mark.parametrize(
    "words",
    [
        ("resend",),
        ("drop",),
        ("resend", "17", "--all"),
        ("drop", "17", "--instance", INSTANCE),
        ("drop", "--all", "--campaign", "c"),
        ("resend", "x"),
        ("resend", "0"),
        ("resend", "9223372036854775808"),
        ("list", "17"),
        ("list", "--limit", "0"),
    ],
    ids=" ".join,
)
def test_wrong_usage(fairpost: Fairpost, words: tuple[str, ...]) -> None:
    """What makes no sense is exit code 2, before the database is asked."""
    answer = fairpost("uncertain", *words)
    assert (answer.code, answer.out) == (2, b"")
    assert answer.err.startswith("Usage: ")


async def test_an_agent_cannot_say_so(post: Post, owner: Connection) -> None:
    """No agent can resolve what is uncertain, nor retire another."""
    async with post.agent.connection() as connection:
        for signature in (
            "send_again(bigint, message_state, bigint[], text, text, timestamptz, text, int)",
            "drop_uncertain(bigint, bigint[], text, timestamptz, text, int)",
            "retire_chunk(text, bigint, int)",
        ):
            assert not await fetch_one(
                owner, f"SELECT has_function_privilege('agent', 'fairpost.{signature}', 'EXECUTE')"
            )
        assert await fetch_one(connection, "SELECT current_user = 'agent'")
