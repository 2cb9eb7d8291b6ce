"""Resending: what no Postfix has, as far as is known, is planned again at a person's word."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection

from contract.states import MessageState

BLOCK: Final = 1_000
"""Messages in one transaction at most, so that nothing waits long."""

SEND_AGAIN: Final = """
SELECT state, messages FROM send_again(%(chunk_id)s, %(state)s, %(dispatch_ids)s, %(instance)s, %(reason)s, %(until)s,
                                       %(actor)s, %(limit)s)"""
"""A block of a chunk that is planned again (`resending.sql`): how many messages became what."""


class Found(Struct, frozen=True):
    """How many messages are meant at a moment of the database's clock."""

    number: int
    at: datetime


async def count(
    connection: AsyncConnection[Any], statement: str, values: Mapping[str, Any]
) -> Found:
    """How many messages are meant now, by a statement that answers their number and the moment."""
    row = await (await connection.execute(statement.encode(), values)).fetchone()
    assert row is not None  # noqa: S101  an aggregate has a row
    return Found(*row)


async def find_chunks(
    connection: AsyncConnection[Any], statement: str, values: Mapping[str, Any]
) -> list[int]:
    """The chunks that hold them, in the order of the statement."""
    rows = await (await connection.execute(statement.encode(), values)).fetchall()
    return [chunk_id for (chunk_id,) in rows]


async def in_blocks(
    connection: AsyncConnection[Any],
    statement: str,
    values: Mapping[str, Any],
    chunk_ids: Iterable[int],
    seen: Callable[[int], None],
) -> Counter[MessageState]:
    """Calls for each chunk until a block is not full; answers how many messages became what.

    Args:
        connection: in autocommit: a transaction a block.
        statement: such as `SEND_AGAIN`; it is given `chunk_id` and `limit` too.
        values: its other parameters.
        chunk_ids: in ascending order.
        seen: told how many messages are done.
    """
    done: Counter[MessageState] = Counter()
    for chunk_id in chunk_ids:
        parameters = {**values, "chunk_id": chunk_id, "limit": BLOCK}
        while rows := await (await connection.execute(statement.encode(), parameters)).fetchall():
            block = Counter({MessageState(state): number for state, number in rows})
            done += block
            seen(done.total())
            if block.total() < BLOCK:
                break
    return done
