"""How a step consumes its topic: at least once, in batches, through outages, with nothing acknowledged early.

This is the one place that touches Faust's streams, whose types are wrong (`StreamT` has no `noack_take`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Any, Final

from aiokafka.errors import KafkaError
from msgspec import Struct

from contract.database import is_outage as is_database_outage
from contract.outage import outlast
from processor import metrics
from processor.stall import Progress

logger = logging.getLogger(__name__)

WITHIN: Final = 0.2
"""Seconds that a batch waits for more events at most."""
_DISABLED_POLL: Final = 0.5


class Record(Struct, frozen=True):
    """A record of Kafka as a step sees it.

    Attributes:
        at: when the broker appended it (LogAppendTime).
    """

    topic: str
    partition: int
    offset: int
    at: datetime
    value: bytes
    key: bytes | None = None


class Status(StrEnum):
    """What became of a batch."""

    SENT = "sent"
    DISABLED = "disabled"
    """Nothing was done; the same batch is tried again until sending is on."""


class Done(Struct, frozen=True):
    """What a step says of a batch: its status, the distinct users in it, the events it emitted."""

    status: Status
    users: int
    sent: int


Step = Callable[[Sequence[Record]], Awaitable[Done]]


def is_outage(error: Exception) -> bool:
    """Whether Postgres or Kafka may take the same batch later."""
    return is_database_outage(error) or isinstance(error, KafkaError | OSError | TimeoutError)


async def consume(stream: Any, name: str, step: Step, progress: Progress, *, size: int) -> None:
    """Gives the events of a stream to a step, batch by batch, and acknowledges what it has done.

    A batch is tried again through outages and while sending is off, and acknowledged only when the step has returned.
    Any other error leaves the process with nothing acknowledged: it is a fault of ours, and the service manager starts
    the worker anew.
    """
    async for events in stream.noack_take(size, within=WITHIN):
        started = time.perf_counter()
        progress.begin(name)
        records = [_record(event.message) for event in events]
        metrics.EVENTS.labels(name).inc(len(records))
        done = await outlast(name, partial(step, records), is_outage)
        while done.status is Status.DISABLED:
            _log(name, done, records)
            metrics.BATCHES.labels(name, done.status).inc()
            await asyncio.sleep(_DISABLED_POLL)
            done = await outlast(name, partial(step, records), is_outage)
        for event in events:
            await stream.ack(event)
        progress.end(name, time.monotonic())
        _log(name, done, records)
        metrics.BATCHES.labels(name, done.status).inc()
        metrics.BATCH_SECONDS.labels(name).observe(time.perf_counter() - started)


def _record(message: Any) -> Record:
    return Record(
        message.topic,
        message.partition,
        message.offset,
        datetime.fromtimestamp(message.timestamp, UTC),
        message.value or b"",
        message.key,
    )


def _log(name: str, done: Done, records: Sequence[Record]) -> None:
    logger.log(
        logging.DEBUG if done.status is Status.DISABLED else logging.INFO,
        "%s: status=%s users=%d sent=%d events=%d",
        name,
        done.status,
        done.users,
        done.sent,
        len(records),
    )
