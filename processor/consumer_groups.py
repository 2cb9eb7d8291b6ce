"""Consumer groups as a person sees them: who is there, and how far behind they are, asked of Kafka without joining one."""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # re-exported without saying so
    AdminClient,
    OffsetSpec,
)

from contract import events
from processor.brokers import Refusal
from processor.health import LATELY, Group, KafkaVitals, TopicLag
from processor.kafka_outage import await_answer, checked
from processor.settings import ProcessorSettings

T = TypeVar("T")

TAKEN: Final[Mapping[str, tuple[str, ...]]] = {
    "worker": (events.CAMPAIGNS, events.DUE_EMAILS, events.SEND_EMAILS),
    "tracker": (events.DELIVERY_LOG,),
}
"""Which topics the group of each process takes."""

TIMEOUT: Final = 5.0
"""Seconds for Kafka to answer a request."""
_OLDEST_SECONDS: Final = 2.0
"""For which the oldest records are waited for."""

_FIRST: Final = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_END: Final = OffsetSpec.latest()  # type: ignore[no-untyped-call]

Place = tuple[str, int]
"""Topic and partition."""


def read_kafka_vitals(settings: ProcessorSettings, now: datetime) -> KafkaVitals:
    """How the groups of worker and tracker stand, and how many dead letters came lately.

    A few requests, however many records there are.

    Raises:
        KafkaException: Kafka does not answer, or refuses what is asked.
        SettingsError: Kafka refuses the client, or it Kafka.
    """
    kafka = ConsumerGroups(settings)
    present = kafka.partitions(settings.topics)
    return KafkaVitals(
        groups=tuple(
            kafka.group(
                process,
                [topic for topic in topics if settings.planning or topic != events.SEND_EMAILS],
                present,
                now,
            )
            for process, topics in TAKEN.items()
        ),
        dead_letters=kafka.written_since(
            settings.topic(events.DEAD_LETTERS), present, now - LATELY
        ),
        missing=tuple(name for name in settings.topics if name not in present),
    )


