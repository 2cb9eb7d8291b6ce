"""Campaigns: what their events and people make of them.

Events set the state and the content; what a person pauses is a hold, a flag of its own that only a person lifts.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import psycopg
from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from contract.database import Connection, Pool, is_bad_data
from contract.events import (
    CAMPAIGNS,
    DEAD_LETTERS,
    CampaignEvent,
    CampaignScheduled,
    EventError,
    campaign_event_type,
    decode_campaign_event,
)
from contract.outage import first_line
from contract.states import CampaignState, next_campaign_state
from contract.templates import TemplateError, check_templates
from processor import metrics
from processor.consuming import Done, Record, Status
from processor.dead_letters import dead_letter
from processor.emitting import Emission, Emitter
from processor.fail_points import FailPoint, FailPoints
from processor.settings import ProcessorSettings

STEP: Final = "campaigns"

# Makes the row that the next statement locks: an unknown campaign is a placeholder.
_PLACEHOLDER: Final = "INSERT INTO campaigns (campaign_id) VALUES (%s) ON CONFLICT DO NOTHING"

_LOCK: Final = """
SELECT state, scheduled_for IS NOT NULL, applied_at, applied_offset
  FROM campaigns WHERE campaign_id = %s FOR NO KEY UPDATE"""

_SET_STATE: Final = """
UPDATE campaigns
   SET state = %(state)s, applied_at = greatest(applied_at, %(at)s), applied_offset = %(offset)s
 WHERE campaign_id = %(campaign_id)s"""

# A content replaces the former as a whole; its revision tells agents to fetch it anew.
_SET_CONTENT: Final = """
UPDATE campaigns
   SET name = %(name)s, sender = %(sender)s, reply_to = %(reply_to)s, scheduled_for = %(scheduled_for)s,
       finish_by = %(finish_by)s, templates = %(templates)s, unsubscribe_url = %(unsubscribe_url)s,
       headers = %(headers)s, revision = revision + 1, ended_at = NULL
 WHERE campaign_id = %(campaign_id)s"""


class Campaigns:
    """The step of the topic `campaigns`."""

    def __init__(self, settings: ProcessorSettings, pool: Pool, emitter: Emitter) -> None:
        self._settings = settings
        self._pool = pool
        self._emitter = emitter
        self._fail_points = FailPoints(settings.fail_points)

    async def __call__(self, records: Sequence[Record]) -> Done:
        """Applies each event, in order; raises whatever `consuming.is_outage` names."""
        applied = 0
        for record in records:
            try:
                applied += await self._apply(record, read_campaign_event(record.value))
            except EventError as error:
                await self._bury(record, first_line(error))
            except psycopg.Error as error:
                if not is_bad_data(error):
                    raise
                await self._bury(record, f"{CAMPAIGNS}: {first_line(error)}")
        return Done(Status.SENT, 0, applied)

    async def _apply(self, record: Record, event: CampaignEvent) -> bool:
        async with self._pool.connection() as connection, connection.transaction():
            applied = await apply_event(connection, event, record.at, record.offset)
        self._fail_points.reach(FailPoint.CAMPAIGN_APPLIED)
        metrics.CAMPAIGN_EVENTS.labels(
            campaign_event_type(event), "applied" if applied else "old"
        ).inc()
        return applied

    async def _bury(self, record: Record, reason: str) -> None:
        topic = self._settings.topic(DEAD_LETTERS)
        await self._emitter.emit([Emission(topic, record.topic, dead_letter(record, reason))])
        metrics.DEAD_LETTERS.labels(STEP).inc()


def read_campaign_event(value: bytes) -> CampaignEvent:
    """A record of the topic `campaigns` whose templates compile.

    Raises:
        EventError: it is none, or a template of it is wrong; with its line.
    """
    event = decode_campaign_event(value)
    if isinstance(event, CampaignScheduled):
        try:
            check_templates(event)
        except TemplateError as error:
            raise EventError(f"{CAMPAIGNS}: {error}") from error
    return event


async def apply_event(
    connection: Connection, event: CampaignEvent, at: datetime, offset: int
) -> bool:
    """Applies an event within the caller's transaction; False: one at least as new was applied before.

    Args:
        connection: in a transaction.
        event: the event.
        at: when the broker appended it.
        offset: where it stands in its partition; a re-created topic starts anew, at later times.
    """
    await connection.execute(_PLACEHOLDER, (event.campaign_id,))
    row = await (await connection.execute(_LOCK, (event.campaign_id,))).fetchone()
    assert row is not None  # noqa: S101  the statement before made it
    state, scheduled, applied_at, applied_offset = row
    # Brokers' clocks step back: a later record may be stamped earlier. A record of before is neither later nor further on.
    if applied_at is not None and at <= applied_at and offset <= applied_offset:
        return False
    if isinstance(event, CampaignScheduled):
        await connection.execute(_SET_CONTENT, _content(event))
    following = next_campaign_state(
        CampaignState(state), campaign_event_type(event), scheduled=scheduled
    )
    await connection.execute(
        _SET_STATE,
        {"campaign_id": event.campaign_id, "state": following, "at": at, "offset": offset},
    )
    return True


def _content(event: CampaignScheduled) -> dict[str, Any]:
    return {
        **msgspec.structs.asdict(event),
        "templates": Jsonb(msgspec.to_builtins(event.templates)),
        "headers": Jsonb(event.headers),
    }


# ------------------------------------------------------------------ what people see and do


class CampaignError(ValueError):
    """What a person asked of a campaign cannot be done; the text is one line."""


class Campaign(Struct, frozen=True):
    """A campaign with its messages by state; `unplanned` are reserved only."""

    campaign_id: str
    name: str | None
    state: str
    scheduled_for: datetime | None
    finish_by: datetime | None
    held_at: datetime | None
    held_by: str | None
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


COUNTED: Final = (
    "unplanned",
    "planned",
    "handed",
    "uncertain",
    "queued",
    "deferred",
    "sent",
    "bounced",
    "expired",
    "rejected",
    "suppressed",
    "cancelled",
    "pruned",
)

# Counts are kept, not counted: a row a chunk, a row a source partition, and the rows of `pending` themselves.
_TOTALS: Final = """
SELECT c.campaign_id, c.name, c.state, c.scheduled_for, c.finish_by, c.held_at, c.held_by,
       coalesce(d.dispatches, 0) AS dispatches, coalesce(p.unplanned, 0) AS unplanned,
       coalesce(m.planned, 0) AS planned, coalesce(m.handed, 0) AS handed, coalesce(m.uncertain, 0) AS uncertain,
       coalesce(m.queued, 0) AS queued, coalesce(m.deferred, 0) AS deferred, coalesce(m.sent, 0) AS sent,
       coalesce(m.bounced, 0) AS bounced, coalesce(m.expired, 0) AS expired, coalesce(m.rejected, 0) AS rejected,
       coalesce(m.suppressed, 0) AS suppressed, coalesce(m.cancelled, 0) AS cancelled, c.pruned
  FROM campaigns c
  LEFT JOIN LATERAL (
    SELECT sum(dispatches)::bigint AS dispatches FROM dispatch_counts WHERE campaign_id = c.campaign_id) d ON true
  LEFT JOIN (SELECT campaign_id, count(*) AS unplanned FROM pending GROUP BY campaign_id) p USING (campaign_id)
  LEFT JOIN LATERAL (
    SELECT sum(k.planned)::bigint AS planned, sum(handed)::bigint AS handed, sum(uncertain)::bigint AS uncertain,
           sum(queued)::bigint AS queued, sum(deferred)::bigint AS deferred, sum(sent)::bigint AS sent,
           sum(bounced)::bigint AS bounced, sum(expired)::bigint AS expired, sum(rejected)::bigint AS rejected,
           sum(suppressed)::bigint AS suppressed, sum(cancelled)::bigint AS cancelled
      FROM chunks k JOIN chunk_counts USING (chunk_id) WHERE k.campaign_id = c.campaign_id) m ON true
 WHERE %(campaign_id)s::text IS NULL OR c.campaign_id = %(campaign_id)s
 ORDER BY c.scheduled_for DESC NULLS FIRST, c.campaign_id"""


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


_SHARES: Final = """
SELECT k.operator, count(*) AS chunks, count(*) FILTER (WHERE k.instance IS NOT NULL) AS claimed,
       sum(k.planned + handed + uncertain + queued + deferred + sent + bounced + expired + rejected + suppressed
           + cancelled)::bigint AS messages, sum(k.planned)::bigint AS planned, sum(sent)::bigint AS sent,
       sum(bounced)::bigint AS bounced, sum(deferred)::bigint AS deferred
  FROM chunks k JOIN chunk_counts USING (chunk_id)
 WHERE k.campaign_id = %s GROUP BY k.operator ORDER BY k.operator"""


async def list_campaigns(connection: AsyncConnection[Any]) -> list[Campaign]:
    """Every campaign, the latest first."""
    return await _campaigns(connection, None)


async def show_campaign(connection: AsyncConnection[Any], campaign_id: str) -> Campaign:
    """One campaign; raises CampaignError where there is none."""
    found = await _campaigns(connection, campaign_id)
    if not found:
        raise _unknown(campaign_id)
    return found[0]


async def campaign_shares(
    connection: AsyncConnection[Any], campaign_id: str
) -> list[OperatorShare]:
    """How a campaign stands at each operator."""
    async with connection.cursor(row_factory=class_row(OperatorShare)) as cursor:
        return await (await cursor.execute(_SHARES, (campaign_id,))).fetchall()


async def _campaigns(connection: AsyncConnection[Any], campaign_id: str | None) -> list[Campaign]:
    async with connection.cursor(row_factory=class_row(Campaign)) as cursor:
        return await (await cursor.execute(_TOTALS, {"campaign_id": campaign_id})).fetchall()


_HOLD: Final = """
UPDATE campaigns SET held_at = coalesce(held_at, clock_timestamp()), held_by = coalesce(held_by, %(actor)s)
 WHERE campaign_id = %(campaign_id)s AND state <> 'cancelled' RETURNING state"""

_LIFT: Final = """
UPDATE campaigns SET held_at = NULL, held_by = NULL
 WHERE campaign_id = %(campaign_id)s AND state <> 'cancelled' RETURNING state"""

_CANCEL: Final = """
UPDATE campaigns SET state = 'cancelled' WHERE campaign_id = %(campaign_id)s RETURNING state"""

_AUDIT: Final = """
INSERT INTO audit (actor, action, subject) VALUES (%(actor)s, %(action)s, %(campaign_id)s)"""


async def hold(connection: AsyncConnection[Any], campaign_id: str, actor: str) -> CampaignState:
    """Stops the campaign until a person lifts the hold; answers the state that its events gave it.

    Raises:
        CampaignError: it is unknown or cancelled.
    """
    return await _act(connection, _HOLD, campaign_id, actor, "campaign.hold")


async def lift(connection: AsyncConnection[Any], campaign_id: str, actor: str) -> CampaignState:
    """Lifts a hold; a pause by an event stays. Answers the state that its events gave it.

    Raises:
        CampaignError: it is unknown or cancelled.
    """
    return await _act(connection, _LIFT, campaign_id, actor, "campaign.lift")


async def cancel(connection: AsyncConnection[Any], campaign_id: str, actor: str) -> CampaignState:
    """Cancels the campaign for good: what was not handed over never is.

    Raises:
        CampaignError: it is unknown.
    """
    return await _act(connection, _CANCEL, campaign_id, actor, "campaign.cancel")


async def _act(
    connection: AsyncConnection[Any], statement: str, campaign_id: str, actor: str, action: str
) -> CampaignState:
    values = {"campaign_id": campaign_id, "actor": actor, "action": action}
    async with connection.transaction():
        row = await (await connection.execute(statement.encode(), values)).fetchone()
        if row is None:
            known = await _campaigns(connection, campaign_id)
            raise _cancelled(campaign_id) if known else _unknown(campaign_id)
        await connection.execute(_AUDIT, values)
    return CampaignState(row[0])


def _unknown(campaign_id: str) -> CampaignError:
    return CampaignError(f"campaign {campaign_id!r}: unknown; see `fairpost campaigns list`")


def _cancelled(campaign_id: str) -> CampaignError:
    return CampaignError(f"campaign {campaign_id!r}: was cancelled, which is final")
