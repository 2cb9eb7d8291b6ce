"""The outbox: every change of a state is told on `delivery-status`, and what was told is deleted, nothing else."""

from collections.abc import AsyncIterator, Sequence

import psycopg
import pytest

from contract.database import Connection, Pool
from contract.events import DELIVERY_STATUS, decode_delivery_status
from processor.brokers import Brokers
from processor.emitting import Emission
from processor.outbox import Outbox, OutboxError
from processor.publishing import Publisher
from processor.settings import ProcessorSettings
from tests.conftest import Database, TestTopics
from tests.integration.conftest import START, Post, cancelled, due, fetch, pool_of, scheduled


class PartlyAcknowledged(Publisher):
    """A broker that refuses the events of some users, as when the leader of their partition is away."""

    def __init__(self, brokers: Brokers, *refused: str) -> None:
        super().__init__(brokers)
        self._refused = refused

    def publish(self, emissions: Sequence[Emission]) -> list[str | None]:
        """Publishes the others."""
        accepted = [e for e in emissions if e.key not in self._refused]
        results = dict(zip(map(id, accepted), super().publish(accepted), strict=True))
        return [results.get(id(e), "refused") for e in emissions]


@pytest.fixture
def outbox(settings: ProcessorSettings, topics: TestTopics) -> Outbox:
    """The publisher of this installation's outbox, whose topics are there."""
    del topics
    return Outbox(settings, Publisher(settings.brokers))


@pytest.fixture
async def session(worker: Pool) -> AsyncIterator[Connection]:
    """A connection of the tracker."""
    async with worker.connection() as connection:
        yield connection


async def told(post: Post, number: int) -> list[int]:
    """Dispatches with a row each in the outbox."""
    await post.apply(scheduled(), cancelled())
    return await post.plan([due(n) for n in range(number)])


async def test_publishes_what_happened(
    post: Post, outbox: Outbox, session: Connection, topics: TestTopics
) -> None:
    """An event has the identity of its due e-mail and all that is known of its outcome, keyed by user; then its row is gone."""
    (dispatch_id,) = await post.plan([due(7)])
    await post.owner.execute(
        """
        INSERT INTO outbox (dispatch_id, at, status, attempt, class, dsn, reply, instance)
        VALUES (%s, %s, 'deferred', 3, 'soft', '4.2.2', 'full', 'postfix-a'), (%s, %s, 'sent', 4, NULL, NULL, NULL, NULL)""",
        (dispatch_id, START, dispatch_id, START),
    )
    assert await outbox.take(session)
    assert await outbox.publish(session) == 2
    messages = topics.read(DELIVERY_STATUS)
    assert [message.key() for message in messages] == [b"user7", b"user7"]
    first, second = (decode_delivery_status(message.value() or b"") for message in messages)
    assert (first.dispatch_id, first.user_id, first.campaign_id, first.email_key) == (
        dispatch_id,
        "user7",
        "c",
        "hello",
    )
    assert (first.status, first.reply_class, first.dsn, first.reply) == (
        "deferred",
        "soft",
        "4.2.2",
        "full",
    )
    assert (first.attempt, first.instance, first.at) == (3, "postfix-a", START)
    assert (second.status, second.reply_class, second.instance) == ("sent", None, None)
    assert second.event_id > first.event_id
    assert await fetch(post.owner, "SELECT * FROM outbox") == []
    assert await outbox.publish(session) == 0


async def test_a_users_events_are_in_order(
    post: Post, outbox: Outbox, session: Connection, topics: TestTopics
) -> None:
    """The events of each dispatch stand in one partition in the order in which they happened."""
    dispatch_ids = await post.plan([due(n) for n in range(50)])
    for status in ("queued", "deferred", "sent"):
        await post.owner.execute(
            "INSERT INTO outbox (dispatch_id, at, status) SELECT unnest(%s::bigint[]), now(), %s",
            (dispatch_ids, status),
        )
    assert await outbox.publish(session) == 150
    seen: dict[int, list[tuple[str, int | None]]] = {}
    for message in topics.read(DELIVERY_STATUS):
        event = decode_delivery_status(message.value() or b"")
        seen.setdefault(event.dispatch_id, []).append((event.status, message.partition()))
    assert seen.keys() == set(dispatch_ids)
    for events in seen.values():
        assert [status for status, _ in events] == ["queued", "deferred", "sent"]
        assert len({partition for _, partition in events}) == 1


async def test_only_acknowledged_rows_are_deleted(
    settings: ProcessorSettings, post: Post, session: Connection, topics: TestTopics
) -> None:
    """What the broker did not acknowledge stays, and is published later under the same `event_id`."""
    dispatch_ids = await told(post, 5)
    refusing = PartlyAcknowledged(settings.brokers, "user1", "user3")
    assert await Outbox(settings, refusing).publish(session) == 3
    left = await fetch(post.owner, "SELECT dispatch_id, event_id FROM outbox ORDER BY event_id")
    assert [dispatch_id for dispatch_id, _ in left] == [dispatch_ids[1], dispatch_ids[3]]
    assert await Outbox(settings, Publisher(settings.brokers)).publish(session) == 2
    events = [decode_delivery_status(value) for value in topics.values(DELIVERY_STATUS)]
    assert sorted(event.dispatch_id for event in events) == dispatch_ids
    assert {(event.dispatch_id, event.event_id) for event in events} >= set(left)


async def test_nothing_acknowledged_is_an_outage(
    settings: ProcessorSettings, post: Post, session: Connection
) -> None:
    """When the broker acknowledges nothing, it is said and nothing is deleted."""
    await told(post, 1)
    refusing = PartlyAcknowledged(settings.brokers, "user0")
    with pytest.raises(OutboxError, match="refused"):
        await Outbox(settings, refusing).publish(session)
    assert len(await fetch(post.owner, "SELECT * FROM outbox")) == 1


class Overtaken(Publisher):
    """A broker that takes so long that something else happens meanwhile."""

    def __init__(self, brokers: Brokers, database: str) -> None:
        super().__init__(brokers)
        self._database = database

    def publish(self, emissions: Sequence[Emission]) -> list[str | None]:
        """Publishes, and another row comes."""
        results = super().publish(emissions)
        with psycopg.connect(self._database) as connection:
            connection.execute(
                "INSERT INTO fairpost.outbox (dispatch_id, at, status) VALUES (1, now(), 'cancelled')"
            )
        return results


async def test_what_comes_meanwhile_stays(
    settings: ProcessorSettings,
    database: Database,
    post: Post,
    session: Connection,
    topics: TestTopics,
) -> None:
    """A row that is written while others are published is neither deleted nor lost."""
    await told(post, 1)
    publisher = Overtaken(settings.brokers, database.owner)
    assert await Outbox(settings, publisher).publish(session) == 1
    assert await fetch(post.owner, "SELECT event_id FROM outbox") == [(2,)]
    assert len(topics.read(DELIVERY_STATUS)) == 1


async def test_one_publisher_at_a_time(
    settings: ProcessorSettings, database: Database, outbox: Outbox, session: Connection
) -> None:
    """Of several trackers one publishes; another takes over when its session ends."""
    other = Outbox(settings, Publisher(settings.brokers))
    assert await outbox.take(session)
    assert await outbox.take(session)
    async with pool_of(database.worker, 1) as pool, pool.connection() as second:
        assert not await other.take(second)
        await session.close()
        while not await other.take(second):
            pass
        async with pool_of(database.worker, 1) as third_pool, third_pool.connection() as third:
            assert not await outbox.take(third)
