"""The topics of an installation: what must be true of each, and what is said of one that is wrong."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from contract import events
from processor.partitions import find_changes
from processor.settings import ProcessorSettings
from processor.topics import TopicSpec, find_faults, topic_specs

README = Path(__file__).parents[2] / "deploy" / "kafka" / "README.md"
WEEK = 7 * 24 * 3600 * 1000


def installation(prefix: str = "") -> ProcessorSettings:
    """Settings of an installation with this prefix."""
    return ProcessorSettings(
        database=SecretStr(""), kafka_bootstrap_servers="k:9092", topic_prefix=prefix
    )


def spec(name: str, *, replication: int = 3) -> TopicSpec:
    """What one topic must be."""
    specs = topic_specs(installation(), partitions=12, replication=replication)
    return next(spec for spec in specs if spec.name == name)


def config(spec: TopicSpec, **changed: str) -> dict[str, str | None]:
    """A right configuration, but for what is changed; `_` stands for Kafka's points."""
    right: dict[str, str | None] = {rule.name: rule.value for rule in spec.rules}
    return right | {name.replace("_", "."): value for name, value in changed.items()}


@pytest.mark.parametrize("prefix", ["", "eu."])
@pytest.mark.parametrize("partitions", [1, 12])
def test_topic_specs(prefix: str, partitions: int) -> None:
    """Every topic once, under the installation's prefix; one partition where order rests on it; a week at least."""
    settings = installation(prefix)
    specs = {spec.name: spec for spec in topic_specs(settings, partitions=partitions)}
    assert set(specs) == set(settings.topics)
    assert {name.removeprefix(prefix): spec.partitions for name, spec in specs.items()} == {
        events.CAMPAIGNS: 1,
        events.DUE_EMAILS: partitions,
        events.SEND_EMAILS: partitions,
        events.DELIVERY_LOG: partitions,
        events.DELIVERY_STATUS: partitions,
        events.DEAD_LETTERS: 1,
    }
    # Which campaign event is newer is judged by append time.
    campaigns = {rule.name: rule.value for rule in specs[prefix + events.CAMPAIGNS].rules}
    assert campaigns["message.timestamp.type"] == "LogAppendTime"
    for topic in specs.values():
        assert int({rule.name: rule.value for rule in topic.rules}["retention.ms"]) >= WEEK


@pytest.mark.parametrize(("replication", "least"), [(1, "1"), (2, "1"), (3, "2"), (5, "4")])
def test_one_copy_may_be_away(replication: int, least: str) -> None:
    """As many copies are written before an acknowledgement as there are without one broker."""
    for topic in topic_specs(installation(), partitions=1, replication=replication):
        assert topic.copies == replication
        assert ("min.insync.replicas", least) in {(rule.name, rule.value) for rule in topic.rules}


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("due-emails", {}, None),
        ("due-emails", {"retention_ms": str(2 * WEEK)}, None),
        ("due-emails", {"retention_ms": "-1"}, None),
        (
            "due-emails",
            {"retention_ms": "3600000"},
            "retention.ms is 3600000, must be 604800000 at least: then due e-mails wait unread while sending is off",
        ),
        ("due-emails", {"retention_bytes": "1000"}, "retention.bytes is 1000, must be -1"),
        ("send-emails", {"cleanup_policy": "compact"}, "cleanup.policy is compact, must be delete"),
        ("delivery-log", {"min_insync_replicas": "3"}, None),
        (
            "delivery-log",
            {"min_insync_replicas": "1"},
            "min.insync.replicas is 1, must be 2 at least: then what the brokers acknowledged outlives",
        ),
        (
            "delivery-status",
            {"unclean_leader_election_enable": "true"},
            "unclean.leader.election.enable is true, must be false",
        ),
        (
            "campaigns",
            {"message_timestamp_type": "CreateTime"},
            "message.timestamp.type is CreateTime, must be LogAppendTime: then the newer",
        ),
        ("due-emails", {"message_timestamp_type": "CreateTime"}, None),
    ],
)
def test_a_wrong_configuration_is_told(
    name: str, changed: dict[str, str], said: str | None
) -> None:
    """Each rule is told with the promise that rests on it and the command that mends it; more than needed is right."""
    topic = spec(name)
    faults = find_faults(topic, 3, config(topic, **changed), "k:9092")
    if said is None:
        assert faults == []
        return
    (fault,) = faults
    assert fault.complaint.startswith(said)
    setting = next(iter(changed)).replace("_", ".")
    assert fault.mend.startswith("kafka-configs.sh --bootstrap-server k:9092 --alter --entity-type")
    assert f"--entity-name {name} --add-config {setting}=" in fault.mend


def test_the_rules_are_documented() -> None:
    """What operators read of the topics names every rule."""
    text = README.read_text()
    for topic in topic_specs(installation(), partitions=12):
        assert topic.name in text
        for rule in topic.rules:
            assert f"`{rule.name}`" in text


def test_too_few_copies_are_told() -> None:
    """A topic with fewer copies than asked for is wrong, one with more is right."""
    topic = spec("due-emails")
    (fault,) = find_faults(topic, 1, config(topic), "k")
    assert fault.complaint.startswith("replication factor is 1, must be 3 at least")
    assert find_faults(topic, 4, config(topic), "k") == []


@pytest.mark.parametrize(
    ("counts", "known", "wrong"),
    [
        ({}, None, {}),
        ({"eu.campaigns": 1, "eu.delivery-log": 12}, None, {}),
        ({"eu.campaigns": 1, "eu.delivery-log": 12}, 12, {}),
        ({"eu.due-emails": 24, "eu.send-emails": 48}, 12, {}),
        (
            {"eu.campaigns": 2, "eu.delivery-log": 12},
            12,
            {"eu.campaigns": "has 2 partitions, must have 1"},
        ),
        (
            {"eu.campaigns": 1, "eu.delivery-log": 24},
            12,
            {"eu.delivery-log": "has 24 partitions, must have 12, as before"},
        ),
        ({"eu.campaigns": 1, "eu.delivery-log": 1}, 12, {"eu.delivery-log": "has 1 partitions"}),
    ],
)
def test_changed_partitions(
    counts: dict[str, int], known: int | None, wrong: dict[str, str]
) -> None:
    """Only the topics whose order rests on their partitions may not change them."""
    faults = find_changes(installation("eu."), counts, known)
    assert set(faults) == set(wrong)
    for topic, complaint in wrong.items():
        assert faults[topic].complaint.startswith(complaint)
