"""Hand-over: what is given to Postfix is written ahead, comes back where it stands, and is given to none that may not have it."""

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from contract.database import Connection
from contract.events import Template
from contract.rendering import Content, Rendered
from contract.rendering_pool import RenderingPool
from processor.interventions import cancel
from smtp_agent.claims import Claim
from smtp_agent.handover import Batch, HandedOver, Refusal
from tests.integration.conftest import (
    INSTANCE,
    START,
    Post,
    cancelled,
    due,
    fetch,
    fetch_one,
    paused,
    resumed,
    scheduled,
)


async def a_claim(post: Post, number: int = 5) -> tuple[Claim, list[int]]:
    """A claimed chunk of as many messages."""
    await post.apply(scheduled())
    dispatch_ids = await post.plan([due(n) for n in range(number)])
    await post.ripen()
    return await post.claim(), dispatch_ids


def ids(batch: Batch) -> list[int]:
    """The dispatches of a batch, in order."""
    return [recipient.dispatch_id for recipient in batch.recipients]


async def cursor(post: Post) -> int:
    """Where the next batch of the only chunk begins to look."""
    position: int = await fetch_one(post.owner, "SELECT cursor FROM chunks")
    return position


async def test_write_ahead_marks_the_next_messages(post: Post) -> None:
    """Batches take the messages in the order of the chunk; each is `handed` to the claim's instance before it is answered."""
    claim, dispatch_ids = await a_claim(post)
    handover = post.handover()
    first = await handover.write_ahead(claim, 1, 2)
    assert (first.outcome, first.revision, ids(first)) == ("batch", 1, dispatch_ids[:2])
    assert [(r.user_id, r.email, r.email_key, r.variables) for r in first.recipients] == [
        (f"user{n}", f"user{n}@example.test", "hello", {}) for n in range(2)
    ]
    assert await fetch(
        post.owner,
        "SELECT dispatch_id, instance, handed_at, handovers FROM messages WHERE state = 'handed' ORDER BY position",
    ) == [(dispatch_id, INSTANCE, first.handed_at, 1) for dispatch_id in dispatch_ids[:2]]
    second = await handover.write_ahead(claim, 2, 2)
    third = await handover.write_ahead(claim, 3, 2)
    assert (ids(second), ids(third)) == (dispatch_ids[2:4], dispatch_ids[4:])
    assert (await handover.write_ahead(claim, 4, 2)).outcome == "empty"
    assert (await handover.write_ahead(claim, 5, 2)).outcome == "empty"
    assert await post.told() == []


async def test_a_hand_over_is_recorded(post: Post) -> None:
    """Each batch stands in `handovers` with its positions, and with the run of Postfix and the log that it went to."""
    (post.postfix.queue_directory / "pid").mkdir()
    (post.postfix.queue_directory / "pid" / "master.pid").write_text("1")
    os.utime(
        post.postfix.queue_directory / "pid" / "master.pid", (START.timestamp(), START.timestamp())
    )
    assert post.postfix.log is not None
    post.postfix.log.write_text("")
    claim, _ = await a_claim(post)
    batches = [await post.handover().write_ahead(claim, n, 2) for n in (1, 2, 3, 4)]
    assert await fetch(
        post.owner,
        """
        SELECT claim_token, batch, chunk_id, instance, operator, at, positions, postfix_started_at, log_inode
          FROM handovers ORDER BY batch""",
    ) == [
        (
            claim.token,
            number,
            claim.chunk_id,
            INSTANCE,
            "other",
            batches[number - 1].handed_at,
            positions,
            START,
            post.postfix.log.stat().st_ino,
        )
        for number, positions in ((1, [0, 1]), (2, [2, 3]), (3, [4]))
    ]


async def test_the_same_batch_is_answered_again(post: Post) -> None:
    """A batch that is asked for again, as when its answer was lost, is the same batch, handed over once."""
    claim, dispatch_ids = await a_claim(post)
    handover = post.handover()
    first = await handover.write_ahead(claim, 1, 3)
    again = await handover.write_ahead(claim, 1, 100)
    assert again == first
    assert ids(await handover.write_ahead(claim, 2, 100)) == dispatch_ids[3:]
    assert await fetch(post.owner, "SELECT DISTINCT handovers FROM messages") == [(1,)]


