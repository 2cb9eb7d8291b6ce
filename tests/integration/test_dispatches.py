"""Dispatches as people look for them: what is reserved and not planned, and what became of a user's."""

import asyncio

import msgspec
import pytest

from contract.database import Connection, Pool
from contract.events import SEND_EMAILS
from processor.dispatches import (
    Dispatch,
    Unplanned,
    count_unplanned,
    list_dispatches,
    list_unplanned,
)
from processor.emitting import Emitter
from processor.reservation import Reservation
from processor.settings import ProcessorSettings
from tests.conftest import TestTopics
from tests.integration.conftest import (
    Answer,
    Fairpost,
    Post,
    due,
    fetch,
    records,
    scheduled,
)

AGED = "UPDATE pending SET reserved_at = reserved_at - make_interval(secs => %s) WHERE dispatch_id = %s"


async def unplanned(pool: Pool, older_than: float = 0, limit: int = 100) -> list[Unplanned]:
    """What the role of the command line is shown."""
    async with pool.connection() as connection:
        found = await list_unplanned(connection, older_than=older_than, limit=limit)
        count = await count_unplanned(connection, older_than=older_than)
    assert len(found) == min(count, limit)
    return found


async def of_user(pool: Pool, user_id: str, limit: int = 100) -> list[Dispatch]:
    """Likewise of a user."""
    async with pool.connection() as connection:
        return await list_dispatches(connection, user_id, limit=limit)


async def aged(owner: Connection, seconds: dict[int, float]) -> None:
    """Makes reservations older."""
    for dispatch_id, by in seconds.items():
        await owner.execute(AGED.encode(), (by, dispatch_id))


async def test_nothing_is_unplanned(post: Post) -> None:
    """What is planned is not listed."""
    await post.apply(scheduled())
    await post.plan([due(1), due(2)])
    assert await unplanned(post.worker) == []


async def test_the_oldest_comes_first(post: Post) -> None:
    """Each unplanned dispatch is listed with its due e-mail, where that stands, and its age; the oldest first."""
    events = await post.reserve([due(n) for n in range(3)], partition=1, offset=40)
    first, second, third = (event.dispatch_id for event in events)
    await aged(post.owner, {second: 500, third: 100})
    found = await unplanned(post.worker)
    assert [row.dispatch_id for row in found] == [second, third, first]
    assert 500 <= found[0].age_seconds < 600
    assert 100 <= found[1].age_seconds < 200
    assert 0 <= found[2].age_seconds < 100
    [(reserved_at,)] = await fetch(
        post.owner, "SELECT reserved_at FROM pending WHERE dispatch_id = %s", second
    )
    assert found[0] == Unplanned(
        dispatch_id=second,
        user_id="user1",
        campaign_id="c",
        email_key="hello",
        source_partition=1,
        source_offset=41,
        reserved_at=reserved_at,
        age_seconds=found[0].age_seconds,
    )


async def test_age_and_number_can_be_limited(post: Post) -> None:
    """Only what is old enough is listed, and of that the oldest."""
    events = await post.reserve([due(n) for n in range(5)])
    ids = [event.dispatch_id for event in events]
    await aged(post.owner, {ids[0]: 61, ids[1]: 59, ids[2]: 3600})
    assert [row.dispatch_id for row in await unplanned(post.worker, 60)] == [ids[2], ids[0]]
    async with post.worker.connection() as connection:
        found = await list_unplanned(connection, older_than=50, limit=2)
        assert [row.dispatch_id for row in found] == [ids[2], ids[0]]
        assert await count_unplanned(connection, older_than=50) == 3


async def test_what_became_of_a_users_dispatches(post: Post) -> None:
    """A user's dispatches are listed with state, instance and last reply, the latest first; nobody else's are."""
    await post.apply(scheduled(), scheduled("d"))
    bounced, planned = await post.plan([due(1), due(1, "d")])
    await post.plan([due(2)])
    await post.hand(1)
    await post.owner.execute(
        """
        UPDATE messages SET state = 'deferred', attempts = 2, dsn = '4.2.2', reply = 'full', status_at = clock_timestamp()
         WHERE dispatch_id = %s""",
        (bounced,),
    )
    await post.owner.execute(
        "INSERT INTO told (event_id, dispatch_id, at, created_at, status, attempt) VALUES (1, %s, now(), now(), 'deferred', 2)",
        (bounced,),
    )
    [reserved] = await post.reserve([due(1, email_key="goodbye")])
    found = await of_user(post.worker, "user1")
    assert [(row.dispatch_id, row.state) for row in found] == [
        (reserved.dispatch_id, "unplanned"),
        (planned, "planned"),
        (bounced, "deferred"),
    ]
    deferred = found[-1]
    assert (deferred.instance, deferred.attempts, deferred.dsn, deferred.reply) == (
        "postfix-a",
        2,
        "4.2.2",
        "full",
    )
    assert deferred.status_at is not None
    assert (found[1].instance, found[1].reply, found[1].campaign_id) == (None, None, "d")
    assert [row.dispatch_id for row in await of_user(post.worker, "user1", 2)] == [
        reserved.dispatch_id,
        planned,
    ]
    assert await of_user(post.worker, "user") == []


