"""Campaigns: what their events and people make of them.

Events set the state and the content; what a person pauses is a hold, a flag of its own that only a person lifts.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
import psycopg
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
from contract.fail_points import FailPoints, WorkerFailPoint
from contract.outage import first_line
from contract.states import CampaignState, next_campaign_state
from contract.templates import TemplateError, check_templates
from processor import metrics
from processor.consuming import Done, Record, Status
from processor.dead_letters import dead_letter
from processor.emitting import Emission, Emitter
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
                # Half a megabyte of templates compiles for seconds, in which the worker must not fall silent to Kafka.
                event = await asyncio.to_thread(read_campaign_event, record.value)
                applied += await self._apply(record, event)
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
        self._fail_points.reach(WorkerFailPoint.CAMPAIGN_APPLIED)
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
