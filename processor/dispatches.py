"""Dispatches as people look for them: what is reserved and not planned, and what became of a user's."""

from datetime import datetime
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import class_row


class Unplanned(Struct, frozen=True):
    """A dispatch that is reserved and not planned.

    Attributes:
        source_partition: of `due-emails`, where the due e-mail stands that it was reserved for.
        source_offset: likewise.
        age_seconds: since `reserved_at`, by the database's clock.
    """

    dispatch_id: int
    user_id: str
    campaign_id: str
    email_key: str
    source_partition: int
    source_offset: int
    reserved_at: datetime
    age_seconds: int


class Dispatch(Struct, frozen=True):
    """A dispatch with what became of its message.

    Attributes:
        state: the message's; `unplanned` before there is one, `pruned` when there is none any more.
        instance: whose Postfix it was handed to; None: it was not.
        attempts: deliveries that Postfix tried.
        status_at: when the log, or planning, last said something of it.
        dsn: of the last reply (RFC 3463).
        reply: the last one.
    """

    dispatch_id: int
    campaign_id: str
    email_key: str
    state: str
    instance: str | None
    attempts: int
    status_at: datetime | None
    dsn: str | None
    reply: str | None


# The oldest are picked before their dispatches are looked up: there may be a million.
_UNPLANNED: Final = """
SELECT p.dispatch_id, d.user_id, p.campaign_id, d.email_key, p.source_partition, p.source_offset, p.reserved_at,
       greatest(extract(epoch FROM clock_timestamp() - p.reserved_at), 0)::bigint AS age_seconds
  FROM (SELECT * FROM pending WHERE reserved_at <= clock_timestamp() - make_interval(secs => %(older_than)s)
         ORDER BY reserved_at, dispatch_id LIMIT %(limit)s) p
  JOIN dispatches d USING (dispatch_id)
 ORDER BY p.reserved_at, p.dispatch_id"""

_COUNT: Final = """
SELECT count(*) FROM pending WHERE reserved_at <= clock_timestamp() - make_interval(secs => %(older_than)s)"""

_OF_USER: Final = """
SELECT d.dispatch_id, d.campaign_id, d.email_key,
       CASE WHEN m.dispatch_id IS NOT NULL THEN m.state::text
            WHEN p.dispatch_id IS NOT NULL THEN 'unplanned' ELSE 'pruned' END AS state,
       m.instance, coalesce(m.attempts, 0) AS attempts, m.status_at, m.dsn, m.reply
  FROM dispatches d LEFT JOIN messages m USING (dispatch_id) LEFT JOIN pending p USING (dispatch_id)
 WHERE d.user_id = %(user_id)s ORDER BY d.dispatch_id DESC LIMIT %(limit)s"""


async def list_unplanned(
    connection: AsyncConnection[Any], *, older_than: float, limit: int
) -> list[Unplanned]:
    """What is reserved and not planned, the oldest first.

    Args:
        connection: to the database.
        older_than: seconds since the reservation, at least.
        limit: how many at most.
    """
    async with connection.cursor(row_factory=class_row(Unplanned)) as cursor:
        values = {"older_than": older_than, "limit": limit}
        return await (await cursor.execute(_UNPLANNED, values)).fetchall()


async def count_unplanned(connection: AsyncConnection[Any], *, older_than: float) -> int:
    """How many are reserved and not planned for at least so many seconds."""
    row = await (await connection.execute(_COUNT, {"older_than": older_than})).fetchone()
    return int(row[0]) if row else 0


async def list_dispatches(
    connection: AsyncConnection[Any], user_id: str, *, limit: int
) -> list[Dispatch]:
    """A user's dispatches, the latest first, at most `limit`."""
    async with connection.cursor(row_factory=class_row(Dispatch)) as cursor:
        values = {"user_id": user_id, "limit": limit}
        return await (await cursor.execute(_OF_USER, values)).fetchall()
