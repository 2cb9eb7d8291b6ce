"""The tracker: one process that tracks outcomes, publishes the outbox and keeps house."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final
from zoneinfo import ZoneInfo

import psycopg
from confluent_kafka import Consumer, KafkaException, Message

from contract.database import Pool, conninfo, is_outage, open_pool
from contract.events import DEAD_LETTERS, DELIVERY_LOG
from contract.outage import first_line, outlast
from processor import housekeeping
from processor.consuming import Record
from processor.dead_letters import dead_letter
from processor.emitting import Emission
from processor.outbox import Outbox, OutboxError
from processor.publishing import Publisher
from processor.settings import ProcessorSettings
from processor.tracking import Tracking

logger = logging.getLogger(__name__)

BATCH: Final = 2_000
WAIT: Final = 0.2
_HOUSEKEEPING_SECONDS: Final = 1.0
_OBSERVE_EVERY: Final = 10
_BALANCE_EVERY: Final = 60


async def run_tracker(settings: ProcessorSettings) -> None:
    """Runs until SIGTERM or SIGINT: finishes the batch in hand, then returns."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pool = await open_pool(settings.database.get_secret_value(), "fairpost tracker", size=4)
    publisher = Publisher(settings.kafka_bootstrap_servers)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_track(settings, pool, publisher, stop))
            tasks.create_task(_publish(settings, publisher, stop))
            tasks.create_task(_keep_house(pool, stop))
    finally:
        await pool.close()


async def _track(
    settings: ProcessorSettings, pool: Pool, publisher: Publisher, stop: asyncio.Event
) -> None:
    tracking = Tracking(pool, ZoneInfo(settings.log_timezone))
    consumer = Consumer(
        {
            "bootstrap.servers": settings.kafka_bootstrap_servers,
            "group.id": settings.group("tracker"),
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 6_000,
            "heartbeat.interval.ms": 1_000,
            "log_level": 2,
        }
    )
    consumer.subscribe([settings.topic(DELIVERY_LOG)])
    try:
        while not stop.is_set():
            messages = await asyncio.to_thread(consumer.consume, BATCH, WAIT)
            records = [_record(message) for message in messages if _is_record(message)]
            if not records:
                continue

            async def track(records: list[Record] = records) -> list[tuple[Record, str]]:
                return await tracking.track(records, datetime.now(UTC))

            dead = await outlast("tracking", track, is_outage)
            await _bury(settings, publisher, dead)
            await asyncio.to_thread(_commit, consumer)
    finally:
        await asyncio.to_thread(consumer.close)


def _is_record(message: Message) -> bool:
    if (error := message.error()) is None:
        return True
    logger.warning("delivery-log: %s; waiting for Kafka", error.str())
    return False


def _record(message: Message) -> Record:
    return Record(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC),
        message.value() or b"",
    )


def _commit(consumer: Consumer) -> None:
    try:
        consumer.commit(asynchronous=False)
    except KafkaException as error:
        # What was tracked is read again after a rebalance, and changes nothing.
        logger.warning("delivery-log: offsets not committed: %s", error.args[0].str())


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


async def _publish(settings: ProcessorSettings, publisher: Publisher, stop: asyncio.Event) -> None:
    """Publishes the outbox whenever this tracker is the one that does."""
    outbox = Outbox(settings, publisher)
    dsn = conninfo(settings.database.get_secret_value(), "fairpost outbox")

    async def session() -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            while not await outbox.take(connection):
                if await _stopped(stop, 1.0):
                    return
            while not stop.is_set():
                if await outbox.publish(connection) == 0:
                    await _stopped(stop, WAIT)

    await outlast(
        "outbox", session, lambda error: is_outage(error) or isinstance(error, OutboxError)
    )


async def _keep_house(pool: Pool, stop: asyncio.Event) -> None:
    second = 0
    while not await _stopped(stop, _HOUSEKEEPING_SECONDS):
        second += 1
        await _try("sweep", pool, _sweep_all)
        if second % _OBSERVE_EVERY == 0:
            await _try("observe", pool, housekeeping.observe)
        if second % _BALANCE_EVERY == 0:
            await _try("balance", pool, housekeeping.check_balance)


async def _sweep_all(connection: psycopg.AsyncConnection[tuple[object, ...]]) -> None:
    while await housekeeping.sweep(connection):
        pass


async def _try(
    task: str,
    pool: Pool,
    call: Callable[[psycopg.AsyncConnection[tuple[object, ...]]], Awaitable[object]],
) -> None:
    """Does a task of the house; through an outage it waits for its next turn."""
    try:
        async with pool.connection() as connection:
            await call(connection)
    except Exception as error:
        if not is_outage(error):
            raise
        logger.warning("%s: %s; again in a while", task, first_line(error))


async def _stopped(stop: asyncio.Event, seconds: float) -> bool:
    """Waits that long, or until the process is told to stop."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True
