"""Reservation: each due e-mail becomes one dispatch, and none is lost between Postgres and Kafka."""

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from contract.database import Connection, Pool
from contract.events import (
    DEAD_LETTERS,
    DUE_EMAILS,
    SEND_EMAILS,
    DueEmail,
    SendEmail,
    decode_dead_letter,
    decode_send_email,
    encode,
)
from processor.consuming import Done, Status
from processor.emitting import Emitter
from processor.reservation import Reservation
from processor.settings import ProcessorSettings
from testbed import Testbed
from tests.conftest import Database, TestTopics
from tests.integration.conftest import START, Post, due, fetch, fetch_one, pool_of, records


@pytest.fixture
def reservation(settings: ProcessorSettings, worker: Pool, emitter: Emitter) -> Reservation:
    """The step."""
    return Reservation(settings, worker, emitter)


def emitted(topics: TestTopics) -> list[SendEmail]:
    """All send events, by dispatch."""
    events = [decode_send_email(value) for value in topics.values(SEND_EMAILS)]
    return sorted(events, key=lambda event: event.dispatch_id)


class Cut(Emitter):
    """A worker that is killed after its commit and before it emits."""

    async def emit(self, emissions: object) -> None:  # noqa: ARG002
        """Ends like a killed process: nothing that comes after is done."""
        raise asyncio.CancelledError


async def killed_before_emitting(
    settings: ProcessorSettings, worker: Pool, emails: list[DueEmail]
) -> None:
    """Reserves due e-mails of partition 0 and emits nothing."""
    step = Reservation(settings, worker, Cut(settings.brokers))
    with pytest.raises(asyncio.CancelledError):
        await step(records(emails))


async def test_emits_what_it_reserved(
    reservation: Reservation, topics: TestTopics, owner: Connection
) -> None:
    """A due e-mail is emitted once, complete, under its dispatch, and keyed by its user."""
    email = due(7, variables={"n": [1, "ä"]}, not_after=START + timedelta(days=9999))
    done = await reservation(records([email], partition=3, offset=41))
    assert done == Done(Status.SENT, users=1, sent=1)
    (message,) = topics.read(SEND_EMAILS)
    assert message.key() == b"user7"
    event = decode_send_email(message.value() or b"")
    row = ("user7", "c", "hello", "c", 3, 41, event.reserved_at)
    assert await fetch(
        owner,
        """
        SELECT d.user_id, d.campaign_id, d.email_key, p.campaign_id, source_partition, source_offset, reserved_at
          FROM dispatches d JOIN pending p USING (dispatch_id) WHERE dispatch_id = %s""",
        event.dispatch_id,
    ) == [row]
    assert all(getattr(event, name) == getattr(email, name) for name in email.__struct_fields__)


async def test_1200_due_emails_are_6_queries(
    reservation: Reservation, topics: TestTopics, owner: Connection
) -> None:
    """1,200 due e-mails run exactly 6 statements in the database, counted by Postgres itself."""
    await reservation(records([due(0)]))  # opens the connections
    await owner.execute(
        "SELECT public.pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = current_database()"
    )
    done = await reservation(records([due(n) for n in range(1, 1201)], offset=1))
    calls = await fetch(
        owner,
        """
        SELECT sum(calls)::int, sum(rows)::int FROM public.pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
         WHERE d.datname = current_database() AND s.userid = 'worker'::regrole""",
    )
    assert calls == [(6, 1200)]
    assert done == Done(Status.SENT, users=1200, sent=1200)
    assert len(emitted(topics)) == 1201


@pytest.mark.parametrize("block_size", [200, 5])
async def test_a_repeat_is_one_dispatch(  # noqa: PLR0917  fixtures
    settings: ProcessorSettings,
    worker: Pool,
    emitter: Emitter,
    topics: TestTopics,
    owner: Connection,
    block_size: int,
) -> None:
    """A due e-mail that is published twice, in one block or in two, is reserved and emitted once."""
    settings = settings.model_copy(update={"reservation_block_size": block_size})
    emails = [due(n) for n in range(5)]
    done = await Reservation(settings, worker, emitter)(records([*emails, *emails]))
    assert done == Done(Status.SENT, users=5, sent=5)
    assert [e.user_id for e in emitted(topics)] == [e.user_id for e in emails]
    assert await fetch_one(owner, "SELECT count(*) FROM dispatches") == 5
    assert await fetch(
        owner, "SELECT campaign_id, source_partition, dispatches FROM dispatch_counts"
    ) == [("c", 0, 5)]


async def test_another_email_of_the_same_user_is_another_dispatch(
    reservation: Reservation, topics: TestTopics
) -> None:
    """The same user gets each `email_key` of each campaign."""
    emails = [due(1), due(1, email_key="goodbye"), due(1, "d")]
    assert await reservation(records(emails)) == Done(Status.SENT, users=1, sent=3)
    assert {event.key for event in emitted(topics)} == {email.key for email in emails}


