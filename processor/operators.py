"""Operators in the database: applying `operators.toml`, and listing what is applied."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.errors import LockNotAvailable
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from contract.operators import OTHER, Operator, domain_of
from contract.outage import outlast
from processor.audit import Act, Action, change, record

# A reader of hours (a dump) must not make planning and claims queue behind this: it gives up soon, and is tried again.
_IMPATIENTLY: Final = "SET LOCAL lock_timeout = '200ms'"

# Waits for the planners that have read the former operators, so that none plans for one that is removed here.
_LOCK: Final = "LOCK TABLE operators IN ACCESS EXCLUSIVE MODE"

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

# What the audit compares.
_DEFINITIONS: Final = """
SELECT operator, jsonb_build_object('per_minute', per_minute, 'chunk_size', chunk_size, 'tie_break', tie_break,
         'transport', transport, 'domains', ARRAY(
           SELECT domain FROM operator_domains d WHERE d.operator = o.operator ORDER BY domain))
  FROM operators o"""


async def apply_operators(
    connection: AsyncConnection[Any], operators: Sequence[Operator], actor: str, source: str
) -> None:
    """Makes the database's operators those of a file; running lanes follow within seconds.

    What was planned before stays with the operator that its domain had: see `replan_moved`.
    """

    async def apply() -> None:
        async with connection.transaction():
            await connection.execute(_IMPATIENTLY)
            await connection.execute(_LOCK)
            before = dict(await (await connection.execute(_DEFINITIONS)).fetchall())
            await _replace(connection, operators)
            after = dict(await (await connection.execute(_DEFINITIONS)).fetchall())
            await record(
                connection, actor, Act(Action.OPERATORS_APPLY, source, _changes(before, after))
            )

    await outlast("operators", apply, lambda error: isinstance(error, LockNotAvailable))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """By operator, what it was and is; null where there was or is none."""
    return {
        name: {"before": before.get(name), "after": after.get(name)}
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }


async def _replace(connection: AsyncConnection[Any], operators: Sequence[Operator]) -> None:
    names = [operator.name for operator in operators]
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


# Chunks that still have something planned, with the operator they were planned for; only those of operators that are
# no longer there, if so asked: mail that came back from a lane after its operator was removed.
_TO_DO: Final = """
SELECT chunk_id, operator, planned FROM chunks
 WHERE has_planned AND (NOT %s OR operator NOT IN (SELECT operator FROM operators)) ORDER BY chunk_id"""
_DOMAINS: Final = "SELECT domain, operator FROM operator_domains"
_PLANNED: Final = (
    "SELECT dispatch_id, email FROM messages WHERE chunk_id = %s AND state = 'planned'"
)
_REPLAN: Final = "SELECT replan(%s, %s)"
_REPLAN_BLOCK: Final = 1_000


async def replan_moved(
    connection: AsyncConnection[Any],
    seen: Callable[[int, int], None] = lambda _seen, _all: None,
    *,
    only_removed: bool = False,
) -> int:
    """Moves what is still planned to the operator that its domain belongs to now; answers how many messages.

    One transaction a block, so that claims and planning wait for milliseconds; killed, it may be called again.

    Args:
        connection: in autocommit.
        seen: told how many planned messages were looked at, of how many.
        only_removed: look only at what stands with operators that are no longer there.
    """
    chunks = await (await connection.execute(_TO_DO, (only_removed,))).fetchall()
    domains = dict(await (await connection.execute(_DOMAINS)).fetchall())
    total = sum(planned for _, _, planned in chunks)
    moved = looked_at = 0
    for chunk_id, operator, planned in chunks:
        messages = await (await connection.execute(_PLANNED, (chunk_id,))).fetchall()
        strangers = [
            (dispatch_id, domain)
            for dispatch_id, email in messages
            if domains.get(domain := domain_of(email), OTHER) != operator
        ]
        for start in range(0, len(strangers), _REPLAN_BLOCK):
            block = strangers[start : start + _REPLAN_BLOCK]
            values = ([dispatch_id for dispatch_id, _ in block], [domain for _, domain in block])
            row = await (await connection.execute(_REPLAN, values)).fetchone()
            moved += row[0] if row else 0
        looked_at += planned
        seen(looked_at, total)
    return moved


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


_LOCK_ONE: Final = "SELECT FROM operators WHERE operator = %s FOR NO KEY UPDATE"
_PAUSE: Final = """
UPDATE operators SET paused_at = clock_timestamp() WHERE operator = %s AND paused_at IS NULL"""
_RESUME: Final = (
    "UPDATE operators SET paused_at = NULL WHERE operator = %s AND paused_at IS NOT NULL"
)


class OperatorError(ValueError):
    """What a person asked of an operator cannot be done; the text is one line."""


async def pause_operator(connection: AsyncConnection[Any], operator: str, actor: str) -> bool:
    """Stops the lanes of an operator at their next batch, until a person resumes it; what Postfix has goes on.

    False: it was paused already, which stays as it was.

    Raises:
        OperatorError: it is unknown.
    """
    return await _act(connection, _PAUSE, operator, actor, Action.OPERATOR_PAUSE)


async def resume_operator(connection: AsyncConnection[Any], operator: str, actor: str) -> bool:
    """Lifts a pause; False: there was none.

    Raises:
        OperatorError: it is unknown.
    """
    return await _act(connection, _RESUME, operator, actor, Action.OPERATOR_RESUME)


async def _act(
    connection: AsyncConnection[Any], statement: str, operator: str, actor: str, action: Action
) -> bool:
    async with connection.transaction():
        if (await connection.execute(_LOCK_ONE, (operator,))).rowcount == 0:
            raise OperatorError(f"operator {operator!r}: unknown; see `fairpost operators list`")
        return await change(connection, statement, (operator,), actor, Act(action, operator))
