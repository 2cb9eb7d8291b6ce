"""Unread: what waits on a topic, how old the first of it is, and how long Kafka keeps it; whoever runs."""

import math
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported without saying so
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from contract.events import DELIVERY_LOG, DUE_EMAILS
from contract.metrics import REGISTRIES, Process
from processor.emitting import Emission
from processor.publishing import Publisher
from processor.settings import ProcessorSettings
from processor.unread import Unread
from testbed.kafka import Kafka
from tests.conftest import PARTITIONS, TestTopics
from tests.integration.conftest import due


def told(name: str, topic: str) -> float | None:
    """A metric of a topic."""
    return REGISTRIES[Process.TRACKER].get_sample_value(name, {"topic": topic})


@pytest.fixture
def unread(settings: ProcessorSettings) -> Unread:
    """Of this test's topics."""
    return Unread(settings)


def publish(settings: ProcessorSettings, count: int) -> None:
    """Due e-mails for users whose partitions differ."""
    emails = [due(n) for n in range(count)]
    Publisher(settings.brokers).publish(
        [Emission(settings.topic(DUE_EMAILS), e.user_id, e) for e in emails]
    )


def test_what_waits_is_told_with_its_age(
    settings: ProcessorSettings, topics: TestTopics, unread: Unread
) -> None:
    """The age is that of the first record that is not done, in whichever partition; what is done has none."""
    unread.measure(datetime.now(UTC))
    assert told("fairpost_unread_records", DUE_EMAILS) == 0
    assert told("fairpost_unread_age_seconds", DUE_EMAILS) == 0
    publish(settings, 20)
    messages = topics.read(DUE_EMAILS)
    assert {message.partition() for message in messages} == set(range(PARTITIONS))
    now = datetime.now(UTC)
    unread.measure(now)
    first = min(message.timestamp()[1] for message in messages) / 1000
    assert told("fairpost_unread_records", DUE_EMAILS) == 20
    age = pytest.approx(now.timestamp() - first, abs=0.01)
    assert told("fairpost_unread_age_seconds", DUE_EMAILS) == age
    assert told("fairpost_unread_records", DELIVERY_LOG) == 0

    ends = [
        max((m.offset() or 0) + 1 for m in messages if m.partition() == number)
        for number in range(PARTITIONS)
    ]
    group = {
        "bootstrap.servers": settings.kafka_bootstrap_servers,
        "group.id": settings.group("worker"),
    }
    with closing(Consumer(group)) as consumer:
        offsets = [TopicPartition(settings.topic(DUE_EMAILS), n, end) for n, end in enumerate(ends)]
        consumer.commit(offsets=offsets, asynchronous=False)
    unread.measure(datetime.now(UTC))
    assert told("fairpost_unread_records", DUE_EMAILS) == 0
    assert told("fairpost_unread_age_seconds", DUE_EMAILS) == 0


def test_a_broker_that_comes_back(settings: ProcessorSettings, tmp_path: Path) -> None:
    """What is unread is told again when Kafka is back, however often it goes and comes."""
    topics = {settings.topic(name): PARTITIONS for name in (DUE_EMAILS, DELIVERY_LOG)}
    with Kafka(tmp_path / "kafka", topics) as kafka:
        servers = {"kafka_bootstrap_servers": kafka.bootstrap_servers}
        unread = Unread(settings.model_copy(update=servers))
        unread.measure(datetime.now(UTC))
        for _ in range(2):
            kafka.stop()
            with pytest.raises(KafkaException):
                unread.measure(datetime.now(UTC))
            kafka.start()
            unread.measure(datetime.now(UTC))


def test_how_long_a_topic_keeps_its_records(
    settings: ProcessorSettings,
    topics: TestTopics,  # noqa: ARG001  they must be there
    unread: Unread,
) -> None:
    """A week where `fairpost topics create` made it, what a person set later, and for ever where nothing is deleted."""
    unread.measure(datetime.now(UTC))
    assert told("fairpost_retention_seconds", DUE_EMAILS) == 7 * 86400
    admin = AdminClient({"bootstrap.servers": settings.kafka_bootstrap_servers})
    for value, seconds in (("3600000", 3600.0), ("-1", math.inf)):
        entry = ConfigEntry("retention.ms", value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(
            ResourceType.TOPIC, settings.topic(DUE_EMAILS), incremental_configs=[entry]
        )
        admin.incremental_alter_configs([resource])[resource].result(10)
        unread.measure(datetime.now(UTC))
        assert told("fairpost_retention_seconds", DUE_EMAILS) == seconds
