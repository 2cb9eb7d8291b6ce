"""Topics: those that are missing are made, and what a promise rests on is checked."""

from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType  # type: ignore[attr-defined]

from processor.settings import ProcessorSettings
from processor.topics import Topics, TopicsError, TopicSpec, topic_specs
from testbed import Testbed
from testbed.ports import reserve_port


@pytest.fixture
def topics(settings: ProcessorSettings) -> Topics:
    """Topics of an installation that has none yet."""
    return Topics(settings.kafka_bootstrap_servers)


@pytest.fixture
def specs(settings: ProcessorSettings) -> list[TopicSpec]:
    """What they must be."""
    return topic_specs(settings, partitions=3)


def config(testbed: Testbed, topic: str) -> dict[str, Any]:
    """A topic's configuration as the broker has it."""
    admin = AdminClient({"bootstrap.servers": testbed.kafka.bootstrap_servers})
    resource = ConfigResource(ResourceType.TOPIC, topic)
    return {
        name: entry.value
        for name, entry in admin.describe_configs([resource])[resource].result(10).items()
    }


def test_creates_what_is_missing(
    topics: Topics, specs: list[TopicSpec], settings: ProcessorSettings
) -> None:
    """Every topic of the installation is made, once, and then there is nothing to complain of."""
    assert [state.complaint for state in topics.check(specs)] == [
        "is missing: run `fairpost topics create`"
    ] * 6
    assert topics.create(specs, replication=1) == list(settings.topics)
    assert topics.create(specs, replication=1) == []
    states = topics.check(specs)
    assert [state.complaint for state in states] == [None] * 6
    assert [state.partitions for state in states] == [1, 3, 3, 3, 3, 1]


def test_a_topic_that_is_there_stays(
    testbed: Testbed, topics: Topics, specs: list[TopicSpec], settings: ProcessorSettings
) -> None:
    """A topic with more partitions than asked for is neither changed nor complained of, where none rests on it."""
    testbed.kafka.create_topic(settings.topic("due-emails"), 5)
    assert settings.topic("due-emails") not in topics.create(specs, replication=1)
    state = next(s for s in topics.check(specs) if s.topic == settings.topic("due-emails"))
    assert (state.partitions, state.complaint) == (5, None)


def test_campaigns_have_one_partition_and_append_times(
    testbed: Testbed, topics: Topics, specs: list[TopicSpec], settings: ProcessorSettings
) -> None:
    """The order of a campaign's events rests on one partition and on append times, which are made and checked."""
    topics.create(specs[:1], replication=1)
    made = config(testbed, settings.topic("campaigns"))
    assert made["message.timestamp.type"] == "LogAppendTime"


@pytest.mark.parametrize(
    ("partitions", "configuration", "complaint"),
    [
        (2, {"message.timestamp.type": "LogAppendTime"}, "has 2 partitions, must have 1"),
        (1, {}, "message.timestamp.type is CreateTime, must be LogAppendTime"),
    ],
)
def test_wrong_topics_are_complained_of(  # noqa: PLR0917  fixtures
    testbed: Testbed,
    topics: Topics,
    specs: list[TopicSpec],
    settings: ProcessorSettings,
    partitions: int,
    configuration: dict[str, str],
    complaint: str,
) -> None:
    """A `campaigns` topic on which the order of events cannot rest is named, with what is wrong."""
    testbed.kafka.create_topic(settings.topic("campaigns"), partitions, configuration)
    (state,) = topics.check(specs[:1])
    assert state.complaint is not None
    assert complaint in state.complaint


def test_what_kafka_refuses_is_one_line(topics: Topics, specs: list[TopicSpec]) -> None:
    """More replicas than there are brokers are refused in one line that names the topic."""
    with pytest.raises(TopicsError, match=r"topic .*campaigns: .*eplication") as raised:
        topics.create(specs[:1], replication=3)
    assert "\n" not in str(raised.value)


def test_kafka_that_does_not_answer_is_one_line(
    specs: list[TopicSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody listens the person is told which address to look at."""
    monkeypatch.setattr("processor.topics._TIMEOUT", 0.5)
    address = f"127.0.0.1:{reserve_port()}"
    with pytest.raises(TopicsError, match=f"kafka {address}: .*kafka_bootstrap_servers"):
        Topics(address).check(specs)
