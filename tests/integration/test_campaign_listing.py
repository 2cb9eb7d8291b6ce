"""`fairpost campaigns list` and `show`: progress, forecasts, and what looking costs."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from contract.database import Connection, Pool
from contract.operators import Operator
from processor.cli.campaign_listing import ShownCampaign
from processor.operators import apply_operators, pause_operator
from processor.overview import campaign_shares, campaign_work, list_campaigns, show_campaign
from tests.integration.conftest import INSTANCE, Fairpost, Post, due, scheduled
from tests.integration.test_status import OLD_HANDOVERS, register, rows_read

SOON = datetime.now(UTC) + timedelta(hours=3)

CAMPAIGNS = 1_000
SLACK = 20
"""Rows that the planner itself looks at."""
# A thousand campaigns of a thousand messages each, as their counters have them.
MILLION = f"""
INSERT INTO campaigns (campaign_id, state, scheduled_for, name)
SELECT 'many' || n, 'active', now() - n * interval '1 hour', 'n' FROM generate_series(1, {CAMPAIGNS}) n;
INSERT INTO dispatch_counts (campaign_id, source_partition, dispatches)
SELECT 'many' || n, p, 500 FROM generate_series(1, {CAMPAIGNS}) n, generate_series(0, 1) p;
INSERT INTO chunks (opened_at, number, capacity, size, planned, campaign_id, operator)
SELECT now() - interval '1 hour', p, 10000, 500, 300, 'many' || n, 'other'
  FROM generate_series(1, {CAMPAIGNS}) n, generate_series(1, 2) p;
INSERT INTO chunk_counts (chunk_id, sent) SELECT chunk_id, 200 FROM chunks"""  # noqa: S608  no values

Run = Callable[..., Any]


@pytest.fixture
def run(fairpost: Fairpost) -> Run:
    """Runs `fairpost campaigns …` beside the event loop; answers what it printed as JSON, or its lines."""

    async def _run(*words: str) -> Any:
        answer = await asyncio.to_thread(fairpost, "campaigns", *words)
        assert (answer.code, answer.err) == (0, "")
        return json.loads(answer.out) if "--json" in words else answer.out.decode().splitlines()

    return _run


async def limit(post: Post) -> None:
    """Operator `a` takes 60 a minute from an instance, `b` whatever it is given."""
    async with post.worker.connection() as connection:
        operators = [Operator("a", ("a.test",), 60), Operator("b", ("b.test",)), Operator("other")]
        await apply_operators(connection, operators, "ann", "a file")


# ------------------------------------------------------------------ list


async def test_a_thousand_campaigns_and_a_million_messages(owner: Connection, worker: Pool) -> None:
    """The list reads a few counters a campaign and no message, the running ones only theirs, one campaign only its own."""
    await owner.execute(MILLION.encode())
    await owner.execute("UPDATE campaigns SET ended_at = now() WHERE campaign_id NOT LIKE '%7'")
    await owner.execute("ANALYZE")
    async with worker.connection() as connection:
        read = await rows_read(connection, list_campaigns)
        found = await list_campaigns(connection, active=True)
        active = await rows_read(connection, lambda c: list_campaigns(c, active=True))
        one = await rows_read(connection, lambda c: show_campaign(c, "many7"))
    assert read.keys() == {"campaigns", "chunks", "chunk_counts", "dispatch_counts"}
    # A campaign has a row, two counters of dispatches, two chunks and their counters.
    assert sum(read.values()) <= 7 * CAMPAIGNS + SLACK
    assert len(found) == CAMPAIGNS // 10
    assert {(c.dispatches, c.accounted, c.progress) for c in found} == {(1_000, 1_000, 40)}
    assert sum(active.values()) <= CAMPAIGNS + 6 * CAMPAIGNS // 10 + SLACK
    assert sum(one.values()) <= 7 + SLACK


async def test_the_list(post: Post, run: Run) -> None:
    """It has a progress, may leave out what is over, and comes in the order asked for."""
    await post.apply(scheduled("b"), scheduled("c"), scheduled("a", SOON))
    await post.plan([due(n, "b") for n in range(3)])
    await post.plan([due(n, "c") for n in range(8)])
    await post.owner.execute(
        "UPDATE messages SET state = 'cancelled', status_at = now() WHERE dispatch_id = 1"
    )
    await post.owner.execute(
        "INSERT INTO outbox (dispatch_id, at, status) VALUES (1, now(), 'cancelled')"
    )

    async def order(*words: str) -> list[str]:
        return [row["campaign_id"] for row in await run("list", "--json", *words)]

    assert await order() == ["a", "b", "c"]
    assert await order("--sort", "id") == ["a", "b", "c"]
    assert await order("--sort", "left") == ["c", "b", "a"]
    assert await order("--sort", "progress") == ["a", "c", "b"]
    rows = {row["campaign_id"]: row["progress"] for row in await run("list", "--json")}
    assert rows == {"a": None, "b": 33, "c": 0}
    await post.owner.execute("UPDATE campaigns SET ended_at = now() WHERE campaign_id = 'b'")
    await post.owner.execute("UPDATE campaigns SET state = 'cancelled' WHERE campaign_id = 'c'")
    assert await order("--active") == ["a"]
    await post.owner.execute("UPDATE campaigns SET held_at = now() WHERE campaign_id = 'a'")
    head, *lines = await run("list", "--sort", "id")
    assert head.split()[:3] == ["campaign_id", "state", "progress"]
    assert [line.split()[:3] for line in lines] == [
        ["a", "held", "-"],
        ["b", "ended", "33%"],
        ["c", "cancelled", "0%"],
    ]


# ------------------------------------------------------------------ show


async def test_when_it_ends(post: Post, run: Run) -> None:
    """A campaign that has not begun ends when the fleet, shared fairly, can have given the operator's limit."""
    await limit(post)
    await register(post)
    await register(post, "postfix-b")
    await post.apply(scheduled("c", finish_by=SOON), scheduled("d"))
    await post.plan([due(n, domain="a.test") for n in range(600)])
    await post.plan([due(n, "d", domain="a.test") for n in range(5)])
    before = datetime.now(UTC)
    [shown] = await run("show", "c", "--json")
    assert shown.keys() == set(ShownCampaign.__struct_fields__)
    assert (shown["progress"], shown["rate"], shown["on_time"]) == (0, 0, True)
    [share] = shown["operators"]
    assert (share["operator"], share["limit"], share["rate"], share["planned"]) == (
        "a",
        60,
        None,
        600,
    )
    # Two instances for two campaigns: one of them gives 60 a minute.
    done_at = datetime.fromisoformat(shown["done_at"])
    assert before <= done_at - timedelta(minutes=10) <= datetime.now(UTC)
    lines = await run("show", "c")
    assert "progress       0% of 600 dispatches final" in lines
    assert "messages       planned 600" in lines
    assert any(line.startswith("forecast       handed over by ") for line in lines)
    assert any(
        line.startswith("forecast       finish_by ") and line.endswith(": yes") for line in lines
    )


