"""Planning in blocks, against plain INSERTs of the same rows.

The value is the worker's own step (`processor.planning`): send events of twenty campaigns to four operators, blocks of
200. The baseline decodes the same records and inserts the same columns into a table like `messages`, with its indexes
and fill factor, a block an INSERT on the same pool of connections. It is spared what planning is for: the gate that
removes second emissions, the look at campaign and operator, the open chunks with their gapless positions, the counts
by state (triggers of `messages`), the answer. What lies between the two is the price of a plan.

PostgreSQL runs with fsync. Both halves of a repeat get events that were reserved a moment before; that is not timed.
"""

import itertools
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from benchmarks.measurement import Measurement, Pair, compare
from benchmarks.steps import OPERATORS, Steps, open_steps
from benchmarks.workload import CAMPAIGNS, due_emails
from contract.database import Pool
from contract.events import SendEmail, decode_send_email
from processor.blocks import run_blocks
from processor.consuming import Record
from processor.planning import BLOCK_SIZE
from testbed import Testbed

NAME: Final = "planning"
_EVENTS: Final = 12_000
_REPEATS: Final = 9
_CHUNKS: Final = CAMPAIGNS * len(OPERATORS)

_CREATE: Final = "CREATE TABLE plain (LIKE messages INCLUDING ALL) WITH (fillfactor = 50)"
_GRANT: Final = "GRANT INSERT ON plain TO fairpost_processor"
_INSERT: Final = """
INSERT INTO plain (dispatch_id, chunk_id, position, state, email, variables, not_after)
SELECT dispatch_id, chunk_id, position, 'planned', email, variables::jsonb, not_after
  FROM unnest(%s::bigint[], %s::bigint[], %s::int[], %s::text[], %s::text[], %s::timestamptz[])
       AS e (dispatch_id, chunk_id, position, email, variables, not_after)"""


class _Plain:
    """Inserts messages without planning them; in as many chunks at once as planning has open."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._places = itertools.count()

    async def __call__(self, records: Sequence[Record]) -> None:
        events = [decode_send_email(record.value) for record in records]
        await run_blocks(events, BLOCK_SIZE, self._insert)

    async def _insert(self, block: Sequence[SendEmail]) -> list[None]:
        places = list(itertools.islice(self._places, len(block)))
        columns = (
            [event.dispatch_id for event in block],
            [place % _CHUNKS for place in places],
            [place // _CHUNKS for place in places],
            [event.email for event in block],
            [msgspec.json.encode(event.variables).decode() for event in block],
            [event.not_after for event in block],
        )
        async with self._pool.connection() as connection:
            await connection.execute(_INSERT, columns)
        return []


def measure(testbed: Testbed) -> list[Measurement]:
    """Send events a second, planned against plainly inserted."""
    with open_steps(testbed, NAME) as steps:
        with steps.installation.connect() as owner:
            owner.execute(_CREATE)
            owner.execute(_GRANT)
        plain = _Plain(steps.pool)

        def repeat(number: int) -> list[Pair]:
            first = 2 * number * _EVENTS
            planned = _reserve(steps, first)
            inserted = _reserve(steps, first + _EVENTS)
            started = time.perf_counter()
            steps.plan(planned)
            between = time.perf_counter()
            steps.run(steps.in_batches(plain, inserted))
            ended = time.perf_counter()
            return [Pair(_EVENTS / (between - started), _EVENTS / (ended - between))]

        repeat(0)
        measurements = compare([NAME], "events/s", repeat, repeats=_REPEATS)
        with steps.installation.connect() as owner:
            counts = owner.execute(
                "SELECT (SELECT count(*) FROM messages), (SELECT count(*) FROM plain)"
            ).fetchone()
        assert counts == ((_REPEATS + 1) * _EVENTS,) * 2
        return measurements


def _reserve(steps: Steps, first: int) -> list[Record]:
    return steps.reserve(due_emails(_EVENTS, first=first), offset=first)
