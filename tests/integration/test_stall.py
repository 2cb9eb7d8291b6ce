"""The stall watch on a real consumer group: it ends a worker that does nothing, and no other."""

import logging
import threading
import time

import pytest
from confluent_kafka import Consumer, TopicPartition

from contract.events import DUE_EMAILS
from processor.emitting import Emission
from processor.publishing import Publisher
from processor.settings import ProcessorSettings
from processor.stall import Lag, Progress, StallWatch
from tests.conftest import PARTITIONS, TestTopics
from tests.integration.conftest import due

STEP = "reservation"


def publish(settings: ProcessorSettings, count: int) -> None:
    """Due e-mails that nobody has read."""
    emails = [due(n) for n in range(count)]
    Publisher(settings.brokers).publish(
        [Emission(settings.topic(DUE_EMAILS), e.user_id, e) for e in emails]
    )


def partitions(settings: ProcessorSettings) -> frozenset[tuple[str, int]]:
    """All of the topic."""
    return frozenset((settings.topic(DUE_EMAILS), number) for number in range(PARTITIONS))


def watch(settings: ProcessorSettings, progress: Progress) -> tuple[StallWatch, threading.Event]:
    """A watch of the whole topic with a short limit, and whether it gave up."""
    gave_up = threading.Event()
    lag = Lag(settings.brokers, settings.group("worker"))
    topics = {STEP: settings.topic(DUE_EMAILS)}
    return StallWatch(
        lag,
        lambda: partitions(settings),
        topics,
        progress,
        limit=1.0,
        give_up=gave_up.set,
    ), gave_up


def test_lag_is_what_is_not_yet_committed(settings: ProcessorSettings, topics: TestTopics) -> None:
    """Records since the committed offset, by topic; all of them where nothing was ever committed."""
    publish(settings, 25)
    lag = Lag(settings.brokers, settings.group("worker"))
    topic = settings.topic(DUE_EMAILS)
    assert lag.measure(frozenset()) == {}
    assert lag.measure(partitions(settings)) == {topic: 25}
    consumer = Consumer(
        {
            "bootstrap.servers": settings.kafka_bootstrap_servers,
            "group.id": settings.group("worker"),
        }
    )
    first = len([m for m in topics.read(DUE_EMAILS) if m.partition() == 0])
    consumer.commit(offsets=[TopicPartition(topic, 0, first)], asynchronous=False)
    consumer.close()
    assert lag.measure(partitions(settings)) == {topic: 25 - first}
    lag.close()


def test_a_worker_that_does_nothing_ends_itself(
    settings: ProcessorSettings,
    topics: TestTopics,  # noqa: ARG001  they must be there
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Records wait and no batch is taken: the process is ended with a line that says which step and how much."""
    publish(settings, 3)
    stall_watch, gave_up = watch(settings, Progress())
    with caplog.at_level(logging.CRITICAL):
        stall_watch.start()
        assert gave_up.wait(30)
    stall_watch.stop()
    assert "reservation: stalled: 3 records wait" in caplog.text


def test_a_worker_with_a_batch_in_hand_is_left_alone(
    settings: ProcessorSettings,
    topics: TestTopics,  # noqa: ARG001  they must be there
) -> None:
    """However long an outage holds the batch up, it is no stall; once it is given up for idle it is one."""
    publish(settings, 3)
    progress = Progress()
    progress.begin(STEP)
    stall_watch, gave_up = watch(settings, progress)
    stall_watch.start()
    assert not gave_up.wait(3)
    progress.end(STEP, time.monotonic())
    assert gave_up.wait(30)
    stall_watch.stop()
