"""Housekeeping: cancelled campaigns are swept chunk by chunk, and books that do not balance are found."""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC

import pytest

from contract.database import Pool
from contract.events import SEND_EMAILS
from contract.metrics import REGISTRIES, Process
from processor.housekeeping import check_balance, drop_early_lines, end_campaigns, sweep
from processor.tracking import Tracking
from tests.integration.conftest import (
    Post,
    cancelled,
    due,
    fetch,
    fetch_one,
    paused,
    records,
    scheduled,
)
from tests.integration.test_tracking import bounced, queued, sent, track

Refusals = Callable[[], list[str]]


async def sweep_all(worker: Pool) -> list[int]:
    """Sweeps until nothing is left; how many messages each call cancelled."""
    swept = []
    async with worker.connection() as connection:
        while number := await sweep(connection):
            swept.append(number)
    return swept


async def test_sweeps_a_chunk_at_a_time(post: Post) -> None:
    """What is planned of cancelled campaigns becomes `cancelled` and is told, a chunk a call; other mail stays."""
    await post.owner.execute("UPDATE operators SET chunk_size = 10")
    await post.apply(scheduled(), scheduled("d"))
    dispatch_ids = await post.plan([due(n) for n in range(95)])
    others = await post.plan([due(n, "d") for n in range(5)])
    await post.apply(cancelled())
    assert await sweep_all(post.worker) == [*[10] * 9, 5]
    assert await post.states() == dict.fromkeys(dispatch_ids, "cancelled") | dict.fromkeys(
        others, "planned"
    )
    assert sorted(await post.told()) == [
        (dispatch_id, "cancelled") for dispatch_id in sorted(dispatch_ids)
    ]


async def test_what_was_handed_over_is_not_swept(post: Post) -> None:
    """Mail that an instance has stays its own; its outcome will be told."""
    await post.apply(scheduled())
    dispatch_ids = await post.plan([due(n) for n in range(5)])
    await post.hand(2)
    await post.apply(cancelled())
    assert await sweep_all(post.worker) == [3]
    assert await post.states() == dict(
        zip(dispatch_ids, ["handed", "handed", "cancelled", "cancelled", "cancelled"], strict=True)
    )


async def test_a_chunk_in_use_is_swept_later(post: Post) -> None:
    """A sweep does not wait for a chunk that a hand-over has locked, and finds it at its next turn."""
    await post.apply(scheduled())
    await post.plan([due(1)])
    await post.apply(cancelled())
    async with post.owner.transaction():
        await post.owner.execute("SELECT FROM chunks FOR UPDATE")
        async with asyncio.timeout(5):
            assert await sweep_all(post.worker) == []
    assert await sweep_all(post.worker) == [1]


async def test_sweepers_at_once(post: Post) -> None:
    """Sweepers at the same time cancel each message once."""
    await post.owner.execute("UPDATE operators SET chunk_size = 3")
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(100)])
    await post.apply(cancelled())
    swept = await asyncio.gather(*(sweep_all(post.worker) for _ in range(4)))
    await sweep_all(post.worker)
    assert sum(map(sum, swept)) <= 100
    assert set((await post.states()).values()) == {"cancelled"}
    assert len(await post.told()) == 100


async def test_books_that_balance(post: Post) -> None:
    """Reserved, planned, handed and cancelled mail is all accounted for, and so is a campaign that is not known yet."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(5)] + [due(n, "d") for n in range(5)])
    await post.reserve([due(n) for n in range(10, 13)])
    await post.hand(3)
    async with post.worker.connection() as connection:
        assert await check_balance(connection) == []
    assert REGISTRIES[Process.TRACKER].get_sample_value("fairpost_imbalance") == 0


@pytest.mark.parametrize(
    ("damage", "repair"),
    [
        (
            "UPDATE chunk_counts SET handed = handed + 1",
            "UPDATE chunk_counts SET handed = handed - 1",
        ),
        ("UPDATE dispatch_counts SET dispatches = 4", "UPDATE dispatch_counts SET dispatches = 3"),
        ("UPDATE chunks SET planned = planned - 1", "UPDATE chunks SET planned = planned + 1"),
        ("UPDATE campaigns SET pruned = 1", "UPDATE campaigns SET pruned = 0"),
    ],
)
async def test_books_that_do_not_balance(
    post: Post, damage: str, repair: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A campaign whose dispatches are not the sum of its states is named, in the log and in the metric."""
    await post.plan([due(n) for n in range(3)])
    await post.owner.execute(damage.encode())
    with caplog.at_level(logging.ERROR):
        async with post.worker.connection() as connection:
            assert await check_balance(connection) == ["c"]
    assert "campaign c: " in caplog.text
    assert REGISTRIES[Process.TRACKER].get_sample_value("fairpost_imbalance") == 1
    await post.owner.execute(repair.encode())


async def test_dispatches_of_no_campaign_are_no_imbalance(post: Post) -> None:
    """Dispatches that are reserved before anything else is known of their campaign are unplanned, not lost."""
    await post.reserve([due(1)])
    async with post.worker.connection() as connection:
        assert await check_balance(connection) == []
    assert await fetch(post.owner, "SELECT * FROM campaigns") == []


