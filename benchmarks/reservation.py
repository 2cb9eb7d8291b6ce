"""Reservation in blocks, against one INSERT a due e-mail.

The value is the worker's own step (`processor.reservation`), blocks of 200: 1,200 due e-mails are 6 queries. The
baseline is what a step without blocks would do at the least: for each due e-mail one statement, a transaction of its
own, that reserves the dispatch and puts the row into `pending` without which a kill would orphan it. It is spared what
the step's query does besides: the counts by campaign, the look at whether sending is on, the reading back of what is
still pending. Both take a connection from the worker's pool for each query.

Both decode the same records and build the events to emit; both leave out the emission to Kafka, which is the same
either way. PostgreSQL runs with fsync; every repeat reserves due e-mails that were never seen before.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from pydantic import SecretStr

from benchmarks.measurement import Measurement, Pair, compare
from benchmarks.workload import due_emails
from contract.database import Pool, open_pool
from contract.events import DUE_EMAILS, SEND_EMAILS, DueEmail, SendEmail, decode_due_email, encode
from processor.brokers import Brokers
from processor.consuming import Record
from processor.emitting import Emission, Emitter
from processor.reservation import Reservation
from processor.settings import ProcessorSettings
from testbed import Testbed
from testbed.installation import Installation, OperatorRule

NAME: Final = "reservation"
_DUE_EMAILS: Final = 1_200
_REPEATS: Final = 15
_AT: Final = datetime(2026, 1, 1, tzinfo=UTC)

_RESERVE_ONE: Final = """
WITH reserved AS (
  INSERT INTO dispatches (user_id, campaign_id, email_key) VALUES (%s, %s, %s)
      ON CONFLICT (user_id, campaign_id, email_key) DO NOTHING
  RETURNING dispatch_id, campaign_id)
INSERT INTO pending (dispatch_id, campaign_id, source_partition, source_offset, reserved_at)
SELECT dispatch_id, campaign_id, %s, %s, clock_timestamp() FROM reserved
RETURNING dispatch_id, reserved_at"""


class _Unsent(Emitter):
    """Takes events and gives them to nobody."""

    emitted = 0

    async def emit(self, emissions: Iterable[Emission]) -> None:
        self.emitted += len(list(emissions))


class _OneByOne:
    """A reservation without blocks."""

    def __init__(self, settings: ProcessorSettings, pool: Pool, emitter: Emitter) -> None:
        self._topic = settings.topic(SEND_EMAILS)
        self._pool = pool
        self._emitter = emitter

    async def __call__(self, records: Sequence[Record]) -> None:
        emissions: list[Emission] = []
        for record in records:
            due = decode_due_email(record.value)
            values = (*due.key, record.partition, record.offset)
            async with self._pool.connection() as connection:
                row = await (await connection.execute(_RESERVE_ONE, values)).fetchone()
            if row is not None:
                emissions.append(Emission(self._topic, due.user_id, _send_email(due, *row)))
        await self._emitter.emit(emissions)


def _send_email(due: DueEmail, dispatch_id: int, reserved_at: datetime) -> SendEmail:
    return SendEmail(
        user_id=due.user_id,
        campaign_id=due.campaign_id,
        email_key=due.email_key,
        email=due.email,
        variables=due.variables,
        not_after=due.not_after,
        dispatch_id=dispatch_id,
        reserved_at=reserved_at,
    )


def measure(testbed: Testbed) -> list[Measurement]:
    """Due e-mails a second, in blocks against one by one."""
    with (
        Installation(testbed, NAME, [OperatorRule("other")]) as installation,
        asyncio.Runner() as runner,
    ):
        settings = ProcessorSettings(
            database=SecretStr(installation.environment["FAIRPOST_DATABASE"]),
            kafka_bootstrap_servers=testbed.kafka.bootstrap_servers,
        )
        pool = runner.run(
            open_pool(settings.database.get_secret_value(), "fairpost benchmark", size=4)
        )
        blocks, one_by_one = _Unsent(Brokers("")), _Unsent(Brokers(""))
        in_blocks = Reservation(settings, pool, blocks)
        singly = _OneByOne(settings, pool, one_by_one)

        def repeat(number: int) -> list[Pair]:
            first = 2 * number * _DUE_EMAILS
            return [
                Pair(
                    value=runner.run(_rate(in_blocks, first)),
                    baseline=runner.run(_rate(singly, first + _DUE_EMAILS)),
                )
            ]

        try:
            repeat(0)
            measurements = compare([NAME], "due e-mails/s", repeat, repeats=_REPEATS)
        finally:
            runner.run(pool.close())
        assert blocks.emitted == one_by_one.emitted == (_REPEATS + 1) * _DUE_EMAILS
        return measurements


async def _rate(step: Callable[[Sequence[Record]], Awaitable[object]], first: int) -> float:
    records = [
        Record(DUE_EMAILS, 0, first + place, _AT, encode(due))
        for place, due in enumerate(due_emails(_DUE_EMAILS, first=first))
    ]
    started = time.perf_counter()
    await step(records)
    return len(records) / (time.perf_counter() - started)