async def test_workers_with_the_same_blocks_at_once(  # noqa: PLR0917  fixtures
    settings: ProcessorSettings,
    database: Database,
    emitter: Emitter,
    topics: TestTopics,
    owner: Connection,
    refusals: Callable[[], list[str]],
) -> None:
    """Workers that are given the same due e-mails at once, in different orders, win each of them once and never deadlock."""
    emails = [due(n, f"campaign {n % 7}") for n in range(600)]
    orders = [records(emails, partition=place) for place in range(6)]
    for place, order in enumerate(orders):
        order[:] = order[place * 100 :] + order[: place * 100]
        if place % 2:
            order.reverse()
    async with pool_of(database.worker, 6) as pool:
        step = Reservation(settings, pool, emitter)
        done = await asyncio.gather(*(step(order) for order in orders))
    assert sum(d.sent for d in done) == 600
    assert {event.key for event in emitted(topics)} == {email.key for email in emails}
    assert len(emitted(topics)) == 600
    assert await fetch_one(owner, "SELECT count(*) FROM dispatches") == 600
    assert await fetch_one(owner, "SELECT sum(dispatches)::int FROM dispatch_counts") == 600
    assert await fetch_one(owner, "SELECT count(*) FROM pending") == 600
    assert refusals() == []


async def test_killed_between_commit_and_emission(
    settings: ProcessorSettings, worker: Pool, reservation: Reservation, topics: TestTopics
) -> None:
    """What a killed worker had reserved and not emitted is emitted when the same records come again."""
    emails = [due(n) for n in range(10)]
    await killed_before_emitting(settings, worker, emails)
    assert emitted(topics) == []
    assert await reservation(records(emails)) == Done(Status.SENT, users=10, sent=10)
    assert [event.user_id for event in emitted(topics)] == [email.user_id for email in emails]


async def test_other_records_are_no_redelivery(
    settings: ProcessorSettings, worker: Pool, reservation: Reservation, topics: TestTopics
) -> None:
    """A young reservation is not emitted again for a record that is merely a repeat of its due e-mail."""
    await killed_before_emitting(settings, worker, [due(1)])
    assert await reservation(records([due(1)], offset=5)) == Done(Status.SENT, users=1, sent=0)
    assert await reservation(records([due(1)], partition=1)) == Done(Status.SENT, users=1, sent=0)
    assert emitted(topics) == []


async def test_an_old_reservation_is_healed_by_any_record(
    settings: ProcessorSettings,
    worker: Pool,
    reservation: Reservation,
    topics: TestTopics,
    owner: Connection,
) -> None:
    """A reservation that is unplanned for over a minute is emitted again for any record of its due e-mail, once."""
    await killed_before_emitting(settings, worker, [due(1)])
    await owner.execute("UPDATE pending SET reserved_at = reserved_at - interval '61 seconds'")
    done = await reservation(records([due(1), due(1)], partition=1, offset=90))
    assert done == Done(Status.SENT, users=1, sent=1)
    assert [event.user_id for event in emitted(topics)] == ["user1"]


async def test_a_second_emission_is_dropped_by_planning(
    reservation: Reservation, topics: TestTopics, post: Post
) -> None:
    """An event that was emitted twice becomes one message."""
    await reservation(records([due(1)]))
    assert (await reservation(records([due(1)]))).sent == 1
    values = topics.values(SEND_EMAILS)
    assert len(values) == 2
    assert (await post.planning(records(values, SEND_EMAILS))).sent == 1
    assert len(await post.states()) == 1
    assert (await reservation(records([due(1)]))).sent == 0


async def test_send_email_false_does_nothing(
    settings: ProcessorSettings,
    worker: Pool,
    emitter: Emitter,
    topics: TestTopics,
    owner: Connection,
) -> None:
    """With `SEND_EMAIL=false` nothing is reserved and nothing emitted, not even a dead letter."""
    settings = settings.model_copy(update={"send_email": False})
    done = await Reservation(settings, worker, emitter)(records([due(1), b"no JSON"]))
    assert done == Done(Status.DISABLED, users=1, sent=0)
    await assert_untouched(owner, topics)


async def test_sending_off_does_nothing(
    reservation: Reservation, topics: TestTopics, owner: Connection
) -> None:
    """While the fleet's sending is off nothing is reserved or emitted, and once it is on the same records are."""
    await owner.execute("UPDATE fleet SET sending = false")
    batch = records([due(1), due(2), b"no JSON"])
    assert await reservation(batch) == Done(Status.DISABLED, users=2, sent=0)
    await assert_untouched(owner, topics)
    await owner.execute("UPDATE fleet SET sending = true")
    assert await reservation(batch) == Done(Status.SENT, users=2, sent=2)
    assert len(topics.read(DEAD_LETTERS)) == 1


