"""Reading a topic from its beginning to where it ends now."""

from __future__ import annotations

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from testbed.processes import ServiceError

_TIMEOUT = 30.0


def read_topic(bootstrap_servers: str, topic: str) -> list[bytes]:
    """The values of all records of a topic, in order within each partition.

    Raises:
        ServiceError: Kafka does not answer.
    """
    return [record.value() or b"" for record in read_records(bootstrap_servers, topic)]


def read_records(bootstrap_servers: str, topic: str) -> list[Message]:
    """All records of a topic, in order within each partition.

    Raises:
        ServiceError: Kafka does not answer.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "reads-without-a-group",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 2,
        }
    )
    records: list[Message] = []
    try:
        partitions = consumer.list_topics(topic, timeout=_TIMEOUT).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        ended: set[int | None] = set()
        while len(ended) < len(partitions):
            message = consumer.poll(_TIMEOUT)
            if message is None:
                raise ServiceError(f"Kafka: {topic}: no answer within {_TIMEOUT:g} s")
            if (error := message.error()) is None:
                records.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  its public name
                ended.add(message.partition())
            else:
                raise ServiceError(f"Kafka: {topic}: {error.str()}")
    finally:
        consumer.close()
    return records
