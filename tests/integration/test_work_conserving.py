"""Lanes are work-conserving: none idles while its operator has a chunk to claim, and what cannot be sent holds none."""

from datetime import timedelta
from statistics import median

import pytest

from tests.integration.conftest import (
    START,
    House,
    due,
    fetch,
    fetch_one,
    paused,
    resumed,
    scheduled,
)

# A second is promised; the machine that runs the tests may be busy, but a lease or a stuck lane lasts ten times as long.
_SOON = timedelta(seconds=5)

# Notes when a chunk of the database gets a holder, and when it loses it.
_LOG_HOLDERS = """
CREATE TABLE holders (at timestamptz, claimed boolean);
CREATE FUNCTION log_holders() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost AS $$
BEGIN
  INSERT INTO holders VALUES (clock_timestamp(), NEW.instance IS NOT NULL);
  RETURN NULL;
END $$;
CREATE TRIGGER log_holders AFTER UPDATE ON chunks FOR EACH ROW
  WHEN (NEW.claim_token IS DISTINCT FROM OLD.claim_token) EXECUTE FUNCTION log_holders()"""


async def test_an_idle_lane_finds_work(house: House) -> None:
    """A chunk that can be claimed from now on has a lane at the lane's next look."""
    await house.limit()
    async with house.running():
        await house.fenced()
        for number in range(3):
            campaign_id = f"idle {number}"
            await house.post.apply(scheduled(campaign_id))
            await house.post.apply(paused(campaign_id))
            await house.post.plan([due(n, campaign_id, "one.test") for n in range(5)])
            await house.post.ripen()
            began = await fetch_one(house.post.owner, "SELECT clock_timestamp()")
            await house.post.apply(resumed(campaign_id))
            await house.handed(5 * (number + 1))
            claimed_at = await fetch_one(house.post.owner, "SELECT max(claimed_at) FROM chunks")
            assert timedelta(0) < claimed_at - began < _SOON


async def test_a_lane_goes_from_chunk_to_chunk(house: House) -> None:
    """While there are chunks, a lane that gave one back has the next at once."""
    await house.limit()
    await house.execute("UPDATE operators SET chunk_size = 5")
    await house.execute(_LOG_HOLDERS)
    await house.plan(100, "one.test")
    async with house.running():
        await house.handed(100)
    gaps = await fetch(
        house.post.owner,
        """
        SELECT at - lag(at) OVER (ORDER BY at), claimed FROM holders ORDER BY at OFFSET 1""",
    )
    idle = [gap for gap, claimed in gaps if claimed]
    assert len(idle) == 19
    assert median(idle) < timedelta(seconds=0.2)  # an idle lane's poll


@pytest.mark.parametrize(
    "obstacle",
    [
        "UPDATE campaigns SET state = 'paused'",
        "UPDATE campaigns SET held_at = now(), held_by = 'ann'",
        "UPDATE campaigns SET scheduled_for = now() + interval '1 hour'",
    ],
    ids=["paused", "held", "postponed"],
)
async def test_a_stopped_campaign_leaves_its_lane(house: House, obstacle: str) -> None:
    """A lane whose campaign is paused, held or postponed works for another one at its next look."""
    await house.limit(one=600)
    await house.plan(300, "one.test", campaign_id="stopped")
    async with house.running():
        await house.handed(5)
        # Later in the schedule, and so not the next while the lane has a chunk.
        await house.post.apply(scheduled("other one", START + timedelta(hours=1)))
        await house.post.plan([due(n, "other one", "one.test") for n in range(300)])
        await house.post.ripen()
        query = f"{obstacle} WHERE campaign_id = 'stopped' RETURNING clock_timestamp()"
        stopped_at = await fetch_one(house.post.owner, query)

        async def left() -> bool:
            held = "SELECT campaign_id FROM chunks WHERE instance IS NOT NULL"
            return await fetch(house.post.owner, held) == [("other one",)]

        await house.until(left)
        claimed_at = await fetch_one(
            house.post.owner, "SELECT claimed_at FROM chunks WHERE campaign_id = 'other one'"
        )
        assert claimed_at - stopped_at < _SOON
