"""Campaigns as people see them: their messages by state, and how they stand at each operator."""

from datetime import datetime
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import class_row

from contract.states import FINAL, MessageState
from processor.forecast import WINDOW, OperatorWork, Work
from processor.instances import InstanceState, count_instances


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

    @property
    def progress(self) -> int | None:
        """Per cent of its dispatches that are final, rounded down; None: it has none."""
        done = self.pruned + sum(getattr(self, state) for state in FINAL)
        return done * 100 // self.dispatches if self.dispatches else None


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
  LEFT JOIN (
    SELECT campaign_id, count(*) AS unplanned FROM pending
     WHERE %(campaign_id)s::text IS NULL OR campaign_id = %(campaign_id)s GROUP BY campaign_id) p USING (campaign_id)
  CROSS JOIN LATERAL (
    SELECT {STATE_SUMS} FROM chunks JOIN chunk_counts USING (chunk_id) WHERE campaign_id = c.campaign_id) m
 WHERE (%(campaign_id)s::text IS NULL OR c.campaign_id = %(campaign_id)s)
   AND NOT (%(active)s AND (c.ended_at IS NOT NULL OR c.state = 'cancelled'))
 ORDER BY c.scheduled_for DESC NULLS FIRST, c.campaign_id"""  # noqa: S608  names of columns, no values


class OperatorShare(Struct, frozen=True):
    """A campaign's chunks and messages at one operator; `lanes` hold a chunk of it now."""

    operator: str
    chunks: int
    lanes: int
    messages: int
    planned: int
    sent: int
    bounced: int
    deferred: int


_SHARES: Final = f"""
SELECT operator, count(*) AS chunks, count(*) FILTER (WHERE instance IS NOT NULL AND lease_until > now()) AS lanes,
       sum({" + ".join(MessageState)})::bigint AS messages, sum(planned)::bigint AS planned,
       sum(sent)::bigint AS sent, sum(bounced)::bigint AS bounced, sum(deferred)::bigint AS deferred
  FROM chunks JOIN chunk_counts USING (chunk_id)
 WHERE campaign_id = %s GROUP BY operator ORDER BY operator"""  # noqa: S608  names of columns, no values


MAY_GO_ON: Final = (
    "c.state = 'active' AND c.held_at IS NULL AND c.ended_at IS NULL AND c.scheduled_for <= now()"
)
"""SQL: campaign `c` may be handed over now, as claims see it."""

_CLOSED: Final = """
SELECT CASE WHEN c.state = 'cancelled' THEN 'it was cancelled'
            WHEN c.state = 'waiting' THEN 'the campaign itself has not come yet'
            WHEN c.state = 'paused' THEN 'it is paused by its own event'
            WHEN c.held_at IS NOT NULL THEN 'it is held by ' || c.held_by
            WHEN NOT (SELECT sending FROM fleet) THEN 'sending is off' END
  FROM campaigns c WHERE c.campaign_id = %s"""

# Other campaigns with mail for the operator now share its lanes. The hand-overs of the window are found by index, instance
# by instance; without the OFFSET all that there ever were may be read for it.
_WORK: Final = f"""
SELECT k.operator, k.planned, k.chunks, k.largest, o.per_minute AS limit,
       o.paused_at IS NOT NULL AS paused, 1 + others.campaigns AS campaigns,
       coalesce(given.handed, 0) AS handed, coalesce(given.seconds, 0) AS seconds
  FROM (SELECT operator, sum(planned)::bigint AS planned, count(*) FILTER (WHERE has_planned) AS chunks,
               max(planned) AS largest
          FROM chunks WHERE campaign_id = %(campaign_id)s GROUP BY operator) k
  LEFT JOIN operators o USING (operator)
  CROSS JOIN LATERAL (
    SELECT count(DISTINCT c.campaign_id) AS campaigns FROM chunks w JOIN campaigns c USING (campaign_id)
     WHERE w.operator = k.operator AND w.has_planned AND {MAY_GO_ON} AND c.campaign_id <> %(campaign_id)s) others
  CROSS JOIN LATERAL (
    SELECT sum(recent.handed)::bigint AS handed, extract(epoch FROM now() - min(recent.at))::float8 AS seconds
      FROM instances i
      CROSS JOIN LATERAL (
        SELECT h.chunk_id, cardinality(h.positions) AS handed, h.at FROM handovers h
         WHERE h.instance = i.instance AND h.operator = k.operator AND h.at > now() - %(window)s::interval
        OFFSET 0) recent
      JOIN chunks w USING (chunk_id) WHERE w.campaign_id = %(campaign_id)s) given
 ORDER BY k.operator"""  # noqa: S608  no values


async def list_campaigns(
    connection: AsyncConnection[Any], *, active: bool = False
) -> list[Campaign]:
    """Every campaign, the latest first; with `active` those that are neither cancelled nor ended."""
    return await _campaigns(connection, None, active=active)


async def unbalanced(connection: AsyncConnection[Any]) -> list[Campaign]:
    """The campaigns whose dispatches are not the sum of their states, in one snapshot; there should be none."""
    return [c for c in await list_campaigns(connection) if c.dispatches != c.accounted]


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


async def campaign_work(connection: AsyncConnection[Any], campaign: Campaign) -> Work:
    """What a campaign is still to give, for a forecast."""
    campaign_id = campaign.campaign_id
    closed = await (await connection.execute(_CLOSED, (campaign_id,))).fetchone()
    async with connection.cursor(row_factory=class_row(OperatorWork)) as cursor:
        values = {"campaign_id": campaign_id, "window": WINDOW}
        operators = await (await cursor.execute(_WORK.encode(), values)).fetchall()
    return Work(
        operators=tuple(operators),
        closed=closed[0] if closed else None,
        scheduled_for=campaign.scheduled_for,
        finish_by=campaign.finish_by,
        unplanned=campaign.unplanned,
        instances=(await count_instances(connection))[InstanceState.ALIVE],
    )


async def _campaigns(
    connection: AsyncConnection[Any], campaign_id: str | None, *, active: bool = False
) -> list[Campaign]:
    values = {"campaign_id": campaign_id, "active": active}
    async with connection.cursor(row_factory=class_row(Campaign)) as cursor:
        return await (await cursor.execute(_TOTALS.encode(), values)).fetchall()


def unknown_campaign(campaign_id: str) -> CampaignError:
    """What to say of a campaign that is not there."""
    return CampaignError(f"campaign {campaign_id!r}: unknown; see `fairpost campaigns list`")
