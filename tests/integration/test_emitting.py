"""Emitting: an event counts as emitted when the broker has said so, and not before."""

import pytest
from aiokafka.errors import KafkaError

from contract.events import SEND_EMAILS, decode_due_email
from processor.emitting import Emission, Emitter
from processor.settings import ProcessorSettings
from testbed import Testbed
from tests.conftest import TestTopics
from tests.integration.conftest import due


async def test_what_the_broker_refuses_is_not_emitted(
    testbed: Testbed, settings: ProcessorSettings, emitter: Emitter
) -> None:
    """A refusal of the broker, which comes only with its answer, is raised: emitting waits for the answer."""
    topic = settings.topic("small")
    testbed.kafka.create_topic(topic, config={"max.message.bytes": "100"})
    with pytest.raises(KafkaError):
        await emitter.emit([Emission(topic, "u", due(1, variables={"x": "y" * 10_000}))])


async def test_all_are_there_when_it_returns(
    settings: ProcessorSettings, emitter: Emitter, topics: TestTopics
) -> None:
    """Everything that was given stands on its topic when the call returns, in order within a key."""
    events = [due(n % 3, variables={"n": n}) for n in range(300)]
    await emitter.emit([Emission(settings.topic(SEND_EMAILS), e.user_id, e) for e in events])
    stored = [decode_due_email(value) for value in topics.values(SEND_EMAILS)]
    for user in range(3):
        numbers = [e.variables["n"] for e in stored if e.user_id == f"user{user}"]
        assert numbers == list(range(user, 300, 3))
