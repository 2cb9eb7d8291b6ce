"""Topics: those that are missing are made, and what a promise rests on is checked."""

import asyncio
from typing import Any

import msgspec
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewPartitions,
    ResourceType,
)

from contract.settings import SettingsError
from processor.brokers import Brokers
from processor.partitions import await_partitions
from processor.settings import ProcessorSettings
from processor.topics import Topics, TopicsError, TopicSpec, topic_specs
from testbed import Testbed
from testbed.ports import reserve_port
from testbed.processes import wait_until
from tests.integration.conftest import Fairpost, Post, fetch, fetch_one
from tests.integration.test_tracking import handed


@pytest.fixture
def topics(settings: ProcessorSettings) -> Topics:
    """Topics of an installation that has none yet."""
    return Topics(settings.brokers)


@pytest.fixture
def specs(settings: ProcessorSettings) -> list[TopicSpec]:
    """What they must be."""
    return topic_specs(settings, partitions=3, replication=1)


def config(testbed: Testbed, topic: str) -> dict[str, Any]:
    """A topic's configuration as the broker has it."""
    admin = AdminClient({"bootstrap.servers": testbed.kafka.bootstrap_servers})
    resource = ConfigResource(ResourceType.TOPIC, topic)
    return {
        name: entry.value
        for name, entry in admin.describe_configs([resource])[resource].result(10).items()
    }


def test_creates_what_is_missing(
    testbed: Testbed, topics: Topics, specs: list[TopicSpec], settings: ProcessorSettings
) -> None:
    """Every topic of the installation is made, once, as it must be, and then there is nothing to complain of."""
    assert [[fault.complaint for fault in state.faults] for state in topics.check(specs)] == [
        ["is missing"]
    ] * 6
    assert topics.create(specs) == list(settings.topics)
    assert topics.create(specs) == []
    states = topics.check(specs)
    assert [state.faults for state in states] == [[]] * 6
    assert [state.partitions for state in states] == [1, 3, 3, 3, 3, 1]
    assert [state.copies for state in states] == [1] * 6
    for spec in specs:
        made = config(testbed, spec.name)
        assert {rule.name: made[rule.name] for rule in spec.rules} == {
            rule.name: rule.value for rule in spec.rules
        }


def test_a_topic_that_is_there_stays(
    testbed: Testbed, topics: Topics, specs: list[TopicSpec], settings: ProcessorSettings
) -> None:
    """What is there is told of, where a promise rests on what it is not, and never changed."""
    topic = settings.topic("due-emails")
    testbed.kafka.create_topic(topic, 5, {"retention.ms": "3600000"})
    assert topic not in topics.create(specs)
    state = next(s for s in topics.check(specs) if s.topic == topic)
    assert state.partitions == 5
    [fault] = state.faults
    assert fault.complaint.startswith("retention.ms is 3600000, must be 604800000 at least")
    assert config(testbed, topic)["retention.ms"] == "3600000"


def test_what_kafka_refuses_is_one_line(topics: Topics, settings: ProcessorSettings) -> None:
    """More replicas than there are brokers are refused in one line that names the topic."""
    specs = topic_specs(settings, partitions=1, replication=3)
    with pytest.raises(TopicsError, match=r"topic .*campaigns: .*eplication") as raised:
        topics.create(specs[:1])
    assert "\n" not in str(raised.value)


