"""Claims: the campaign with the fewest instances is next, a chunk has one holder, and a lease ends what its holder does not."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta

import psycopg
import pytest
from msgspec import Struct

from contract.operators import Operator
from processor.operators import apply_operators
from smtp_agent.claims import Claim, Claims
from tests.conftest import Database
from tests.integration.conftest import START, Post, due, fetch, fetch_one, pool_of, scheduled


async def one_chunk(post: Post) -> None:
    """A chunk that can be claimed."""
    await post.apply(scheduled())
    await post.plan([due(1), due(2)])
    await post.ripen()


async def test_a_claim(post: Post) -> None:
    """A claim names the chunk, its campaign and what is planned in it, and its holder stands in the database."""
    await one_chunk(post)
    claim = await post.claims("postfix-b", 45).claim("other")
    assert claim is not None
    assert (claim.campaign_id, claim.number, claim.planned) == ("c", 1, 2)
    assert await fetch(
        post.owner,
        """
        SELECT chunk_id, claim_token, instance, sealed, lease_until - claimed_at,
               clock_timestamp() - claimed_at < '10 s' FROM chunks""",
    ) == [(claim.chunk_id, claim.token, "postfix-b", True, timedelta(seconds=45), True)]


@pytest.mark.parametrize(("opened", "scheduled_for", "waited"), [(90, 30, 30), (30, 90, 30)])
async def test_how_long_a_chunk_waited(
    post: Post, opened: int, scheduled_for: int, waited: int
) -> None:
    """At a chunk's first claim it is told since when it was open and due; at later ones nothing."""
    await one_chunk(post)
    await post.owner.execute(
        "UPDATE chunks SET opened_at = now() - %s * interval '1 second'", (opened,)
    )
    await post.owner.execute(
        "UPDATE campaigns SET scheduled_for = now() - %s * interval '1 second'", (scheduled_for,)
    )
    claim = await post.claim()
    assert claim.waited is not None
    assert waited <= claim.waited.total_seconds() < waited + 30
    await post.claims().release(claim)
    assert (await post.claim()).waited is None


async def test_where_an_instance_may_have_messages(post: Post) -> None:
    """Every instance that ever held a chunk stands with it in `claims`, once."""
    await one_chunk(post)
    for instance in ("a", "b", "a"):
        await post.claims().release(await post.claim(instance=instance))
    chunk_id = await fetch_one(post.owner, "SELECT chunk_id FROM chunks")
    assert await fetch(post.owner, "SELECT instance, chunk_id FROM claims ORDER BY instance") == [
        ("a", chunk_id),
        ("b", chunk_id),
    ]


@pytest.mark.parametrize(
    "obstacle",
    [
        "UPDATE campaigns SET state = 'paused'",
        "UPDATE campaigns SET state = 'waiting'",
        "UPDATE campaigns SET state = 'cancelled'",
        "UPDATE campaigns SET held_at = now(), held_by = 'ann'",
        "UPDATE campaigns SET scheduled_for = clock_timestamp() + interval '1 hour'",
        "UPDATE chunks SET opened_at = clock_timestamp() + interval '1 minute'",
        "UPDATE chunks SET instance = 'b', claim_token = gen_random_uuid(), lease_until = now() + interval '1 minute'",
        "UPDATE messages SET state = 'handed', instance = 'b', handed_at = now()",
        "UPDATE operators SET paused_at = now()",
        "UPDATE instances SET paused_at = now()",
        "UPDATE instances SET retired_at = now()",
        "UPDATE fleet SET sending = false",
        "UPDATE chunks SET operator = 'gmail'",
    ],
    ids=lambda statement: statement.removeprefix("UPDATE ").replace("SET ", "")[:40],
)
async def test_what_keeps_a_chunk_from_being_claimed(post: Post, obstacle: str) -> None:
    """Each of the conditions alone keeps a chunk from being claimed that could be claimed without."""
    await one_chunk(post)
    async with post.agent.connection() as connection:
        await fetch(
            connection, "SELECT register_instance('postfix-a', 'machine', '/queue', '1', true)"
        )
    await post.owner.execute(obstacle.encode())
    assert await post.claims().claim("other") is None


