"""Fair share: whatever happens at once, each claim is the one that a brute-force oracle makes of what was known then."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import msgspec
import pytest
from msgspec import Struct

import smtp_agent
from contract.database import Connection, Pool
from contract.operators import Operator
from processor.operators import apply_operators
from smtp_agent.claims import Claims
from tests.conftest import Database
from tests.integration.conftest import (
    START,
    Post,
    due,
    fetch,
    fetch_one,
    paused,
    pool_of,
    resumed,
    scheduled,
)

CLAIMERS = 64
CAMPAIGNS = [f"campaign {n:02}" for n in range(16)]
ENOUGH = 60
"""Chunks that wait before planners rest, so that claimers find nothing now and then."""
LEASE_SECONDS = 0.5
DOMAINS = {"other": "example.test", "gmail": "gmail.test"}
"""The operators: `gmail` rotates, `other` goes by the schedule."""

# Records every look for the next chunk with all that it could see, in its own snapshot, and what came of it. A stable
# function has its caller's snapshot; the volatile one that it calls may write.
_RECORD = """
CREATE TABLE looks (
  number bigint GENERATED ALWAYS AS IDENTITY, xid xid8 NOT NULL, operator text NOT NULL, at timestamptz NOT NULL,
  seen_at timestamptz NOT NULL, rotate boolean NOT NULL, passed bigint[] NOT NULL, seen text NOT NULL);
CREATE TABLE takings (xid xid8, chunk_id bigint, claim_token uuid, campaign_id text, instance text, lease_until timestamptz);
ALTER FUNCTION next_chunk RENAME TO next_chunk_itself;
CREATE FUNCTION record_look(p_operator text, p_at timestamptz, p_rotate boolean, p_but bigint[], p_seen text) RETURNS void
LANGUAGE sql VOLATILE SET search_path = fairpost, pg_temp AS $$
  INSERT INTO looks (xid, operator, at, seen_at, rotate, passed, seen)
  VALUES (pg_current_xact_id(), p_operator, p_at, clock_timestamp(), p_rotate, p_but, p_seen)
$$;
CREATE FUNCTION next_chunk(p_operator text, p_at timestamptz, p_rotate boolean, p_but bigint[]) RETURNS bigint
LANGUAGE plpgsql STABLE SET search_path = fairpost, pg_temp AS $$
BEGIN
  PERFORM record_look(p_operator, p_at, p_rotate, p_but, (
    SELECT coalesce(json_agg(json_build_array(
             k.chunk_id, k.campaign_id, k.number, k.size = k.capacity, k.sealed, extract(epoch FROM k.opened_at), k.planned,
             k.instance, k.claim_token, extract(epoch FROM k.lease_until), c.state, c.ended_at IS NOT NULL,
             c.held_at IS NOT NULL, extract(epoch FROM c.scheduled_for), extract(epoch FROM t.claimed_at))), '[]')::text
      FROM chunks k
      JOIN campaigns c USING (campaign_id)
      LEFT JOIN claim_turns t ON t.operator = k.operator AND t.campaign_id = k.campaign_id
     WHERE k.operator = p_operator AND (k.planned > 0 OR k.instance IS NOT NULL)));
  RETURN next_chunk_itself(p_operator, p_at, p_rotate, p_but);
END $$;
CREATE FUNCTION record_taking() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost AS $$
BEGIN
  INSERT INTO takings
  VALUES (pg_current_xact_id(), NEW.chunk_id, NEW.claim_token, NEW.campaign_id, NEW.instance, NEW.lease_until);
  RETURN NULL;
