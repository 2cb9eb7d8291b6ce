"""Uncertain messages: of which it cannot be known whether they were sent; a person says what becomes of each."""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import class_row

from contract.states import MessageState
from processor.resending import SEND_AGAIN, Found, count, find_chunks, in_blocks


class Verdict(StrEnum):
    """What a person says of an uncertain message."""

    RESEND = "resend"
    """It was not sent, and is to be."""
    DROP = "drop"
    """It is never to be sent, whether it was or not."""


class Selection(Struct, frozen=True):
    """Which uncertain messages are meant; what is None does not narrow it, so that by default all are.

    Attributes:
        dispatch_ids: only these dispatches.
        instance: only what was handed to this one.
        campaign_id: only of this campaign.
    """

    dispatch_ids: Sequence[int] | None = None
    instance: str | None = None
    campaign_id: str | None = None


class UncertainMessage(Struct, frozen=True):
    """A message that may have been sent.

    Attributes:
        email: empty where the user was forgotten.
        instance: whose Postfix may have had it, or may have it still.
        handed_at: when it was handed over.
        since: when it became uncertain.
        handovers: how often it was handed over.
        attempts: deliveries that Postfix tried, as far as its log told.
        why: what made it uncertain, where that is known.
    """

    dispatch_id: int
    user_id: str
    campaign_id: str
    email_key: str
    email: str
    instance: str
    handed_at: datetime
    since: datetime
    handovers: int
    attempts: int
    why: str | None


# Counts by chunk lead there: nobody looks through a million messages for three.
_CHOSEN: Final = """
  FROM chunk_counts n JOIN chunks k USING (chunk_id) JOIN messages m USING (chunk_id)
 WHERE n.uncertain > 0 AND m.state = 'uncertain'
   AND (%(dispatch_ids)s::bigint[] IS NULL OR m.dispatch_id = ANY (%(dispatch_ids)s))
   AND (%(instance)s::text IS NULL OR m.instance = %(instance)s)
   AND (%(campaign_id)s::text IS NULL OR k.campaign_id = %(campaign_id)s)"""

# The oldest are picked before the rest is looked up. A fence that was judged later than a message became uncertain is
# what made it so.
_LIST: Final = f"""
WITH chosen AS MATERIALIZED (
  SELECT m.*, k.campaign_id {_CHOSEN} ORDER BY m.status_at, m.dispatch_id LIMIT %(limit)s)
SELECT c.dispatch_id, d.user_id, c.campaign_id, d.email_key, c.email, c.instance, c.handed_at, c.status_at AS since,
       c.handovers, c.attempts,
       coalesce((SELECT CASE reason
                   WHEN 'audit' THEN 'neither in the queue of its Postfix nor in its log (audit)'
                   ELSE 'handed over before Postfix was restarted, its log rotated or a line of it lost (fence: ' || reason || ')' END
                   FROM fence_messages JOIN fences f USING (fence_token)
                  WHERE dispatch_id = c.dispatch_id AND handed_at = c.handed_at AND f.judged_at >= c.status_at
                  ORDER BY f.judged_at LIMIT 1), c.reply) AS why
  FROM chosen c JOIN dispatches d USING (dispatch_id) ORDER BY c.status_at, c.dispatch_id"""  # noqa: S608  no values

_COUNT: Final = f"SELECT count(*), clock_timestamp() {_CHOSEN}"

_CHUNKS: Final = f"SELECT DISTINCT m.chunk_id {_CHOSEN} ORDER BY m.chunk_id"

_DROP: Final = """
SELECT state, messages FROM drop_uncertain(%(chunk_id)s, %(dispatch_ids)s, %(instance)s, %(until)s, %(actor)s, %(limit)s)"""


async def list_uncertain(
    connection: AsyncConnection[Any], selection: Selection, *, limit: int
) -> list[UncertainMessage]:
    """Uncertain messages, the oldest first, at most `limit`."""
    async with connection.cursor(row_factory=class_row(UncertainMessage)) as cursor:
        values = {**_values(selection), "limit": limit}
        return await (await cursor.execute(_LIST.encode(), values)).fetchall()


async def count_uncertain(connection: AsyncConnection[Any], selection: Selection) -> Found:
    """How many uncertain messages there are now."""
    return await count(connection, _COUNT, _values(selection))


async def resolve(
    connection: AsyncConnection[Any],
    selection: Selection,
    verdict: Verdict,
    *,
    until: datetime,
    actor: str,
    seen: Callable[[int], None] = lambda _done: None,
) -> Counter[MessageState]:
    """Carries out a person's word on uncertain messages; answers how many became what.

    Resent, a message is planned again where it stands, or becomes what it is by now: `cancelled` with its campaign or
    its forgotten user, `expired` past its `not_after`, `suppressed` with its address. Dropped, it is `cancelled`. One
    that is no longer uncertain is left alone. In small transactions, each on record; killed, it may be called again.

    Args:
        connection: in autocommit.
        selection: which are meant.
        verdict: what is to become of them.
        until: what became uncertain after this moment, as by `count_uncertain`, is left alone.
        actor: whose word it is.
        seen: told how many are done.
    """
    chunk_ids = await find_chunks(connection, _CHUNKS, _values(selection))
    statement = _DROP if verdict is Verdict.DROP else SEND_AGAIN
    values = {
        **_values(selection),
        "state": MessageState.UNCERTAIN,
        "reason": None,
        "until": until,
        "actor": actor,
    }
    return await in_blocks(connection, statement, values, chunk_ids, seen)


def _values(selection: Selection) -> dict[str, Any]:
    ids = selection.dispatch_ids
    return {
        "dispatch_ids": None if ids is None else list(ids),
        "instance": selection.instance,
        "campaign_id": selection.campaign_id,
    }
