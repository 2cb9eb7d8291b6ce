"""Interventions: what a person does to a running campaign; each stands in the audit."""

from typing import Any, Final

from psycopg import AsyncConnection

from contract.states import CampaignState
from processor.overview import CampaignError, show_campaign

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
            await show_campaign(connection, campaign_id)
            raise CampaignError(f"campaign {campaign_id!r}: was cancelled, which is final")
        await connection.execute(_AUDIT, values)
    return CampaignState(row[0])