@pytest.mark.parametrize(
    "circumstance",
    [
        "UPDATE chunks SET opened_at = opened_at",
        "UPDATE chunks SET opened_at = now() + interval '1 minute', capacity = 2",
        "UPDATE chunks SET opened_at = now() + interval '1 minute', sealed = true",
        "UPDATE chunks SET instance = 'b', claim_token = gen_random_uuid(), lease_until = now() - interval '1 ms'",
        "UPDATE campaigns SET scheduled_for = now()",
    ],
    ids=["ripe", "full", "given-back", "lease-lapsed", "due-now"],
)
async def test_what_can_be_claimed(post: Post, circumstance: str) -> None:
    """A chunk is claimed when it is over a second old, full, or was claimed before, and its holder's lease is over."""
    await one_chunk(post)
    await post.owner.execute(circumstance.encode())
    assert (await post.claim()).planned == 2


async def test_nothing_for_an_unknown_operator(post: Post) -> None:
    """At an operator that is not applied there is nothing to claim."""
    await one_chunk(post)
    assert await post.claims().claim("nobody") is None


async def chunks_of(post: Post, campaigns: dict[str, int], *, per_campaign: int = 2) -> None:
    """Campaigns, scheduled that many minutes after the start, with as many full chunks of one message each."""
    await post.owner.execute("UPDATE operators SET chunk_size = 1")
    await post.apply(
        *(
            scheduled(name, START + timedelta(minutes=minutes))
            for name, minutes in campaigns.items()
        )
    )
    await post.plan([due(n, name) for n in range(per_campaign) for name in campaigns])


async def claimed_campaigns(post: Post, *instances: str) -> list[tuple[str, int]]:
    """Campaign and number of the chunk that each instance in turn claims."""
    claims = [await post.claim(instance=instance) for instance in instances]
    return [(claim.campaign_id, claim.number) for claim in claims]


async def test_the_fewest_instances_come_first(post: Post) -> None:
    """The campaign for which the fewest instances work is next, then the earlier one, then the lower number."""
    await chunks_of(post, {"late": 30, "early": 10, "middle": 20})
    assert await claimed_campaigns(post, "a", "b", "c", "d", "e", "f") == [
        ("early", 1),
        ("middle", 1),
        ("late", 1),
        ("early", 2),
        ("middle", 2),
        ("late", 2),
    ]


async def test_an_instance_counts_once(post: Post) -> None:
    """An instance with several chunks of a campaign counts as one, and one whose lease is over not at all."""
    await chunks_of(post, {"early": 10, "late": 20}, per_campaign=4)
    assert await claimed_campaigns(post, "a", "b") == [("early", 1), ("late", 1)]
    assert await claimed_campaigns(post, "a") == [("early", 2)]
    assert await claimed_campaigns(post, "b") == [("early", 3)]
    assert await claimed_campaigns(post, "c") == [("late", 2)]
    await post.owner.execute("UPDATE chunks SET lease_until = now() WHERE instance <> 'c'")
    assert await claimed_campaigns(post, "d") == [("early", 1)]
    assert await claimed_campaigns(post, "e", "f") == [("early", 2), ("late", 1)]


async def test_instances_count_within_their_operator(post: Post) -> None:
    """Instances that work for a campaign at another operator do not count against it."""
    async with post.worker.connection() as connection:
        await apply_operators(
            connection, [Operator("gmail", ("gmail.test",)), Operator("other")], "test", "a test"
        )
    await chunks_of(post, {"early": 10, "late": 20})
    await post.plan([due(n, "early", "gmail.test") for n in range(10, 13)])
    for instance in ("a", "b", "c"):
        assert (await post.claim("gmail", instance)).campaign_id == "early"
    assert await claimed_campaigns(post, "d") == [("early", 1)]


async def test_a_freed_chunk_is_next_again(post: Post) -> None:
    """Without rotation the earlier campaign is claimed again as soon as nobody works for it."""
    await chunks_of(post, {"early": 10, "late": 20}, per_campaign=3)
    for number in (1, 2, 3):
        claim = await post.claim()
        assert (claim.campaign_id, claim.number) == ("early", number)
        await finish(post, claim)


async def test_rotation_takes_turns(post: Post) -> None:
    """With `tie_break = "rotate"` the campaign whose last claim is longer ago comes before the earlier one, unclaimed ones first."""
    async with post.worker.connection() as connection:
        await apply_operators(connection, [Operator("other", tie_break="rotate")], "test", "a test")
    await chunks_of(post, {"late": 30, "early": 10, "middle": 20})
    order = []
    for _ in range(6):
        claim = await post.claim()
        order.append((claim.campaign_id, claim.number))
        await finish(post, claim)
    assert order == [(name, number) for number in (1, 2) for name in ("early", "middle", "late")]


