"""The fleet's switch: whether anything is reserved, emitted or handed over at all.

Reservation, claims and each write-ahead look at it, so that it holds within a second; what waits, waits on its topic.
"""

from datetime import datetime
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import class_row

from processor.audit import Action

# On record under the very moment of the change; what is so already is no change.
_SWITCH: Final = """
WITH switched AS (
  UPDATE fleet SET sending = %(sending)s, changed_at = clock_timestamp() WHERE sending <> %(sending)s
  RETURNING changed_at)
INSERT INTO audit (at, actor, action, subject)
SELECT changed_at, %(actor)s, %(action)s, 'fleet' FROM switched"""

_SHOW: Final = """
SELECT sending, changed_at,
       (SELECT actor FROM audit WHERE subject = 'fleet' AND at = changed_at ORDER BY audit_id LIMIT 1) AS changed_by
  FROM fleet"""


class Sending(Struct, frozen=True):
    """Whether the fleet sends.

    Attributes:
        changed_at: when it was last switched, or the schema made.
        changed_by: who switched it; None: no person has yet.
    """

    sending: bool
    changed_at: datetime
    changed_by: str | None


async def switch_sending(connection: AsyncConnection[Any], *, sending: bool, actor: str) -> bool:
    """Switches the fleet on or off; False: it was so already, since when and by whom stays on record."""
    action = Action.SENDING_ON if sending else Action.SENDING_OFF
    values = {"sending": sending, "actor": actor, "action": action}
    return (await connection.execute(_SWITCH, values)).rowcount == 1


async def show_sending(connection: AsyncConnection[Any]) -> Sending:
    """Whether the fleet sends, since when, and by whom."""
    async with connection.cursor(row_factory=class_row(Sending)) as cursor:
        row = await (await cursor.execute(_SHOW)).fetchone()
    assert row is not None  # noqa: S101  the schema made it
    return row