END $$;
CREATE TRIGGER record_taking AFTER UPDATE ON chunks FOR EACH ROW
  WHEN (NEW.claim_token IS NOT NULL AND NEW.claim_token IS DISTINCT FROM OLD.claim_token)
  EXECUTE FUNCTION record_taking()"""

# The last look of each claim is the one it went by. An agent's token for a claim changes at its restart; none restarts here.
_CLAIMS = """
SELECT DISTINCT ON (xid) number, operator, extract(epoch FROM at)::float8, extract(epoch FROM seen_at)::float8, rotate,
       passed, seen, chunk_id, claim_token, campaign_id, instance, extract(epoch FROM lease_until)::float8
  FROM looks LEFT JOIN takings USING (xid) ORDER BY xid, number DESC"""

_WAITING = "SELECT count(*) FROM chunks WHERE planned > 0 AND instance IS NULL"


class Seen(Struct, array_like=True):
    """A chunk and its campaign as a claim saw them; times in Unix seconds."""

    chunk_id: int
    campaign_id: str
    number: int
    full: bool
    sealed: bool
    opened_at: float
    planned: int
    instance: str | None
    token: UUID | None
    lease_until: float | None
    state: str
    ended: bool
    held: bool
    scheduled_for: float | None
    claimed_at: float | None


class Look(Struct, frozen=True):
    """A call of claim_chunk: what it went by, and what it took; `chunk_id` None: nothing."""

    number: int
    operator: str
    at: float
    seen_at: float
    rotate: bool
    passed: list[int]
    seen: str
    chunk_id: int | None
    token: UUID | None
    campaign_id: str | None
    instance: str | None
    lease_until: float | None


class Oracle:
    """Replays calls in the order in which they looked, and says of each what it should have taken.

    What a call saw counts, and every claim before it, whether it saw that or not.

    Args:
        released: when each claim's holder began to release it.
    """

    def __init__(self, released: dict[UUID, float]) -> None:
        self._released = released
        self._held: dict[int, Look] = {}
        self._claimed_at: dict[tuple[str, str], float] = {}
        self.wrong: list[str] = []
        self.double = 0
        self.nothing = 0
        self.choices = 0
        self.lapsed = 0

    def judge(self, look: Look) -> None:
        """Counts what is wrong with a call."""
        chunks = msgspec.json.decode(look.seen, type=list[Seen])
        for chunk in chunks:
            self._add_earlier_claims(look, chunk)
        candidates = [chunk for chunk in chunks if self._can_be_claimed(look, chunk)]
        self.choices += len({chunk.campaign_id for chunk in candidates}) > 1
        working: dict[str, set[str]] = defaultdict(set)
        for chunk in chunks:
            if chunk.instance and chunk.lease_until and chunk.lease_until > look.at:
                working[chunk.campaign_id].add(chunk.instance)

        def place(chunk: Seen) -> tuple[object, ...]:
            turn = (chunk.claimed_at or 0.0) if look.rotate else 0.0
            return len(working[chunk.campaign_id]), turn, chunk.scheduled_for, chunk.number

        if look.chunk_id is None:
            self.nothing += 1
        else:
            taken = next((c for c in chunks if c.chunk_id == look.chunk_id), None)
            self.double += taken is None or _is_held(taken, look.at)
            self.lapsed += taken is not None and taken.instance is not None
            self._held[look.chunk_id] = look
            assert look.campaign_id is not None
            self._claimed_at[look.operator, look.campaign_id] = look.at
        best = min(map(place, candidates), default=None)
        equal = [chunk.chunk_id for chunk in candidates if place(chunk) == best]
        right = look.chunk_id in equal if equal else look.chunk_id is None
        if not right:
            self.wrong.append(f"look {look.number} took {look.chunk_id} instead of {equal}")

    def _add_earlier_claims(self, look: Look, chunk: Seen) -> None:
        chunk.claimed_at = max(
            (
                at
                for at in (
                    chunk.claimed_at,
                    self._claimed_at.get((look.operator, chunk.campaign_id)),
                )
                if at is not None
            ),
            default=None,
        )
        claim = self._held.get(chunk.chunk_id)
        if claim is None or claim.token is None or claim.token == chunk.token:
            return
        if self._released.get(claim.token, float("inf")) > look.seen_at:
            chunk.instance, chunk.token = claim.instance, claim.token
            chunk.lease_until = claim.lease_until

    @staticmethod
    def _can_be_claimed(look: Look, chunk: Seen) -> bool:
        return (
            chunk.planned > 0
            and not _is_held(chunk, look.at)
            and (chunk.full or chunk.sealed or chunk.opened_at <= look.at - 1)
            and (chunk.state, chunk.ended, chunk.held) == ("active", False, False)
            and chunk.scheduled_for is not None
            and chunk.scheduled_for <= look.at
            and chunk.chunk_id not in look.passed
        )


def _is_held(chunk: Seen, at: float) -> bool:
    return chunk.lease_until is not None and chunk.lease_until > at


class Market:
    """Claimers, planners, and people who pause, hold and postpone, all at once.

    Args:
        wanted: claims after which it is over.
    """

    def __init__(self, post: Post, pool: Pool, seed: int, wanted: int) -> None:
        self._post = post
        self._pool = pool
        self._random = random.Random(seed)
        self._wanted = wanted
        self.claimed = 0
        self.released: dict[UUID, float] = {}

    async def run(self) -> None:
        """Until there were enough claims."""
        async with asyncio.timeout(240), asyncio.TaskGroup() as group:
            for number in range(CLAIMERS):
                group.create_task(self._claim(f"instance {number % 24:02}", number))
            group.create_task(self._plan())
            group.create_task(self._disturb())

    @property
    def _open(self) -> bool:
        return self.claimed < self._wanted

    async def _claim(self, instance: str, number: int) -> None:
        claims = Claims(self._pool, instance, LEASE_SECONDS)
        handover = self._post.handover(instance)
        operator = list(DOMAINS)[number % len(DOMAINS)]
        while self._open:
            claim = await claims.claim(operator)
            await asyncio.sleep(self._random.uniform(0, 0.02))  # as long as the work takes
            if claim is None:
                continue
            self.claimed += 1
            fate = self._random.random()
            if fate < 0.1:
                continue  # the lease lapses
            if fate < 0.7:
                await handover.write_ahead(claim, 1, 100)
            self.released[claim.token] = time.time()
            await claims.release(claim)

    async def _plan(self) -> None:
        number = 0
        while self._open:
            if await fetch_one(self._post.owner, _WAITING) > ENOUGH:
                await asyncio.sleep(0.01)
                continue
            campaigns = self._random.sample(CAMPAIGNS, 4)
            emails = [
                due(number + place, campaign, self._random.choice(list(DOMAINS.values())))
                for campaign in campaigns
                for place in range(self._random.randint(5, 15))
            ]
            number += 15
            await self._post.plan(emails)

    async def _disturb(self) -> None:
        owner = self._post.owner
        while self._open:
            campaign = self._random.choice(CAMPAIGNS)
            match self._random.randrange(6):
                case 0 | 1:
                    await self._post.apply(paused(campaign))
                case 2:
                    await owner.execute(
                        "UPDATE campaigns SET held_at = now(), held_by = 'ann' WHERE campaign_id = %s",
                        [campaign],
                    )
                case 3:
                    later = datetime.now(UTC) + timedelta(seconds=self._random.uniform(-60, 2))
                    await self._post.apply(scheduled(campaign, later))
                case _:
                    await self._post.apply(*map(resumed, CAMPAIGNS))
                    await owner.execute("UPDATE campaigns SET held_at = NULL, held_by = NULL")
            await asyncio.sleep(0.01)


@pytest.fixture
async def market(post: Post, database: Database) -> AsyncIterator[Callable[[int], Market]]:
    """Operators, campaigns, and a connection for each claimer."""
    async with post.worker.connection() as connection:
        operators = [Operator("gmail", ("gmail.test",), tie_break="rotate"), Operator("other")]
        await apply_operators(connection, operators, "test", "a test")
    await post.owner.execute("UPDATE operators SET chunk_size = 4")
    await post.apply(
        *(
            scheduled(campaign, START + timedelta(minutes=place * 7 % 5))
            for place, campaign in enumerate(CAMPAIGNS)
        )
    )
    async with pool_of(database.agent, CLAIMERS) as pool:
        yield lambda wanted: Market(post, pool, 5, wanted)


async def judged(owner: Connection, market: Market) -> Oracle:
    """Runs a market on the database as it is, and judges every call in it."""
    await owner.execute(_RECORD)
    await market.run()
    oracle = Oracle(market.released)
    looks = [Look(*row) for row in await fetch(owner, _CLAIMS)]
    for look in sorted(looks, key=lambda look: look.number):
        oracle.judge(look)
    return oracle


async def test_every_claim_is_the_oracles(post: Post, market: Callable[[int], Market]) -> None:
    """Of thousands of claims by 64 at once, with planners and pauses beside them, none breaks the order or is double."""
    oracle = await judged(post.owner, market(4000))
    assert (oracle.wrong, oracle.double) == ([], 0)
    assert oracle.choices > 1000
    assert oracle.nothing > 10
    assert oracle.lapsed > 10


_CLAIMS_SQL = Path(smtp_agent.__file__).with_name("claims.sql")
_LOCK = "PERFORM pg_advisory_xact_lock(hashtextextended('fairpost claim ' || p_operator, 0));"
_LOOK = "v_chunk_id := next_chunk(p_operator, v_now, v_rotate, v_locked);"
_LOOK_WITH_LOCK = """
    SELECT next_chunk(p_operator, v_now, v_rotate, v_locked) INTO v_chunk_id
      FROM (SELECT pg_advisory_xact_lock(hashtextextended('fairpost claim ' || p_operator, 0)) OFFSET 0) AS line;"""
_TAKEN = """
      IF FOUND THEN
        RETURN;
      END IF;"""


@pytest.mark.parametrize(
    "changes",
    [
        {_LOCK: "", "'100ms'": "'1ms'"},
        {_LOCK: "", _LOOK: _LOOK_WITH_LOCK, _TAKEN: "RETURN;"},
    ],
    ids=["skips-what-is-locked", "lock-in-the-same-statement"],
)
async def test_the_oracle_notices(
    post: Post, market: Callable[[int], Market], changes: dict[str, str]
) -> None:
    """Without the lock as a statement of its own, claims break the order, and the oracle finds it."""
    text = _CLAIMS_SQL.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    await post.owner.execute(text.encode())
    oracle = await judged(post.owner, market(800))
    assert oracle.wrong
