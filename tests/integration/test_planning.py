"""Planning: each dispatch becomes one message in a chunk of its campaign and operator."""

import asyncio
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from contract.events import (
    DEAD_LETTERS,
    SEND_EMAILS,
    SendEmail,
    decode_dead_letter,
    encode,
)
from contract.operators import Operator
from processor.consuming import Done, Status
from processor.emitting import Emitter
from processor.operators import apply_operators
from processor.planning import Planning
from processor.settings import ProcessorSettings
from tests.conftest import Database, TestTopics
from tests.integration.conftest import (
    START,
    Post,
    cancelled,
    due,
    fetch,
    fetch_one,
    pool_of,
    records,
    scheduled,
)


async def chunks(post: Post) -> list[tuple[object, ...]]:
    """Campaign, number, operator, size and capacity of every chunk."""
    return await fetch(
        post.owner,
        "SELECT campaign_id, number, operator, size, capacity FROM chunks ORDER BY campaign_id, number",
    )


async def set_chunk_size(post: Post, size: int) -> None:
    """How many messages a chunk for any operator holds, where no limit a minute would give it."""
    await post.owner.execute("UPDATE operators SET chunk_size = %s", (size,))


async def add_operators(post: Post, *names: str, per_minute: int | None = None) -> None:
    """Operators with the domain `NAME.test` each."""
    operators = [Operator(name, (f"{name}.test",), per_minute) for name in names]
    async with post.worker.connection() as connection:
        await apply_operators(connection, [*operators, Operator("other")], "test", "a test")


@pytest.fixture
def planning(settings: ProcessorSettings, post: Post, emitter: Emitter) -> Planning:
    """The step, able to emit dead letters."""
    return Planning(settings, post.worker, emitter)


async def test_a_message_is_what_was_due(post: Post) -> None:
    """A planned message has the address, variables and limit of its due e-mail, and awaits its hand-over."""
    not_after = datetime(2100, 1, 1, tzinfo=UTC)
    await post.apply(scheduled())
    (dispatch_id,) = await post.plan([due(1, variables={"a": ["ß", 10**30]}, not_after=not_after)])
    assert await fetch(
        post.owner,
        "SELECT dispatch_id, email, variables, not_after, position, state, handovers, attempts FROM messages",
    ) == [(dispatch_id, "user1@example.test", {"a": ["ß", 10**30]}, not_after, 0, "planned", 0, 0)]
    assert await fetch(post.owner, "SELECT * FROM pending") == []


@pytest.mark.parametrize(("size", "number"), [(1, 5), (7, 1), (7, 7), (7, 8), (7, 100), (200, 450)])
async def test_chunks_are_filled_one_after_the_other(post: Post, size: int, number: int) -> None:
    """Blocks that span chunks fill each to its capacity before they open the next, in the order of the events."""
    await set_chunk_size(post, size)
    dispatch_ids = await post.plan([due(n) for n in range(number)])
    full, rest = divmod(number, size)
    sizes = [size] * full + [rest] * (rest > 0)
    assert await chunks(post) == [
        ("c", place, "other", filled, size) for place, filled in enumerate(sizes, 1)
    ]
    in_order = await fetch(
        post.owner,
        "SELECT dispatch_id FROM messages JOIN chunks USING (chunk_id) ORDER BY number, position",
    )
    assert [dispatch_id for (dispatch_id,) in in_order] == dispatch_ids


async def test_later_blocks_continue_the_open_chunk(post: Post) -> None:
    """Send events that come one by one fill the same chunk."""
    await set_chunk_size(post, 3)
    for n in range(7):
        await post.plan([due(n)])
    assert [row[3] for row in await chunks(post)] == [3, 3, 1]


async def test_chunks_of_a_limit_are_whole_minutes(post: Post) -> None:
    """At 350 messages a minute a chunk holds 9,800, and the next one begins there."""
    await add_operators(post, "gmail", per_minute=350)
    await post.plan([due(n, domain="gmail.test") for n in range(9_801)])
    assert await chunks(post) == [("c", 1, "gmail", 9800, 9800), ("c", 2, "gmail", 1, 9800)]


