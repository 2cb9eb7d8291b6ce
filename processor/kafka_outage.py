"""Kafka's outages: which of its errors pass by themselves, and waiting them out for a while.

librdkafka waits them out itself where it fetches and produces; what it asks of a broker once it answers with the error.
"""

from collections.abc import Callable
from typing import Final, TypeVar

import stamina
from confluent_kafka import KafkaError, KafkaException, TopicPartition

T = TypeVar("T")

# Kafka's protocol guide, section Error Codes, those that are retriable: while a topic is made, a partition's leader moves
# or a broker starts. A partition or topic that is not known is one of them where the topic is known to be there.
_PASSING: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_CONTROLLER,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.LISTENER_NOT_FOUND,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.ELIGIBLE_LEADERS_NOT_AVAILABLE,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        # librdkafka's own: no connection, no answer, not looked up yet.
        KafkaError._TRANSPORT,  # noqa: SLF001  its public name
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._RESOLVE,  # noqa: SLF001
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError._TIMED_OUT_QUEUE,  # noqa: SLF001
        KafkaError._WAIT_CACHE,  # noqa: SLF001
        KafkaError._WAIT_COORD,  # noqa: SLF001
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)


def passes(error: KafkaError) -> bool:
    """Whether the same request may well succeed in a moment."""
    return not error.fatal() and (error.retriable() or error.code() in _PASSING)


def await_answer(ask: Callable[[], T], seconds: float) -> T:
    """Asks Kafka until it answers with something else than a passing error, for so many seconds at most.

    Args:
        ask: one request, which is safe to repeat.
        seconds: after them the last error is raised.

    Raises:
        KafkaException: an error that does not pass, or one that did not pass in time.
    """
    for attempt in stamina.retry_context(
        on=_is_passing, attempts=None, timeout=seconds, wait_initial=0.02, wait_max=0.5
    ):
        with attempt:
            return ask()
    raise AssertionError("retries end with an answer or an error")


def _is_passing(error: Exception) -> bool:
    return isinstance(error, KafkaException) and passes(error.args[0])


def checked(partitions: list[TopicPartition]) -> list[TopicPartition]:
    """The partitions of an answer, each of which may carry an error of its own.

    Raises:
        KafkaException: one does.
    """
    for partition in partitions:
        if partition.error is not None:
            raise KafkaException(partition.error)
    return partitions
