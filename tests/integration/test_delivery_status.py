"""`delivery-status` end to end: each status is told with its fields, whatever happens to who tells it and who reads it."""

import importlib.util
from collections.abc import Callable, Sequence
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

from contract.events import DELIVERY_STATUS, DeliveryStatus, decode_delivery_status
from contract.states import MessageState
from processor.emitting import Emission
from processor.housekeeping import sweep_all
from processor.instances import retire_instance
from processor.outbox import Outbox
from processor.publishing import Publisher
from processor.settings import ProcessorSettings
from processor.tracking import Tracking
from tests.conftest import TestTopics
from tests.integration.conftest import INSTANCE, Post, cancelled, due, fetch, scheduled
from tests.integration.test_tracking import bounced, deferred, expired, queued, sent, track

CONSUMER = Path(__file__).parents[2] / "docs" / "events" / "consumer.py"
OTHER = "postfix-b"
NEVER_TOLD = {MessageState.PLANNED, MessageState.HANDED}

Fields = tuple[str | None, str | None, str | None, int, str | None]

# class, dsn, reply, attempt and instance of the last event of a message that became so.
LAST: dict[str, Fields] = {
    "queued": (None, None, None, 0, INSTANCE),
    "deferred": ("soft", "4.3.0", "host mx said: 451 4.3.0 Later, at 3", 1, INSTANCE),
    "sent": (None, "2.0.0", "250 2.0.0 Ok", 1, INSTANCE),
    "bounced": (
        "hard",
        "5.1.1",
        "host mx said: 550 5.1.1 User unknown (in reply to RCPT TO command)",
        1,
        INSTANCE,
    ),
    "expired": (None, None, None, 0, INSTANCE),
    "rejected": (None, "5.6.0", "no such template", 0, INSTANCE),
    "suppressed": (None, None, None, 0, None),
    "cancelled": (None, None, None, 0, None),
    "uncertain": (None, None, f"instance {OTHER} was retired", 0, OTHER),
}
REJECT = """
SELECT reject(%s, ARRAY[%s::bigint], ARRAY[%s::timestamptz], '{5.6.0}', '{no such template}')"""


async def nine_ends(post: Post) -> dict[int, str]:
    """Messages that became all that can be told, each by those who bring it about; the status by dispatch."""
    await post.apply(scheduled(), scheduled("stopped"), scheduled("lost"))
    suppressed, *ours = await post.plan([due(n) for n in range(7)])
    active, later, done, refused, old, wrong = ours
    await post.owner.execute(
        "INSERT INTO suppressions (mailbox, source, reason, since) VALUES ('user0@example.test', 'person', 'left', now())"
    )
    await post.ripen()
    batch = await post.handover().write_ahead(await post.claim(), 1, 7)
    assert [recipient.dispatch_id for recipient in batch.recipients] == ours
    [lost] = await post.plan([due(7, "lost")])
    await post.hand(1, OTHER)
    [stopped] = await post.plan([due(8, "stopped")])
    await post.apply(cancelled("stopped"))

    [(handed_at,)] = await fetch(
        post.owner, "SELECT handed_at FROM messages WHERE dispatch_id = %s", wrong
    )
    async with post.agent.connection() as agent:
        await agent.execute(REJECT, (INSTANCE, wrong, handed_at))
        await agent.execute("SELECT register_instance(%s, 'machine', '/q', '1', true)", (OTHER,))
    tracking = Tracking(post.worker, UTC)
    await track(tracking, *map(queued, (active, later, done, refused, old)))
    await track(tracking, deferred(later, 3), sent(done, 4), bounced(refused, 5), expired(old, 6))
    async with post.worker.connection() as worker:
        await sweep_all(worker)
        await retire_instance(worker, OTHER, "ann", force=True)
    ends = (suppressed, active, later, done, refused, old, wrong, lost, stopped)
    states = await post.states()
    return {dispatch_id: states[dispatch_id] for dispatch_id in ends}


class KilledError(BaseException):
    """The publisher's process ends here."""


class Killed(Publisher):
    """A publisher that is killed when the broker has everything, and nothing is deleted yet."""

    def publish(self, emissions: Sequence[Emission]) -> list[str | None]:
        """Publishes, and dies."""
        super().publish(emissions)
        raise KilledError


async def publish_twice(settings: ProcessorSettings, post: Post) -> None:
    """One publisher is killed before it deletes; the next one tells everything once more."""
    async with post.worker.connection() as connection:
        with pytest.raises(KilledError):
            await Outbox(settings, Killed(settings.brokers)).publish(connection)
        outbox = Outbox(settings, Publisher(settings.brokers))
        while await outbox.publish(connection):
            pass


async def test_each_status_is_told(
    settings: ProcessorSettings, post: Post, topics: TestTopics
) -> None:
    """All nine are published with all their fields, and after a kill once more, each with the `event_id` that it had."""
    ends = await nine_ends(post)
    assert set(ends.values()) == set(LAST) == set(MessageState) - NEVER_TOLD
    await publish_twice(settings, post)
    told: dict[int, list[DeliveryStatus]] = {}
    for value in topics.values(DELIVERY_STATUS):
        event = decode_delivery_status(value)
        told.setdefault(event.dispatch_id, []).append(event)
    assert told.keys() == ends.keys()
    for dispatch_id, status in ends.items():
        events = told[dispatch_id]
        once = events[: len(events) // 2]
        assert events == once * 2
        assert len({event.event_id for event in once}) == len(once)
        last = once[-1]
        assert last.status == status
        fields = (last.reply_class, last.dsn, last.reply, last.attempt, last.instance)
        assert fields == LAST[status]
        rows = await fetch(
            post.owner,
            "SELECT user_id, campaign_id, email_key, status_at FROM messages JOIN dispatches USING (dispatch_id)"
            " WHERE dispatch_id = %s",
            dispatch_id,
        )
        assert rows == [(last.user_id, last.campaign_id, last.email_key, last.at)]
        before = [event.status for event in once[:-1]]
        assert before == (
            ["queued"] if status in {"deferred", "sent", "bounced", "expired"} else []
        )


# ------------------------------------------------------------------ docs/events/consumer.py


def example() -> Any:
    """The example that stands in the documentation."""
    spec = importlib.util.spec_from_file_location("consumer", CONSUMER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_the_example_consumer(
    settings: ProcessorSettings, post: Post, topics: TestTopics
) -> None:
    """Killed after any event, it goes on where it was, ignores what comes again, and ends with the last status of each."""
    ends = await nine_ends(post)
    await publish_twice(settings, post)
    number = len(topics.values(DELIVERY_STATUS))
    consumer = example()
    statuses = consumer.LastStatuses()
    handled: list[bool] = []

    def consume(handle: Callable[[dict[str, Any]], object]) -> Any:
        return consumer.consume(
            settings.kafka_bootstrap_servers, "a-service", settings.topic(DELIVERY_STATUS), handle
        )

    def die_at_the_third(event: dict[str, Any]) -> None:
        handled.append(statuses.handle(event))
        if len(handled) == 3:
            raise KilledError

    with pytest.raises(KilledError):
        for _ in consume(die_at_the_third):
            pass
    for _ in consume(lambda event: handled.append(statuses.handle(event))):
        # The third one was handled and not acknowledged.
        if len(handled) == number + 1:
            break
    assert {d: event["status"] for d, event in statuses.by_dispatch.items()} == ends
    assert sum(handled) == number // 2
