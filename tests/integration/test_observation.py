"""Observation: what is of the whole installation, measured at a cost that no number of messages changes."""

from collections.abc import Callable
from datetime import UTC
from typing import Any

import pytest

from contract.database import Connection, Pool
from contract.metrics import REGISTRIES, Process
from contract.states import MessageState
from processor.fences import observe_fences
from processor.fleet import switch_sending
from processor.housekeeping import end_campaigns
from processor.observation import observe, observe_campaigns
from processor.tracking import Tracking
from tests.integration.conftest import (
    INSTANCE,
    START,
    Post,
    cancelled,
    due,
    fetch,
    fetch_one,
    paused,
    scheduled,
)
from tests.integration.test_tracking import bounced, deferred, queued, sent, track


def value(name: str, **labels: str) -> float | None:
    """A tracker's metric; None where it has none with these labels."""
    return REGISTRIES[Process.TRACKER].get_sample_value(name, labels)


def series(name: str, label: str) -> set[str]:
    """The values of a label."""
    families = REGISTRIES[Process.TRACKER].collect()
    return {s.labels[label] for f in families for s in f.samples if s.name == name}


async def look(post: Post, most: int = 20) -> None:
    """One turn of the tracker's."""
    async with post.worker.connection() as connection:
        await observe(connection)
        await observe_campaigns(connection, most)
        await observe_fences(connection)


def chunks(operator: str = "other") -> tuple[float | None, ...]:
    """How many chunks of an operator are held, claimable and waiting."""
    return tuple(
        value("fairpost_chunks", operator=operator, state=state)
        for state in ("held", "claimable", "waiting")
    )


