"""Campaigns as people see them: their messages by state, and how they stand at each operator."""

from datetime import datetime
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import class_row

from contract.states import MessageState


class CampaignError(ValueError):
    """What a person asked of a campaign cannot be done; the text is one line."""


class Campaign(Struct, frozen=True):
    """A campaign with its messages by state; `unplanned` are reserved only.

    `ended_at`: it was cancelled, or all its messages are final and nothing came for a day; what comes reopens it.
    """

    campaign_id: str
    name: str | None
    state: str
    scheduled_for: datetime | None
    finish_by: datetime | None
    held_at: datetime | None
    held_by: str | None
    ended_at: datetime | None
    dispatches: int
    unplanned: int
    planned: int
    handed: int
    uncertain: int
    queued: int
    deferred: int
    sent: int
    bounced: int
    expired: int
    rejected: int
    suppressed: int
    cancelled: int
    pruned: int

    @property
    def accounted(self) -> int:
        """The sum of its states, which is `dispatches` at any moment."""
        return sum(getattr(self, state) for state in COUNTED)


COUNTED: Final = ("unplanned", *(state.value for state in MessageState), "pruned")
"""The fields of a campaign that sum up to its dispatches."""

# `planned` stands with the chunk, the others beside it (count_messages of the migrations keeps both).
STATE_SUMS: Final = ", ".join(
    f"coalesce(sum({state}), 0)::bigint AS {state}" for state in MessageState
)

# Counts are kept, not counted: a row a chunk, a row a source partition, and the rows of `pending` themselves.
_TOTALS: Final = f"""
SELECT c.campaign_id, c.name, c.state, c.scheduled_for, c.finish_by, c.held_at, c.held_by, c.ended_at,
       coalesce(d.dispatches, 0) AS dispatches, coalesce(p.unplanned, 0) AS unplanned,
       {", ".join(f"m.{state}" for state in MessageState)}, c.pruned
  FROM campaigns c
  LEFT JOIN LATERAL (
    SELECT sum(dispatches)::bigint AS dispatches FROM dispatch_counts WHERE campaign_id = c.campaign_id) d ON true
  LEFT JOIN (SELECT campaign_id, count(*) AS unplanned FROM pending GROUP BY campaign_id) p USING (campaign_id)
  CROSS JOIN LATERAL (
    SELECT {STATE_SUMS} FROM chunks JOIN chunk_counts USING (chunk_id) WHERE campaign_id = c.campaign_id) m
 WHERE %(campaign_id)s::text IS NULL OR c.campaign_id = %(campaign_id)s
 ORDER BY c.scheduled_for DESC NULLS FIRST, c.campaign_id"""  # noqa: S608  names of columns, no values


class OperatorShare(Struct, frozen=True):
    """A campaign's chunks and messages at one operator."""

    operator: str
    chunks: int
    claimed: int
    messages: int
    planned: int
    sent: int
    bounced: int
    deferred: int


_SHARES: Final = f"""
SELECT operator, count(*) AS chunks, count(*) FILTER (WHERE instance IS NOT NULL) AS claimed,
       sum({" + ".join(MessageState)})::bigint AS messages, sum(planned)::bigint AS planned,
       sum(sent)::bigint AS sent, sum(bounced)::bigint AS bounced, sum(deferred)::bigint AS deferred
  FROM chunks JOIN chunk_counts USING (chunk_id)
 WHERE campaign_id = %s GROUP BY operator ORDER BY operator"""  # noqa: S608  names of columns, no values


async def list_campaigns(connection: AsyncConnection[Any]) -> list[Campaign]:
    """Every campaign, the latest first."""
    return await _campaigns(connection, None)


async def show_campaign(connection: AsyncConnection[Any], campaign_id: str) -> Campaign:
    """One campaign; raises CampaignError where there is none."""
    found = await _campaigns(connection, campaign_id)
    if not found:
        raise unknown_campaign(campaign_id)
    return found[0]


async def campaign_shares(
    connection: AsyncConnection[Any], campaign_id: str
) -> list[OperatorShare]:
    """How a campaign stands at each operator."""
    async with connection.cursor(row_factory=class_row(OperatorShare)) as cursor:
        return await (await cursor.execute(_SHARES.encode(), (campaign_id,))).fetchall()


async def _campaigns(connection: AsyncConnection[Any], campaign_id: str | None) -> list[Campaign]:
    async with connection.cursor(row_factory=class_row(Campaign)) as cursor:
        return await (
            await cursor.execute(_TOTALS.encode(), {"campaign_id": campaign_id})
        ).fetchall()


def unknown_campaign(campaign_id: str) -> CampaignError:
    """What to say of a campaign that is not there."""
    return CampaignError(f"campaign {campaign_id!r}: unknown; see `fairpost campaigns list`")
