"""The tracker: one process that tracks outcomes, publishes the outbox and keeps house."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from zoneinfo import ZoneInfo

import psycopg
from confluent_kafka import KafkaException
from msgspec import Struct

from contract.database import Pool, conninfo, is_outage, open_pool
from contract.events import DEAD_LETTERS, DELIVERY_LOG
from contract.lifetime import live, rest, stop_on_signals
from contract.notify import NOBODY, Notifier, telling
from contract.outage import RETRIES, first_line, outlast
from contract.pulse import Pulse
from contract.settings import SettingsError
from processor import housekeeping, metrics
from processor.consuming import Record
from processor.dead_letters import dead_letter
from processor.delivery_log import DeliveryLog, Gap
from processor.emitting import Emission
from processor.fences import drop_old_fences, judge_fences, observe_fences
from processor.observation import observe, observe_campaigns
from processor.operators import replan_moved
from processor.outbox import Outbox, OutboxError
from processor.publishing import Publisher
from processor.settings import ProcessorSettings
from processor.suppressions import observe_suppressions
from processor.topics import TopicsError
from processor.tracking import STEP, News, Tracking
from processor.unread import Unread

logger = logging.getLogger(__name__)

WAIT: Final = 0.2
_TOPICS_SECONDS: Final = 15.0
"""Between two looks at what is unread."""

HouseTask = Callable[[psycopg.AsyncConnection[Any]], Awaitable[object]]

_HOUSE_TASKS: Final[tuple[tuple[str, float, HouseTask], ...]] = (
    ("sweep", 1.0, housekeeping.sweep_all),
    ("fences", 1.0, judge_fences),
    ("observe", 10.0, observe),
    ("observe fences", 10.0, observe_fences),
    ("replan", 10.0, partial(replan_moved, only_removed=True)),
    ("ends", 300.0, housekeeping.end_campaigns),
    ("balance", 60.0, housekeeping.check_balance),
    ("early lines", 600.0, housekeeping.drop_early_lines),
    ("retries", 60.0, housekeeping.drop_old_retries),
    ("old fences", 3600.0, drop_old_fences),
    ("suppressions", 60.0, observe_suppressions),
)


async def run_tracker(
    settings: ProcessorSettings, partitions: Mapping[str, int], notifier: Notifier = NOBODY
) -> None:
    """Runs until SIGTERM or SIGINT: finishes the batch in hand, then returns.

    Args:
        settings: of the installation.
        partitions: how many each topic has.
        notifier: is told how it stands.

    Raises:
        SettingsError: `delivery-log` has more meanwhile.
    """
    stop = stop_on_signals()
    pool = await open_pool(settings.database.get_secret_value(), "fairpost tracker", size=6)
    publisher = Publisher(settings.brokers)
    log = DeliveryLog(settings, partitions[settings.topic(DELIVERY_LOG)])
    most_active = partial(observe_campaigns, most=settings.metrics_campaigns)
    tasks: list[tuple[str, float, HouseTask]] = [
        *_HOUSE_TASKS,
        ("observe campaigns", 15.0, most_active),
    ]
    try:
        pulse = Pulse(time.monotonic)

        def summary() -> str:
            return f"tracks {log.partitions} partitions"

        async with telling(notifier, summary, pulse.standing, stop):
            await live(
                stop,
                _track(settings, log, pool, publisher, pulse=pulse, stop=stop),
                _publish(settings, publisher, pulse, stop),
                _measure_topics(settings, stop),
                *(_every(seconds, task, call, pool, stop) for task, seconds, call in tasks),
            )
    finally:
        await pool.close()


async def _track(
    settings: ProcessorSettings,
    log: DeliveryLog,
    pool: Pool,
    publisher: Publisher,
    *,
    pulse: Pulse,
    stop: asyncio.Event,
) -> None:
    tracking = Tracking(pool, ZoneInfo(settings.log_timezone))
    # The next batch is read while this one is written.
    reading = asyncio.create_task(_read(log, tracking))
    try:
        while not stop.is_set():
            pulse.beat("tracking")
            batch = await reading
            reading = asyncio.create_task(_read(log, tracking))
            if not batch.records:
                continue
            started = time.perf_counter()
            for gap in batch.gaps:
                await outlast("tracking", partial(tracking.miss, gap), is_outage)
            dead = await outlast("tracking", partial(tracking.write, batch.said), is_outage)
            await _bury(settings, publisher, dead)
            await log.commit(batch.records)
            metrics.BATCH_SECONDS.labels(STEP).observe(time.perf_counter() - started)
    finally:
        await asyncio.gather(reading, return_exceptions=True)
        await log.close()


class _Batch(Struct, frozen=True):
    records: list[Record]
    gaps: list[Gap]
    said: list[tuple[Record, News]]


async def _read(log: DeliveryLog, tracking: Tracking) -> _Batch:
    records, gaps = await log.read()
    said = await asyncio.to_thread(tracking.read, records, datetime.now(UTC))
    return _Batch(records, gaps, said)


async def _bury(
    settings: ProcessorSettings, publisher: Publisher, dead: list[tuple[Record, str]]
) -> None:
    """Publishes dead letters; returns only when the broker has them all."""
    emissions = [
        Emission(settings.topic(DEAD_LETTERS), record.topic, dead_letter(record, why))
        for record, why in dead
    ]

    async def publish() -> None:
        nonlocal emissions
        results = await asyncio.to_thread(publisher.publish, emissions)
        emissions = [e for e, error in zip(emissions, results, strict=True) if error is not None]
        if emissions:
            raise OutboxError(f"{emissions[0].topic}: not acknowledged")

    await outlast("dead letters", publish, lambda error: isinstance(error, OutboxError))


async def _publish(
    settings: ProcessorSettings, publisher: Publisher, pulse: Pulse, stop: asyncio.Event
) -> None:
    """Publishes the outbox whenever this tracker is the one that does."""
    session = _OutboxSession(settings, publisher)
    try:
        while not stop.is_set():
            pulse.beat("outbox")
            published = await outlast("outbox", session.publish, _is_outbox_outage)
            if published == 0:
                await rest(stop, WAIT)
    finally:
        await session.close()


def _is_outbox_outage(error: Exception) -> bool:
    return is_outage(error) or isinstance(error, OutboxError)


class _OutboxSession:
    """The connection that holds the lock; made anew after any error, when another tracker may have taken over."""

    def __init__(self, settings: ProcessorSettings, publisher: Publisher) -> None:
        self._dsn = conninfo(settings.database.get_secret_value(), "fairpost outbox")
        self._outbox = Outbox(settings, publisher)
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._locked = False

    async def publish(self) -> int:
        """Publishes the next rows, if this is the publisher; answers how many."""
        try:
            if self._connection is None:
                self._connection = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
            self._locked = self._locked or await self._outbox.take(self._connection)
            return await self._outbox.publish(self._connection) if self._locked else 0
        except Exception:
            await self.close()
            raise

    async def close(self) -> None:
        """Gives up the lock."""
        connection, self._connection, self._locked = self._connection, None, False
        if connection is not None:
            await connection.close()


async def _measure_topics(settings: ProcessorSettings, stop: asyncio.Event) -> None:
    """Measures what is unread, again and again."""
    unread = Unread(settings)

    def is_away(error: Exception) -> bool:
        # Also a refusal: by it alone no tracker ends that runs already.
        return isinstance(error, KafkaException | TopicsError | SettingsError)

    while not stop.is_set():
        await outlast(
            "unread", lambda: asyncio.to_thread(unread.measure, datetime.now(UTC)), is_away
        )
        await rest(stop, _TOPICS_SECONDS)


async def _every(
    seconds: float, task: str, call: HouseTask, pool: Pool, stop: asyncio.Event
) -> None:
    """Does a task of the house again and again, so long after the last time; first at once."""
    while not stop.is_set():
        await _try(task, pool, call)
        await rest(stop, seconds)


async def _try(task: str, pool: Pool, call: HouseTask) -> None:
    """Does a task of the house; through an outage it waits for its next turn."""
    try:
        async with pool.connection() as connection:
            await call(connection)
    except Exception as error:
        if not is_outage(error):
            raise
        RETRIES.labels(task).inc()
        logger.warning("%s: %s; again in a while", task, first_line(error))
