"""The topics of an installation: which there must be, what they must be, and which promise rests on what."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported without saying so
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from msgspec import Struct

from contract import events
from processor.brokers import Brokers, Refusal, advise
from processor.kafka_outage import await_answer
from processor.settings import ProcessorSettings

_TIMEOUT: Final = 15.0
_TRY: Final = 2.0
_DAY_MS: Final = 24 * 3600 * 1000
_LONG_DAYS: Final = 30

T = TypeVar("T")


class Rule(Struct, frozen=True):
    """What a topic's configuration must say.

    Attributes:
        name: Kafka's.
        value: what it is created with.
        promise: what is not kept where it says something else.
        least: whether more will do; without limit (-1) is more.
    """

    name: str
    value: str
    promise: str
    least: bool = False

    def holds(self, value: str | None) -> bool:
        """Whether a topic's value will do."""
        if value is None or not self.least:
            return value == self.value
        return int(value) >= int(self.value) or int(value) == -1


class TopicSpec(Struct, frozen=True):
    """What a topic must be.

    Attributes:
        partitions: how many it is created with.
        copies: how many brokers keep each (Kafka's replication factor).
    """

    name: str
    partitions: int
    copies: int
    rules: tuple[Rule, ...]


class Fault(Struct, frozen=True):
    """What is wrong with a topic: one line that names the promise, and what mends it."""

    complaint: str
    mend: str


class TopicState(Struct, frozen=True):
    """A topic as it is.

    Attributes:
        partitions: None where it is missing.
        copies: of the partition that has the fewest.
        faults: none where it is right.
    """

    topic: str
    partitions: int | None
    copies: int | None
    faults: list[Fault]

    @property
    def verdict(self) -> str:
        """In two words."""
        return f"{len(self.faults)} wrong" if self.faults else "right"


def topic_specs(
    settings: ProcessorSettings, *, partitions: int, replication: int = 3, retention_days: int = 7
) -> list[TopicSpec]:
    """The topics.

    Args:
        settings: of the installation.
        partitions: of the topics that more workers share out.
        replication: copies of each.
        retention_days: how long what waits to be read is kept at least.
    """
    acknowledged = "what the brokers acknowledged outlives the loss of one"
    common = (
        # One copy may be away, and what is acknowledged still stands twice.
        Rule("min.insync.replicas", str(max(1, replication - 1)), acknowledged, least=True),
        Rule("unclean.leader.election.enable", "false", acknowledged),
        Rule("cleanup.policy", "delete", "each record is kept for its time"),
        Rule("retention.bytes", "-1", "each record is kept for its time"),
    )

    def spec(name: str, count: int, days: int, promise: str, *more: Rule) -> TopicSpec:
        kept = Rule("retention.ms", str(days * _DAY_MS), promise, least=True)
        return TopicSpec(settings.topic(name), count, replication, (kept, *more, *common))

    long = max(_LONG_DAYS, retention_days)
    return [
        spec(
            events.CAMPAIGNS,
            1,
            long,
            "a campaign is known to workers that start late",
            Rule(
                "message.timestamp.type",
                "LogAppendTime",
                "the newer of a campaign's events counts, as the broker saw them",
            ),
        ),
        spec(
            events.DUE_EMAILS,
            partitions,
            retention_days,
            "due e-mails wait unread while sending is off or workers are away",
        ),
        spec(
            events.SEND_EMAILS,
            partitions,
            retention_days,
            "what is reserved is planned, however long planning is away",
        ),
        spec(
            events.DELIVERY_LOG,
            partitions,
            retention_days,
            "trackers that were away miss no line, and fences can be judged",
        ),
        spec(
            events.DELIVERY_STATUS,
            partitions,
            retention_days,
            "services that were away miss no outcome",
        ),
        spec(events.DEAD_LETTERS, 1, long, "people have the time to mend what was wrong"),
    ]


def find_faults(
    spec: TopicSpec, copies: int, config: Mapping[str, str | None], servers: str
) -> list[Fault]:
    """What is wrong with a topic that is there, its partitions left out.

    Args:
        spec: what it must be.
        copies: of the partition that has the fewest.
        config: by Kafka's names.
        servers: for the commands that mend.
    """
    faults = []
    if copies < spec.copies:
        faults.append(
            Fault(
                f"replication factor is {copies}, must be {spec.copies} at least: then what the brokers acknowledged"
                " outlives the loss of one",
                "kafka-reassign-partitions.sh (deploy/kafka/README.md)",
            )
        )
    faults += [
        Fault(
            f"{rule.name} is {config.get(rule.name)}, must be {rule.value}{' at least' if rule.least else ''}: then"
            f" {rule.promise}",
            f"kafka-configs.sh --bootstrap-server {servers} --alter --entity-type topics --entity-name {spec.name}"
            f" --add-config {rule.name}={rule.value}",
        )
        for rule in spec.rules
        if not rule.holds(config.get(rule.name))
    ]
    return faults