def test_kafka_that_does_not_answer_is_one_line(
    specs: list[TopicSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody listens the person is told which address to look at."""
    monkeypatch.setattr("processor.topics._TIMEOUT", 0.5)
    monkeypatch.setattr("processor.topics._TRY", 0.5)
    address = f"127.0.0.1:{reserve_port()}"
    with pytest.raises(TopicsError, match=f"kafka {address}: .*kafka_bootstrap_servers"):
        Topics(Brokers(address)).check(specs)


# ------------------------------------------------------------------ the command


def test_check_by_command(fairpost: Fairpost, settings: ProcessorSettings) -> None:
    """What is wrong is on standard error with what mends it, and in the JSON; the exit code says so."""
    assert fairpost("topics", "create", "--replication", "1", "--partitions", "2").code == 0
    right = fairpost("topics", "check", "--replication", "1", "--json")
    assert (right.code, right.err) == (0, "")
    assert [row["faults"] for row in msgspec.json.decode(right.out)] == [[]] * 6
    wrong = fairpost("topics", "check", "--replication", "1", "--retention-days", "8")
    assert wrong.code == 1
    topic = settings.topic("send-emails")
    assert f"{topic}: retention.ms is 604800000, must be 691200000 at least: then " in wrong.err
    assert f"--entity-name {topic} --add-config retention.ms=691200000\n" in wrong.err
    assert b"1 wrong" in wrong.out


# ------------------------------------------------------------------ partitions


def add_partitions(testbed: Testbed, topic: str, total: int) -> None:
    """Adds partitions to a topic; returns when they can be seen."""
    admin = AdminClient({"bootstrap.servers": testbed.kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic, total)])[topic].result(10)
    topics = Topics(Brokers(testbed.kafka.bootstrap_servers))
    wait_until(
        lambda: topics.count_partitions([topic])[topic] == total,
        timeout=10,
        what=f"{topic} has {total} partitions",
    )


async def test_partitions_are_as_they_were(
    testbed: Testbed, topics: Topics, specs: list[TopicSpec], settings: ProcessorSettings
) -> None:
    """A start writes down how many delivery-log has; later ones may differ in other topics, not in this one."""
    topics.create(specs)
    assert (await await_partitions(settings))[settings.topic("delivery-log")] == 3
    add_partitions(testbed, settings.topic("due-emails"), 6)
    assert (await await_partitions(settings))[settings.topic("due-emails")] == 6
    add_partitions(testbed, settings.topic("delivery-log"), 4)
    with pytest.raises(
        SettingsError, match=r"delivery-log: has 4 partitions, must have 3"
    ) as error:
        await await_partitions(settings)
    assert "fairpost topics accept" in str(error.value)
    assert "\n" not in str(error.value)


async def test_campaigns_in_two_partitions_are_refused(
    testbed: Testbed, topics: Topics, specs: list[TopicSpec], settings: ProcessorSettings
) -> None:
    """No worker or tracker starts while the order of campaign events is not sure."""
    topics.create(specs)
    add_partitions(testbed, settings.topic("campaigns"), 2)
    with pytest.raises(SettingsError, match=r"campaigns: has 2 partitions, must have 1"):
        await await_partitions(settings)


async def test_more_partitions_are_accepted_by_a_person(
    testbed: Testbed, fairpost: Fairpost, post: Post, settings: ProcessorSettings
) -> None:
    """Accepting them is audited, and leaves nothing that is handed over to be given back by a fence."""
    created = await asyncio.to_thread(
        fairpost, "topics", "create", "--replication", "1", "--partitions", "2"
    )
    assert created.code == 0
    never_seen = await asyncio.to_thread(fairpost, "topics", "accept")
    assert (never_seen.code, never_seen.err) == (
        0,
        f"{settings.topic('delivery-log')}: 2 partitions, as before\n",
    )
    await await_partitions(settings)
    same = await asyncio.to_thread(fairpost, "topics", "accept")
    assert "2 partitions, as before" in same.err
    await handed(post, 1)
    await post.owner.execute(
        "INSERT INTO instances (instance, machine_id, queue_directory, started_at, seen_at, version)"
        " VALUES ('postfix-a', 'm', '/q', now(), now(), '1') ON CONFLICT DO NOTHING"
    )
    await post.owner.execute("UPDATE handovers SET log_inode = 7")
    proven = "SELECT count(*) FROM handovers WHERE log_inode IS NOT NULL"
    assert await fetch_one(post.owner, proven) == 1
    add_partitions(testbed, settings.topic("delivery-log"), 3)
    check = await asyncio.to_thread(fairpost, "topics", "check", "--replication", "1")
    assert check.code == 1
    assert "delivery-log: has 3 partitions, must have 2, as before" in check.err
    unsure = await asyncio.to_thread(fairpost, "topics", "accept", stdin="n\n")
    assert unsure.code == 130
    accepted = await asyncio.to_thread(fairpost, "topics", "accept", "--yes")
    assert accepted.code == 0
    assert (
        "3 partitions from now on; no fence can prove what became of 1 hand-overs" in accepted.err
    )
    assert await fetch_one(post.owner, proven) == 0
    on_record = "SELECT subject, details FROM audit WHERE action = 'topics.accept'"
    assert await fetch(post.owner, on_record) == [
        (settings.topic("delivery-log"), {"partitions": 3})
    ]
    check = await asyncio.to_thread(fairpost, "topics", "check", "--replication", "1")
    assert (check.code, check.err) == (0, "")
    await await_partitions(settings)
