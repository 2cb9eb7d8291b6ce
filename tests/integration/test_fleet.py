"""The fleet's switch: off, nothing is reserved, emitted or handed over; on again, all that waited goes out once."""

import asyncio
import urllib.request
from collections import Counter
from datetime import UTC, datetime

import msgspec
import psycopg
from confluent_kafka import Consumer, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from contract.database import Connection, Pool, conninfo
from contract.events import CAMPAIGNS, DUE_EMAILS, SEND_EMAILS, decode_send_email
from contract.metrics import REGISTRIES, Process
from processor.consuming import Done, Status
from processor.emitting import Emission, Emitter
from processor.fleet import Sending, show_sending, switch_sending
from processor.observation import observe
from processor.publishing import Publisher
from processor.reservation import Reservation
from processor.settings import ProcessorSettings
from testbed.processes import wait_until
from tests.conftest import Database, TestTopics
from tests.integration.conftest import (
    Fairpost,
    Post,
    Start,
    due,
    fetch,
    fetch_one,
    records,
    scheduled,
)

PATIENCE = 60

# Somebody switches the fleet off while the third block of a batch is waited for.
SWITCHED_OFF_AFTER_TWO_BLOCKS = """
CREATE FUNCTION switch_off() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = fairpost AS $$
BEGIN
  UPDATE fleet SET sending = false WHERE (SELECT count(*) FROM dispatches) >= 400;
  RETURN NULL;
END $$;
CREATE TRIGGER switch_off AFTER INSERT ON dispatches FOR EACH STATEMENT EXECUTE FUNCTION switch_off()"""


async def switch(pool: Pool, *, sending: bool, actor: str = "ann") -> bool:
    """Switches the fleet under the role of the command line."""
    async with pool.connection() as connection:
        return await switch_sending(connection, sending=sending, actor=actor)


async def shown(pool: Pool) -> Sending:
    """How the fleet stands, as that role sees it."""
    async with pool.connection() as connection:
        return await show_sending(connection)


async def test_a_new_fleet_sends(worker: Pool) -> None:
    """A fleet sends from the start, and nobody is said to have switched it."""
    found = await shown(worker)
    assert (found.sending, found.changed_by) == (True, None)


async def test_who_switched_it_and_when(worker: Pool, owner: Connection) -> None:
    """A switch is on record with its time and actor; what changes nothing leaves that as it was."""
    before = datetime.now(UTC)
    assert await switch(worker, sending=False, actor="ann")
    off = await shown(worker)
    assert (off.sending, off.changed_by) == (False, "ann")
    assert before <= off.changed_at <= datetime.now(UTC)
    assert not await switch(worker, sending=False, actor="ben")
    assert await shown(worker) == off
    assert await switch(worker, sending=True, actor="ben")
    on = await shown(worker)
    assert (on.sending, on.changed_by) == (True, "ben")
    assert on.changed_at > off.changed_at
    assert await fetch(owner, "SELECT actor, action, subject, at FROM audit ORDER BY audit_id") == [
        ("ann", "sending.off", "fleet", off.changed_at),
        ("ben", "sending.on", "fleet", on.changed_at),
    ]


async def test_a_switch_by_hand_is_nobodys(worker: Pool, owner: Connection) -> None:
    """Who last used the command is not blamed for what was changed in the database itself."""
    await switch(worker, sending=False)
    await owner.execute("UPDATE fleet SET sending = true, changed_at = clock_timestamp()")
    found = await shown(worker)
    assert (found.sending, found.changed_by) == (True, None)


async def test_two_people_at_once(worker: Pool, owner: Connection) -> None:
    """Of people who switch it off at the same moment one does, and one is on record."""
    switched = await asyncio.gather(
        *(switch(worker, sending=False, actor=f"person {n}") for n in range(4))
    )
    assert sorted(switched) == [False, False, False, True]
    assert await fetch(owner, "SELECT actor FROM audit") == [
        (f"person {switched.index(True)}",),
    ]
    assert (await shown(worker)).changed_by == f"person {switched.index(True)}"


def test_the_commands(fairpost: Fairpost) -> None:
    """`off`, `on` and `status` say in one line how the fleet stands; the exit code is 0 whichever it is."""
    assert fairpost("sending", "status").out.startswith(b"sending is on since 2")
    off = fairpost("sending", "off")
    assert (off.code, off.out) == (0, b"")
    assert off.err.startswith("sending is off since 2")
    assert fairpost("sending", "off").err == off.err.strip() + ": nothing to switch\n"
    status = fairpost("sending", "status")
    assert (status.code, status.out.decode(), status.err) == (0, off.err, "")
    [told] = msgspec.json.decode(fairpost("sending", "status", "--json").out)
    assert told.keys() == {"sending", "changed_at", "changed_by"}
    assert (told["sending"], off.err.strip().endswith(f", by {told['changed_by']}")) == (
        False,
        True,
    )
    assert fairpost("sending", "on").err.startswith("sending is on since 2")
    [told] = msgspec.json.decode(fairpost("sending", "status", "--json").out)
    assert told["sending"] is True


async def test_the_metric(worker: Pool) -> None:
    """The tracker shows whether the fleet sends."""
    for sending in (False, True):
        await switch(worker, sending=sending)
        async with worker.connection() as connection:
            await observe(connection)
        assert REGISTRIES[Process.TRACKER].get_sample_value("fairpost_sending") == sending