async def test_the_same_batch_asked_for_at_once(post: Post) -> None:
    """A batch that is asked for again while the first call is still under way is the same batch."""
    claim, dispatch_ids = await a_claim(post)
    handover = post.handover()
    batches = await asyncio.gather(*(handover.write_ahead(claim, 1, 3) for _ in range(4)))
    assert [ids(batch) for batch in batches] == [dispatch_ids[:3]] * 4
    assert len({batch.handed_at for batch in batches}) == 1
    assert Counter((await post.states()).values()) == {"handed": 3, "planned": 2}


async def test_a_lost_claim_hands_nothing_over(post: Post) -> None:
    """With the token of a claim that another has taken over, or that never was, nothing is handed over."""
    claim, dispatch_ids = await a_claim(post)
    await post.owner.execute("UPDATE chunks SET lease_until = clock_timestamp()")
    other = await post.claim(instance="postfix-b")
    handover = post.handover()
    assert await handover.write_ahead(claim, 1, 3) == Batch("lost", 0, None, [])
    foreign = msgspec.structs.replace(claim, token=uuid4())
    assert (await handover.write_ahead(foreign, 1, 3)).outcome == "lost"
    assert set((await post.states()).values()) == {"planned"}
    assert ids(await post.handover("postfix-b").write_ahead(other, 1, 9)) == dispatch_ids


async def test_a_batch_whose_claim_was_lost_meanwhile_is_given_back(post: Post) -> None:
    """Whoever asks again for a batch after it lost the claim has sent none of it: it is planned again for the new holder."""
    claim, dispatch_ids = await a_claim(post)
    await post.handover().write_ahead(claim, 1, 3)
    await post.owner.execute("UPDATE chunks SET lease_until = clock_timestamp()")
    other = await post.claim(instance="postfix-b")
    assert (await post.handover().write_ahead(claim, 1, 3)).outcome == "lost"
    assert set((await post.states()).values()) == {"planned"}
    assert ids(await post.handover("postfix-b").write_ahead(other, 1, 9)) == dispatch_ids


async def test_what_another_instance_has_is_not_handed_again(post: Post) -> None:
    """Who takes a chunk over gets what is still planned only; what was handed over stays its instance's."""
    claim, dispatch_ids = await a_claim(post)
    await post.handover().write_ahead(claim, 1, 3)
    await post.owner.execute("UPDATE chunks SET lease_until = clock_timestamp()")
    other = await post.claim(instance="postfix-b")
    assert other.planned == 2
    assert ids(await post.handover("postfix-b").write_ahead(other, 1, 9)) == dispatch_ids[3:]
    assert await fetch(
        post.owner, "SELECT instance, count(*) FROM messages GROUP BY instance ORDER BY instance"
    ) == [(INSTANCE, 3), ("postfix-b", 2)]


CLOSED = [
    ("UPDATE campaigns SET state = 'paused'", "paused"),
    ("UPDATE campaigns SET held_at = now()", "held"),
    ("UPDATE campaigns SET scheduled_for = clock_timestamp() + interval '1 hour'", "postponed"),
    ("UPDATE fleet SET sending = false", "sending is off"),
    ("UPDATE operators SET paused_at = now()", "operator paused"),
    ("UPDATE instances SET paused_at = now()", "instance paused"),
    ("UPDATE instances SET retired_at = now()", "instance paused"),
]


@pytest.mark.parametrize(("statement", "outcome"), CLOSED)
async def test_why_nothing_may_be_handed_over(post: Post, statement: str, outcome: str) -> None:
    """Each reason stops the next batch, and a batch whose answer was lost is given back where it stood."""
    claim, dispatch_ids = await a_claim(post)
    async with post.agent.connection() as connection:
        await fetch(
            connection, "SELECT register_instance(%s, 'machine', '/queue', '1', true)", INSTANCE
        )
    handover = post.handover()
    await handover.write_ahead(claim, 1, 2)
    await handover.write_ahead(claim, 2, 2)
    await post.owner.execute(statement.encode())
    assert await handover.write_ahead(claim, 3, 2) == Batch(outcome, 0, None, [])
    assert Counter((await post.states()).values()) == {"handed": 4, "planned": 1}
    assert await handover.write_ahead(claim, 2, 2) == Batch(outcome, 0, None, [])
    assert await post.states() == dict(
        zip(dispatch_ids, ["handed", "handed", "planned", "planned", "planned"], strict=True)
    )
    assert await cursor(post) == 2
    assert await post.told() == []


async def test_a_cancelled_campaigns_batch_is_cancelled(post: Post) -> None:
    """A batch whose answer was lost before its campaign was cancelled becomes `cancelled`, not planned."""
    claim, dispatch_ids = await a_claim(post)
    await post.handover().write_ahead(claim, 1, 2)
    await post.apply(cancelled())
    assert (await post.handover().write_ahead(claim, 1, 2)).outcome == "cancelled"
    assert sorted(await post.told()) == [
        (dispatch_id, "cancelled") for dispatch_id in dispatch_ids[:2]
    ]