async def test_a_claimed_chunk_takes_no_more(post: Post) -> None:
    """A chunk that was claimed once is never appended to, even when it was given back."""
    await post.apply(scheduled())
    await post.plan([due(1)])
    await post.ripen()
    claim = await post.claim()
    await post.plan([due(2)])
    await post.claims().release(claim)
    await post.plan([due(3)])
    assert [row[3] for row in await chunks(post)] == [1, 2]


async def test_operators_have_chunks_of_their_own(post: Post) -> None:
    """Each operator's domains, however they are written, go to its chunks, any other to `other`; numbers are the campaign's."""
    await add_operators(post, "gmail", "outlook")
    await set_chunk_size(post, 2)
    domains = [
        "gmail.test",
        "GMail.Test.",
        "example.test",
        "outlook.test",
        "gmail.test",
        "x.gmail.test",
    ]
    await post.plan([due(n, domain=domain) for n, domain in enumerate(domains)])
    assert Counter((row[2], row[3]) for row in await chunks(post)) == {
        ("gmail", 2): 1,
        ("gmail", 1): 1,
        ("outlook", 1): 1,
        ("other", 2): 1,
    }
    assert [row[1] for row in await chunks(post)] == [1, 2, 3, 4]


async def test_many_campaigns_in_a_block(post: Post) -> None:
    """A block of many campaigns gives each its own chunks, numbered from 1."""
    await set_chunk_size(post, 2)
    await post.plan([due(n, f"campaign {n % 20}") for n in range(100)])
    assert Counter((row[1], row[3]) for row in await chunks(post)) == {
        (1, 2): 20,
        (2, 2): 20,
        (3, 1): 20,
    }


@pytest.mark.parametrize("campaigns", [1, 6])
async def test_many_planners_at_once(
    settings: ProcessorSettings,
    database: Database,
    post: Post,
    refusals: Callable[[], list[str]],
    campaigns: int,
) -> None:
    """Planners of the same events at once plan each once, leave no gap, over-fill no chunk and never deadlock."""
    await add_operators(post, "gmail", "outlook")
    await set_chunk_size(post, 7)
    emails = [
        due(n, f"campaign {n % campaigns}", ("gmail", "outlook", "example")[n % 3] + ".test")
        for n in range(600)
    ]
    events = await post.reserve(emails)
    async with pool_of(database.worker, 6) as pool:
        planning = Planning(settings, pool, Emitter(settings.brokers))
        orders = [events[n * 90 :] + events[: n * 90] for n in range(6)]
        batches = [
            order[start : start + 50]
            for start in range(0, 600, 50)
            for order in (*orders[:3], *(o[::-1] for o in orders[3:]))
        ]
        done = await asyncio.gather(*(planning(records(batch, SEND_EMAILS)) for batch in batches))
    assert sum(d.sent for d in done) == 600
    assert len(await post.states()) == 600
    # One chunk of each campaign and operator may be open.
    assert sum(row[3] < row[4] for row in await chunks(post)) <= 3 * campaigns  # type: ignore[operator]
    assert refusals() == []


async def test_planners_and_claimers_at_once(post: Post) -> None:
    """A claim that seals the open chunk while others plan makes them open the next: nothing is lost or misplaced."""
    await set_chunk_size(post, 20)
    await post.apply(scheduled())
    await post.plan([due(0)])
    events = await post.reserve([due(n) for n in range(1, 301)])
    claimed: set[int] = set()

    async def claim_all(instance: str) -> None:
        while len(await post.states()) < 301:
            await post.ripen()
            if (claim := await post.claims(instance).claim("other")) is not None:
                claimed.add(claim.chunk_id)

    await asyncio.gather(
        *(post.planning(records(events[n::30], SEND_EMAILS)) for n in range(30)),
        claim_all("postfix-a"),
        claim_all("postfix-b"),
    )
    assert len(claimed) > 1
    assert await fetch_one(post.owner, "SELECT sum(size)::int FROM chunks") == 301


