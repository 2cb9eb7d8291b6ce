"""Rejected messages: retried by a person's word only, where they stand, and nothing that a Postfix ever accepted."""

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import UTC, timedelta
from typing import Any

import msgspec
import pytest
from psycopg.errors import InsufficientPrivilege

from contract.operators import Operator
from contract.states import MessageState
from processor.housekeeping import end_campaigns, sweep_all
from processor.operators import apply_operators
from processor.overview import CampaignError, show_campaign
from processor.rejected import Selection, count_rejected, list_reasons, retry
from processor.resending import BLOCK
from processor.retention import forget
from processor.suppressions import add, read_suppression
from processor.tracking import Tracking
from smtp_agent.handover import Refusal
from tests.integration.conftest import (
    Answer,
    Fairpost,
    Post,
    cancelled,
    due,
    fetch,
    fetch_one,
    scheduled,
)
from tests.integration.test_tracking import queued, sent, track

ALL = Selection("c")
PLANNED, REJECTED = MessageState.PLANNED, MessageState.REJECTED


async def reject(
    post: Post, number: int, reason: str = "a template", operator: str = "other"
) -> list[int]:
    """Hands the next messages over, all of which are then rejected: their dispatches, by position."""
    claim, batch = await post.hand(number, operator=operator)
    assert batch.handed_at is not None
    ids = [recipient.dispatch_id for recipient in batch.recipients]
    await post.handover().reject([Refusal(i, batch.handed_at, None, reason) for i in ids])
    await post.claims().release(claim)
    return ids


async def retried(post: Post, selection: Selection = ALL) -> Counter[MessageState]:
    """A person's word on what is rejected now, under the role of the command line."""
    async with post.worker.connection() as connection:
        found = await count_rejected(connection, selection)
        done = await retry(connection, selection, until=found.at, actor="ann")
    assert done.total() == found.number
    return done


@pytest.fixture
def tracking(post: Post) -> Tracking:
    """The step that reads the logs."""
    return Tracking(post.worker, UTC)


async def test_they_are_planned_again_where_they_stand(post: Post, tracking: Tracking) -> None:
    """Retried messages are handed over again from their places, once each, and nothing else of their chunk moves."""
    await post.apply(scheduled())
    ids = await post.plan([due(n) for n in range(5)])
    claim, batch = await post.hand(4)
    assert batch.handed_at is not None
    await post.handover().reject(
        [Refusal(i, batch.handed_at, None, "no") for i in (ids[1], ids[3])]
    )
    await track(tracking, queued(ids[0]), sent(ids[0]), queued(ids[2]))
    assert await retried(post) == {PLANNED: 2}
    assert await retried(post) == {}
    assert await post.states() == dict(
        zip(ids, ["sent", "planned", "queued", "planned", "planned"], strict=True)
    )
    again = await post.handover().write_ahead(claim, 2, 10)
    assert [r.dispatch_id for r in again.recipients] == [ids[1], ids[3], ids[4]]
    assert [again.handovers[i] for i in (ids[1], ids[3], ids[4])] == [2, 2, 1]
    await track(tracking, queued(ids[1]), sent(ids[1]))
    told = [status for dispatch_id, status in await post.told() if dispatch_id == ids[1]]
    assert told == ["rejected", "queued", "sent"]


