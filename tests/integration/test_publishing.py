"""Publishing and emitting: each event is known to have arrived or not, and both ways agree on partitions."""

import pytest
from aiokafka.errors import KafkaError

from contract.events import DEAD_LETTERS, DUE_EMAILS, DeadLetter, decode_due_email
from contract.fields import MAX_VARIABLES
from processor.brokers import Brokers
from processor.consuming import is_outage
from processor.emitting import Emission, Emitter
from processor.publishing import Publisher
from processor.settings import ProcessorSettings
from testbed.ports import reserve_port
from tests.conftest import TestTopics
from tests.integration.conftest import due


def emissions(settings: ProcessorSettings, number: int, topic: str = DUE_EMAILS) -> list[Emission]:
    """As many due e-mails, each of its own user."""
    return [Emission(settings.topic(topic), f"user{n}", due(n)) for n in range(number)]


@pytest.fixture
def publisher(settings: ProcessorSettings) -> Publisher:
    """A producer of its own."""
    return Publisher(settings.brokers)


def test_publishes_everything(
    settings: ProcessorSettings, publisher: Publisher, topics: TestTopics
) -> None:
    """All events arrive, each once, whole and keyed, and each is answered."""
    assert publisher.publish(emissions(settings, 5_000)) == [None] * 5_000
    messages = topics.read(DUE_EMAILS)
    events = [decode_due_email(message.value() or b"") for message in messages]
    assert sorted(event.user_id for event in events) == sorted(f"user{n}" for n in range(5_000))
    assert all(
        message.key() == event.user_id.encode()
        for message, event in zip(messages, events, strict=True)
    )


def test_a_key_keeps_its_order(
    settings: ProcessorSettings, publisher: Publisher, topics: TestTopics
) -> None:
    """The events of one key stand in one partition in the order in which they were given."""
    topic = settings.topic(DUE_EMAILS)
    batch = [Emission(topic, f"user{n % 3}", due(n % 3, email_key=f"{n:04}")) for n in range(600)]
    publisher.publish(batch)
    keys = [
        (event.user_id, event.email_key)
        for event in map(decode_due_email, topics.values(DUE_EMAILS))
    ]
    for user in range(3):
        mine = [key for user_id, key in keys if user_id == f"user{user}"]
        assert mine == sorted(mine)
        assert len(mine) == 200


async def test_both_ways_lead_to_the_same_partition(
    settings: ProcessorSettings, publisher: Publisher, emitter: Emitter, topics: TestTopics
) -> None:
    """A key has the same partition whether the worker's client or librdkafka wrote it."""
    batch = emissions(settings, 100)
    publisher.publish(batch)
    await emitter.emit(batch)
    partitions: dict[bytes, set[int]] = {}
    messages = topics.read(DUE_EMAILS)
    for message in messages:
        key, partition = message.key(), message.partition()
        assert isinstance(key, bytes)
        assert partition is not None
        partitions.setdefault(key, set()).add(partition)
    assert len(messages) == 200
    assert {len(found) for found in partitions.values()} == {1}
    assert len(set.union(*partitions.values())) == 2


def test_what_the_broker_refuses_is_told_apart(
    settings: ProcessorSettings, publisher: Publisher, topics: TestTopics
) -> None:
    """An event that is too large for the broker is answered with the reason, the others are stored."""
    large = DeadLetter(topic="t", partition=0, offset=0, reason="r", value="x" * 4_000_000)
    batch = [
        *emissions(settings, 2),
        Emission(settings.topic(DUE_EMAILS), "user1", large),
        *emissions(settings, 2),
    ]
    first, second, refused, fourth, fifth = publisher.publish(batch)
    assert [first, second, fourth, fifth] == [None] * 4
    assert refused is not None
    assert "large" in refused.lower()
    assert len(topics.read(DUE_EMAILS)) == 4


async def test_the_largest_events_are_emitted(
    settings: ProcessorSettings, emitter: Emitter, topics: TestTopics
) -> None:
    """A dead letter or send event of the largest size that is allowed can be emitted."""
    largest = due(1, variables={"x": "ä" * (MAX_VARIABLES // 2 - 10)})
    await emitter.emit(
        [Emission(settings.topic(name), "user1", largest) for name in (DUE_EMAILS, DEAD_LETTERS)]
        * 20
    )
    assert len(topics.read(DUE_EMAILS)) == len(topics.read(DEAD_LETTERS)) == 20


async def test_no_kafka_is_an_outage() -> None:
    """An emitter that finds no broker raises what is waited out, and leaves nothing open that a later try would leave again."""
    emitter = Emitter(Brokers(f"127.0.0.1:{reserve_port()}"))
    for _ in range(2):
        with pytest.raises(KafkaError) as raised:
            await emitter.open()
        assert is_outage(raised.value)
    await emitter.close()
