"""What is old goes and what is forgotten is gone; that an e-mail was sent once is kept for ever."""

from datetime import timedelta

from contract.events import SEND_EMAILS
from processor.overview import show_campaign
from processor.retention import forget, prune
from tests.integration.conftest import INSTANCE, Post, due, fetch, fetch_one, records, scheduled

DAY = timedelta(days=1)


async def age(post: Post, days: int) -> None:
    """Lets everything that is there become so many days older."""
    for statement in (
        "UPDATE chunks SET opened_at = opened_at - make_interval(days => %s)",
        "UPDATE messages SET status_at = status_at - make_interval(days => %s)",
        "UPDATE queue_ids SET seen_at = seen_at - make_interval(days => %s)",
        "UPDATE handovers SET at = at - make_interval(days => %s)",
    ):
        await post.owner.execute(statement, (days,))


async def run_prune(post: Post, older_than: timedelta = 30 * DAY) -> int:
    """Prunes under the role of the command line."""
    async with post.worker.connection() as connection:
        return await prune(connection, older_than, "ann")


async def run_forget(post: Post, user_id: str) -> int:
    """Forgets under the role of the command line."""
    async with post.worker.connection() as connection:
        return await forget(connection, user_id, "ann")


async def finish(post: Post, state: str, count: int) -> None:
    """Makes handed messages final, as their log lines would."""
    await post.owner.execute(
        "UPDATE messages SET state = %s, status_at = clock_timestamp(), reply = 'to <x@shop.test>: no'"
        " WHERE dispatch_id IN (SELECT dispatch_id FROM messages WHERE state = 'handed' LIMIT %s)",
        (state, count),
    )
    await post.owner.execute(
        "INSERT INTO told (event_id, dispatch_id, at, created_at, status, attempt)"
        " SELECT 10000 + dispatch_id, dispatch_id, now(), now(), state, 1 FROM messages WHERE state = %s",
        (state,),
    )


async def test_old_final_messages_go_and_the_books_balance(post: Post) -> None:
    """Final messages of long ago are deleted, younger and unfinished ones stay, and the campaign counts them all."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(10)])
    await post.hand(8)
    await finish(post, "sent", 5)
    await age(post, 40)
    await finish(post, "bounced", 1)
    assert await run_prune(post) == 5
    states = list((await post.states()).values())
    assert sorted(states) == ["bounced", "handed", "handed", "planned", "planned"]
    async with post.worker.connection() as connection:
        campaign = await show_campaign(connection, "c")
    assert (campaign.pruned, campaign.dispatches, campaign.accounted) == (5, 10, 10)
    assert await fetch_one(post.owner, "SELECT count(*) FROM dispatches") == 10
    assert await run_prune(post) == 0


async def test_empty_chunks_go_but_a_campaigns_last(post: Post) -> None:
    """A chunk whose messages are gone goes too, with who held it; the last one stays, so that numbers go on from it."""
    await post.owner.execute("UPDATE operators SET chunk_size = 3")
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(9)])
    for _ in range(3):
        claim, _ = await post.hand(3)
        await post.claims().release(claim)
    await finish(post, "sent", 9)
    await age(post, 40)
    assert await run_prune(post) == 9
    chunks = "SELECT number FROM chunks ORDER BY number"
    assert await fetch(post.owner, chunks) == [(3,)]
    assert await fetch(post.owner, "SELECT count(*) FROM chunk_counts") == [(1,)]
    assert await fetch(post.owner, "SELECT count(*) FROM handovers") == [(0,)]
    assert await fetch(
        post.owner, "SELECT c.instance, number FROM claims c LEFT JOIN chunks USING (chunk_id)"
    ) == [(INSTANCE, 3)]
    await post.plan([due(n) for n in range(9, 12)])
    assert await fetch(post.owner, chunks) == [(3,), (4,)]
    await post.owner.execute(
        "UPDATE chunks SET number = number - 2"
    )  # for the books: none is missing


async def test_a_replay_after_pruning_plans_nothing(post: Post) -> None:
    """Old send events that are read again find nothing pending, and their dispatches are still there."""
    await post.apply(scheduled())
    events = await post.reserve([due(n) for n in range(4)])
    await post.planning(records(events, SEND_EMAILS))
    await post.hand(4)
    await finish(post, "sent", 4)
    await age(post, 40)
    assert await run_prune(post) == 4
    assert (await post.planning(records(events, SEND_EMAILS))).sent == 0
    assert await post.states() == {}


async def test_prune_forgets_queue_ids_of_messages_that_are_gone_only(post: Post) -> None:
    """The queue id of a message that still waits stays, however old it is."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(2)])
    await post.hand(2)
    await post.owner.execute(
        "INSERT INTO queue_ids (instance, queue_id, dispatch_id, seen_at)"
        " SELECT instance, 'Q' || dispatch_id, dispatch_id, now() FROM messages"
    )
    await post.owner.execute("INSERT INTO queue_ids VALUES (NULL, now(), 'a', 'FOREIGN')")
    await finish(post, "sent", 1)
    await age(post, 40)
    assert await run_prune(post) == 1
    left = await fetch(
        post.owner, "SELECT dispatch_id IN (SELECT dispatch_id FROM messages) FROM queue_ids"
    )
    assert left == [(True,)]