async def assert_untouched(owner: Connection, topics: TestTopics) -> None:
    """Nothing was reserved or emitted."""
    for table in ("dispatches", "pending", "dispatch_counts"):
        assert await fetch(owner, f"SELECT * FROM {table}") == []  # noqa: S608  three names
    assert topics.read(SEND_EMAILS) == []
    assert topics.read(DEAD_LETTERS) == []


async def test_a_refused_row_costs_only_itself(
    reservation: Reservation, topics: TestTopics, owner: Connection
) -> None:
    """What Postgres refuses of a block becomes a dead letter, and all the rest of the block is emitted."""
    await owner.execute(
        "ALTER TABLE dispatches ADD CHECK (user_id NOT IN ('user0', 'user77', 'user199'))"
    )
    done = await reservation(records([due(n) for n in range(200)], partition=1, offset=1000))
    assert done == Done(Status.SENT, users=200, sent=197)
    assert len(emitted(topics)) == 197
    letters = [decode_dead_letter(value) for value in topics.values(DEAD_LETTERS)]
    assert [(letter.partition, letter.offset) for letter in letters] == [
        (1, 1000),
        (1, 1077),
        (1, 1199),
    ]
    assert all("dispatches_user_id_check" in letter.reason for letter in letters)
    assert await fetch_one(owner, "SELECT dispatches FROM dispatch_counts") == 197


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"no JSON", "malformed"),
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (
            b'{"user_id": "u", "campaign_id": "c", "email_key": "k"}',
            "missing required field `email`",
        ),
        (encode(due(1)).replace(b"@", b"(at)"), "no address"),
        (encode(due(1)).replace(b"user1@", b"a\\u0000@"), "control character"),
        (encode(due(1)).replace(b'"c"', b'"\\u0000"'), "NUL"),
        (encode(due(1)).replace(b'"c"', b'"' + b"c" * 201 + b'"'), "201 bytes"),
        (encode(due(1))[:-1] + b', "variables": ' + b"[" * 5000 + b"]" * 5000 + b"}", "variables"),
        (encode(due(1)).replace(b"user1@", b"a\\r\\nBcc: b@"), "control character"),
        (encode(due(1)).replace(b"user1@", b"u" * 310 + b"@"), "at most 320"),
        (encode(due(1)).replace(b'"c"', b"4711"), "Expected `str`, got `int`"),
        (
            encode(due(1))[:-1] + b', "variables": {"x": "' + b"x" * 65_536 + b'"}}',
            "at most 65536",
        ),
        (encode(due(1))[:-1] + b', "variables": {"x": 1e200000}}', "out of range"),
        (encode(due(1))[:-1] + b', "not_after": "2026-01-01T00:00:00"}', "timezone"),
    ],
)
async def test_a_bad_event_is_a_dead_letter(
    reservation: Reservation, topics: TestTopics, value: bytes, reason: str
) -> None:
    """An unusable record becomes a dead letter that says where it stood and why, and the others are emitted."""
    done = await reservation(records([due(1), value, due(2)], partition=1, offset=7))
    assert done == Done(Status.SENT, users=2, sent=2)
    (message,) = topics.read(DEAD_LETTERS)
    letter = decode_dead_letter(message.value() or b"")
    assert (letter.topic, letter.partition, letter.offset) == (DUE_EMAILS, 1, 8)
    assert reason in letter.reason
    assert letter.value.encode() == value[: 64 * 1024]
    assert message.key() == DUE_EMAILS.encode()


async def test_what_is_not_utf8_is_kept_as_it_is(
    reservation: Reservation, topics: TestTopics
) -> None:
    """A record that is not UTF-8 becomes a dead letter in base64, and the others are emitted."""
    value = encode(due(1)).replace(b"user1@", b"us\xff\xfer@")
    done = await reservation(records([due(1), value, due(2)]))
    assert done == Done(Status.SENT, users=2, sent=2)
    (letter,) = [decode_dead_letter(v) for v in topics.values(DEAD_LETTERS)]
    assert letter.encoding == "base64"
    assert b64decode(letter.value) == value


async def test_an_outage_of_postgres_is_raised_and_the_batch_given_again(
    testbed: Testbed, reservation: Reservation, database: Database, topics: TestTopics
) -> None:
    """A connection that dies within a batch is an outage, after which the same batch is done in full."""
    batch = records([due(n) for n in range(400)])
    await reservation(batch[:1])
    async with terminated(testbed, database):
        pass
    assert (await reservation(batch)).sent == 400
    assert len({event.key for event in emitted(topics)}) == 400


@asynccontextmanager
async def terminated(testbed: Testbed, database: Database) -> AsyncIterator[None]:
    """Ends every connection of the worker."""
    del testbed
    async with pool_of(database.owner, 1) as pool, pool.connection() as connection:
        await connection.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = 'worker'"
        )
        yield
