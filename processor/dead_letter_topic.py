"""The topic `dead-letters` as a person reads it: without a consumer group, so that reading it changes nothing."""

import heapq
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from contract.events import DEAD_LETTERS, DeadLetter, EventError, decode_dead_letter
from processor.brokers import Refusal
from processor.kafka_outage import await_answer, checked, passes
from processor.settings import ProcessorSettings
from processor.topics import TopicsError, unanswered

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT: Final = 15.0
_TRY: Final = 2.0
_NO_OFFSET: Final = -1


class StoredLetter(DeadLetter, frozen=True, kw_only=True):
    """A dead letter where it stands.

    Attributes:
        position: `PARTITION:OFFSET` of the dead letter itself; its record's are `partition` and `offset`.
        at: when it was written.
    """

    position: str
    at: datetime

    @property
    def place(self) -> str:
        """`TOPIC/PARTITION/OFFSET` of its record."""
        return f"{self.topic}/{self.partition}/{self.offset}"


class DeadLetterError(ValueError):
    """A dead letter is not there, or cannot be used; the text is one line."""


class DeadLetterTopic:
    """Reads dead letters; a context manager that disconnects.

    Every method raises TopicsError where Kafka does not answer or has no such topic.
    """

    def __init__(self, settings: ProcessorSettings) -> None:
        self._topic = settings.topic(DEAD_LETTERS)
        self._servers = settings.kafka_bootstrap_servers
        self._refusal = Refusal()
        self._consumer = Consumer(
            {
                **settings.brokers.librdkafka(),
                "group.id": settings.group("dead-letters"),  # librdkafka wants one; none is joined
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 10,  # a fetch at the end of the topic would hold up the next one
                "error_cb": self._refusal,
                "log_level": 2,
            }
        )

    def read(
        self, *, since: datetime | None = None, last: int | None = None
    ) -> Iterator[StoredLetter]:
        """What stands on the topic now, partition by partition, oldest first; what is no dead letter is logged.

        Args:
            since: only what was written at this time or later.
            last: only so many records at the end of each partition.
        """
        for partition in self._partitions():
            low, high = self._bounds(partition)
            start = low if last is None else max(low, high - last)
            if since is not None:
                start = max(start, self._offset_at(partition, since, high))
            for message in self._messages(partition, start, high):
                try:
                    yield _stored(message)
                except EventError as error:
                    logger.warning("%d:%d: left out: %s", partition, message.offset(), error)

    def find(self, position: str) -> StoredLetter:
        """The dead letter at `PARTITION:OFFSET`.

        Raises:
            DeadLetterError: there is none.
        """
        partition, offset = map(int, position.split(":"))
        if partition not in self._partitions():
            raise DeadLetterError(f"{position}: {self._topic} has no partition {partition}")
        low, high = self._bounds(partition)
        if low <= offset < high:
            message = next(self._messages(partition, offset, offset + 1), None)
            if message is not None and message.offset() == offset:
                try:
                    return _stored(message)
                except EventError as error:
                    raise DeadLetterError(f"{position}: {error}") from None
        holds = f"holds {partition}:{low} to {partition}:{high - 1}" if low < high else "is empty"
        raise DeadLetterError(f"{position}: no such dead letter; {self._topic} {holds}")

    def _partitions(self) -> list[int]:
        found = self._ask(self._look_up)
        if found is None:
            raise TopicsError(f"topic {self._topic}: is missing: run `fairpost topics create`")
        return found

    def _look_up(self) -> list[int] | None:
        topic = self._consumer.list_topics(self._topic, timeout=_TRY).topics[self._topic]
        if topic.error is None:
            return sorted(topic.partitions)
        if topic.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            return None
        raise KafkaException(topic.error)

    def _bounds(self, partition: int) -> tuple[int, int]:
        where = TopicPartition(self._topic, partition)
        low, high = self._ask(lambda: self._consumer.get_watermark_offsets(where, timeout=_TIMEOUT))
        return low, high

    def _offset_at(self, partition: int, at: datetime, high: int) -> int:
        milliseconds = max(0, int(at.timestamp() * 1000))
        where = [TopicPartition(self._topic, partition, milliseconds)]
        [found] = self._ask(
            lambda: checked(self._consumer.offsets_for_times(where, timeout=_TIMEOUT))
        )
        return high if found.offset == _NO_OFFSET else found.offset

    def _messages(self, partition: int, start: int, end: int) -> Iterator[Message]:
        """The records from `start` to before `end`, of those that are there still."""
        if start >= end:
            return
        self._consumer.assign([TopicPartition(self._topic, partition, start)])
        following = start
        while following < end:
            message = self._next()
            following = (message.offset() or 0) + 1
            if following <= end:
                yield message

    def _next(self) -> Message:
        """The next record; errors that pass are only told, librdkafka goes on by itself."""
        end = time.monotonic() + _TIMEOUT
        last = KafkaError(KafkaError._TIMED_OUT)  # noqa: SLF001  its public name
        while (seconds := end - time.monotonic()) > 0:
            message = self._consumer.poll(seconds)
            if message is None:
                break
            error = message.error()
            if error is None:
                return message
            last = error
            if not passes(error):
                break
        raise unanswered(self._servers, last)

    def _ask(self, request: Callable[[], T]) -> T:
        try:
            return await_answer(lambda: self._refusal.ask(request, self._consumer.poll), _TIMEOUT)
        except KafkaException as error:
            raise unanswered(self._servers, error.args[0]) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._consumer.close()


def newest(letters: Iterable[StoredLetter], limit: int) -> list[StoredLetter]:
    """The last ones, the newest first; of those of one moment, what stands later."""
    return heapq.nlargest(limit, letters, key=lambda letter: (letter.at, _place(letter.position)))


def _place(position: str) -> tuple[int, ...]:
    return tuple(map(int, position.split(":")))


def _stored(message: Message) -> StoredLetter:
    letter = decode_dead_letter(message.value() or b"")
    return StoredLetter(
        position=f"{message.partition()}:{message.offset()}",
        at=datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC),
        **msgspec.structs.asdict(letter),
    )
