"""Operators in the database: applying `operators.toml`, and listing what is applied."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from contract.operators import Operator, OperatorsError

# Waits for the planners that have read the former operators, so that none plans for one that is removed here.
_LOCK: Final = "LOCK TABLE operators, operator_domains IN ACCESS EXCLUSIVE MODE"

_IN_USE: Final = """
SELECT operator, sum(planned)::bigint FROM chunks
 WHERE has_planned AND operator <> ALL (%s) GROUP BY operator ORDER BY operator"""

_UPSERT: Final = """
INSERT INTO operators (operator, per_minute, chunk_size, tie_break, transport)
VALUES (%(name)s, %(per_minute)s, %(chunk_size)s, %(tie_break)s, %(transport)s)
    ON CONFLICT (operator) DO UPDATE
   SET per_minute = excluded.per_minute, chunk_size = excluded.chunk_size, tie_break = excluded.tie_break,
       transport = excluded.transport, applied_at = clock_timestamp()"""

_REMOVE: Final = "DELETE FROM operators WHERE operator <> ALL (%s)"
_CLEAR_DOMAINS: Final = "DELETE FROM operator_domains"
_ADD_DOMAINS: Final = (
    "INSERT INTO operator_domains (domain, operator) SELECT unnest(%s::text[]), %s"
)
_AUDIT: Final = "INSERT INTO audit (actor, action, subject) VALUES (%s, 'operators.apply', %s)"


async def apply_operators(
    connection: AsyncConnection[Any], operators: Sequence[Operator], actor: str, source: str
) -> None:
    """Makes the database's operators those of a file; running lanes follow within seconds.

    Raises:
        OperatorsError: an operator that is no longer named still has messages to be handed over.
    """
    names = [operator.name for operator in operators]
    async with connection.transaction():
        await connection.execute(_LOCK)
        in_use = await (await connection.execute(_IN_USE, (names,))).fetchone()
        if in_use is not None:
            raise OperatorsError(
                f"{source}: operator {in_use[0]!r} is missing, and {in_use[1]} messages are planned for it:"
                " keep it until they are handed over"
            )
        await connection.execute(_CLEAR_DOMAINS)
        await connection.execute(_REMOVE, (names,))
        for operator in operators:
            await connection.execute(
                _UPSERT,
                {
                    "name": operator.name,
                    "per_minute": operator.per_minute,
                    "chunk_size": operator.chunk_size,
                    "tie_break": operator.tie_break,
                    "transport": Jsonb(operator.transport),
                },
            )
            await connection.execute(_ADD_DOMAINS, (list(operator.domains), operator.name))
        await connection.execute(_AUDIT, (actor, source))


class AppliedOperator(Struct, frozen=True):
    """An operator as the database has it, with what waits for it."""

    operator: str
    per_minute: int | None
    chunk_size: int
    tie_break: str
    domains: int
    planned: int
    lanes: int
    paused_at: datetime | None


_LIST: Final = """
SELECT o.operator, o.per_minute, o.chunk_size, o.tie_break,
       (SELECT count(*) FROM operator_domains d WHERE d.operator = o.operator) AS domains,
       (SELECT coalesce(sum(planned), 0)::bigint FROM chunks k WHERE k.operator = o.operator AND has_planned) AS planned,
       (SELECT count(*) FROM chunks k WHERE k.operator = o.operator AND instance IS NOT NULL
                                        AND lease_until > clock_timestamp()) AS lanes,
       o.paused_at
  FROM operators o ORDER BY o.operator"""


async def list_operators(connection: AsyncConnection[Any]) -> list[AppliedOperator]:
    """Every operator, by name."""
    async with connection.cursor(row_factory=class_row(AppliedOperator)) as cursor:
        return await (await cursor.execute(_LIST)).fetchall()
