"""Due e-mails reserved a second on 1, 2 and 4 connections at once: what PostgreSQL takes, without the worker's share.

`reservation_rate_1` is the worker's own query on one connection: `reserve`, in blocks of 200, a transaction each. Its
baseline inserts the same rows into the same two tables (`dispatches`, `pending`) in blocks of the same size on one
connection, one plain INSERT a block: what PostgreSQL takes at the most of rows that must be durable at the end of each
block. Not COPY, which cannot give the second table the identities that the first one drew. What lies between the two
is what makes a reservation: the conflicts it looks for, the order that keeps workers from deadlocks, the counts by
campaign, the look at whether sending is on.

`reservation_rate_2` and `_4` are two and four connections at once, each with a partition of its own, against one.

The columns of all blocks are made before the clock starts. PostgreSQL runs with fsync; every due e-mail is a new one.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

import psycopg

from benchmarks.measurement import Measurement, Pair, compare
from benchmarks.workload import due_emails
from contract.database import conninfo
from contract.events import DueEmail
from testbed import Testbed
from testbed.installation import Installation, OperatorRule

NAME: Final = "reservation_rate"
_DUE_EMAILS: Final = 40_000
_BLOCK_SIZE: Final = 200
_CONNECTIONS: Final = (1, 2, 4)
_REPEATS: Final = 9

_RESERVE: Final = """
SELECT ordinal, dispatch_id, reserved_at, won
  FROM reserve(%s::text[], %s::text[], %s::text[], %s::int[], %s::bigint[])"""

_INSERT: Final = """
WITH due AS (
  SELECT * FROM unnest(%s::text[], %s::text[], %s::text[], %s::int[], %s::bigint[])
           AS e (user_id, campaign_id, email_key, source_partition, source_offset)
), reserved AS (
  INSERT INTO dispatches (user_id, campaign_id, email_key) SELECT user_id, campaign_id, email_key FROM due
  RETURNING dispatch_id, user_id, campaign_id, email_key)
INSERT INTO pending (dispatch_id, campaign_id, source_partition, source_offset, reserved_at)
SELECT dispatch_id, campaign_id, source_partition, source_offset, clock_timestamp()
  FROM reserved JOIN due USING (user_id, campaign_id, email_key)
RETURNING dispatch_id"""

Connection = psycopg.Connection[Any]
Columns = tuple[list[str], list[str], list[str], list[int], list[int]]


def measure(testbed: Testbed) -> list[Measurement]:
    """Due e-mails a second: one connection against plain INSERTs, two and four against one."""
    with Installation(testbed, NAME, [OperatorRule("other")]) as installation, ExitStack() as stack:
        dsn = conninfo(testbed.postgres.dsn(installation.name), "fairpost benchmark")
        connections = [
            stack.enter_context(psycopg.connect(dsn, autocommit=True))
            for _ in range(max(_CONNECTIONS))
        ]
        rates = _Rates(connections)

        def repeat(_: int) -> list[Pair]:
            plain = rates.next(_INSERT, 1)
            one, *more = [rates.next(_RESERVE, number) for number in _CONNECTIONS]
            return [Pair(one, plain), *(Pair(rate, one) for rate in more)]

        repeat(0)
        names = [f"{NAME}_{number}" for number in _CONNECTIONS]
        return compare(names, "due e-mails/s", repeat, repeats=_REPEATS)


class _Rates:
    """Measures rates, each with due e-mails that no other one had."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._reserved = 0

    def next(self, query: str, connections: int) -> float:
        """Due e-mails a second on that many connections at once."""
        shares = [self._share(partition, connections) for partition in range(connections)]
        with ThreadPoolExecutor(connections) as threads:
            started = time.perf_counter()
            done = threads.map(_run, self._connections, [query] * connections, shares)
            assert sum(done) == _DUE_EMAILS
            return _DUE_EMAILS / (time.perf_counter() - started)

    def _share(self, partition: int, connections: int) -> list[Columns]:
        emails = due_emails(_DUE_EMAILS // connections, first=self._reserved)
        first, self._reserved = self._reserved, self._reserved + len(emails)
        return [
            _columns(emails[start : start + _BLOCK_SIZE], partition, first + start)
            for start in range(0, len(emails), _BLOCK_SIZE)
        ]


def _columns(block: Sequence[DueEmail], partition: int, offset: int) -> Columns:
    return (
        [due.user_id for due in block],
        [due.campaign_id for due in block],
        [due.email_key for due in block],
        [partition] * len(block),
        list(range(offset, offset + len(block))),
    )


def _run(connection: Connection, query: str, blocks: Sequence[Columns]) -> int:
    """Answers how many rows the blocks gave."""
    return sum(len(connection.execute(query, block).fetchall()) for block in blocks)
