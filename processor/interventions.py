"""Interventions: what a person does to a running campaign; what changes it stands in the audit."""

from typing import Any, Final

from psycopg import AsyncConnection

from contract.states import CampaignState
from processor.audit import Act, Action, change
from processor.overview import CampaignError, unknown_campaign

_LOCK: Final = "SELECT state FROM campaigns WHERE campaign_id = %s FOR NO KEY UPDATE"

_HOLD: Final = """
UPDATE campaigns SET held_at = clock_timestamp(), held_by = %(actor)s
 WHERE campaign_id = %(campaign_id)s AND held_at IS NULL"""

_LIFT: Final = """
UPDATE campaigns SET held_at = NULL, held_by = NULL WHERE campaign_id = %(campaign_id)s AND held_at IS NOT NULL"""

_CANCEL: Final = """
UPDATE campaigns SET state = 'cancelled' WHERE campaign_id = %(campaign_id)s AND state <> 'cancelled'"""


async def hold(connection: AsyncConnection[Any], campaign_id: str, actor: str) -> CampaignState:
    """Stops the campaign until a person lifts the hold; answers the state that its events gave it.

    Raises:
        CampaignError: it is unknown or cancelled.
    """
    return await _act(connection, _HOLD, campaign_id, actor, Action.CAMPAIGN_HOLD)


async def lift(connection: AsyncConnection[Any], campaign_id: str, actor: str) -> CampaignState:
    """Lifts a hold; a pause by an event stays. Answers the state that its events gave it.

    Raises:
        CampaignError: it is unknown or cancelled.
    """
    return await _act(connection, _LIFT, campaign_id, actor, Action.CAMPAIGN_LIFT)


async def cancel(connection: AsyncConnection[Any], campaign_id: str, actor: str) -> None:
    """Cancels the campaign for good: what was not handed over never is.

    Raises:
        CampaignError: it is unknown.
    """
    await _act(connection, _CANCEL, campaign_id, actor, Action.CAMPAIGN_CANCEL)


async def _act(
    connection: AsyncConnection[Any], statement: str, campaign_id: str, actor: str, action: Action
) -> CampaignState:
    async with connection.transaction():
        row = await (await connection.execute(_LOCK, (campaign_id,))).fetchone()
        if row is None:
            raise unknown_campaign(campaign_id)
        state = CampaignState(row[0])
        if state is CampaignState.CANCELLED and action is not Action.CAMPAIGN_CANCEL:
            raise CampaignError(f"campaign {campaign_id!r}: was cancelled, which is final")
        values = {"campaign_id": campaign_id, "actor": actor}
        await change(connection, statement, values, actor, Act(action, campaign_id))
    return state