async def test_a_pause_during_the_call_is_seen(post: Post, owner: Connection) -> None:
    """A pause that is stored while a hand-over waits for the chunk stops that very hand-over."""
    claim, _ = await a_claim(post)
    async with owner.transaction():
        await owner.execute("SELECT FROM chunks FOR UPDATE")
        call = asyncio.create_task(post.handover().write_ahead(claim, 1, 2))
        async with asyncio.timeout(10):
            while not await fetch(owner, "SELECT FROM pg_locks WHERE NOT granted"):
                pass
        await post.apply(paused())
    assert (await call).outcome == "paused"
    assert set((await post.states()).values()) == {"planned"}
    await post.apply(resumed())
    assert (await post.handover().write_ahead(claim, 1, 2)).outcome == "batch"


async def test_suppressed_and_expired_messages_are_passed_over(post: Post) -> None:
    """A suppressed address, however it is written, and a message past its time get no mail: their states are final and told."""
    await post.apply(scheduled())
    expired, suppressed, good = await post.plan(
        [
            due(1, not_after=datetime.now(UTC) + timedelta(hours=1)),
            due(2, email="Some.One@Example.TEST"),
            due(3),
        ]
    )
    await post.ripen()
    await post.owner.execute("UPDATE messages SET not_after = now() WHERE not_after IS NOT NULL")
    await post.owner.execute(
        "INSERT INTO suppressions (mailbox, source, reason, since)"
        " VALUES ('some.one@example.test', 'person', 'no more', now())"
    )
    claim = await post.claim()
    batch = await post.handover().write_ahead(claim, 1, 2)
    assert (batch.outcome, batch.recipients) == ("batch", [])
    assert ids(await post.handover().write_ahead(claim, 2, 2)) == [good]
    assert await post.states() == {expired: "expired", suppressed: "suppressed", good: "handed"}
    assert sorted(await post.told()) == [(expired, "expired"), (suppressed, "suppressed")]


async def test_new_content_is_announced_by_its_revision(post: Post) -> None:
    """A batch names the revision of the campaign's content as it is at that moment."""
    claim, _ = await a_claim(post)
    assert (await post.handover().write_ahead(claim, 1, 2)).revision == 1
    await post.apply(scheduled(templates={"hello": Template(subject="New", text="new")}))
    assert (await post.handover().write_ahead(claim, 2, 2)).revision == 2


async def test_what_postfix_surely_does_not_have_is_given_back(post: Post) -> None:
    """While Postfix does not listen every message of a batch is planned again where it stands, and handed over next."""
    claim, dispatch_ids = await a_claim(post)
    handover = post.handover()
    await handover.write_ahead(claim, 1, 2)
    batch = await handover.write_ahead(claim, 2, 2)
    done = await handover.hand_over(claim, batch, float("inf"))
    assert sorted(done.given_back) == dispatch_ids[2:4]
    assert (done.accepted, done.refused, done.in_doubt, done.counted) == ([], [], [], 0)
    assert done.unsent is not None
    assert await cursor(post) == 2
    again = await handover.write_ahead(claim, 3, 9)
    assert ids(again) == dispatch_ids[2:]
    assert again.handovers == dict(zip(dispatch_ids[2:], [2, 2, 1], strict=True))
    assert await fetch(post.owner, "SELECT handovers FROM messages ORDER BY position") == [
        (1,),
        (1,),
        (2,),
        (2,),
        (1,),
    ]


@pytest.mark.parametrize(
    ("meanwhile", "state"),
    [
        ("UPDATE campaigns SET state = 'paused'", "planned"),
        ("UPDATE campaigns SET state = 'cancelled'", "cancelled"),
        ("UPDATE messages SET not_after = now()", "expired"),
        (
            """
            INSERT INTO suppressions (mailbox, source, reason, since)
            SELECT email, 'person', 'no more', now() FROM messages""",
            "suppressed",
        ),
    ],
)
async def test_what_is_given_back_becomes_what_it_is_meanwhile(
    post: Post, meanwhile: str, state: str
) -> None:
    """A message given back is planned, or what its campaign, its time or its address have made of it meanwhile."""
    claim, dispatch_ids = await a_claim(post, 2)
    handover = post.handover()
    batch = await handover.write_ahead(claim, 1, 2)
    await post.owner.execute(meanwhile.encode())
    await handover.hand_over(claim, batch, float("inf"))
    assert await post.states() == dict.fromkeys(dispatch_ids, state)
    told = [] if state == "planned" else [(dispatch_id, state) for dispatch_id in dispatch_ids]
    assert sorted(await post.told()) == told