async def test_a_chunk_that_was_done_is_claimed_again(post: Post) -> None:
    """Nobody held it any more; its campaign had ended, and is open again."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(3)])
    ids = await reject(post, 3)
    await post.owner.execute("UPDATE campaigns SET ended_at = now()")
    assert await post.claims().claim("other") is None
    assert await retried(post) == {PLANNED: 3}
    async with post.worker.connection() as connection:
        campaign = await show_campaign(connection, "c")
    assert (campaign.planned, campaign.rejected, campaign.ended_at) == (3, 0, None)
    _, batch = await post.hand(3)
    assert [recipient.dispatch_id for recipient in batch.recipients] == ids


async def test_a_campaign_that_is_retried_just_now_does_not_end(post: Post) -> None:
    """Though all of it is final until the retry commits, housekeeping passes it over: no mail is left in an ended campaign."""
    await post.apply(scheduled())
    await post.plan([due(1)])
    await reject(post, 1)
    await post.owner.execute(
        "UPDATE chunks SET opened_at = '2024-05-01', claimed_at = '2024-05-01'"
    )
    await post.owner.execute("UPDATE campaigns SET applied_at = '2024-05-01'")
    async with (
        post.worker.connection() as retrying,
        post.worker.connection() as keeping,
        retrying.transaction(),
    ):
        found = await count_rejected(retrying, ALL)
        assert await retry(retrying, ALL, until=found.at, actor="ann") == {PLANNED: 1}
        assert await end_campaigns(keeping) == 0
    await post.hand(1)


async def test_a_repeated_word_of_the_agent_changes_nothing(post: Post) -> None:
    """An agent that says once more what was rejected, as its reply was lost, does not reject what is retried."""
    await post.apply(scheduled())
    await post.plan([due(1)])
    _, batch = await post.hand(1)
    assert batch.handed_at is not None
    refusal = Refusal(batch.recipients[0].dispatch_id, batch.handed_at, None, "no")
    await post.handover().reject([refusal])
    assert await retried(post) == {PLANNED: 1}
    await post.handover().reject([refusal])
    assert set((await post.states()).values()) == {"planned"}


async def test_only_what_is_meant(post: Post) -> None:
    """Campaign, operator and a part of the reason narrow it; what is not meant stays rejected."""
    async with post.worker.connection() as connection:
        await apply_operators(
            connection, [Operator("a", ("a.test",)), Operator("other", ())], "ann", "f"
        )
    await post.apply(scheduled(), scheduled("d"))
    await post.plan([due(n) for n in range(2)])
    here = await reject(post, 1, "text: line 3: 'name' is undefined")
    there = await reject(post, 1, "html: line 9: '%' is odd")
    await post.plan([due(9, domain="a.test")])
    at_a = await reject(post, 1, "text: line 3: 'name' is undefined", "a")
    await post.plan([due(5, "d")])
    other = await reject(post, 1)
    assert await retried(post, Selection("c", operator="a", reason="html")) == {}
    assert await retried(post, Selection("c", reason="%")) == {PLANNED: 1}
    assert await post.states() == {
        **dict.fromkeys(here + at_a + other, "rejected"),
        **dict.fromkeys(there, "planned"),
    }
    assert await retried(post, Selection("c", operator="a")) == {PLANNED: 1}
    assert await retried(post, Selection("c")) == {PLANNED: 1}
    assert [i for i, state in (await post.states()).items() if state == "rejected"] == other


async def test_what_became_of_them_meanwhile(post: Post) -> None:
    """Past its `not_after` one is expired, with its address suppressed it is suppressed: both are told; the forgotten stays."""
    await post.apply(scheduled())
    ids = await post.plan([due(n) for n in range(4)])
    await reject(post, 4)
    await post.owner.execute(
        "UPDATE messages SET not_after = now() - interval '1 hour' WHERE dispatch_id = %s",
        (ids[0],),
    )
    async with post.worker.connection() as connection:
        suppression = read_suppression("user1@example.test", reason="left", campaign_id="c")
        await add(connection, [suppression], "ann")
        await forget(connection, "user2", "ann")
    assert await retried(post) == {"expired": 1, "suppressed": 1, PLANNED: 1}
    assert await post.states() == dict(
        zip(ids, ["expired", "suppressed", "rejected", "planned"], strict=True)
    )
    assert (await post.told())[-2:] == [(ids[0], "expired"), (ids[1], "suppressed")]


async def test_what_could_not_be_planned_stays(post: Post) -> None:
    """A message that was rejected before it had an address is not retried."""
    await post.apply(scheduled())
    [event] = await post.reserve([due(1)])
    await fetch(
        post.owner,
        "SELECT * FROM plan(%s, '{c}', '{\"\"}', '{\"\"}', '{NULL}', '{{}}', '{NULL}', '{bad}')".replace(
            "'{{}}'", "ARRAY['{}']"
        ),
        [event.dispatch_id],
    )
    assert await post.states() == {event.dispatch_id: "rejected"}
    assert await retried(post) == {}


async def test_a_cancelled_campaign_refuses(post: Post) -> None:
    """Of a campaign that was cancelled or is unknown nothing is retried; cancelled in between, it is cancelled at once."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(2)])
    await reject(post, 1)
    async with post.worker.connection() as connection:
        found = await count_rejected(connection, ALL)
        await post.apply(cancelled())
        with pytest.raises(CampaignError, match="'c': was cancelled, which is final"):
            await count_rejected(connection, ALL)
        with pytest.raises(CampaignError, match="'nobody': unknown"):
            await count_rejected(connection, Selection("nobody"))
        assert await retry(connection, ALL, until=found.at, actor="ann") == {"cancelled": 1}
        await sweep_all(connection)
    assert set((await post.states()).values()) == {"cancelled"}


