"""A worker from `due-emails` to acknowledged `send-emails`, against Faust alone.

The value is one `fairpost worker` process with planning off: it takes the events, reserves them in PostgreSQL (fsync
on), emits them and waits for the broker. The baseline (`bare_loop`) takes the same events from the same topic by the
same recipe and settings, and does nothing but acknowledge them: the ceiling that Faust sets.

Each repeat has a database and topics of its own and publishes the events once; each half reads them under a group of
its own. A worker's event is done when the broker appended it to `send-emails`, an event of the bare loop when it was
acknowledged. Rates leave out the first and the last tenth of the events, and with them the start of either process and
the wait for more events before the last, partial batch.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from confluent_kafka import Consumer, TopicPartition

from benchmarks.measurement import Measurement, Pair, compare, steady_rate
from benchmarks.workload import due_emails
from contract.events import DUE_EMAILS, SEND_EMAILS
from processor.brokers import Brokers
from processor.emitting import Emission
from processor.publishing import Publisher
from testbed import Testbed
from testbed.installation import Installation, OperatorRule
from testbed.processes import Process, wait_until

NAME: Final = "due_to_send"
_EVENTS: Final = 40_000
_PARTITIONS: Final = 4
_REPEATS: Final = 5
_TIMEOUT: Final = 60.0
_ROOT: Final = Path(__file__).parents[1]


def measure(testbed: Testbed) -> list[Measurement]:
    """Events a second, a worker against the bare loop."""
    return compare([NAME], "events/s", lambda number: _repeat(testbed, number), repeats=_REPEATS)


def _repeat(testbed: Testbed, number: int) -> list[Pair]:
    with published(testbed, f"{NAME}_{number}", _EVENTS) as installation:
        return [
            Pair(
                value=steady_rate(emitted_times(testbed, installation, _EVENTS)),
                baseline=steady_rate(_bare_times(installation)),
            )
        ]


@contextmanager
def published(testbed: Testbed, name: str, events: int) -> Iterator[Installation]:
    """An installation on whose topic `due-emails` so many events wait."""
    # Made before the installation makes those that are missing: the broker's clock says when each event was there.
    testbed.kafka.create_topic(
        f"{name}.{SEND_EMAILS}", _PARTITIONS, {"message.timestamp.type": "LogAppendTime"}
    )
    with Installation(
        testbed, name, [OperatorRule("other")], partitions=_PARTITIONS
    ) as installation:
        topic = installation.topic(DUE_EMAILS)
        publisher = Publisher(Brokers(testbed.kafka.bootstrap_servers))
        answers = publisher.publish(
            [Emission(topic, due.user_id, due) for due in due_emails(events)]
        )
        assert not any(answers), next(filter(None, answers))
        yield installation


def emitted_times(testbed: Testbed, installation: Installation, events: int) -> list[float]:
    """When each event was appended to `send-emails` by a worker with planning off, in seconds."""
    topic = installation.topic(SEND_EMAILS)
    partitions = [TopicPartition(topic, number, 0) for number in range(_PARTITIONS)]
    consumer = Consumer(
        {
            "bootstrap.servers": testbed.kafka.bootstrap_servers,
            "group.id": "reads-without-a-group",
            "enable.auto.commit": False,
            "log_level": 2,
        }
    )
    worker = installation.start_worker(FAIRPOST_PLANNING="false", FAIRPOST_LOG_LEVEL="WARNING")
    try:
        wait_until(
            lambda: (
                sum(consumer.get_watermark_offsets(p, timeout=5)[1] for p in partitions) >= events
            ),
            timeout=_TIMEOUT,
            what=f"{events} events on {topic}",
        )
        worker.stop()
        consumer.assign(partitions)
        messages = consumer.consume(events, timeout=_TIMEOUT)
    finally:
        worker.stop()
        consumer.close()
    assert len({message.key() for message in messages}) == events
    return [message.timestamp()[1] / 1000 for message in messages]


def _bare_times(installation: Installation) -> list[float]:
    """When each event was acknowledged, in seconds."""
    result = installation.directory / "bare-loop.json"
    process = Process(
        "bare loop",
        [sys.executable, "-m", "benchmarks.bare_loop", str(_EVENTS), str(result)],
        log=installation.directory / "bare-loop.log",
        environment={**installation.environment, "PYTHONPATH": str(_ROOT)},
    )
    try:
        process.start(result.exists, timeout=_TIMEOUT)
    finally:
        process.stop()
    return msgspec.json.decode(result.read_bytes(), type=list[float])