async def test_a_repeat_in_a_block_is_planned_once(post: Post) -> None:
    """A send event that stands twice in a block, or comes again, is planned once."""
    events = await post.reserve([due(1), due(2)])
    assert await post.planning(records([*events, *events], SEND_EMAILS)) == Done(Status.SENT, 2, 2)
    assert await post.planning(records(events, SEND_EMAILS)) == Done(Status.SENT, 2, 0)


async def test_what_was_never_reserved_is_not_planned(post: Post) -> None:
    """A send event whose dispatch is not pending plans nothing."""
    (event,) = await post.reserve([due(1)])
    foreign = msgspec.structs.replace(event, dispatch_id=event.dispatch_id + 1000)
    assert (await post.planning(records([foreign], SEND_EMAILS))).sent == 0
    assert await post.states() == {}


async def test_an_event_of_another_campaign_plans_nothing(post: Post) -> None:
    """A send event that names another campaign than its reservation plans nothing, and the right one still does."""
    (event,) = await post.reserve([due(1)])
    wrong = msgspec.structs.replace(event, campaign_id="d")
    assert (await post.planning(records([wrong], SEND_EMAILS))).sent == 0
    assert (await post.planning(records([wrong, event], SEND_EMAILS))).sent == 1
    assert [row[0] for row in await chunks(post)] == ["c"]


async def test_an_unknown_campaign_waits(post: Post) -> None:
    """Mail of a campaign that is not known yet is planned, and can be claimed when the campaign's event has come."""
    await post.plan([due(1)])
    await post.ripen()
    assert await fetch(post.owner, "SELECT state, scheduled_for FROM campaigns") == [
        ("waiting", None)
    ]
    assert await post.claims().claim("other") is None
    await post.apply(scheduled())
    assert (await post.claim()).campaign_id == "c"


async def test_a_cancelled_campaigns_mail_is_cancelled_at_once(post: Post) -> None:
    """What is planned after its campaign was cancelled is `cancelled`, and that is told."""
    await post.apply(scheduled(), cancelled())
    dispatch_ids = await post.plan([due(1), due(2)])
    assert await post.states() == dict.fromkeys(dispatch_ids, "cancelled")
    assert sorted(await post.told()) == [(dispatch_id, "cancelled") for dispatch_id in dispatch_ids]


async def test_what_comes_too_late_is_expired(post: Post) -> None:
    """A message past its `not_after` is `expired` when it is planned, and that is told; one before it is planned."""
    now = datetime.now(UTC)
    late, early = await post.plan(
        [due(1, not_after=now - timedelta(seconds=1)), due(2, not_after=now + timedelta(hours=1))]
    )
    assert await post.states() == {late: "expired", early: "planned"}
    assert await post.told() == [(late, "expired")]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: value.replace(b"@", b"(at)"),
        lambda value: value.replace(b'"email_key":"hello",', b""),
        lambda value: value.replace(b"user1@", b"\\u0000@"),
        lambda value: value[:-1] + b',"variables":3}',
    ],
)
async def test_what_cannot_be_planned_is_rejected(
    post: Post, planning: Planning, topics: TestTopics, spoil: Callable[[bytes], bytes]
) -> None:
    """An unusable send event is a dead letter, and its dispatch a `rejected` message with the reason."""
    good, bad = await post.reserve([due(2), due(1)])
    batch = records([good, spoil(encode(bad))], SEND_EMAILS, offset=4)
    assert (await planning(batch)).sent == 2
    assert await post.states() == {good.dispatch_id: "planned", bad.dispatch_id: "rejected"}
    assert await post.told() == [(bad.dispatch_id, "rejected")]
    assert await fetch(post.owner, "SELECT * FROM pending") == []
    (letter,) = [decode_dead_letter(value) for value in topics.values(DEAD_LETTERS)]
    assert (letter.topic, letter.partition, letter.offset) == (SEND_EMAILS, 0, 5)
    assert await fetch_one(post.owner, "SELECT reply FROM told") == letter.reason