async def test_a_transition_that_is_not_allowed_is_noticed(post: Post) -> None:
    """These tests would notice a message that left a final state: what they check after each is not empty."""
    await post.apply(scheduled(), cancelled())
    await post.plan([due(1)])
    await post.owner.execute("UPDATE messages SET state = 'planned'")
    assert (
        await fetch_one(
            post.owner,
            "SELECT count(*) FROM transitions WHERE before = 'cancelled' AND after = 'planned'",
        )
        == 1
    )
    await post.owner.execute("UPDATE messages SET state = 'cancelled'")
    await post.owner.execute("DELETE FROM transitions")


async def test_planning_and_claims_go_on_beside_a_sweep(post: Post, refusals: Refusals) -> None:
    """While a large cancelled campaign is swept, blocks that hold its mail too are planned, and others are claimed."""
    await post.owner.execute("UPDATE operators SET chunk_size = 500")
    await post.apply(scheduled(), scheduled("d"))
    for first in range(0, 10_000, 1_000):
        await post.plan([due(n) for n in range(first, first + 1_000)])
    await post.apply(cancelled())

    async def plan_and_claim(first: int) -> None:
        for number in range(first, first + 10):
            await post.plan([due(number), due(number, "d")])
        await post.ripen()
        claim = await post.claim()
        assert claim.campaign_id == "d"
        await post.claims().release(claim)

    async with post.worker.connection() as connection, connection.transaction():
        assert await sweep(connection) == 500
        async with asyncio.timeout(30):
            await plan_and_claim(20_000)

    left = "SELECT count(*) FROM chunks WHERE campaign_id = 'c' AND has_planned"

    async def sweep_to_the_end() -> int:
        swept = 0
        async with post.worker.connection() as connection:
            while await fetch_one(post.owner, left):
                swept += await sweep(connection)
        return swept

    swept, _ = await asyncio.gather(sweep_to_the_end(), plan_and_claim(30_000))
    assert swept == 9_500
    assert [line for line in refusals() if "deadlock" in line] == []
    assert sorted(set((await post.states()).values())) == ["cancelled", "planned"]


async def test_lines_without_a_queue_id_are_kept_for_a_day(post: Post) -> None:
    """What nobody claimed within a day goes; younger lines wait on."""
    await post.owner.execute(
        "INSERT INTO early_statuses (at, received_at, state, instance, queue_id)"
        " SELECT now(), now() - n * interval '10 hours', 'sent', 'a', 'Q' || n FROM generate_series(0, 4) n"
    )
    async with post.worker.connection() as connection:
        assert await drop_early_lines(connection) == 2
    assert await fetch(post.owner, "SELECT queue_id FROM early_statuses ORDER BY 1") == [
        ("Q0",),
        ("Q1",),
        ("Q2",),
    ]


AGE = "UPDATE chunks SET opened_at = opened_at - interval '1 day', claimed_at = claimed_at - interval '1 day'"


async def ended(post: Post) -> set[str]:
    """The campaigns that have ended, after a turn of housekeeping."""
    async with post.worker.connection() as connection:
        await end_campaigns(connection)
    rows = await fetch(post.owner, "SELECT campaign_id FROM campaigns WHERE ended_at IS NOT NULL")
    return {campaign_id for (campaign_id,) in rows}


async def test_campaigns_end(post: Post) -> None:
    """A cancelled campaign has ended; another one when all its mail is final and nothing came for a day. What comes reopens it."""
    await post.apply(scheduled(), scheduled("stopped"), scheduled("busy"))
    first, second = await post.plan([due(1), due(2)])
    await post.hand(2)
    await post.plan([due(3, "busy"), due(4, "unknown")])
    await post.apply(cancelled("stopped"), paused("busy"))
    assert await ended(post) == {"stopped"}
    tracking = Tracking(post.worker, UTC)
    await track(tracking, queued(first), queued(second), sent(first))
    await post.owner.execute(AGE)
    assert await ended(post) == {"stopped"}
    await track(tracking, bounced(second))
    [reserved] = await post.reserve([due(5)])
    assert await ended(post) == {"stopped"}
    await post.planning(records([reserved], SEND_EMAILS))
    await post.hand(1)
    await track(tracking, queued(reserved.dispatch_id), sent(reserved.dispatch_id))
    assert await ended(post) == {"stopped"}
    await post.owner.execute(AGE)
    assert await ended(post) == {"stopped", "c"}
    assert await fetch_one(post.owner, "SELECT count(*) FROM campaigns WHERE ended_at IS NULL") == 2

    await post.plan([due(6)])
    assert await ended(post) == {"stopped"}
    await post.hand(1)


async def test_a_campaign_that_is_planned_just_now_does_not_end(post: Post) -> None:
    """Housekeeping passes over a campaign whose planner has not committed yet, so that no mail is left in an ended one."""
    await post.apply(scheduled())
    async with post.owner.transaction():
        await post.owner.execute("SELECT FROM campaigns FOR NO KEY UPDATE")
        async with post.worker.connection() as connection:
            assert await end_campaigns(connection) == 0
    assert await ended(post) == {"c"}
