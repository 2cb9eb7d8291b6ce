"""`campaigns test`: what is published, what refuses it, and how its outcome is told."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.events import (
    CAMPAIGNS,
    DUE_EMAILS,
    SEND_EMAILS,
    CampaignScheduled,
    Template,
    decode_campaign_event,
    decode_due_email,
)
from processor.fleet import switch_sending
from processor.interventions import hold
from processor.overview import show_campaign
from processor.suppressions import add, read_suppression
from processor.trials import Outcome, follow, stored_campaign
from smtp_agent.handover import Refusal
from tests.conftest import TestTopics
from tests.integration.conftest import (
    Answer,
    Fairpost,
    Post,
    due,
    fetch,
    fetch_one,
    records,
    scheduled,
)

ME = "me@shop.test"


async def run(fairpost: Fairpost, *words: str) -> Answer:
    """A test, outside this event loop."""
    return await asyncio.to_thread(fairpost, "campaigns", "test", *words)


async def test_what_is_published(post: Post, topics: TestTopics, fairpost: Fairpost) -> None:
    """Of a campaign that is held and not due, one marked campaign and one due e-mail of its own are published, and nothing else moves."""
    await post.apply(scheduled(scheduled_for=scheduled().scheduled_for.replace(year=2036)))
    async with post.worker.connection() as connection:
        await hold(connection, "c", "ann")
        before = await show_campaign(connection, "c")
        answer = await run(fairpost, "c", "--to", ME)
        assert answer.code == 0, answer.err
        assert await show_campaign(connection, "c") == before
    [campaign] = map(decode_campaign_event, topics.values(CAMPAIGNS))
    [email] = map(decode_due_email, topics.values(DUE_EMAILS))
    assert isinstance(campaign, CampaignScheduled)
    trial_id = campaign.campaign_id
    assert trial_id.startswith("test-")
    assert answer.err == f"{trial_id}: published, to {ME}\n"
    assert campaign.templates == {
        "hello": Template(subject="[test] Hello", text="Hello {{ user_id }}")
    }
    assert campaign.headers == {"X-Fairpost-Test": "yes"}
    assert campaign.scheduled_for <= await fetch_one(post.owner, "SELECT clock_timestamp()")
    assert (email.user_id, email.campaign_id, email.email) == (trial_id, trial_id, ME)
    [(subject, details)] = await fetch(
        post.owner, "SELECT subject, details FROM audit WHERE action = 'campaign.test'"
    )
    assert subject == "c"
    assert (details["test"], details["email_key"]) == (trial_id, "hello")
    assert ME not in str(details)


@pytest.mark.parametrize("campaign_id", [None, "c"])
async def test_a_suppressed_address_is_refused(
    post: Post, topics: TestTopics, fairpost: Fairpost, campaign_id: str | None
) -> None:
    """What keeps the campaign's mail from an address keeps its test away too; a suppression of another campaign does not."""
    await post.apply(scheduled())
    async with post.worker.connection() as connection:
        await add(connection, [read_suppression(ME, reason="x", campaign_id=campaign_id)], "ann")
        await add(connection, [read_suppression("b@shop.test", reason="x", campaign_id="d")], "ann")
    answer = await run(fairpost, "c", "--to", "ME@shop.test")
    assert (answer.code, answer.out) == (1, b"")
    assert answer.err == (
        "ME@shop.test: is suppressed; see `fairpost suppressions check ME@shop.test`\n"
    )
    assert topics.values(CAMPAIGNS) == []
    assert await fetch(post.owner, "SELECT FROM audit WHERE action = 'campaign.test'") == []
    assert (await run(fairpost, "c", "--to", "b@shop.test")).code == 0


async def test_a_mail_that_cannot_be_made_is_not_sent(
    post: Post, topics: TestTopics, fairpost: Fairpost, tmp_path: Path
) -> None:
    """A missing variable is told at once, and nothing is published or on record."""
    await post.apply(scheduled(templates={"hello": Template(subject="s", text="{{ name }}")}))
    answer = await run(fairpost, "c", "--to", ME)
    assert (answer.code, answer.err) == (
        1,
        "campaign 'c': email_key 'hello': text: line 1: 'name' is undefined\n",
    )
    assert topics.values(CAMPAIGNS) == []
    assert await fetch(post.owner, "SELECT FROM audit") == []
    (tmp_path / "me.json").write_text('{"name": "Me"}')
    assert (
        await run(fairpost, "c", "--to", ME, "--variables", str(tmp_path / "me.json"))
    ).code == 0


async def test_a_fleet_that_is_off(post: Post, topics: TestTopics, fairpost: Fairpost) -> None:
    """It is published and waits, which is said; who waits for it in vain gets exit code 1 and how far it got."""
    await post.apply(scheduled())
    async with post.worker.connection() as connection:
        await switch_sending(connection, sending=False, actor="ann")
    answer = await run(fairpost, "c", "--to", ME, "--wait", "--timeout", "0", "--json")
    assert answer.code == 1
    [found] = msgspec.json.decode(answer.out)
    trial_id = found["campaign_id"]
    assert (found["state"], found["dispatch_id"]) == ("unreserved", None)
    assert answer.err.splitlines() == [
        f"{trial_id}: published, to {ME}",
        "sending is off: it waits until `fairpost sending on`",
        f"{trial_id}: unreserved",
        f"{trial_id}: no outcome yet; see `fairpost campaigns show {trial_id}`",
    ]
    assert len(topics.values(DUE_EMAILS)) == 1


async def test_it_is_followed_until_it_is_final(post: Post) -> None:
    """Each step is told once, and the last with its reply."""
    await post.apply(scheduled("test-1"))
    seen: list[tuple[str, Any]] = []
    async with post.worker.connection() as connection:

        def tell(found: Outcome) -> None:
            seen.append((found.state, found.reply))

        following = asyncio.create_task(follow(connection, "test-1", 60, tell))

        async def reached(state: str) -> None:
            async with asyncio.timeout(60):
                while not seen or seen[-1][0] != state:  # noqa: ASYNC110  told by a poll
                    await asyncio.sleep(0.01)

        await reached("unreserved")
        email = msgspec.structs.replace(due(1, "test-1"), user_id="test-1")
        [event] = await post.reserve([email])
        await reached("unplanned")
        await post.planning(records([event], SEND_EMAILS))
        await reached("planned")
        _, batch = await post.hand(1)
        await reached("handed")
        assert batch.handed_at is not None
        await post.handover().reject(
            [Refusal(event.dispatch_id, batch.handed_at, "5.1.3", "501 no")]
        )
        found = await following
    assert (found.state, found.dispatch_id, found.dsn, found.reply) == (
        "rejected",
        event.dispatch_id,
        "5.1.3",
        "501 no",
    )
    assert [state for state, _ in seen] == [
        "unreserved",
        "unplanned",
        "planned",
        "handed",
        "rejected",
    ]


async def test_a_stored_campaign_is_the_published_one(post: Post) -> None:
    """What is read back is what its event said, times and templates included."""
    event = scheduled(
        reply_to="a@b.test", headers={"X-A": "{{ x }}"}, unsubscribe_url="https://a.test"
    )
    await post.apply(event)
    async with post.worker.connection() as connection:
        assert await stored_campaign(connection, "c") == event