async def test_observes_what_waits(post: Post) -> None:
    """The metrics say how much is reserved and unplanned, for how long, and how many messages are in each open state."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(5)])
    await post.hand(2)
    await post.reserve([due(9), due(10)])
    await post.owner.execute("UPDATE pending SET reserved_at = reserved_at - interval '5 minutes'")
    await post.owner.execute(
        "INSERT INTO outbox (dispatch_id, at, status, created_at) VALUES (1, now(), 'sent', now() - interval '1 hour')"
    )
    await look(post)
    assert value("fairpost_unplanned") == 2
    assert 300 <= (value("fairpost_unplanned_age_seconds") or 0) < 400
    assert 3600 <= (value("fairpost_outbox_age_seconds") or 0) < 3700
    assert (value("fairpost_observed_timestamp_seconds") or 0) > START.timestamp()
    assert {
        state: value("fairpost_messages", operator="other", state=state)
        for state in ("planned", "handed", "uncertain", "queued", "deferred", "sent")
    } == {"planned": 3, "handed": 2, "uncertain": 0, "queued": 0, "deferred": 0, "sent": None}


async def test_open_messages_of_all_campaigns_are_counted(post: Post) -> None:
    """What is on its way counts even where its campaign was cancelled and has ended; what is final does not."""
    await post.apply(scheduled())
    ids = await post.plan([due(n) for n in range(6)])
    await post.hand(6)
    tracking = Tracking(post.worker, UTC)
    await track(tracking, *map(queued, ids[:5]), sent(ids[0]), bounced(ids[1]), deferred(ids[2], 9))
    await post.apply(cancelled())
    async with post.worker.connection() as connection:
        assert await end_campaigns(connection) == 1
    await look(post)
    open_messages = {
        state: value("fairpost_messages", operator="other", state=state)
        for state in ("planned", "handed", "queued", "deferred")
    }
    assert open_messages == {"planned": 0, "handed": 1, "queued": 2, "deferred": 1}
    counted = await fetch(
        post.owner, "SELECT state::text, count(*) FROM messages WHERE state < 'sent' GROUP BY 1"
    )
    assert {state: number for state, number in open_messages.items() if number} == dict(counted)


Obstacle = Callable[[Post], Any]


async def _pause(post: Post) -> None:
    await post.apply(paused())


async def _hold(post: Post) -> None:
    await post.owner.execute("UPDATE campaigns SET held_at = now(), held_by = 'x'")


async def _postpone(post: Post) -> None:
    await post.owner.execute("UPDATE campaigns SET scheduled_for = now() + interval '1 hour'")


async def _pause_operator(post: Post) -> None:
    await post.owner.execute("UPDATE operators SET paused_at = now()")


async def _switch_off(post: Post) -> None:
    async with post.worker.connection() as connection:
        await switch_sending(connection, sending=False, actor="test")


async def _open_just_now(post: Post) -> None:
    await post.owner.execute("UPDATE chunks SET opened_at = now() + interval '1 minute'")


async def _nothing(_: Post) -> None:
    pass


@pytest.mark.parametrize(
    "obstacle",
    [_nothing, _pause, _hold, _postpone, _pause_operator, _switch_off, _open_just_now],
    ids=lambda obstacle: obstacle.__name__,
)
async def test_claimable_is_what_a_lane_can_claim(post: Post, obstacle: Obstacle) -> None:
    """A chunk counts as claimable exactly where a claim gets it; a claimed one is held until its lease runs out."""
    await post.apply(scheduled())
    await post.plan([due(1)])
    await post.ripen()
    await obstacle(post)
    await look(post)
    before = chunks()
    claim = await post.claims().claim("other")
    assert before == ((0, 1, 0) if claim else (0, 0, 1))
    assert (claim is not None) == (obstacle is _nothing)
    if claim is not None:
        await look(post)
        assert chunks() == (1, 0, 0)
        await post.owner.execute("UPDATE chunks SET lease_until = now() - interval '1 second'")
        await look(post)
        assert chunks() == (0, 1, 0)


async def test_states_by_campaign_and_operator(post: Post) -> None:
    """A campaign's messages are told by operator and state, with its dispatches; when it has ended they vanish."""
    await post.owner.execute("INSERT INTO operators (operator, chunk_size) VALUES ('gmail', 100)")
    await post.owner.execute("INSERT INTO operator_domains VALUES ('gmail.test', 'gmail')")
    await post.apply(scheduled(), scheduled("d"))
    ids = await post.plan(
        [*(due(n) for n in range(3)), *(due(n, domain="gmail.test") for n in range(3, 7))]
    )
    await post.hand(2)
    await post.plan([due(9, "d")])
    await track(Tracking(post.worker, UTC), queued(ids[0]), sent(ids[0]))
    await look(post)
    told = {
        (operator, state): value(
            "fairpost_campaign_messages", campaign="c", operator=operator, state=state
        )
        for operator in ("other", "gmail")
        for state in ("planned", "handed", "sent")
    }
    assert told == {
        ("other", "planned"): 1,
        ("other", "handed"): 1,
        ("other", "sent"): 1,
        ("gmail", "planned"): 4,
        ("gmail", "handed"): 0,
        ("gmail", "sent"): 0,
    }
    assert value("fairpost_campaign_dispatches", campaign="c") == 7
    assert value("fairpost_campaigns", state="active") == 2
    await post.apply(cancelled())
    async with post.worker.connection() as connection:
        await end_campaigns(connection)
    await look(post)
    assert series("fairpost_campaign_messages", "campaign") == {"d"}
    assert series("fairpost_campaign_dispatches", "campaign") == {"d"}
    assert value("fairpost_campaigns", state="active") == 1


async def test_only_the_most_active_campaigns_have_series(post: Post) -> None:
    """Of a thousand campaigns those that were claimed last are told, so many as the setting says."""
    await post.owner.execute(
        "INSERT INTO campaigns (campaign_id, state, scheduled_for)"
        " SELECT 'c' || n, 'active', now() FROM generate_series(1, 1000) n"
    )
    await post.owner.execute(
        "INSERT INTO claim_turns SELECT 'other', 'c' || n, now() - n * interval '1 minute' FROM generate_series(1, 500) n"
    )
    await post.owner.execute(
        "INSERT INTO chunks (campaign_id, operator, number, capacity, size, opened_at)"
        " SELECT 'c' || n, 'other', 1, 10, 0, now() FROM generate_series(1, 1000) n"
    )
    await post.owner.execute("INSERT INTO chunk_counts (chunk_id) SELECT chunk_id FROM chunks")
    for most in (20, 3, 0):
        await look(post, most)
        expected = {f"c{n}" for n in range(1, most + 1)}
        assert series("fairpost_campaign_dispatches", "campaign") == expected
        assert series("fairpost_campaign_messages", "campaign") == expected
    await post.owner.execute("TRUNCATE chunks, chunk_counts")


