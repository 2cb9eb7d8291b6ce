"""Fences, the tracker's side: when their lines were read, they are judged by what was known by then.

The agent asks for a fence and stores what is to be judged (`smtp_agent/fence.py`); here it is given back, or `uncertain`.
"""

import logging
from typing import Any, Final

from msgspec import Struct
from psycopg import AsyncConnection
from psycopg.rows import class_row

from processor import metrics

logger = logging.getLogger(__name__)

_SEE: Final = "SELECT see_fence(%s, %s)"
_LOSE_EVIDENCE: Final = "SELECT lose_evidence(%s)"
_LOSE_ALL_EVIDENCE: Final = "SELECT coalesce(sum(lose_evidence(instance)), 0) FROM instances"

# Fences whose line is tracked and that the agent has confirmed, the oldest first.
_DUE: Final = """
SELECT fence_token FROM fences
 WHERE judged_at IS NULL AND line_seen_at IS NOT NULL AND confirmed_at IS NOT NULL ORDER BY asked_at"""

_JUDGE: Final = "SELECT instance, reason, given_back, uncertain FROM judge_fence(%s)"

# Nobody asks the Postfix of a retired instance any more.
_UNJUDGED: Final = """
SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - min(asked_at)), 0)::float8
  FROM fences f
 WHERE judged_at IS NULL
   AND NOT EXISTS (SELECT FROM instances i WHERE i.instance = f.instance AND i.retired_at IS NOT NULL)"""

_DOUBTFUL: Final = """
SELECT count(*) FROM fences JOIN fence_messages USING (fence_token) WHERE judged_at IS NULL"""

# What one that was never judged was to judge, the next one of its instance finds anew.
_DROP_OLD: Final = "DELETE FROM fences WHERE asked_at < clock_timestamp() - interval '30 days'"


class Judgement(Struct, frozen=True):
    """What became of the messages of a fence that were still as they were when it was asked for.

    Attributes:
        given_back: never accepted by Postfix: planned again, or what they have become meanwhile.
        uncertain: nobody can know.
    """

    instance: str
    reason: str
    given_back: int
    uncertain: int


async def see_fence(connection: AsyncConnection[Any], token: str, instance: str) -> bool:
    """Notes that the instance's log is tracked up to the fence's line; False where no unjudged fence waits for it."""
    row = await (await connection.execute(_SEE, (token, instance))).fetchone()
    return bool(row and row[0])


async def lose_evidence(connection: AsyncConnection[Any], instance: str) -> int:
    """Notes that a line of the instance's log is lost: what was handed over before can be proven no more.

    Answers how many hand-overs that is; none of them is proven by any fence, even if the line is found again.
    """
    row = await (await connection.execute(_LOSE_EVIDENCE, (instance,))).fetchone()
    return int(row[0]) if row else 0


async def lose_all_evidence(connection: AsyncConnection[Any]) -> int:
    """The same for lines of nobody knows which instances; answers how many hand-overs of all of them."""
    row = await (await connection.execute(_LOSE_ALL_EVIDENCE)).fetchone()
    return int(row[0]) if row else 0


async def judge_fences(connection: AsyncConnection[Any]) -> list[Judgement]:
    """Judges what is due, each fence once and in a transaction of its own, with it the earlier ones whose line was lost.

    Answers a judgement a fence; what an earlier one left counts with the one that it was judged with.

    Args:
        connection: in autocommit.
    """
    due = await (await connection.execute(_DUE)).fetchall()
    judgements: list[Judgement] = []
    for (token,) in due:
        async with connection.cursor(row_factory=class_row(Judgement)) as cursor:
            judged = await (await cursor.execute(_JUDGE, (token,))).fetchall()
        for judgement in judged:
            _tell(judgement)
        judgements += judged
    return judgements


def _tell(judgement: Judgement) -> None:
    metrics.FENCES.labels(judgement.reason).inc()
    metrics.FENCED.labels("given_back").inc(judgement.given_back)
    metrics.FENCED.labels("uncertain").inc(judgement.uncertain)
    logger.log(
        logging.WARNING if judgement.uncertain else logging.INFO,
        "fence (%s) of %s: %d given back, %d uncertain%s",
        judgement.reason,
        judgement.instance,
        judgement.given_back,
        judgement.uncertain,
        ": see `fairpost uncertain list`" if judgement.uncertain else "",
    )


async def unjudged_fences(connection: AsyncConnection[Any]) -> tuple[int, float]:
    """How many fences wait for their lines, and for how many seconds the oldest does."""
    row = await (await connection.execute(_UNJUDGED)).fetchone()
    return (row[0], row[1]) if row else (0, 0.0)


async def observe_fences(connection: AsyncConnection[Any]) -> None:
    """Measures the fences that wait for their lines."""
    number, age = await unjudged_fences(connection)
    metrics.FENCES_UNJUDGED.set(number)
    metrics.FENCE_AGE.set(age)
    doubtful = await (await connection.execute(_DOUBTFUL)).fetchone()
    metrics.DOUBTFUL.set(doubtful[0] if doubtful else 0)


async def drop_old_fences(connection: AsyncConnection[Any]) -> int:
    """Forgets fences that were asked for a month ago; answers how many."""
    return (await connection.execute(_DROP_OLD)).rowcount