class ConsumerGroups:
    """Asks Kafka about the groups of an installation.

    Each method raises KafkaException where it does not answer, and SettingsError where it refuses the client, or it Kafka.
    """

    def __init__(self, settings: ProcessorSettings) -> None:
        self._settings = settings
        self._refusal = Refusal()
        self._admin = AdminClient(
            settings.brokers.librdkafka() | {"error_cb": self._refusal, "log_level": 2}
        )
        self._consumers: dict[str, Consumer] = {}

    def partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """How many partitions each topic has; those that are missing are left out."""
        found = self._ask(lambda: self._admin.list_topics(timeout=TIMEOUT).topics)
        return {name: len(found[name].partitions) for name in topics if name in found}

    def group(
        self, process: str, topics: Iterable[str], present: Mapping[str, int], now: datetime
    ) -> Group:
        """A group, with its lag on each of these topics (names of `contract.events`)."""
        members = self._members(self._settings.group(process))
        return Group(process, members, self.lags(process, topics, present, now))

    def lags(
        self, process: str, topics: Iterable[str], present: Mapping[str, int], now: datetime
    ) -> tuple[TopicLag, ...]:
        """What a group has not done of each of these topics (names of `contract.events`) that is there."""
        group = self._settings.group(process)
        named = {
            name: topic for topic in topics if (name := self._settings.topic(topic)) in present
        }
        places = [(name, number) for name in named for number in range(present[name])]
        if not places:
            return ()
        consumer = self._consumer(group)
        done = self._done(consumer, places)
        ends = self._offsets(places, _END)
        behind = {place: done[place] for place in places if ends[place] > done[place]}
        written = _written(consumer, behind)
        return tuple(
            TopicLag(
                topic,
                sum(ends[place] - done[place] for place in behind if place[0] == name),
                _age([written.get(place) for place in behind if place[0] == name], now),
            )
            for name, topic in named.items()
        )

    def written_since(self, topic: str, present: Mapping[str, int], since: datetime) -> int:
        """How many records were written to a topic since then."""
        places = [(topic, number) for number in range(present.get(topic, 0))]
        if not places:
            return 0
        ends = self._offsets(places, _END)
        starts = self._offsets(
            places, OffsetSpec.for_timestamp(max(0, int(since.timestamp() * 1000)))
        )
        # Kafka answers -1 where nothing was written since.
        return sum(ends[place] - starts[place] for place in places if starts[place] >= 0)

    def _members(self, group: str) -> int:
        # No other way tells. Only commands ask, which are no loss where it ends them (see `_consumer`).
        def ask() -> int:
            [future] = self._admin.describe_consumer_groups(
                [group], request_timeout=TIMEOUT
            ).values()
            try:
                return len(future.result().members)
            except KafkaException as error:
                if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                    return 0
                raise

        return self._ask(ask)

    def _consumer(self, group: str) -> Consumer:
        """One that looks at a group and never joins it.

        An AdminClient that asks a group's coordinator ends the process where the connection breaks meanwhile
        (librdkafka 2.16, pull request 5397).
        """
        if group not in self._consumers:
            self._consumers[group] = Consumer(
                {
                    **self._settings.brokers.librdkafka(),
                    "group.id": group,
                    "enable.auto.commit": False,
                    "auto.offset.reset": "earliest",
                    "queued.min.messages": 1,
                    "fetch.message.max.bytes": 10_000,
                    "fetch.wait.max.ms": 10,
                    "fetch.queue.backoff.ms": 10,
                    "error_cb": self._refusal,
                    "log_level": 2,
                }
            )
        return self._consumers[group]

    def _done(self, consumer: Consumer, places: list[Place]) -> dict[Place, int]:
        """The offset from which on each partition is to be done."""
        asked = [TopicPartition(*place) for place in places]

        def ask() -> list[TopicPartition]:
            return checked(consumer.committed(asked, timeout=TIMEOUT))

        found = await_answer(lambda: self._refusal.ask(ask, consumer.poll), TIMEOUT)
        committed = {(p.topic, p.partition): p.offset for p in found}
        first = self._offsets(places, _FIRST)
        return {place: max(committed.get(place, 0), first[place]) for place in places}

    def _offsets(self, places: list[Place], which: OffsetSpec) -> dict[Place, int]:
        asked = {TopicPartition(*place): which for place in places}

        def ask() -> dict[Place, int]:
            futures = self._admin.list_offsets(asked, request_timeout=TIMEOUT)
            return {(p.topic, p.partition): f.result().offset for p, f in futures.items()}

        return self._ask(ask)

    def _ask(self, request: Callable[[], T]) -> T:
        return await_answer(lambda: self._refusal.ask(request, self._admin.poll), TIMEOUT)


def _written(consumer: Consumer, offsets: Mapping[Place, int]) -> dict[Place, datetime]:
    """When the records at these offsets were written; those that do not come in time are left out."""
    written: dict[Place, datetime] = {}
    if not offsets:
        return written
    consumer.assign([TopicPartition(*place, offset) for place, offset in offsets.items()])
    try:
        end = time.monotonic() + _OLDEST_SECONDS
        while len(written) < len(offsets) and (seconds := end - time.monotonic()) > 0:
            message = consumer.poll(seconds)
            if message is not None and message.error() is None:
                place = (message.topic() or "", message.partition() or 0)
                at = datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC)
                written.setdefault(place, at)
    finally:
        consumer.unassign()
    return written


def _age(written: list[datetime | None], now: datetime) -> float | None:
    """Seconds since the oldest was written; None where none is known, 0 where there is none."""
    known = [at for at in written if at is not None]
    if written and not known:
        return None
    # Kafka's clock may be a little ahead of this one.
    return max([0.0, *((now - at).total_seconds() for at in known)])
