"""The topic `delivery-log` as a tracker takes it: in batches, acknowledged when they are written, and none missing unseen.

Kafka deletes what is older than the topic's retention, read or not, and a consumer goes on with what is left without a
word. As every line is a record, a step in the offsets says that lines are missing.
"""

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from msgspec import Struct

from contract.events import DELIVERY_LOG
from contract.outage import outlast
from contract.settings import SettingsError
from processor.brokers import Refusal
from processor.consuming import Record
from processor.kafka_outage import checked, passes
from processor.settings import ProcessorSettings

logger = logging.getLogger(__name__)

_BATCH: Final = 5_000
_WAIT: Final = 0.2
_TIMEOUT: Final = 10.0


class Gap(Struct, frozen=True):
    """Records of a partition that were deleted before they were read.

    Attributes:
        expected: the offset that should have come.
        found: the one that came; 0 where the topic was made anew.
    """

    partition: int
    expected: int
    found: int


class Continuity:
    """Which offset of each partition comes next.

    Fluentd produces without transactions and the topic is not compacted, so that offsets have no steps of their own.
    """

    def __init__(self) -> None:
        self._next: dict[int, int] = {}
        self._begun: set[int] = set()

    def forget(self, partition: int) -> None:
        """The partition was assigned: another may have gone on with it meanwhile."""
        self._next.pop(partition, None)
        self._begun.discard(partition)

    def knows(self, partition: int) -> bool:
        """Whether it is known where the partition goes on."""
        return partition in self._next

    def begin(self, partition: int, offset: int | None) -> None:
        """The partition goes on at the offset; None: it was never read, and begins at 0."""
        self._next[partition] = offset or 0

    def follow(self, partition: int, offset: int) -> Gap | None:
        """A record of a partition came; what is missing before it. A repeat lacks nothing."""
        expected = self._next[partition]
        anew = offset == 0 < expected and partition not in self._begun
        self._begun.add(partition)
        self._next[partition] = offset + 1 if anew else max(expected, offset + 1)
        return Gap(partition, expected, offset) if offset > expected or anew else None


class DeliveryLog:
    """A member of the trackers' consumer group; it is closed by the one who reads it.

    Args:
        settings: of the installation.
        partitions: how many the topic has; lines in further ones would be read out of order.

    Attributes:
        partitions: how many are its own now.
    """

    def __init__(self, settings: ProcessorSettings, partitions: int) -> None:
        self.topic = settings.topic(DELIVERY_LOG)
        self.partitions = 0
        self._continuity = Continuity()
        self._partitions = partitions
        self._refusal = Refusal()
        self._added = False
        self._told: str | None = None
        self._consumer = Consumer(
            {
                **settings.brokers.librdkafka(),
                "group.id": settings.group("tracker"),
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 6_000,
                "heartbeat.interval.ms": 1_000,
                "error_cb": self._refusal,
                "log_level": 2,
            }
        )
        self._consumer.subscribe(
            [self.topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )

    async def read(self) -> tuple[list[Record], list[Gap]]:
        """The next records, none where none came for a moment, and what is missing between them. One call at a time.

        Raises:
            SettingsError: the topic has more partitions than before.
        """
        messages = await asyncio.to_thread(self._consumer.consume, _BATCH, _WAIT)
        self._tell_refusal(heard=bool(messages))
        if self._added:
            raise SettingsError(
                f"topic {self.topic}: has more than {self._partitions} partitions now, and a host's lines are not in order;"
                " mend: fairpost topics accept (its --help says when)"
            )
        records = [_record(message) for message in messages if _is_record(message)]
        # Asked for only now that records are here: what they begin with was asked for earlier.
        unknown = {r.partition for r in records if not self._continuity.knows(r.partition)}
        if unknown:
            await outlast("delivery-log", partial(self._begin, unknown), _is_outage)
        gaps = (self._continuity.follow(record.partition, record.offset) for record in records)
        return records, [gap for gap in gaps if gap is not None]

    async def commit(self, records: Sequence[Record]) -> None:
        """Acknowledges all up to these records, in any thread's time; where Kafka does not take it, they come again."""
        ends = {record.partition: record.offset + 1 for record in records}
        offsets = [TopicPartition(self.topic, *end) for end in ends.items()]
        try:
            await asyncio.to_thread(self._consumer.commit, offsets=offsets, asynchronous=False)
        except KafkaException as error:
            # What was tracked is read again after a rebalance, and changes nothing.
            logger.warning("delivery-log: offsets not committed: %s", error.args[0].str())

    async def close(self) -> None:
        """Leaves the group."""
        await asyncio.to_thread(self._consumer.close)

    def _assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.partitions = len(partitions)
        for partition in partitions:
            self._continuity.forget(partition.partition)
            self._added |= partition.partition >= self._partitions

    def _tell_refusal(self, *, heard: bool) -> None:
        """Once, and again only after Kafka was heard of."""
        if heard:
            self._refusal.reason = self._told = None
        elif self._refusal.reason != self._told:
            self._told = self._refusal.reason
            logger.warning("delivery-log: %s", self._told)

    def _revoked(self, _: Consumer, __: list[TopicPartition]) -> None:
        self.partitions = 0

    async def _begin(self, partitions: set[int]) -> None:
        asked = [TopicPartition(self.topic, partition) for partition in sorted(partitions)]
        committed = await asyncio.to_thread(self._consumer.committed, asked, _TIMEOUT)
        for place in checked(committed):
            self._continuity.begin(place.partition, place.offset if place.offset >= 0 else None)


def _is_outage(error: Exception) -> bool:
    return isinstance(error, KafkaException) and passes(error.args[0])


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
        message.key(),
    )