async def test_only_ones_own_hand_over_is_given_back(post: Post) -> None:
    """What was handed over anew since, or is another instance's, is not given back."""
    claim, dispatch_ids = await a_claim(post, 3)
    batch = await post.handover().write_ahead(claim, 1, 2)
    await post.handover("postfix-b").hand_over(claim, batch, float("inf"))
    older = msgspec.structs.replace(batch, handed_at=START)
    await post.handover().hand_over(claim, older, float("inf"))
    assert await post.states() == dict(
        zip(dispatch_ids, ["handed", "handed", "planned"], strict=True)
    )


async def test_a_chunk_with_given_back_mail_can_be_claimed(post: Post) -> None:
    """What was given back after the claim ended is handed over under the next claim."""
    claim, dispatch_ids = await a_claim(post, 2)
    handover = post.handover()
    batch = await handover.write_ahead(claim, 1, 2)
    await post.claims().release(claim)
    assert await post.claims().claim("other") is None
    await handover.hand_over(claim, batch, float("inf"))
    other = await post.claim(instance="postfix-b")
    assert ids(await post.handover("postfix-b").write_ahead(other, 1, 9)) == dispatch_ids


async def test_a_template_that_fails_is_refused(post: Post) -> None:
    """A message that cannot be rendered is refused for good, and does not keep the others."""
    await post.apply(
        scheduled(
            templates={"hello": Template(subject="Hello", text="{{ variables_that_fail() }}")}
        )
    )
    await post.plan([due(1), due(2, email_key="no such key")])
    claim, batch = await post.hand(2)
    done = await post.handover().hand_over(claim, batch, float("inf"))
    assert [refusal.dispatch_id for refusal in done.refused] == ids(batch)
    await post.handover().reject(done.refused)
    assert set((await post.states()).values()) == {"rejected"}


async def test_a_batch_whose_content_cannot_be_read_is_given_back(post: Post) -> None:
    """Whatever fails before a batch is rendered, nothing of it stays handed: it is planned again, and the error is raised."""
    await post.apply(scheduled())
    await post.plan([due(1), due(2)])
    claim, batch = await post.hand(2)
    await post.owner.execute("""UPDATE campaigns SET templates = '{"hello": 1}'""")
    with pytest.raises(msgspec.ValidationError):
        await post.handover().hand_over(claim, batch, float("inf"))
    assert set((await post.states()).values()) == {"planned"}


async def test_a_message_whose_rendering_never_ends_is_refused_alone(post: Post) -> None:
    """A template that loops for minutes is refused with its limit, and the others of its batch go on."""
    loop = "{% for a in range(99999) %}{{ range(99999)|list|sum }}{% endfor %}"
    templates = {
        "hello": Template(subject="Hello", text="Hello"),
        "loop": Template(subject="Hello", text=loop),
    }
    await post.apply(scheduled(templates=templates))
    first, bad, last = await post.plan([due(1), due(2, email_key="loop"), due(3)])
    claim, batch = await post.hand(3)
    done = await post.handover().hand_over(claim, batch, float("inf"))
    why = "campaign 'c', email_key 'loop': rendering took longer than 0.25 s of CPU time"
    assert [(r.dispatch_id, r.dsn, r.reply) for r in done.refused] == [(bad, None, why)]
    assert sorted(done.given_back) == [first, last]


async def test_what_is_not_rendered_in_time_is_given_back(post: Post) -> None:
    """A batch that cannot be rendered by its deadline is planned again, and nothing is said against Postfix."""
    claim, dispatch_ids = await a_claim(post, 3)
    handover = post.handover()
    batch = await handover.write_ahead(claim, 1, 3)
    done = await handover.hand_over(claim, batch, time.monotonic())
    assert done == HandedOver([], [], dispatch_ids, [], None)
    assert set((await post.states()).values()) == {"planned"}