async def test_switched_off_within_a_batch(
    settings: ProcessorSettings,
    worker: Pool,
    emitter: Emitter,
    topics: TestTopics,
    owner: Connection,
) -> None:
    """A batch of which two blocks are reserved when the fleet is switched off emits nothing, and all of it once later."""
    await owner.execute(SWITCHED_OFF_AFTER_TWO_BLOCKS)
    reservation = Reservation(settings, worker, emitter)
    batch = records([due(n) for n in range(1200)])
    for _ in range(2):
        assert await reservation(batch) == Done(Status.DISABLED, users=1200, sent=0)
    assert await fetch_one(owner, "SELECT count(*) FROM dispatches") == 400
    assert topics.read(SEND_EMAILS) == []
    await owner.execute("DROP TRIGGER switch_off ON dispatches")
    await switch(worker, sending=True)
    assert await reservation(batch) == Done(Status.SENT, users=1200, sent=1200)
    events = [decode_send_email(value) for value in topics.values(SEND_EMAILS)]
    assert Counter(event.user_id for event in events) == Counter(f"user{n}" for n in range(1200))
    assert await reservation(records([due(n) for n in range(1200)], partition=1)) == Done(
        Status.SENT, users=1200, sent=0
    )


async def test_nothing_is_claimed_or_handed_over(post: Post) -> None:
    """A lane gets no chunk and a running one no further message, until the fleet sends again."""
    await post.apply(scheduled(), scheduled("d"))
    await post.plan([due(n) for n in range(4)])
    await post.plan([due(9, "d")])
    claim, _ = await post.hand(2)
    await switch(post.worker, sending=False)
    assert (await post.handover().write_ahead(claim, 2, 1)).outcome == "sending is off"
    assert await post.claims("postfix-b").claim("other") is None
    assert Counter((await post.states()).values()) == {"handed": 2, "planned": 3}
    await switch(post.worker, sending=True)
    assert len((await post.handover().write_ahead(claim, 2, 2)).recipients) == 2
    assert await post.claims("postfix-b").claim("other") is not None


def test_a_worker_that_runs(
    settings: ProcessorSettings,
    database: Database,
    topics: TestTopics,
    fairpost: Fairpost,
    start: Start,
) -> None:
    """Due e-mails that come while the fleet is off wait unread on their topic, and once it is on each is planned once."""
    publisher = Publisher(settings.brokers)

    def publish(first: int, end: int) -> None:
        emissions = [
            Emission(settings.topic(DUE_EMAILS), f"user{n}", due(n)) for n in range(first, end)
        ]
        assert set(publisher.publish(emissions)) == {None}

    def planned() -> int:
        with psycopg.connect(conninfo(database.owner, "test")) as connection:
            row = connection.execute("SELECT count(*) FROM messages").fetchone()
        return int(row[0]) if row else 0

    worker = start("worker")
    publish(0, 100)
    wait_until(lambda: planned() == 100, timeout=PATIENCE, what="planned")
    wait_until(lambda: committed(settings) == 100, timeout=PATIENCE, what="acknowledged")
    assert fairpost("sending", "off").code == 0
    publish(50, 300)
    wait_until(lambda: disabled(worker.metrics_port) >= 3, timeout=PATIENCE, what="refused")
    assert len(topics.read(SEND_EMAILS)) == planned() == 100
    assert committed(settings) == 100, "unread as far as Kafka knows"
    assert fairpost("sending", "on").code == 0
    wait_until(lambda: planned() == 300, timeout=PATIENCE, what="planned")
    wait_until(lambda: committed(settings) == 350, timeout=PATIENCE, what="acknowledged")
    events = [decode_send_email(value) for value in topics.values(SEND_EMAILS)]
    assert Counter(event.user_id for event in events) == Counter(f"user{n}" for n in range(300))


def test_a_backlog_that_waits_holds_up_no_other_topic(
    settings: ProcessorSettings,
    database: Database,
    topics: TestTopics,  # noqa: ARG001  they must be there
    fairpost: Fairpost,
    start: Start,
) -> None:
    """While more due e-mails wait than a worker can buffer, campaign events are applied as ever."""
    publisher = Publisher(settings.brokers)
    assert fairpost("sending", "off").code == 0
    topic = settings.topic(DUE_EMAILS)
    emails = [Emission(topic, f"user{n}", due(n)) for n in range(30_000)]
    assert set(publisher.publish(emails)) == {None}
    worker = start("worker")
    wait_until(lambda: disabled(worker.metrics_port) >= 5, timeout=PATIENCE, what="refused")
    campaign = scheduled()
    publisher.publish([Emission(settings.topic(CAMPAIGNS), campaign.campaign_id, campaign)])

    def state() -> list[object]:
        with psycopg.connect(conninfo(database.owner, "test")) as connection:
            return [row[0] for row in connection.execute("SELECT state FROM campaigns").fetchall()]

    wait_until(lambda: state() == ["active"], timeout=PATIENCE, what="the campaign event applied")


def committed(settings: ProcessorSettings) -> int:
    """How many due e-mails the workers have acknowledged."""
    consumer = Consumer(
        {
            "bootstrap.servers": settings.kafka_bootstrap_servers,
            "group.id": settings.group("worker"),
            "log_level": 2,
        }
    )
    try:
        topic = settings.topic(DUE_EMAILS)
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        found = consumer.committed([TopicPartition(topic, n) for n in partitions], timeout=10)
        return sum(max(0, partition.offset) for partition in found)
    finally:
        consumer.close()


def disabled(port: int) -> float:
    """How often a worker found that the fleet does not send."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        families = text_string_to_metric_families(page.read().decode())
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "fairpost_batches_total"
        and sample.labels == {"step": "reservation", "status": "disabled"}
    )
