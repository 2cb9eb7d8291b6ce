"""Housekeeping: sweeps what cancelled campaigns left, and checks that every dispatch is accounted for."""

import logging
from datetime import timedelta
from typing import Any, Final

from psycopg import AsyncConnection

from processor import metrics
from processor.overview import unbalanced

logger = logging.getLogger(__name__)

CHUNKS_A_SWEEP: Final = 1

_SWEEP: Final = "SELECT sweep(%s)"

IDLE: Final = timedelta(hours=24)
"""A campaign to which nothing came for so long, and of which all is final, has ended."""

_END_CAMPAIGNS: Final = "SELECT end_campaigns(%s)"

_DROP_EARLY_LINES: Final = (
    "DELETE FROM early_statuses WHERE received_at < clock_timestamp() - interval '1 day'"
)

_DROP_OLD_RETRIES: Final = (
    "DELETE FROM retries WHERE at < clock_timestamp() - interval '10 minutes'"
)


async def sweep(connection: AsyncConnection[Any]) -> int:
    """Cancels planned messages of cancelled campaigns, a chunk a call, so that planning waits little; answers how many.

    It waits for nobody: 0 means that none is left but in chunks that others have locked just now.
    """
    row = await (await connection.execute(_SWEEP, (CHUNKS_A_SWEEP,))).fetchone()
    swept = int(row[0]) if row else 0
    metrics.SWEPT.inc(swept)
    return swept


async def sweep_all(connection: AsyncConnection[Any]) -> None:
    """Sweeps until nothing is left that can be had; the rest is for the next turn."""
    while await sweep(connection):
        pass


async def end_campaigns(connection: AsyncConnection[Any]) -> int:
    """Notes which campaigns have ended; answers how many. What comes for one later reopens it."""
    row = await (await connection.execute(_END_CAMPAIGNS, (IDLE,))).fetchone()
    return int(row[0]) if row else 0


async def drop_early_lines(connection: AsyncConnection[Any]) -> int:
    """Forgets lines whose queue id did not come within a day: their mail is none of ours; answers how many."""
    return (await connection.execute(_DROP_EARLY_LINES)).rowcount


async def drop_old_retries(connection: AsyncConnection[Any]) -> int:
    """Forgets retries that no pace looks at any more; answers how many seconds' worth."""
    return (await connection.execute(_DROP_OLD_RETRIES)).rowcount


async def check_balance(connection: AsyncConnection[Any]) -> list[str]:
    """Tells of each campaign whose dispatches are not the sum of their states; answers which."""
    wrong = await unbalanced(connection)
    metrics.IMBALANCE.set(len(wrong))
    for campaign in wrong:
        logger.error(
            "campaign %s: %d dispatches, but its states sum up to %d: please report this",
            campaign.campaign_id,
            campaign.dispatches,
            campaign.accounted,
        )
    return [campaign.campaign_id for campaign in wrong]