async def test_content_is_kept_for_a_few_campaigns(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more campaigns than are kept the one used longest ago is read anew; each is rendered from its own."""
    monkeypatch.setattr("smtp_agent.handover._CONTENTS", 2)
    rendered: list[tuple[str, int]] = []
    render = RenderingPool.render

    def noting(
        self: RenderingPool, content: Content, *rest: Any, **named: Any
    ) -> AsyncIterator[list[Rendered | str]]:
        rendered.append((content.campaign_id, content.revision))
        return render(self, content, *rest, **named)

    monkeypatch.setattr(RenderingPool, "render", noting)
    handover = post.handover()
    batches = {}
    for campaign_id in "abc":
        await post.apply(scheduled(campaign_id))
        await post.plan([due(1, campaign_id)])
        batches[campaign_id] = await post.hand(1)
    for campaign_id in "abacab":
        if len(rendered) == 2:
            # Not announced by the batch, so seen only where the content is read anew.
            await post.owner.execute("UPDATE campaigns SET revision = 9")
        claim, batch = batches[campaign_id]
        assert claim.campaign_id == campaign_id
        await handover.hand_over(claim, batch, float("inf"))
    assert rendered == [("a", 1), ("b", 1), ("a", 1), ("c", 9), ("a", 1), ("b", 9)]


async def test_new_content_is_read_when_a_batch_announces_it(post: Post) -> None:
    """A batch written ahead under a newer revision is rendered from it, though an older one was kept."""
    claim, (first, *_) = await a_claim(post)
    handover = post.handover()
    done = await handover.hand_over(claim, await handover.write_ahead(claim, 1, 1), float("inf"))
    assert done.given_back == [first]
    await post.apply(scheduled(templates={"other": Template(subject="New", text="new")}))
    done = await handover.hand_over(claim, await handover.write_ahead(claim, 2, 1), float("inf"))
    assert [refusal.dispatch_id for refusal in done.refused] == [first]


async def test_a_refusal_is_final_and_told(post: Post) -> None:
    """What Postfix refused for good is `rejected` with its reply, once, however often it is written."""
    claim, dispatch_ids = await a_claim(post, 2)
    batch = await post.handover().write_ahead(claim, 1, 2)
    assert batch.handed_at is not None
    refusal = Refusal(
        dispatch_ids[0], batch.handed_at, "5.1.3", "501 5.1.3 Bad recipient address syntax"
    )
    for _ in range(2):
        await post.handover().reject([refusal])
    assert await post.states() == dict(zip(dispatch_ids, ["rejected", "handed"], strict=True))
    assert await fetch(
        post.owner, "SELECT dispatch_id, status, dsn, reply, instance, attempt FROM outbox"
    ) == [(dispatch_ids[0], "rejected", refusal.dsn, refusal.reply, INSTANCE, 0)]


async def test_only_ones_own_hand_over_is_rejected(post: Post) -> None:
    """A refusal of another instance, or of an earlier hand-over, changes nothing, nor does one of mail in the queue."""
    claim, dispatch_ids = await a_claim(post, 2)
    batch = await post.handover().write_ahead(claim, 1, 2)
    assert batch.handed_at is not None
    await post.handover("postfix-b").reject([Refusal(dispatch_ids[0], batch.handed_at, None, "no")])
    await post.handover().reject(
        [Refusal(dispatch_ids[0], batch.handed_at - timedelta(microseconds=1), None, "no")]
    )
    assert set((await post.states()).values()) == {"handed"}


async def test_lanes_and_a_cancel_at_once(post: Post, refusals: Callable[[], list[str]]) -> None:
    """While lanes of several instances hand over and give back, a cancel leaves every message handed or cancelled, none lost."""
    await post.owner.execute("UPDATE operators SET chunk_size = 40")
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(400)])
    await post.ripen()
    handed: list[int] = []

    async def lane(instance: str) -> None:
        handover = post.handover(instance)
        while (claim := await post.claims(instance).claim("other")) is not None:
            for number in itertools.count(1):
                batch = await handover.write_ahead(claim, number, 7)
                if batch.outcome != "batch":
                    break
                if number % 3 == 0:
                    await handover.hand_over(claim, batch, float("inf"))
                else:
                    handed.extend(ids(batch))
                if len(handed) > 150:
                    async with post.worker.connection() as connection:
                        await cancel(connection, "c", "test")
            await post.claims(instance).release(claim)

    await asyncio.gather(*(lane(f"postfix-{n}") for n in range(4)))
    async with post.worker.connection() as connection:
        while await fetch_one(connection, "SELECT sweep(2)"):
            pass
    assert len(handed) == len(set(handed))
    states = await post.states()
    assert {dispatch_id for dispatch_id, state in states.items() if state == "handed"} == set(
        handed
    )
    assert Counter(states.values()) == {"handed": len(handed), "cancelled": 400 - len(handed)}
    assert refusals() == []