async def test_the_present_rate_decides(post: Post, run: Run) -> None:
    """Once mail flows, the end is what is planned by the rate of the last two minutes, of this campaign alone."""
    await limit(post)
    await register(post)
    await post.apply(scheduled("c"), scheduled("d"))
    await post.plan([due(n, domain="b.test") for n in range(100)])
    await post.hand(10, operator="b")
    await post.plan([due(n, "d", domain="b.test") for n in range(50)])
    await post.hand(40, "postfix-b", "b")
    assert (await run("show", "c", "--json"))[0]["unknown"] == "no rate is known yet"
    await post.owner.execute("UPDATE handovers SET at = at - interval '60 seconds'")
    before = datetime.now(UTC)
    [shown] = await run("show", "c", "--json")
    assert shown["rate"] == 10
    minutes = (datetime.fromisoformat(shown["done_at"]) - before) / timedelta(minutes=1)
    assert minutes == pytest.approx(9, rel=0.2)
    await post.owner.execute("UPDATE handovers SET at = at - interval '1 hour'")
    assert (await run("show", "c", "--json"))[0]["rate"] == 0


@pytest.mark.parametrize(
    ("statement", "unknown"),
    [
        ("UPDATE campaigns SET state = 'paused'", "it is paused by its own event"),
        ("UPDATE campaigns SET state = 'cancelled'", "it was cancelled"),
        ("UPDATE campaigns SET state = 'waiting'", "the campaign itself has not come yet"),
        ("UPDATE campaigns SET held_at = now(), held_by = 'ann'", "it is held by ann"),
        ("UPDATE fleet SET sending = false", "sending is off"),
        ("UPDATE operators SET paused_at = now()", "a is paused"),
        ("UPDATE instances SET paused_at = now()", "no instance is alive"),
        ("UPDATE instances SET seen_at = now() - interval '1 minute'", "no instance is alive"),
    ],
    ids=["paused", "cancelled", "waiting", "held", "off", "operator", "instance", "silent"],
)
async def test_what_keeps_it_from_ending(
    post: Post, run: Run, statement: str, unknown: str
) -> None:
    """Where mail cannot go now, no end is promised, and the reason is told."""
    await limit(post)
    await register(post)
    await post.apply(scheduled())
    await post.plan([due(n, domain="a.test") for n in range(6)])
    assert (await run("show", "c", "--json"))[0]["done_at"] is not None
    await post.owner.execute(statement.encode())
    [shown] = await run("show", "c", "--json")
    assert (shown["done_at"], shown["unknown"]) == (None, unknown)
    assert f"forecast       end not known: {unknown}" in await run("show", "c")


async def test_what_a_forecast_counts(post: Post) -> None:
    """Of each operator the chunks, the largest of them, and the other campaigns that wait there now."""
    await limit(post)
    await register(post)
    await post.owner.execute("UPDATE operators SET chunk_size = 10 WHERE operator = 'a'")
    await post.apply(scheduled("c"), scheduled("d"), scheduled("later", SOON))
    await post.plan([due(n, domain="a.test") for n in range(23)] + [due(30, domain="b.test")])
    await post.plan([due(n, "d", domain="a.test") for n in range(2)])
    await post.plan([due(n, "later", domain="a.test") for n in range(2)])
    await post.reserve([due(n) for n in range(40, 44)])
    async with post.worker.connection() as connection:
        await pause_operator(connection, "b", "ann")
        work = await campaign_work(connection, await show_campaign(connection, "c"))
    assert (work.closed, work.unplanned, work.instances) == (None, 4, 1)
    a, b = work.operators
    assert (a.planned, a.chunks, a.largest, a.limit, a.campaigns, a.handed) == (23, 3, 10, 60, 2, 0)
    assert (b.planned, b.chunks, b.limit, b.campaigns, b.paused) == (1, 1, None, 1, True)


async def test_showing_reads_no_messages(post: Post) -> None:
    """What a forecast costs does not grow with the campaign's messages."""
    await register(post)
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(2_000)])
    await post.hand(10)
    await post.owner.execute(OLD_HANDOVERS, (INSTANCE,))
    async with post.worker.connection() as connection:
        campaign = await show_campaign(connection, "c")
        read = await rows_read(connection, lambda c: campaign_work(c, campaign))
        shares = await rows_read(connection, lambda c: campaign_shares(c, "c"))
    assert not {"messages", "dispatches"} & (read.keys() | shares.keys())
    assert sum(read.values()) + sum(shares.values()) <= 30
