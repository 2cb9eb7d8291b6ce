"""Observation: what the metrics say of the whole installation, measured by every tracker now and then.

A scrape reads what was measured last. Measuring costs the same at ten and at ten million messages (`observation.sql`).
"""

import time
from typing import Any, Final

from psycopg import AsyncConnection

from contract.metrics import tell_all
from contract.states import FINAL, MessageState
from processor import metrics
from processor.fleet import show_sending
from processor.instances import count_instances

CHUNK_STATES: Final = ("held", "claimable", "waiting")
OPEN_STATES: Final = tuple(state for state in MessageState if state not in FINAL)
CAMPAIGN_STATES: Final = ("waiting", "active", "paused", "held")

MOST_UNPLANNED: Final = 100_000
"""More unplanned dispatches are not counted."""

# The lowest id is as good as the oldest: dispatches are numbered when they are reserved.
_UNPLANNED: Final = """
SELECT (SELECT count(*) FROM (SELECT FROM pending LIMIT %s) p),
       coalesce((SELECT extract(epoch FROM clock_timestamp() - reserved_at) FROM pending ORDER BY dispatch_id LIMIT 1),
                0)::float8"""

_OUTBOX_AGE: Final = """
SELECT coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float8
  FROM (SELECT created_at FROM outbox ORDER BY event_id LIMIT 1) oldest"""

_BY_OPERATOR: Final = (
    f"SELECT operator, {', '.join((*CHUNK_STATES, *OPEN_STATES))} FROM count_by_operator()"  # noqa: S608  names of columns, no values
)

_OPEN_MESSAGES: Final = (
    f"SELECT {', '.join(f'sum({state})::bigint' for state in OPEN_STATES)} FROM count_by_operator()"  # noqa: S608  likewise
)

_CAMPAIGNS: Final = "SELECT state, campaigns FROM count_campaigns()"

_MOST_ACTIVE: Final = "SELECT campaign_id, dispatches FROM most_active(%s)"

_BY_CAMPAIGN: Final = (
    f"SELECT campaign_id, operator, {', '.join(MessageState)} FROM count_by_campaign(%s)"  # noqa: S608  names of columns, no values
)


async def observe(connection: AsyncConnection[Any]) -> None:
    """Measures what waits: the fleet, its instances, reservations, the outbox, chunks and messages by operator."""
    metrics.SENDING.set((await show_sending(connection)).sending)
    instances = await count_instances(connection)
    tell_all(metrics.INSTANCES, {(state,): number for state, number in instances.items()})
    unplanned, age = await unplanned_dispatches(connection)
    metrics.UNPLANNED.set(unplanned)
    metrics.UNPLANNED_AGE.set(age)
    metrics.OUTBOX_AGE.set(await outbox_age(connection))
    chunks: dict[tuple[str, ...], float] = {}
    messages: dict[tuple[str, ...], float] = {}
    for operator, *numbers in await _rows(connection, _BY_OPERATOR):
        metrics.DUE_TO_SENT.labels(operator)  # begins at 0
        found = dict(zip((*CHUNK_STATES, *OPEN_STATES), numbers, strict=True))
        chunks |= {(operator, state): found[state] for state in CHUNK_STATES}
        messages |= {(operator, state): found[state] for state in OPEN_STATES}
    tell_all(metrics.CHUNKS, chunks)
    tell_all(metrics.MESSAGES, messages)
    metrics.OBSERVED.set(time.time())


async def observe_campaigns(connection: AsyncConnection[Any], most: int) -> None:
    """Counts the campaigns, and the messages of the `most` active ones by operator and state; the others vanish."""
    counted = dict(await _rows(connection, _CAMPAIGNS))
    tell_all(metrics.CAMPAIGNS, {(state,): counted.get(state, 0) for state in CAMPAIGN_STATES})
    active = dict(await _rows(connection, _MOST_ACTIVE, most))
    tell_all(metrics.CAMPAIGN_DISPATCHES, {(campaign,): n for campaign, n in active.items()})
    messages: dict[tuple[str, ...], float] = {
        (campaign, operator, state): number
        for campaign, operator, *numbers in await _rows(connection, _BY_CAMPAIGN, list(active))
        for state, number in zip(MessageState, numbers, strict=True)
    }
    tell_all(metrics.CAMPAIGN_MESSAGES, messages)


async def unplanned_dispatches(connection: AsyncConnection[Any]) -> tuple[int, float]:
    """How many dispatches are reserved and not planned, up to `MOST_UNPLANNED`, and for how many seconds the first is."""
    [(number, age)] = await _rows(connection, _UNPLANNED, MOST_UNPLANNED)
    return number, age


async def outbox_age(connection: AsyncConnection[Any]) -> float:
    """Seconds since the outbox's oldest row was written; 0 where it is empty."""
    [(age,)] = await _rows(connection, _OUTBOX_AGE)
    return float(age)


async def open_messages(connection: AsyncConnection[Any]) -> dict[MessageState, int]:
    """How many messages are in each state that is not final."""
    [numbers] = await _rows(connection, _OPEN_MESSAGES)
    return dict(zip(OPEN_STATES, numbers, strict=True))


async def _rows(
    connection: AsyncConnection[Any], statement: str, *values: object
) -> list[tuple[Any, ...]]:
    return await (await connection.execute(statement.encode(), values)).fetchall()