async def test_what_postgres_refuses_is_rejected(
    post: Post, planning: Planning, topics: TestTopics
) -> None:
    """A message that Postgres refuses is `rejected` and a dead letter, and all the rest of its block is planned."""
    await post.owner.execute("ALTER TABLE messages ADD CHECK (email !~ '^user(3|150)@')")
    events = await post.reserve([due(n) for n in range(200)])
    await planning(records(events, SEND_EMAILS))
    assert Counter((await post.states()).values()) == {"planned": 198, "rejected": 2}
    letters = [decode_dead_letter(value) for value in topics.values(DEAD_LETTERS)]
    assert [letter.offset for letter in letters] == [3, 150]
    assert all("messages_email_check" in letter.reason for letter in letters)
    assert await fetch(post.owner, "SELECT * FROM pending") == []


EVENT = encode(
    SendEmail(
        user_id="user1",
        campaign_id="c",
        email_key="hello",
        email="user1@example.test",
        dispatch_id=1,
        reserved_at=START,
    )
)


@pytest.mark.parametrize(
    "value",
    [
        b"no JSON",
        b"{}",
        EVENT.replace(b'"c"', b'"\\u0000"'),
        EVENT.replace(b'"c"', b'"' + b"c" * 3000 + b'"'),
        EVENT.replace(b'"dispatch_id":1', b'"dispatch_id":9223372036854775808'),
        EVENT.replace(b'"dispatch_id":1', b'"dispatch_id":"1"'),
        EVENT[:-1] + b', "variables": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=["text", "empty", "nul", "long-id", "large-dispatch", "ill-typed-dispatch", "deep"],
)
async def test_an_event_of_no_dispatch_is_a_dead_letter(
    post: Post, planning: Planning, topics: TestTopics, value: bytes
) -> None:
    """Not even an event whose dispatch cannot be told stops the stream: it is a dead letter, the next is planned."""
    events = await post.reserve([due(n) for n in range(1, 4)])
    await planning(records([*events[1:2], value, *events[2:]], SEND_EMAILS))
    assert list((await post.states()).values()) == ["planned", "planned"]
    (letter,) = [decode_dead_letter(value) for value in topics.values(DEAD_LETTERS)]
    assert (letter.topic, letter.offset) == (SEND_EMAILS, 1)


async def test_a_new_due_email_reopens_an_ended_campaign(post: Post) -> None:
    """Planning for a campaign that has ended makes it one that can be claimed again."""
    await post.apply(scheduled())
    await post.owner.execute("UPDATE campaigns SET ended_at = now()")
    await post.plan([due(1)])
    await post.ripen()
    assert (await post.claim()).planned == 1


async def test_a_limit_changed_while_a_chunk_is_open(post: Post) -> None:
    """The open chunk keeps its size and is filled; the next one has the size of the new limit."""
    await post.owner.execute("UPDATE operators SET chunk_size = 10")
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(6)])
    await post.owner.execute("UPDATE operators SET chunk_size = 3")
    await post.plan([due(n) for n in range(6, 20)])
    assert await fetch(post.owner, "SELECT number, capacity, size FROM chunks ORDER BY number") == [
        (1, 10, 10),
        (2, 3, 3),
        (3, 3, 3),
        (4, 3, 3),
        (5, 3, 1),
    ]


async def test_the_recipient_is_kept_as_given(post: Post) -> None:
    """Domains are compared in one form; the address stays as the producer wrote it."""
    async with post.worker.connection() as connection:
        await apply_operators(
            connection,
            [Operator("a", ("xn--bcher-kva.test",)), Operator("other")],
            "ann",
            "a file",
        )
    await post.apply(scheduled())
    given = ["Ann@BÜCHER.test", "bob@xn--bcher-kva.TEST", "cyd@bücher.test."]
    await post.plan([due(n, email=email) for n, email in enumerate(given)])
    assert await fetch(
        post.owner,
        "SELECT operator, email FROM messages JOIN chunks USING (chunk_id) ORDER BY position",
    ) == [("a", email) for email in given]