class TopicsError(Exception):
    """Kafka did not do what was asked of it; the text is one line."""


def unanswered(servers: str, error: KafkaError) -> TopicsError:
    """Kafka does not answer, or not what was asked."""
    return TopicsError(f"kafka {servers}: {error.str()}; {advise(error)}")


class Topics:
    """Creates and looks at the topics of an installation.

    Every method raises SettingsError where Kafka refuses the client, or it Kafka.
    """

    def __init__(self, brokers: Brokers) -> None:
        self._servers = brokers.servers
        self._refusal = Refusal()
        self._admin = AdminClient(
            brokers.librdkafka() | {"error_cb": self._refusal, "log_level": 2}
        )

    def create(self, specs: list[TopicSpec]) -> list[str]:
        """Creates those that are missing and answers their names, once they can be found.

        Raises:
            TopicsError: Kafka does not answer or refuses.
        """
        present = self._present()
        missing = [spec for spec in specs if spec.name not in present]
        if not missing:
            return []
        futures = self._admin.create_topics(
            [
                NewTopic(
                    spec.name,
                    num_partitions=spec.partitions,
                    replication_factor=spec.copies,
                    config={rule.name: rule.value for rule in spec.rules},
                )
                for spec in missing
            ],
            operation_timeout=_TIMEOUT,
        )
        for topic, future in futures.items():
            try:
                future.result(timeout=_TIMEOUT)
            except KafkaException as error:
                reason: KafkaError = error.args[0]
                raise TopicsError(f"topic {topic}: {reason.str()}") from error
        names = [spec.name for spec in missing]
        self._ask(lambda: self._find(names))
        return names

    def check(self, specs: list[TopicSpec]) -> list[TopicState]:
        """Compares each topic with what it must be, its number of partitions left out.

        Raises:
            TopicsError: Kafka does not answer, or does not tell.
        """
        present = self._present()
        return [self._state(spec, present.get(spec.name)) for spec in specs]

    def count_partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """How many partitions each of these topics has; those that are missing are left out.

        Raises:
            TopicsError: Kafka does not answer.
        """
        present = self._present()
        return {topic: len(present[topic]) for topic in topics if topic in present}

    def retention(self, topic: str) -> float:
        """For how many seconds the topic keeps a record; infinity: for ever.

        Raises:
            TopicsError: Kafka does not answer.
        """
        milliseconds = int(self._config(topic)["retention.ms"] or -1)
        return milliseconds / 1000 if milliseconds >= 0 else math.inf

    def _present(self) -> dict[str, list[int]]:
        """The copies of each partition of each topic."""
        topics = self._ask(lambda: self._admin.list_topics(timeout=_TRY).topics)
        return {
            name: [len(partition.replicas) for partition in topic.partitions.values()]
            for name, topic in topics.items()
        }

    def _find(self, names: Iterable[str]) -> None:
        """Finds these topics; a broker hears of a new one a moment after the controller has made it."""
        present = self._admin.list_topics(timeout=_TRY).topics
        for name in names:
            if name not in present:
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"no {name} yet"))

    def _state(self, spec: TopicSpec, copies: list[int] | None) -> TopicState:
        if not copies:
            return TopicState(
                spec.name, None, None, [Fault("is missing", "fairpost topics create")]
            )
        faults = find_faults(spec, min(copies), self._config(spec.name), self._servers)
        return TopicState(spec.name, len(copies), min(copies), faults)

    def _config(self, topic: str) -> dict[str, str | None]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        entries = self._ask(
            lambda: self._admin.describe_configs([resource])[resource].result(timeout=_TIMEOUT)
        )
        return {name: entry.value for name, entry in entries.items()}

    def _ask(self, request: Callable[[], T]) -> T:
        try:
            return await_answer(lambda: self._refusal.ask(request, self._admin.poll), _TIMEOUT)
        except KafkaException as error:
            raise unanswered(self._servers, error.args[0]) from error
