"""The outbox: what happened to messages, told on `delivery-status` at least once and in order.

One tracker publishes at a time (an advisory lock of the session). Exactly the rows that the broker acknowledged are
deleted; a row is published again when that was not known, under the same `event_id`.
"""

import asyncio
from typing import Any, Final

from psycopg import AsyncConnection
from psycopg.rows import class_row

from contract.events import DELIVERY_STATUS, DeliveryStatus
from processor import metrics
from processor.emitting import Emission
from processor.publishing import Publisher
from processor.settings import ProcessorSettings

BATCH: Final = 5_000
_LOCK: Final = 0x6F757462  # "outb"

# The lock ends with its session, so that a dead publisher is followed by another.
_TAKE_LOCK: Final = "SELECT pg_try_advisory_lock(%s)"

# The oldest rows first: what a dispatch is told first was committed first.
_NEXT: Final = """
SELECT o.event_id, o.dispatch_id, d.user_id, d.campaign_id, d.email_key, o.status::text, o.class AS reply_class, o.dsn,
       o.reply, o.attempt, o.instance, o.at
  FROM outbox o JOIN dispatches d USING (dispatch_id) ORDER BY o.event_id LIMIT %s"""

_DELETE: Final = "DELETE FROM outbox WHERE event_id = ANY (%b)"


class Outbox:
    """Publishes the outbox over a connection of its own, which holds the lock."""

    def __init__(self, settings: ProcessorSettings, publisher: Publisher) -> None:
        self._topic = settings.topic(DELIVERY_STATUS)
        self._publisher = publisher

    async def take(self, connection: AsyncConnection[Any]) -> bool:
        """Whether this session is now the one that publishes; it may ask again while it is."""
        row = await (await connection.execute(_TAKE_LOCK, (_LOCK,))).fetchone()
        return row is not None and bool(row[0])

    async def publish(self, connection: AsyncConnection[Any]) -> int:
        """Publishes the next rows and deletes those acknowledged; answers how many.

        Raises:
            OutboxError: the broker acknowledged none of them.
        """
        async with connection.cursor(binary=True, row_factory=class_row(DeliveryStatus)) as cursor:
            rows = await (await cursor.execute(_NEXT, (BATCH,))).fetchall()
        if not rows:
            return 0
        results = await asyncio.to_thread(
            self._publisher.publish, [Emission(self._topic, row.user_id, row) for row in rows]
        )
        acknowledged = [
            row.event_id for row, error in zip(rows, results, strict=True) if error is None
        ]
        await connection.execute(_DELETE, (acknowledged,))
        metrics.PUBLISHED.inc(len(acknowledged))
        if not acknowledged:
            raise OutboxError(f"{self._topic}: {results[0]}")
        return len(acknowledged)


class OutboxError(Exception):
    """Nothing could be published for now."""
