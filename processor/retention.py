"""Retention: what is old goes, and what a person wants forgotten; that an e-mail was sent once is kept for ever."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from psycopg import AsyncConnection

from processor.audit import Act, Action, record

BLOCK: Final = 5_000
"""Rows deleted in one transaction at most, so that nothing waits long."""

# Chunks that may hold what is old enough; the clock is the database's.
_OLD_CHUNKS: Final = """
SELECT chunk_id, clock_timestamp() - %s::interval
  FROM chunks WHERE opened_at < clock_timestamp() - %s::interval ORDER BY chunk_id"""

_PRUNE: Final = "SELECT prune_chunk(%s, %s, %s)"

# Which queue id carried which dispatch, once no message of it is left.
_PRUNE_QUEUE_IDS: Final = """
DELETE FROM queue_ids WHERE (instance, queue_id) IN (
  SELECT instance, queue_id FROM queue_ids q
   WHERE seen_at < clock_timestamp() - %s::interval
     AND NOT EXISTS (SELECT FROM messages m WHERE m.dispatch_id = q.dispatch_id)
   LIMIT %s)"""

_PRUNE_HANDOVERS: Final = """
DELETE FROM handovers WHERE (claim_token, batch) IN (
  SELECT claim_token, batch FROM handovers WHERE at < clock_timestamp() - %s::interval LIMIT %s)"""

_FORGET: Final = "SELECT forget(%s)"


async def prune(
    connection: AsyncConnection[Any],
    age: timedelta,
    actor: str,
    seen: Callable[[int, int], None] = lambda _seen, _all: None,
) -> int:
    """Deletes messages that are final and of which nothing was heard for `age`; answers how many.

    In small transactions; killed, it may be called again. Counts go into the campaign, dispatches stay.

    Args:
        connection: in autocommit.
        age: since the last word of a message.
        actor: for the audit.
        seen: told how many chunks were looked at, of how many.
    """
    await record(connection, actor, Act(Action.PRUNE, f"older than {age}"))
    chunks = await (await connection.execute(_OLD_CHUNKS, (age, age))).fetchall()
    pruned = 0
    for number, (chunk_id, before) in enumerate(chunks, start=1):
        while gone := await _prune_block(connection, chunk_id, before):
            pruned += gone
            if gone < BLOCK:
                break
        seen(number, len(chunks))
    for statement in (_PRUNE_QUEUE_IDS, _PRUNE_HANDOVERS):
        while (await connection.execute(statement, (age, BLOCK))).rowcount == BLOCK:
            pass
    return pruned


async def _prune_block(connection: AsyncConnection[Any], chunk_id: int, before: object) -> int:
    row = await (await connection.execute(_PRUNE, (chunk_id, before, BLOCK))).fetchone()
    return int(row[0]) if row else 0


async def forget(connection: AsyncConnection[Any], user_id: str, actor: str) -> int:
    """Erases addresses, variables and replies of a user's messages; answers how many messages there were.

    What was not handed over yet becomes `cancelled`. The user id stays in `dispatches`, so that the same e-mail is never
    sent again. Kafka's topics keep what they hold until their retention is over.
    """
    async with connection.transaction():
        row = await (await connection.execute(_FORGET, (user_id,))).fetchone()
        forgotten = int(row[0]) if row else 0
        await record(connection, actor, Act(Action.FORGET, user_id, {"messages": forgotten}))
    return forgotten