async def test_a_user_who_is_forgotten_is_gone_everywhere(post: Post) -> None:
    """No table holds the address, a variable or a reply of the user any more; others are untouched."""
    await post.apply(scheduled())
    await post.plan([due(n) for n in range(3)])
    await post.hand(3)
    await finish(post, "bounced", 3)
    await post.owner.execute("UPDATE outbox SET reply = 'x'")
    [(user_id, email)] = await fetch(
        post.owner,
        "SELECT user_id, email FROM messages JOIN dispatches USING (dispatch_id) ORDER BY dispatch_id LIMIT 1",
    )
    await post.owner.execute(
        "INSERT INTO suppressions (mailbox, source, reason, since) VALUES (%s, 'person', %s, now())",
        (email, f"{email} asked for it"),
    )
    assert await run_forget(post, user_id) == 1
    rows = await fetch(
        post.owner,
        "SELECT user_id = %s, email, variables::text, reply FROM messages JOIN dispatches USING (dispatch_id)",
        user_id,
    )
    assert [row[1:] for row in rows if row[0]] == [("", "{}", None)]
    assert all(row[1] and row[3] for row in rows if not row[0])
    whole = await fetch_one(post.owner, "SELECT schema_to_xml('fairpost', true, false, '')::text")
    assert "shop.test" in whole
    assert email not in whole
    assert await fetch(post.owner, "SELECT actor, subject FROM audit WHERE action = 'forget'") == [
        ("ann", user_id)
    ]


async def test_what_is_not_yet_handed_over_never_is(post: Post) -> None:
    """Planned and merely reserved mail of a forgotten user becomes `cancelled`; its send event plans nothing."""
    await post.apply(scheduled())
    planned, reserved = events = await post.reserve([due(1), due(2)])
    await post.planning(records([planned], SEND_EMAILS))
    for event in (planned, reserved):
        assert await run_forget(post, event.user_id) == 1
    assert set((await post.states()).values()) == {"cancelled"}
    assert await fetch_one(post.owner, "SELECT count(*) FROM pending") == 0
    assert await fetch_one(post.owner, "SELECT string_agg(email, '') FROM messages") == ""
    assert (await post.planning(records(events, SEND_EMAILS))).sent == 0
    assert await run_forget(post, "a-stranger") == 0


async def test_a_forgotten_message_under_way_tells_its_fate_without_words(post: Post) -> None:
    """Given back it is cancelled, and a later line of the log leaves no reply."""
    await post.apply(scheduled())
    await post.plan([due(1), due(2)])
    _, batch = await post.hand(2)
    for recipient in batch.recipients:
        await run_forget(post, recipient.user_id)
    first, second = (recipient.dispatch_id for recipient in batch.recipients)
    [(chunk_id, handed_at, instance)] = await fetch(
        post.owner, "SELECT DISTINCT chunk_id, handed_at, instance FROM messages"
    )
    await post.owner.execute(
        "SELECT give_back(%s, %s, %s, %s)", (chunk_id, instance, handed_at, [first])
    )
    await post.owner.execute(
        "SELECT track(%s, %s, %s, %s::message_state[], ARRAY[now()], ARRAY['hard'], ARRAY['5.1.1'], %s)",
        ([instance], ["Q1"], [second], ["bounced"], ["550 <x@shop.test> unknown"]),
    )
    assert await post.states() == {first: "cancelled", second: "bounced"}
    assert await fetch(post.owner, "SELECT reply FROM messages UNION SELECT reply FROM outbox") == [
        (None,)
    ]
