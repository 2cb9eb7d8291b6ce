"""`delivery-log` as the tracker takes it from Kafka: what was deleted before it was read is told, and proves nothing."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from urllib.request import urlopen

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from contract.events import DELIVERY_LOG, PostfixLine
from contract.settings import SettingsError
from processor.consuming import Record
from processor.delivery_log import DeliveryLog, Gap
from processor.emitting import Emission
from processor.partitions import await_partitions
from processor.publishing import Publisher
from processor.settings import ProcessorSettings
from testbed import Testbed
from testbed.installation import Running
from testbed.processes import wait_until
from tests.conftest import PARTITIONS, TestTopics
from tests.integration.conftest import INSTANCE, PATIENCE, Post, Start, fetch
from tests.integration.test_tracking import handed, queued


def publish(settings: ProcessorSettings, lines: Iterable[PostfixLine]) -> None:
    """Lines as Fluentd sends them."""
    topic = settings.topic(DELIVERY_LOG)
    emissions = [Emission(topic, line.instance, line) for line in lines]
    assert not any(Publisher(settings.brokers).publish(emissions))


def delete(settings: ProcessorSettings, partition: int, before: int) -> None:
    """Deletes what stands before an offset, as the topic's retention does."""
    admin = AdminClient({"bootstrap.servers": settings.kafka_bootstrap_servers})
    place = TopicPartition(settings.topic(DELIVERY_LOG), partition, before)
    for done in admin.delete_records([place]).values():
        done.result()


async def read(log: DeliveryLog, number: int) -> tuple[list[Record], list[Gap]]:
    """So many records."""
    records: list[Record] = []
    gaps: list[Gap] = []
    end = time.monotonic() + PATIENCE
    while len(records) < number:
        assert time.monotonic() < end, f"{len(records)} of {number}"
        more, missing = await log.read()
        records += more
        gaps += missing
    return records, gaps


async def test_what_was_deleted_unread(settings: ProcessorSettings, topics: TestTopics) -> None:
    """A tracker that starts, or comes back, after lines were deleted is told where; one that comes back in time is not."""
    publish(settings, [queued(n) for n in range(8)])
    [partition] = {message.partition() for message in topics.read(DELIVERY_LOG)}
    assert partition is not None
    delete(settings, partition, 3)

    first = DeliveryLog(settings, PARTITIONS)
    records, gaps = await read(first, 5)
    assert gaps == [Gap(partition, 0, 3)]
    await first.commit(records)
    publish(settings, [queued(n) for n in range(2)])
    records, gaps = await read(first, 2)
    assert gaps == []
    await first.close()  # these two are not acknowledged

    publish(settings, [queued(n) for n in range(5)])
    second = DeliveryLog(settings, PARTITIONS)
    records, gaps = await read(second, 7)
    assert ([record.offset for record in records], gaps) == (list(range(8, 15)), [])
    await second.commit(records[:2])
    await second.close()

    delete(settings, partition, 13)
    third = DeliveryLog(settings, PARTITIONS)
    records, gaps = await read(third, 2)
    assert ([record.offset for record in records], gaps) == ([13, 14], [Gap(partition, 10, 13)])
    await third.close()


async def test_partitions_that_were_added_are_not_read(
    settings: ProcessorSettings,
    topics: TestTopics,  # noqa: ARG001  they must be there
) -> None:
    """A tracker that is given a partition more than there were when it started reads no line of any, and says why."""
    publish(settings, [queued(1)])
    log = DeliveryLog(settings, PARTITIONS - 1)
    with pytest.raises(SettingsError, match="fairpost topics accept"):
        await read(log, 1)
    await log.close()


async def test_a_tracker_refuses_changed_partitions(
    testbed: Testbed, settings: ProcessorSettings, start: Start
) -> None:
    """With more partitions than before a tracker ends at its start with code 2, in one line that says what to do."""
    await await_partitions(settings)
    topic = settings.topic(DELIVERY_LOG)
    admin = AdminClient({"bootstrap.servers": testbed.kafka.bootstrap_servers})
    admin.create_partitions([NewPartitions(topic, PARTITIONS + 1)])[topic].result(10)
    process = start("tracker").process
    await asyncio.to_thread(
        wait_until, lambda: not process.running, timeout=PATIENCE, what="the tracker ends"
    )
    assert process.exit_code == 2
    assert process.log.read_text() == (
        f"topic {topic}: has {PARTITIONS + 1} partitions, must have {PARTITIONS}, as before: then a host's lines are in"
        " order, and fences judged rightly; mend: fairpost topics accept (its --help says when)\n"
    )


def metrics_of(running: Running) -> bytes:
    """What a process's metrics endpoint answers."""
    with urlopen(f"http://{running.address}:{running.metrics_port}/metrics") as answer:
        return bytes(answer.read())


async def test_a_tracker_that_was_away_too_long(
    settings: ProcessorSettings, post: Post, start: Start
) -> None:
    """It says so in one line, counts it, goes on with what is left, and no fence proves what was handed over before."""
    seen, lost = await handed(post, 2)
    await post.owner.execute("UPDATE handovers SET log_inode = 1")
    async with post.agent.connection() as connection:
        await connection.execute(
            "SELECT register_instance(%s, 'machine', '/q', '0.1', true)", (INSTANCE,)
        )
    publish(settings, [queued(lost), queued(seen)])
    for partition in range(PARTITIONS):
        with suppress(KafkaException):  # the one that has no records
            delete(settings, partition, 1)
    tracker = start("tracker")
    end = time.monotonic() + PATIENCE
    while await post.states() != {seen: "queued", lost: "handed"}:
        assert time.monotonic() < end, tracker.log.read_text()
        await asyncio.sleep(0.05)
    assert await fetch(post.owner, "SELECT DISTINCT log_inode FROM handovers") == [(None,)]
    [warning] = [line for line in tracker.log.read_text().splitlines() if " WARNING " in line]
    assert "offset 1 came where 0 should have" in warning
    assert "no fence can prove what became of 1 hand-overs" in warning
    assert b"fairpost_log_gaps_total 1.0" in await asyncio.to_thread(metrics_of, tracker)