async def test_a_pruned_message_is_said_to_be(owner: Connection, worker: Pool) -> None:
    """A dispatch whose message is gone is listed all the same: it is kept for ever."""
    await owner.execute(
        "INSERT INTO dispatches (user_id, campaign_id, email_key) VALUES ('u', 'c', 'k')"
    )
    [found] = await of_user(worker, "u")
    assert (found.state, found.attempts) == ("pruned", 0)


# ------------------------------------------------------------------ the command


async def ask(fairpost: Fairpost, *words: str) -> Answer:
    """Runs `fairpost dispatches` beside the loop."""
    return await asyncio.to_thread(fairpost, "dispatches", *words)


async def test_the_unplanned_are_listed(post: Post, fairpost: Fairpost) -> None:
    """`--unplanned` lists them, and says on standard error how many there are and what to do; exit code 0."""
    none = await ask(fairpost, "--unplanned", "--json")
    assert (none.code, msgspec.json.decode(none.out)) == (0, [])
    assert none.err == "dispatches: none is reserved and not planned\n"
    events = await post.reserve([due(n) for n in range(3)], partition=1, offset=7)
    await aged(post.owner, {events[1].dispatch_id: 90, events[2].dispatch_id: 70})
    table = await ask(fairpost, "--unplanned")
    assert (table.code, len(table.out.splitlines())) == (0, 4)
    assert table.err.startswith("dispatches: 3 reserved and not planned: ")
    assert len(table.err.splitlines()) == 1
    listed = await ask(fairpost, "--unplanned", "--json", "--older-than", "60", "--limit", "1")
    [row] = msgspec.json.decode(listed.out)
    assert {name: row[name] for name in row if name not in ("reserved_at", "age_seconds")} == {
        "dispatch_id": events[1].dispatch_id,
        "user_id": "user1",
        "campaign_id": "c",
        "email_key": "hello",
        "source_partition": 1,
        "source_offset": 8,
    }
    assert listed.err.startswith("dispatches: 2 reserved and not planned for 60 s or longer: ")


async def test_what_it_advises_heals(
    settings: ProcessorSettings,
    post: Post,
    emitter: Emitter,
    topics: TestTopics,
    fairpost: Fairpost,
) -> None:
    """A dispatch that stays unplanned is planned after its due e-mail was published again, a minute later."""
    await post.apply(scheduled())
    [event] = await post.reserve([due(1)])
    reservation = Reservation(settings, post.worker, emitter)
    again = records([due(1)], partition=1, offset=99)
    assert (await reservation(again)).sent == 0
    await aged(post.owner, {event.dispatch_id: 61})
    assert (await reservation(again)).sent == 1
    await post.planning(records(topics.values(SEND_EMAILS), SEND_EMAILS))
    assert await post.states() == {event.dispatch_id: "planned"}
    assert msgspec.json.decode((await ask(fairpost, "--unplanned", "--json")).out) == []


async def test_a_users_are_listed(post: Post, fairpost: Fairpost) -> None:
    """A user's dispatches are one JSON array, or a table; a user without any is told of in a line."""
    await post.apply(scheduled())
    [dispatch_id] = await post.plan([due(1)])
    listed = await ask(fairpost, "user1", "--json")
    assert (listed.code, listed.err) == (0, "")
    assert msgspec.json.decode(listed.out) == [
        {
            "dispatch_id": dispatch_id,
            "campaign_id": "c",
            "email_key": "hello",
            "state": "planned",
            "instance": None,
            "attempts": 0,
            "status_at": None,
            "dsn": None,
            "reply": None,
        }
    ]
    assert str(dispatch_id).encode() in (await ask(fairpost, "user1")).out
    nobody = await ask(fairpost, "nobody", "--json")
    assert (nobody.code, msgspec.json.decode(nobody.out)) == (0, [])
    assert nobody.err == "dispatches: user 'nobody' has none\n"


@pytest.mark.parametrize(
    "words",
    [(), ("user1", "--unplanned"), ("user1", "--older-than", "5"), ("--unplanned", "--limit", "0")],
    ids=" ".join,
)
def test_one_question_at_a_time(fairpost: Fairpost, words: tuple[str, ...]) -> None:
    """Neither or both of a user and `--unplanned` is wrong usage."""
    answer = fairpost("dispatches", *words)
    assert (answer.code, answer.out) == (2, b"")
    assert answer.err.startswith("Usage: ")
