"""Claims, against plain `FOR UPDATE SKIP LOCKED` that takes the earliest campaign's chunk first.

The value is `claim_chunk` (smtp_agent/claims.sql): fewest servers first, one claim at a time at an operator. The baseline
has the same candidates in the order of their schedule, and nothing waits for anything. Both work on the same tables:
1,000 campaigns, three operators with 100 open and 100 finished chunks of each campaign (300,000 of either), 64 instances
that hold a chunk each, and finish it before they claim the next. What is not the claim is not timed.

- `few`: twenty campaigns are due, the others tomorrow;
- `due`: all are due, each since another second;
- `at_once`: all are due since the same second, so that the first chunks of all must be compared.

p50 and p99 are of claims one after the other, in microseconds; the rate is that of 64 connections at once, finishing
included. PostgreSQL runs with fsync.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from msgspec import Struct
from psycopg.errors import LockNotAvailable

from benchmarks.measurement import Measurement, Pair, compare, summarize
from contract.database import Connection, Pool, open_pool
from testbed import Testbed
from testbed.installation import Installation, OperatorRule

NAME: Final = "claim"
_OPERATORS: Final = ("gmail", "outlook", "other")
_CAMPAIGNS: Final = 1_000
_CHUNKS: Final = 100
_INSTANCES: Final = 64
_CLAIMS: Final = 400
_CLAIMS_AT_ONCE: Final = 640
_REPEATS: Final = 3

_FILL: Final = f"""
INSERT INTO campaigns (campaign_id, state, scheduled_for)
SELECT 'campaign ' || c, 'active', now() FROM generate_series(1, {_CAMPAIGNS}) c;
INSERT INTO chunks (campaign_id, operator, number, opened_at, capacity, size, planned, cursor, sealed)
SELECT 'campaign ' || c, operator, row_number() OVER (PARTITION BY c ORDER BY n, operator), now() - interval '1 day',
       10000, 10000, CASE WHEN n <= {_CHUNKS} THEN 0 ELSE 10000 END, CASE WHEN n <= {_CHUNKS} THEN 10000 ELSE 0 END,
       n <= {_CHUNKS}
  FROM generate_series(1, {_CAMPAIGNS}) c, generate_series(1, 2 * {_CHUNKS}) n, unnest(ARRAY['gmail', 'outlook', 'other']) operator
 ORDER BY n, c"""  # noqa: S608  figures of this file

_SCHEDULES: Final = {
    "few": "now() + CASE WHEN {n} <= 20 THEN -1 ELSE 1 END * interval '1 day' + {n} * interval '1 second'",
    "due": "now() - interval '1 day' + {n} * interval '1 second'",
    "at_once": "now() - interval '1 day'",
}
_SCHEDULE: Final = "UPDATE campaigns SET scheduled_for = {}"
_NUMBER: Final = "split_part(campaign_id, ' ', 2)::int"

# What was claimed is as it was before; the figures of one repeat are not those of what the one before it left.
_RESTORE: Final = """
UPDATE chunks SET planned = size, instance = NULL, claim_token = NULL, lease_until = NULL, claimed_at = NULL, sealed = false
 WHERE claimed_at IS NOT NULL;
TRUNCATE claims, claim_turns"""
_VACUUM: Final = "VACUUM ANALYZE chunks, campaigns"

CLAIM_FAIR: Final = "SELECT chunk_id FROM claim_chunk(%s, %s, '1 minute')"
CLAIM_FIFO: Final = """
UPDATE chunks SET instance = %s, claim_token = gen_random_uuid(), claimed_at = now(), lease_until = now() + interval '1 minute',
       sealed = true
 WHERE chunk_id = (
   SELECT k.chunk_id FROM chunks k JOIN campaigns c USING (campaign_id)
    WHERE k.operator = %s AND k.has_planned AND (k.instance IS NULL OR k.lease_until <= now())
      AND (k.sealed OR k.size = k.capacity OR k.opened_at <= now() - interval '1 second')
      AND c.state = 'active' AND c.ended_at IS NULL AND c.held_at IS NULL AND c.scheduled_for <= now()
    ORDER BY c.scheduled_for, k.number LIMIT 1 FOR NO KEY UPDATE OF k SKIP LOCKED)