async def test_doubtful_messages_are_those_of_unjudged_fences(post: Post) -> None:
    """What a fence is to judge is told until it is judged."""
    await post.owner.execute(
        "INSERT INTO fences (fence_token, instance, reason, asked_at) VALUES ('t', %s, 'doubt', now() - interval '1 minute')",
        (INSTANCE,),
    )
    await post.owner.execute(
        "INSERT INTO fence_messages SELECT 't', n, now() FROM generate_series(1, 7) n"
    )
    await look(post)
    assert (value("fairpost_doubtful_messages"), value("fairpost_fences_unjudged")) == (7, 1)
    assert 60 <= (value("fairpost_fence_age_seconds") or 0) < 120
    await post.owner.execute("UPDATE fences SET judged_at = now()")
    await look(post)
    assert (value("fairpost_doubtful_messages"), value("fairpost_fence_age_seconds")) == (0, 0)


# ------------------------------------------------------------------ what it costs

_MORE = """
INSERT INTO messages (dispatch_id, chunk_id, position, state, email, variables)
SELECT nextval('more'), k.chunk_id, %s + n,
       (enum_range(NULL::message_state))[1 + n %% %s], 'a@example.test', '{}'
  FROM chunks k, generate_series(1, %s) n WHERE campaign_id LIKE 'live%%'"""


async def blocks_read(owner: Connection, worker: Pool) -> int:
    """How many blocks of tables and indexes one turn of observing touches."""
    await owner.execute("VACUUM ANALYZE")
    async with worker.connection() as connection:
        # What a first call reads of catalogues is none of ours.
        for _ in range(2):
            await owner.execute("SELECT public.pg_stat_statements_reset()")
            await observe(connection)
            await observe_campaigns(connection, 20)
    return int(
        await fetch_one(
            owner,
            "SELECT sum(shared_blks_hit + shared_blks_read) FROM public.pg_stat_statements"
            " WHERE userid = 'worker'::regrole",
        )
    )


async def test_it_costs_the_same_however_many_messages(owner: Connection, worker: Pool) -> None:
    """Three hundred times the messages in as many chunks, and ten times as many chunks of campaigns that ended: no more is read."""
    states = len(MessageState)
    await owner.execute("CREATE SEQUENCE more")
    await _add_chunks(owner, "live", 40)
    await _add_ended_chunks(owner, "ended before", 400)
    await owner.execute(_MORE, (0, states, states))
    few = await blocks_read(owner, worker)
    await owner.execute(_MORE, (states, states, 299 * states))
    many = await blocks_read(owner, worker)
    assert await fetch_one(owner, "SELECT count(*) FROM messages") == 40 * 300 * states
    await _add_ended_chunks(owner, "ended after", 4_000)
    done = await blocks_read(owner, worker)
    assert few < 1_000
    assert many <= few * 1.1
    assert done <= few * 1.1


async def _add_ended_chunks(owner: Connection, name: str, number: int) -> None:
    await _add_chunks(owner, name, number)
    await owner.execute("UPDATE campaigns SET ended_at = now() WHERE campaign_id LIKE 'ended%'")


async def _add_chunks(owner: Connection, name: str, number: int) -> None:
    """Chunks without messages, of as many campaigns."""
    await owner.execute(
        "INSERT INTO campaigns (campaign_id, state, scheduled_for)"
        " SELECT %s || n, 'active', now() FROM generate_series(1, %s::int) n",
        (name, number),
    )
    await owner.execute(
        "INSERT INTO chunks (campaign_id, operator, number, capacity, size, opened_at)"
        " SELECT %s || n, 'other', 1, 10000, 10000, now() FROM generate_series(1, %s::int) n",
        (name, number),
    )
    await owner.execute(
        "INSERT INTO chunk_counts (chunk_id) SELECT chunk_id FROM chunks EXCEPT SELECT chunk_id FROM chunk_counts"
    )