async def finish(post: Post, claim: Claim) -> None:
    """Hands over all of a chunk and ends the claim."""
    await post.handover().write_ahead(claim, 1, 100)
    await post.claims().release(claim)


async def test_a_locked_row_holds_up_nobody(post: Post, database: Database) -> None:
    """A chunk whose row somebody locks for long is passed over, and is next again when it is free."""
    await chunks_of(post, {"early": 10, "late": 20}, per_campaign=3)
    async with await psycopg.AsyncConnection.connect(database.owner) as other:
        await other.execute(
            "SELECT FROM fairpost.chunks WHERE campaign_id = 'early' AND number = 1 FOR UPDATE"
        )
        assert await claimed_campaigns(post, "a") == [("early", 2)]
    assert await claimed_campaigns(post, "b", "c") == [("late", 1), ("early", 1)]


async def test_a_chunk_that_is_gone_meanwhile(post: Post, database: Database) -> None:
    """Whoever waited for a chunk that turns out to be held takes the next one, and does not go without."""
    await chunks_of(post, {"early": 10}, per_campaign=2)
    claim = await post.claim()
    await post.owner.execute("UPDATE chunks SET lease_until = now() WHERE instance IS NOT NULL")
    async with await psycopg.AsyncConnection.connect(database.owner) as holder:
        await holder.execute(
            "SELECT fairpost.renew_lease(%s, %s, '1 minute')", [claim.chunk_id, claim.token]
        )
        claiming = asyncio.create_task(post.claim(instance="postfix-b"))
        async with asyncio.timeout(10):
            while not await fetch(post.owner, WAITING_FOR_A_ROW):
                pass
        await holder.commit()
    assert (await claiming).number == 2


WAITING_FOR_A_ROW = """
SELECT FROM pg_stat_activity
 WHERE datname = current_database() AND wait_event_type = 'Lock' AND query ~ 'claim_chunk'"""


