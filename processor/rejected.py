"""Rejected messages: of which a template failed, or that the instance's own Postfix refused; a person has them retried.

No Postfix has accepted any of them. What could not even be planned has no address, and never can be sent.
"""

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import class_row

from contract.states import CampaignState, MessageState
from processor.overview import CampaignError, show_campaign
from processor.resending import SEND_AGAIN, Found, count, find_chunks, in_blocks


class Selection(Struct, frozen=True):
    """Which rejected messages of a campaign are meant; what is None does not narrow it.

    Attributes:
        operator: only of this mailbox operator.
        reason: only those whose reason holds this text.
    """

    campaign_id: str
    operator: str | None = None
    reason: str | None = None


class Reason(Struct, frozen=True):
    """Why messages were rejected at an operator, addresses left out, and how many."""

    operator: str
    messages: int
    reason: str


# Counts by chunk lead there: nobody looks through a million messages for three.
_CHOSEN: Final = """
  FROM chunk_counts n JOIN chunks k USING (chunk_id) JOIN messages m USING (chunk_id)
 WHERE k.campaign_id = %(campaign_id)s AND n.rejected > 0 AND m.state = 'rejected' AND m.email <> ''
   AND (%(operator)s::text IS NULL OR k.operator = %(operator)s)
   AND (%(reason)s::text IS NULL OR strpos(m.reply, %(reason)s) > 0)"""

_COUNT: Final = f"SELECT count(*), clock_timestamp() {_CHOSEN}"

_REASONS: Final = f"""
SELECT k.operator, count(*) AS messages, replace(coalesce(m.reply, ''), m.email, '…') AS reason {_CHOSEN}
 GROUP BY 1, 3 ORDER BY 2 DESC, 1, 3 LIMIT %(limit)s"""

_CHUNKS: Final = f"SELECT DISTINCT m.chunk_id {_CHOSEN} ORDER BY m.chunk_id"


async def count_rejected(connection: AsyncConnection[Any], selection: Selection) -> Found:
    """How many there are to retry now.

    Raises:
        CampaignError: the campaign is unknown, or cancelled.
    """
    campaign = await show_campaign(connection, selection.campaign_id)
    if campaign.state == CampaignState.CANCELLED:
        raise CampaignError(f"campaign {selection.campaign_id!r}: was cancelled, which is final")
    return await count(connection, _COUNT, _values(selection))


async def list_reasons(
    connection: AsyncConnection[Any], selection: Selection, *, limit: int
) -> list[Reason]:
    """Why they were rejected, the most frequent reason first, at most `limit`."""
    async with connection.cursor(row_factory=class_row(Reason)) as cursor:
        values = {**_values(selection), "limit": limit}
        return await (await cursor.execute(_REASONS.encode(), values)).fetchall()


async def retry(
    connection: AsyncConnection[Any],
    selection: Selection,
    *,
    until: datetime,
    actor: str,
    seen: Callable[[int], None] = lambda _done: None,
) -> Counter[MessageState]:
    """Plans rejected messages again where they stand; answers how many became what.

    One may become what it is by now: `expired` past its `not_after`, `suppressed` with its address, `cancelled` with its
    campaign. In small transactions, each on record; killed, it may be called again.

    Args:
        connection: in autocommit.
        selection: which are meant.
        until: what was rejected after this moment, as by `count_rejected`, is left alone.
        actor: whose word it is.
        seen: told how many are done.
    """
    chunk_ids = await find_chunks(connection, _CHUNKS, _values(selection))
    values = {
        "state": MessageState.REJECTED,
        "dispatch_ids": None,
        "instance": None,
        "reason": selection.reason,
        "until": until,
        "actor": actor,
    }
    return await in_blocks(connection, SEND_AGAIN, values, chunk_ids, seen)


def _values(selection: Selection) -> dict[str, Any]:
    return {name: getattr(selection, name) for name in selection.__struct_fields__}
