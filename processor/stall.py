"""Stalls: a worker that has work and does none of it, for no reason that it knows, ends itself to be started anew.

Stream processors stall in ways that raise no error (a consumer that fetches no more, a lost wake-up). Waiting has good
reasons too, which are no stall: no lag, a batch in hand that an outage holds up, sending switched off.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from confluent_kafka import Consumer, KafkaException, TopicPartition
from msgspec import Struct

from processor import metrics
from processor.brokers import Brokers
from processor.kafka_outage import checked

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0
_TIMEOUT: Final = 10.0

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


class Lag:
    """How far a consumer group is behind, asked of Kafka itself."""

    def __init__(self, brokers: Brokers, group: str) -> None:
        self._consumer = Consumer(
            {
                **brokers.librdkafka(),
                "group.id": group,
                "enable.auto.commit": False,
                "log_level": 2,
            }
        )

    def measure(self, partitions: Partitions) -> dict[str, int]:
        """Records not yet acknowledged, by topic.

        Raises:
            KafkaException: Kafka does not answer.
        """
        lags: dict[str, int] = {}
        asked = [TopicPartition(topic, number) for topic, number in sorted(partitions)]
        found = checked(self._consumer.committed(asked, timeout=_TIMEOUT)) if asked else []
        for partition in found:
            low, high = self._consumer.get_watermark_offsets(partition, timeout=_TIMEOUT)
            done = max(partition.offset, low)
            lags[partition.topic] = lags.get(partition.topic, 0) + high - done
        return lags

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