async def test_a_line_is_joined_again_at_once(
    post: Post, refusals: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Whom other claimers kept waiting past the lock's time-out has a chunk as soon as they are done, and nobody is told."""
    await one_chunk(post)
    async with post.owner.transaction():
        await post.owner.execute(
            "SELECT pg_advisory_xact_lock(hashtextextended('fairpost claim other', 0))"
        )
        claiming = asyncio.create_task(post.claim())
        async with asyncio.timeout(10):
            while len(refusals()) < 2:
                await post.owner.execute("SELECT pg_sleep(0.01)")
    async with asyncio.timeout(0.4):  # what a backoff would take longer than
        await claiming
    assert not caplog.records


class Chunk(Struct):
    """A chunk as the order of claims sees it."""

    campaign_id: str
    number: int
    scheduled_for: datetime
    instance: str
    claimed_at: datetime


async def test_many_claimers_at_once(post: Post, database: Database) -> None:
    """Of 32 claimers at once none gets another's chunk, and each claim is the one that the order demands at its moment."""
    await chunks_of(post, {f"campaign {n:02}": n * 7 % 12 for n in range(15)}, per_campaign=8)
    async with pool_of(database.agent, 32) as pool:

        async def claim_all(instance: str) -> list[Claim]:
            claims = Claims(pool, instance, 60)
            mine = []
            while (claim := await claims.claim("other")) is not None:
                mine.append(claim)
            return mine

        held = await asyncio.gather(*(claim_all(f"instance {n % 10}") for n in range(32)))
    claims = [claim for mine in held for claim in mine]
    assert (
        len({claim.chunk_id for claim in claims})
        == len({claim.token for claim in claims})
        == len(claims)
        == 120
    )
    rows = await fetch(
        post.owner,
        """
        SELECT campaign_id, number, scheduled_for, instance, claimed_at
          FROM chunks JOIN campaigns USING (campaign_id) ORDER BY claimed_at""",
    )
    assert_fair([Chunk(*row) for row in rows])


def assert_fair(claimed: list[Chunk]) -> None:
    """Each chunk, in the order of its claim, is the least of those that were still free."""
    working: dict[str, set[str]] = defaultdict(set)
    for place, chunk in enumerate(claimed):
        free = claimed[place:]
        best = min(free, key=lambda c: (len(working[c.campaign_id]), c.scheduled_for, c.number))
        chosen, wanted = (
            (len(working[c.campaign_id]), c.scheduled_for, c.number) for c in (chunk, best)
        )
        assert chosen == wanted, f"claim {place}: {chunk} instead of {best}"
        working[chunk.campaign_id].add(chunk.instance)


async def test_a_lease_is_renewed(post: Post) -> None:
    """A claim that is kept outlasts its lease many times, and nobody else gets the chunk meanwhile."""
    await one_chunk(post)
    claims = post.claims(lease_seconds=0.4)
    claim = await claims.claim("other")
    assert claim is not None
    first = await lease(post)
    async with claims.kept(claim) as lost, asyncio.timeout(10):
        while await lease(post) < first + timedelta(seconds=1):
            assert await post.claims("postfix-b").claim("other") is None
        assert not lost.is_set()
    async with asyncio.timeout(10):
        while (other := await post.claims("postfix-b").claim("other")) is None:
            pass
    assert other.chunk_id == claim.chunk_id
    assert other.token != claim.token


async def lease(post: Post) -> datetime:
    """Until when the only chunk is held."""
    until: datetime = await fetch_one(post.owner, "SELECT lease_until FROM chunks")
    return until


async def test_a_lost_claim_is_noticed(post: Post) -> None:
    """Whoever keeps a claim that another has taken over learns it, and can neither renew nor release it."""
    await one_chunk(post)
    claims = post.claims(lease_seconds=0.2)
    claim = await claims.claim("other")
    assert claim is not None
    await post.owner.execute("UPDATE chunks SET lease_until = clock_timestamp()")
    other = await post.claim(instance="postfix-b")
    async with claims.kept(claim) as lost, asyncio.timeout(10):
        await lost.wait()
    await claims.release(claim)
    assert await fetch(post.owner, "SELECT instance, claim_token FROM chunks") == [
        ("postfix-b", other.token)
    ]


async def test_a_lease_that_cannot_be_renewed_is_given_up_in_time(
    post: Post, caplog: pytest.LogCaptureFixture
) -> None:
    """While the database does not answer, a claim counts as lost before another can have it."""
    await one_chunk(post)
    claims = post.claims(lease_seconds=1)
    claim = await claims.claim("other")
    assert claim is not None
    clock = asyncio.get_running_loop().time
    started = clock()
    async with post.owner.transaction():
        await post.owner.execute(
            "SELECT FROM chunks FOR UPDATE"
        )  # what a hung database is to a renewal
        async with claims.kept(claim) as lost, asyncio.timeout(10):
            await lost.wait()
            assert clock() - started < 1
    assert "lease of chunk" in caplog.text


async def test_a_released_chunk_can_be_claimed_at_once(post: Post) -> None:
    """A claim that is released leaves its chunk to the next, and releasing twice is harmless."""
    await one_chunk(post)
    claim = await post.claim()
    await post.claims().release(claim)
    other = await post.claim(instance="postfix-b")
    await post.claims().release(claim)
    assert other.chunk_id == claim.chunk_id
    assert await fetch_one(post.owner, "SELECT instance FROM chunks") == "postfix-b"


async def register(
    post: Post, instance: str, machine: str, queue: str, *, starting: bool = True
) -> str | None:
    """Registers an instance; what is wrong."""
    async with post.agent.connection() as connection:
        answer: str | None = await fetch_one(
            connection,
            "SELECT register_instance(%s, %s, %s, '1.0', %s)",
            instance,
            machine,
            queue,
            starting,
        )
    return answer


async def test_a_name_belongs_to_one_machine_and_queue(post: Post) -> None:
    """An instance registers again from its own machine and queue only, and not once it is retired."""
    assert await register(post, "postfix-a", "m1", "/q1") is None
    started = await fetch_one(post.owner, "SELECT started_at FROM instances")
    assert await register(post, "postfix-a", "m1", "/q1", starting=False) is None
    assert await fetch_one(post.owner, "SELECT started_at FROM instances") == started
    assert await register(post, "postfix-a", "m1", "/q1") is None
    assert await fetch_one(post.owner, "SELECT started_at FROM instances") > started
    assert "m1" in (await register(post, "postfix-a", "m2", "/q1") or "")
    assert "/q1" in (await register(post, "postfix-a", "m1", "/q2") or "")
    await post.owner.execute("UPDATE instances SET retired_at = now()")
    assert "retired" in (await register(post, "postfix-a", "m1", "/q1") or "")
