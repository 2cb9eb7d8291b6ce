"""Stalls: a worker that has work and does none of it, for no reason that it knows, ends itself to be started anew.

Stream processors stall in ways that raise no error (a consumer that fetches no more, a lost wake-up). Waiting has good
reasons too, which are no stall: no lag, a batch in hand that an outage holds up, sending switched off.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition
from msgspec import Struct

from contract.outage import RETRIES
from processor import metrics
from processor.brokers import Brokers
from processor.kafka_outage import checked

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0
_TIMEOUT: Final = 10.0
_POLL: Final = 0.2

Partitions = frozenset[tuple[str, int]]


class Progress:
    """What the steps of a worker do, as seen from outside its event loop."""

    def __init__(self) -> None:
        self._busy: set[str] = set()
        self._done: dict[str, float] = {}

    def begin(self, step: str) -> None:
        """The step has a batch in hand."""
        self._busy.add(step)

    def end(self, step: str, now: float) -> None:
        """The step has done with it."""
        self._busy.discard(step)
        self._done[step] = now

    def idle_since(self, step: str) -> float | None:
        """Since when it has no batch in hand (monotonic seconds); None while it has one."""
        if step in self._busy:
            return None
        return self._done.get(step, 0.0)


class Stall(Struct, frozen=True):
    """A step that has work and does none."""

    step: str
    lag: int
    seconds: float


def find_stall(
    progress: Progress,
    lags: Mapping[str, int],
    behind_since: Mapping[str, float],
    now: float,
    limit: float,
) -> Stall | None:
    """The first step that has been behind, without a batch in hand, for `limit` seconds.

    Args:
        progress: what the steps do.
        lags: records not yet done, by step.
        behind_since: since when each step has lag.
        now: monotonic seconds, as all times here.
        limit: seconds.
    """
    for step, lag in lags.items():
        idle_since = progress.idle_since(step)
        if lag == 0 or idle_since is None or step not in behind_since:
            continue
        seconds = now - max(idle_since, behind_since[step])
        if seconds >= limit:
            return Stall(step, lag, seconds)
    return None


class Place(Struct, frozen=True):
    """Where a consumer group goes on in a partition, and how many records from there on are not done."""

    topic: str
    partition: int
    offset: int
    records: int


class Lag:
    """How far a consumer group is behind, asked of Kafka itself."""

    def __init__(self, brokers: Brokers, group: str) -> None:
        self._consumer = Consumer(
            {
                **brokers.librdkafka(),
                "group.id": group,
                "enable.auto.commit": False,
                # Of what it fetches, the first record of a partition is all that it wants.
                "auto.offset.reset": "earliest",
                "fetch.message.max.bytes": 16_384,
                "queued.min.messages": 1,
                "log_level": 2,
            }
        )

    def measure(self, partitions: Partitions) -> dict[str, int]:
        """Records not yet acknowledged, by topic.

        Raises:
            KafkaException: Kafka does not answer.
        """
        lags: dict[str, int] = {}
        for place in self.find(partitions):
            lags[place.topic] = lags.get(place.topic, 0) + place.records
        return lags

    def find(self, partitions: Partitions) -> list[Place]:
        """Where the group stands in each of the partitions.

        Raises:
            KafkaException: Kafka does not answer.
        """
        asked = [TopicPartition(topic, number) for topic, number in sorted(partitions)]
        found = checked(self._consumer.committed(asked, timeout=_TIMEOUT)) if asked else []
        places: list[Place] = []
        for partition in found:
            low, high = self._consumer.get_watermark_offsets(partition, timeout=_TIMEOUT)
            done = max(partition.offset, low)
            places.append(Place(partition.topic, partition.partition, done, high - done))
        return places

    def read_times(self, places: Iterable[Place]) -> dict[str, float]:
        """When the first record that is not done was appended, by topic, in seconds since 1970.

        A topic of which nothing waits is left out, and so is one whose record Kafka does not give within seconds.

        Raises:
            KafkaException: Kafka refuses.
        """
        behind = {(p.topic, p.partition): p.offset for p in places if p.records}
        times: dict[str, float] = {}
        if not behind:
            return times
        self._consumer.assign([TopicPartition(*key, offset) for key, offset in behind.items()])
        try:
            end = time.monotonic() + _TIMEOUT
            while behind and time.monotonic() < end:
                message = self._consumer.poll(_POLL)
                if message is None:
                    continue
                if (error := message.error()) is not None:
                    raise KafkaException(error)
                topic = message.topic() or ""
                if behind.pop((topic, message.partition() or 0), None) is not None:
                    at = message.timestamp()[1] / 1000
                    times[topic] = min(at, times.get(topic, at))
        finally:
            self._consumer.unassign()
        return times

    def close(self) -> None:
        """Disconnects."""
        self._consumer.close()


class StallWatch:
    """Looks every few seconds, from a thread of its own: a stuck event loop is a stall too.

    Args:
        lag: of the worker's group.
        assigned: the partitions that this worker has now.
        steps: topic by step.
        progress: what the steps do.
        limit: seconds after which a step that has work and does none is stalled.
        give_up: ends the process.
    """

    def __init__(
        self,
        lag: Lag,
        assigned: Callable[[], Partitions],
        steps: Mapping[str, str],
        progress: Progress,
        *,
        limit: float,
        give_up: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        self._lag = lag
        self._assigned = assigned
        self._steps = steps
        self._progress = progress
        self._limit = limit
        self._give_up = give_up
        self._behind_since: dict[str, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall watch", daemon=True)

    def start(self) -> None:
        """Watches from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Watches no more."""
        self._stopped.set()
        self._thread.join(timeout=_TIMEOUT)

    def _run(self) -> None:
        while not self._stopped.wait(min(LOOK_SECONDS, self._limit / 4)):
            try:
                by_topic = self._lag.measure(self._assigned())
            except KafkaException as error:
                RETRIES.labels("lag").inc()
                logger.debug("lag: %s", error.args[0].str())
                self._behind_since.clear()
            else:
                self._look({step: by_topic.get(topic, 0) for step, topic in self._steps.items()})
        self._lag.close()

    def _look(self, lags: Mapping[str, int]) -> None:
        now = time.monotonic()
        for step, lag in lags.items():
            metrics.LAG.labels(step).set(lag)
            if lag:
                self._behind_since.setdefault(step, now)
            else:
                self._behind_since.pop(step, None)
        stall = find_stall(self._progress, lags, self._behind_since, now, self._limit)
        if stall is not None:
            logger.critical(
                "%s: stalled: %d records wait, and none was taken for %.0f s; ending, to be started anew",
                stall.step,
                stall.lag,
                stall.seconds,
            )
            self._give_up()