RETURNING chunk_id"""
_FINISH: Final = """
UPDATE chunks SET planned = 0, instance = NULL, claim_token = NULL, lease_until = NULL WHERE chunk_id = %s"""


class _Figures(Struct, frozen=True):
    """Of one policy in one repeat; microseconds, and claims a second."""

    p50: float
    p99: float
    rate: float


class _Policy:
    """A way to claim.

    Args:
        fair: fair share; else the baseline.
    """

    def __init__(self, pool: Pool, *, fair: bool) -> None:
        self._pool = pool
        self._fair = fair

    async def measure(self, owner: Connection) -> _Figures:
        """Both figures, from tables as they were filled."""
        await _restore(owner)
        durations = await self._one_after_the_other()
        await _restore(owner)
        return _Figures(
            p50=statistics.median(durations) * 1e6,
            p99=statistics.quantiles(durations, n=100)[98] * 1e6,
            rate=await self._at_once(),
        )

    async def _one_after_the_other(self) -> list[float]:
        durations = []
        held: deque[int] = deque()
        async with self._pool.connection() as connection:
            for number in range(_INSTANCES + _CLAIMS):
                if number >= _INSTANCES:
                    await connection.execute(_FINISH, [held.popleft()])
                started = time.perf_counter()
                held.append(await self._claim(connection, number % _INSTANCES))
                durations.append(time.perf_counter() - started)
        return durations[_INSTANCES:]

    async def _at_once(self) -> float:
        turns = iter(range(_CLAIMS_AT_ONCE))
        everybody_holds_one = asyncio.Barrier(_INSTANCES)

        async def work(instance: int) -> float:
            async with self._pool.connection() as connection:
                chunk_id = await self._claim(connection, instance)
                await everybody_holds_one.wait()
                started = time.perf_counter()
                for _ in turns:
                    await connection.execute(_FINISH, [chunk_id])
                    chunk_id = await self._claim(connection, instance)
            return started

        started = min(await asyncio.gather(*map(work, range(_INSTANCES))))
        return _CLAIMS_AT_ONCE / (time.perf_counter() - started)

    async def _claim(self, connection: Connection, instance: int) -> int:
        operator, name = _OPERATORS[instance % len(_OPERATORS)], f"instance {instance}"
        query, values = (
            (CLAIM_FAIR, [operator, name]) if self._fair else (CLAIM_FIFO, [name, operator])
        )
        while True:
            # Whom the others keep waiting for too long joins the line again, as in smtp_agent/claims.py.
            with suppress(LockNotAvailable):
                cursor = await connection.execute(query, values)
                row = await cursor.fetchone()
                assert row is not None, "there is work for everybody"
                chunk_id: int = row[0]
                return chunk_id


async def _restore(owner: Connection) -> None:
    await owner.execute(_RESTORE)
    await owner.execute(_VACUUM)


def measure(testbed: Testbed) -> list[Measurement]:
    """p50, p99 and rate of claims in the three cases."""
    operators = [OperatorRule(o, [] if o == "other" else [f"{o}.test"]) for o in _OPERATORS]
    with Installation(testbed, NAME, operators) as installation, asyncio.Runner() as runner:
        with installation.connect() as filler:
            filler.execute(_FILL.encode())
        dsn = testbed.postgres.dsn(NAME)
        pool = runner.run(open_pool(dsn, "fairpost benchmark", size=_INSTANCES + 1))
        try:
            return [
                measurement
                for case, schedule in _SCHEDULES.items()
                for measurement in _measure_case(runner, pool, case, schedule)
            ]
        finally:
            runner.run(pool.close())


def _measure_case(
    runner: asyncio.Runner, pool: Pool, case: str, schedule: str
) -> list[Measurement]:
    async def both() -> tuple[_Figures, _Figures]:
        async with pool.connection() as owner:
            await owner.execute(_SCHEDULE.format(schedule.format(n=_NUMBER)).encode())
            return (
                await _Policy(pool, fair=True).measure(owner),
                await _Policy(pool, fair=False).measure(owner),
            )

    measured: list[list[Pair]] = []

    def repeat(number: int) -> Sequence[Pair]:
        del number
        fair, fifo = runner.run(both())
        measured.append([Pair(fair.rate, fifo.rate)])
        return [Pair(fair.p50, fifo.p50), Pair(fair.p99, fifo.p99)]

    names = [f"{NAME}_{case}_p50", f"{NAME}_{case}_p99"]
    latencies = compare(names, "us", repeat, repeats=_REPEATS)
    rate = summarize(f"{NAME}_{case}", "claims/s", [pair for (pair,) in measured])
    return [*latencies, rate]
