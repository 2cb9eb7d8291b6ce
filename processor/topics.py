"""The topics of an installation: which there must be, and what of them a promise rests on."""

import math
from collections.abc import Callable, Iterable
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
from processor.kafka_outage import await_answer
from processor.settings import ProcessorSettings

_TIMEOUT: Final = 15.0
_DAY_MS: Final = 24 * 3600 * 1000

T = TypeVar("T")


class TopicSpec(Struct, frozen=True):
    """What a topic must be.

    Attributes:
        partitions: how many it is created with.
        fixed: whether another number breaks a promise.
        config: topic configuration, by Kafka's names.
    """

    name: str
    partitions: int
    fixed: bool
    config: dict[str, str]


class TopicState(Struct, frozen=True):
    """A topic beside what it must be; `complaint` is None where it is right."""

    topic: str
    partitions: int | None
    complaint: str | None


def topic_specs(settings: ProcessorSettings, *, partitions: int) -> list[TopicSpec]:
    """The topics; `partitions` are those of the topics that more workers share out."""
    append_time = {"message.timestamp.type": "LogAppendTime"}
    week = {"retention.ms": str(7 * _DAY_MS)}
    return [
        # One partition keeps a campaign's events in order, append times decide which is newer.
        TopicSpec(
            settings.topic(events.CAMPAIGNS),
            1,
            True,
            {**append_time, "retention.ms": str(30 * _DAY_MS)},
        ),
        TopicSpec(settings.topic(events.DUE_EMAILS), partitions, False, week),
        TopicSpec(settings.topic(events.SEND_EMAILS), partitions, False, week),
        # A host's lines stay in order only as long as its key stays in its partition.
        TopicSpec(settings.topic(events.DELIVERY_LOG), partitions, True, week),
        TopicSpec(settings.topic(events.DELIVERY_STATUS), partitions, False, week),
        TopicSpec(
            settings.topic(events.DEAD_LETTERS), 1, False, {"retention.ms": str(30 * _DAY_MS)}
        ),
    ]


class TopicsError(Exception):
    """Kafka did not do what was asked of it; the text is one line."""


class Topics:
    """Creates and checks the topics of an installation."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 2})

    def create(self, specs: list[TopicSpec], *, replication: int) -> list[str]:
        """Creates those that are missing and answers their names, once they can be found.

        Raises:
            TopicsError: Kafka does not answer or refuses.
        """
        present = self._partitions()
        missing = [spec for spec in specs if spec.name not in present]
        if not missing:
            return []
        futures = self._admin.create_topics(
            [
                NewTopic(
                    spec.name,
                    num_partitions=spec.partitions,
                    replication_factor=replication,
                    config=spec.config,
                )
                for spec in missing
            ],
            operation_timeout=_TIMEOUT,
        )
        for topic, future in futures.items():
            try:
                future.result(timeout=_TIMEOUT)
            except KafkaException as error:
                raise TopicsError(f"topic {topic}: {error.args[0].str()}") from error
        names = [spec.name for spec in missing]
        self._ask(lambda: self._list(names))
        return names

    def check(self, specs: list[TopicSpec]) -> list[TopicState]:
        """Compares each topic with what it must be.

        Raises:
            TopicsError: Kafka does not answer.
        """
        present = self._partitions()
        return [
            TopicState(spec.name, present.get(spec.name), self._complaint(spec, present))
            for spec in specs
        ]

    def count_partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """How many partitions each of these topics has; those that are missing are left out.

        Raises:
            TopicsError: Kafka does not answer.
        """
        present = self._partitions()
        return {topic: present[topic] for topic in topics if topic in present}

    def retention(self, topic: str) -> float:
        """For how many seconds the topic keeps a record; infinity: for ever.

        Raises:
            TopicsError: Kafka does not answer.
        """
        milliseconds = int(self._config(topic)["retention.ms"] or -1)
        return milliseconds / 1000 if milliseconds >= 0 else math.inf

    def _partitions(self) -> dict[str, int]:
        topics = self._ask(lambda: self._admin.list_topics(timeout=_TIMEOUT).topics)
        return {name: len(topic.partitions) for name, topic in topics.items()}

    def _list(self, names: Iterable[str]) -> None:
        """Finds these topics; a broker hears of a new one a moment after the controller has made it."""
        present = self._admin.list_topics(timeout=_TIMEOUT).topics
        for name in names:
            if name not in present:
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"no {name} yet"))

    def _complaint(self, spec: TopicSpec, present: dict[str, int]) -> str | None:
        if spec.name not in present:
            return "is missing: run `fairpost topics create`"
        if spec.fixed and spec.partitions == 1 and present[spec.name] != 1:
            return f"has {present[spec.name]} partitions, must have 1: the order of its events rests on it"
        config = self._config(spec.name)
        for name, value in spec.config.items():
            if name == "message.timestamp.type" and config.get(name) != value:
                return f"{name} is {config.get(name)}, must be {value}: which event is newer rests on it"
        return None

    def _config(self, topic: str) -> dict[str, str | None]:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        entries = self._ask(
            lambda: self._admin.describe_configs([resource])[resource].result(timeout=_TIMEOUT)
        )
        return {name: entry.value for name, entry in entries.items()}

    def _ask(self, request: Callable[[], T]) -> T:
        try:
            return await_answer(request, _TIMEOUT)
        except KafkaException as error:
            raise TopicsError(
                f"kafka {self._bootstrap_servers}: {error.args[0].str()}; is kafka_bootstrap_servers right?"
            ) from error