async def test_what_is_rejected_meanwhile_is_left_alone(post: Post) -> None:
    """A template that fails again does not keep the command busy for ever."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(2)])
    first = await reject(post, 1)
    async with post.worker.connection() as connection:
        found = await count_rejected(connection, ALL)
        later = await reject(post, 1)
        assert await retry(connection, ALL, until=found.at, actor="ann") == {PLANNED: 1}
    assert await post.states() == {first[0]: "planned", later[0]: "rejected"}


async def test_many_in_blocks(post: Post) -> None:
    """More than a block is retried block by block, each on record with its dispatches; who is told sees it grow."""
    number = BLOCK + 100
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(number)])
    ids = await reject(post, number)
    seen: list[int] = []
    async with post.worker.connection() as connection:
        found = await count_rejected(connection, ALL)
        done = await retry(connection, ALL, until=found.at, actor="ann", seen=seen.append)
    assert done == {PLANNED: number}
    assert seen == [BLOCK, number]
    entries = await fetch(
        post.owner, "SELECT actor, action, subject, details FROM audit ORDER BY audit_id"
    )
    assert {entry[:3] for entry in entries} == {("ann", "campaign.retry_rejected", "c")}
    assert [i for entry in entries for i in entry[3]["dispatch_ids"]] == sorted(ids)


async def test_a_cancel_and_several_retries_at_once(
    post: Post, refusals: Callable[[], list[str]]
) -> None:
    """Whoever comes first, each message is moved once, and nothing deadlocks."""
    await post.owner.execute("UPDATE operators SET chunk_size = 50")
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(200)])
    for _ in range(4):
        await reject(post, 50)
    async with post.worker.connection() as connection:
        found = await count_rejected(connection, ALL)

    async def one() -> Counter[MessageState]:
        async with post.worker.connection() as connection:
            return await retry(connection, ALL, until=found.at, actor="ann")

    cancelling = asyncio.create_task(post.apply(cancelled()))
    done = await asyncio.gather(one(), one(), one())
    await cancelling
    assert sum(counter.total() for counter in done) == 200
    async with post.worker.connection() as connection:
        await sweep_all(connection)
    assert set((await post.states()).values()) == {"cancelled"}
    assert refusals() == []


@pytest.mark.parametrize("state", [s for s in MessageState if s not in {"rejected", "uncertain"}])
async def test_nothing_else_is_ever_sent_again(post: Post, state: MessageState) -> None:
    """Asked for any other state the function does nothing."""
    await post.apply(scheduled())
    await post.plan([due(1)])
    await post.hand(1)
    await post.owner.execute("UPDATE messages SET status_at = now()")
    async with post.worker.connection() as connection:
        rows = await fetch(
            connection,
            "SELECT * FROM send_again((SELECT chunk_id FROM chunks), %s, NULL, NULL, NULL, now() + %s, 'ann', 10)",
            state,
            timedelta(hours=1),
        )
    assert rows == []
    assert set((await post.states()).values()) == {"handed"}


# ------------------------------------------------------------------ the command


async def run(fairpost: Fairpost, *words: str, stdin: str = "") -> Answer:
    """A command, outside this event loop."""
    return await asyncio.to_thread(fairpost, "campaigns", "retry-rejected", *words, stdin=stdin)


async def test_the_command(post: Post, fairpost: Fairpost) -> None:
    """It says how many and why before anything is done, asks, and says in one line what it did; run again, it finds nothing."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(4)])
    await reject(post, 2, "text: line 1: 'name' is undefined")
    [third] = await reject(post, 1, "x")
    reply = "550 5.1.1 <user2@example.test>: unknown"
    await post.owner.execute(
        "UPDATE messages SET reply = %s WHERE dispatch_id = %s", (reply, third)
    )

    dry = await run(fairpost, "c", "--dry-run", "--json")
    reasons: list[dict[str, Any]] = msgspec.json.decode(dry.out)
    assert reasons == [
        {"operator": "other", "messages": 2, "reason": "text: line 1: 'name' is undefined"},
        {"operator": "other", "messages": 1, "reason": "550 5.1.1 <…>: unknown"},
    ]
    assert (dry.code, dry.err) == (0, "campaign c: 3 messages to retry\n")
    assert b"is undefined" in (await run(fairpost, "c", "--dry-run")).out
    refused = await run(fairpost, "c", stdin="n\n")
    assert refused.code == 130
    assert "Send 3 messages after all? [y/N]" in refused.err
    assert Counter((await post.states()).values()) == {"rejected": 3, "planned": 1}

    done = await run(fairpost, "c", "--reason", "'name'", "--yes")
    assert (done.code, done.out, done.err) == (0, b"", "campaign c: 2 messages planned again\n")
    await post.owner.execute("UPDATE messages SET not_after = now() WHERE state = 'rejected'")
    done = await run(fairpost, "c", "--yes")
    assert done.err == "campaign c: 0 messages planned again, 1 expired\n"
    again = await run(fairpost, "c", "--yes")
    assert (again.code, again.err) == (0, "campaign c: 0 messages to retry\n")
    for campaign_id, why in (("nobody", "unknown; see"), ("c", "was cancelled, which is final")):
        if campaign_id == "c":
            await post.apply(cancelled())
        answer = await run(fairpost, campaign_id, "--yes")
        assert (answer.code, answer.out) == (1, b"")
        assert answer.err.startswith(f"campaign '{campaign_id}': {why}")


async def test_reasons_come_by_their_number(post: Post) -> None:
    """The most frequent reason is the first, and no more are listed than asked for."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(6)])
    for number, reason in ((1, "rare"), (3, "frequent"), (2, "now and then")):
        await reject(post, number, reason)
    async with post.worker.connection() as connection:
        reasons = await list_reasons(connection, ALL, limit=2)
    assert [(reason.messages, reason.reason) for reason in reasons] == [
        (3, "frequent"),
        (2, "now and then"),
    ]


async def test_an_agent_cannot_say_so(post: Post) -> None:
    """No agent can have anything sent again."""
    async with post.agent.connection() as connection:
        with pytest.raises(InsufficientPrivilege):
            await connection.execute(
                "SELECT send_again(1, 'rejected', NULL, NULL, NULL, now(), 'ann', 1)"
            )
    assert await fetch_one(post.owner, "SELECT count(*) FROM audit") == 0
