"""Campaigns: events make of them the same whenever and however often they come, and a hold is a person's alone."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from contract.database import Connection, Pool
from contract.events import (
    CAMPAIGNS,
    DEAD_LETTERS,
    CampaignEvent,
    Template,
    decode_dead_letter,
    encode,
)
from contract.states import CampaignState
from processor.campaigns import Campaigns, apply_event
from processor.consuming import Done, Status
from processor.emitting import Emitter
from processor.interventions import cancel, hold, lift
from processor.overview import CampaignError, campaign_shares, list_campaigns, show_campaign
from processor.settings import ProcessorSettings
from tests.conftest import TestTopics
from tests.integration.conftest import (
    START,
    Post,
    cancelled,
    due,
    fetch,
    fetch_one,
    paused,
    records,
    resumed,
    scheduled,
)

STEPS: dict[str, Callable[[str], CampaignEvent]] = {
    "scheduled": scheduled,
    "paused": paused,
    "resumed": resumed,
    "cancelled": cancelled,
}


async def state(post: Post, campaign_id: str = "c") -> tuple[str, bool]:
    """The campaign's state, and whether it is held."""
    ((state, held),) = await fetch(
        post.owner,
        "SELECT state, held_at IS NOT NULL FROM campaigns WHERE campaign_id = %s",
        campaign_id,
    )
    return state, held


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([scheduled()], "active"),
        ([scheduled(), paused()], "paused"),
        ([scheduled(), paused(), resumed()], "active"),
        ([scheduled(), paused(), scheduled()], "paused"),
        ([paused()], "paused"),
        ([paused(), scheduled()], "paused"),
        ([paused(), resumed()], "waiting"),
        ([resumed(), scheduled()], "active"),
        ([scheduled(), cancelled(), scheduled(), resumed(), paused()], "cancelled"),
        ([cancelled(), scheduled()], "cancelled"),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "-".join(type(e).__name__[8:] for e in value)
    ),
)
async def test_events_set_the_state(post: Post, events: list[CampaignEvent], expected: str) -> None:
    """A campaign's state follows from its events, `cancelled` is final, and a pause outlasts a new schedule."""
    await post.apply(*events)
    assert await state(post) == (expected, False)


async def test_content_is_stored_and_replaced_as_a_whole(post: Post) -> None:
    """A later `campaign.scheduled` replaces all of the content, and its revision tells it from the former."""
    await post.apply(
        scheduled(
            reply_to="answers@example.org",
            finish_by=START + timedelta(hours=2),
            unsubscribe_url="https://example.org/{{ user_id }}",
            headers={"X-One": "1"},
        )
    )
    await post.apply(
        scheduled(
            name="Other",
            templates={"bye": Template(subject="Bye", html="<p>")},
            headers={"X-Two": "2"},
        )
    )
    assert await fetch(
        post.owner,
        """
        SELECT name, sender, reply_to, scheduled_for, finish_by, templates, unsubscribe_url, headers, revision
          FROM campaigns""",
    ) == [
        (
            "Other",
            "Sender <sender@example.org>",
            None,
            START,
            None,
            {"bye": {"subject": "Bye", "html": "<p>"}},
            None,
            {"X-Two": "2"},
            2,
        )
    ]


@hypothesis_settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    log=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
)
async def test_redelivery_in_any_order_changes_nothing(
    post: Post, numbers: "itertools.count[int]", log: list[str], order: random.Random
) -> None:
    """Events that come again, all or some, after newer ones, leave the campaign as the newest one made it."""
    once, again = f"once {next(numbers)}", f"again {next(numbers)}"
    await post.campaigns(records([STEPS[name](once) for name in log], CAMPAIGNS))
    batch = records([STEPS[name](again) for name in log], CAMPAIGNS)
    redelivered = batch * 2
    order.shuffle(redelivered)
    done = await post.campaigns([*batch, *redelivered])
    assert done == Done(Status.SENT, 0, len(log))
    assert await state(post, once) == await state(post, again)


@pytest.fixture
def numbers() -> "itertools.count[int]":
    """Numbers that name campaigns of one test apart."""
    return itertools.count()


async def apply_at(worker: Pool, event: CampaignEvent, seconds: float, offset: int) -> bool:
    """Applies an event appended that many seconds after the start."""
    async with worker.connection() as connection, connection.transaction():
        return await apply_event(connection, event, START + timedelta(seconds=seconds), offset)


async def test_an_older_event_changes_nothing(post: Post, worker: Pool) -> None:
    """An event that is neither later nor further on than the last applied one is old, and is not applied."""
    assert await apply_at(worker, scheduled(), 10, 5)
    assert await apply_at(worker, paused(), 10, 6)
    assert not await apply_at(worker, paused(), 10, 6)
    assert not await apply_at(worker, resumed(), 10, 5)
    assert not await apply_at(worker, scheduled(name="Old"), 9, 4)
    assert await state(post) == ("paused", False)
    assert await fetch_one(post.owner, "SELECT name FROM campaigns") == "A campaign"


async def test_a_brokers_clock_that_steps_back_hides_nothing(post: Post, worker: Pool) -> None:
    """A later record that was stamped earlier is applied, and neither is applied again."""
    assert await apply_at(worker, scheduled(), 10, 5)
    assert await apply_at(worker, paused(), 7, 6)
    assert await apply_at(worker, resumed(), 8, 7)
    for event, seconds, offset in ((scheduled(), 10, 5), (paused(), 7, 6), (resumed(), 8, 7)):
        assert not await apply_at(worker, event, seconds, offset)
    assert await state(post) == ("active", False)
    assert await apply_at(worker, cancelled(), 9, 8)
    assert await state(post) == ("cancelled", False)


async def test_a_recreated_topic_goes_on(post: Post, worker: Pool) -> None:
    """Events of a topic that was made anew, at smaller offsets and later times, are applied."""
    assert await apply_at(worker, scheduled(), 0, 1_000)
    assert await apply_at(worker, paused(), 1, 0)
    assert await state(post) == ("paused", False)


async def test_only_a_person_lifts_a_hold(post: Post, owner: Connection) -> None:
    """No event lifts a hold or sets one; a lifted hold leaves what the events made, and what changed is on record."""
    await post.apply(scheduled())
    async with post.worker.connection() as connection:
        assert await hold(connection, "c", "ann") == CampaignState.ACTIVE
        assert await hold(connection, "c", "bob") == CampaignState.ACTIVE
        assert await fetch_one(owner, "SELECT held_by FROM campaigns") == "ann"
        await post.apply(resumed(), scheduled(), paused())
        assert await state(post) == ("paused", True)
        assert await lift(connection, "c", "bob") == CampaignState.PAUSED
    assert await state(post) == ("paused", False)
    await post.apply(resumed())
    assert await state(post) == ("active", False)
    assert await fetch(owner, "SELECT actor, action, subject FROM audit ORDER BY audit_id") == [
        ("ann", "campaign.hold", "c"),
        ("bob", "campaign.lift", "c"),
    ]


async def test_a_persons_cancel_is_final(post: Post, owner: Connection) -> None:
    """What a person cancelled no event revives, and nobody can hold or lift; it is on record once."""
    await post.apply(scheduled())
    async with post.worker.connection() as connection:
        await cancel(connection, "c", "ann")
        await cancel(connection, "c", "ben")
        await post.apply(scheduled(), resumed(), paused())
        for act in (hold, lift):
            with pytest.raises(CampaignError, match="final"):
                await act(connection, "c", "ann")
    assert await state(post) == ("cancelled", False)
    assert await fetch(owner, "SELECT actor, action, subject FROM audit") == [
        ("ann", "campaign.cancel", "c")
    ]


async def test_what_is_done_to_an_unknown_campaign(post: Post, owner: Connection) -> None:
    """A person is told that there is no such campaign, and nothing is recorded."""
    async with post.worker.connection() as connection:
        for act in (hold, lift, cancel):
            with pytest.raises(CampaignError, match="'nobody'"):
                await act(connection, "nobody", "ann")
        with pytest.raises(CampaignError, match="'nobody'"):
            await show_campaign(connection, "nobody")
    assert await fetch(owner, "SELECT * FROM audit") == []
    assert await fetch(owner, "SELECT * FROM campaigns") == []


async def test_a_campaign_is_shown_with_its_messages_by_state(post: Post) -> None:
    """A campaign's totals and its shares by operator are those of its own messages."""
    await post.apply(scheduled("c"), scheduled("d", START + timedelta(hours=1)))
    await post.plan([due(n) for n in range(5)] + [due(n, "d") for n in range(3)])
    await post.reserve([due(9)])
    await post.hand(2)
    async with post.worker.connection() as connection:
        first, second = await list_campaigns(connection)
        shown = await show_campaign(connection, "c")
        shares = await campaign_shares(connection, "c")
    assert (first.campaign_id, first.dispatches, first.planned) == ("d", 3, 3)
    assert shown == second
    assert (shown.dispatches, shown.unplanned, shown.planned, shown.handed) == (6, 1, 3, 2)
    assert [(s.operator, s.chunks, s.lanes, s.messages, s.planned) for s in shares] == [
        ("other", 1, 1, 5, 3)
    ]


@pytest.mark.parametrize(
    "value",
    [
        b'{"type": "campaign.scheduled"',
        b'{"type": "campaign.unknown", "campaign_id": "c"}',
        b'{"campaign_id": "c"}',
        encode(scheduled()).replace(b'"name"', b'"nome"'),
        encode(scheduled()).replace(b"Hello ", b"Hello \\u0000"),
        encode(scheduled()).replace(b"12:00:00Z", b"12:00:00"),
        encode(scheduled(name="n" * 600_000)),
    ],
    ids=["syntax", "unknown-type", "no-type", "missing", "nul", "no-zone", "too-large"],
)
async def test_a_bad_event_is_a_dead_letter(
    settings: ProcessorSettings, post: Post, emitter: Emitter, topics: TestTopics, value: bytes
) -> None:
    """An unusable campaign event becomes a dead letter, and those around it are applied."""
    campaigns = Campaigns(settings, post.worker, emitter)
    done = await campaigns(records([scheduled(), value, paused()], CAMPAIGNS, offset=3))
    assert done == Done(Status.SENT, 0, 2)
    assert await state(post) == ("paused", False)
    (letter,) = [decode_dead_letter(value) for value in topics.values(DEAD_LETTERS)]
    assert (letter.topic, letter.partition, letter.offset) == (CAMPAIGNS, 0, 4)
    assert letter.reason.startswith("campaigns: ")


async def test_a_template_that_does_not_compile_is_told_with_its_line(
    settings: ProcessorSettings, post: Post, emitter: Emitter, topics: TestTopics
) -> None:
    """A campaign with a syntax error in a template is a dead letter with the position, and the former content stays."""
    campaigns = Campaigns(settings, post.worker, emitter)
    broken = scheduled(templates={"hello": Template(subject="s", text="one\ntwo {% if %}")})
    done = await campaigns(records([scheduled(), broken, paused()], CAMPAIGNS))
    assert done == Done(Status.SENT, 0, 2)
    (letter,) = [decode_dead_letter(value) for value in topics.values(DEAD_LETTERS)]
    assert letter.reason.startswith("campaigns: templates: hello: text: line 2: ")
    assert await fetch_one(post.owner, "SELECT revision FROM campaigns") == 1
    assert await state(post) == ("paused", False)


async def test_what_takes_long_to_compile_does_not_stop_the_worker(post: Post) -> None:
    """While a large campaign compiles the event loop turns: the worker keeps its place in the consumer group."""
    macros = "".join(f"{{% macro m{n}() %}}{{% endmacro %}}" for n in range(200))
    templates = {f"hello-{n}": Template(subject="Hello", text=macros) for n in range(20)}
    turns = [time.perf_counter()]

    async def turn() -> None:
        while True:
            await asyncio.sleep(0.001)
            turns.append(time.perf_counter())

    turning = asyncio.create_task(turn())
    await post.apply(scheduled(templates=templates))
    turning.cancel()
    assert await state(post) == ("active", False)
    turns.append(time.perf_counter())
    longest = max(later - earlier for earlier, later in pairwise(turns))
    assert longest < (turns[-1] - turns[0]) / 2


async def test_what_postgres_refuses_is_a_dead_letter(
    settings: ProcessorSettings, post: Post, emitter: Emitter, topics: TestTopics
) -> None:
    """An event that Postgres refuses becomes a dead letter and leaves the campaign as it was."""
    await post.owner.execute("ALTER TABLE campaigns ADD CHECK (name <> 'bad')")
    campaigns = Campaigns(settings, post.worker, emitter)
    await campaigns(records([scheduled(name="good"), scheduled(name="bad"), paused()], CAMPAIGNS))
    assert await fetch(post.owner, "SELECT name, state, revision FROM campaigns") == [
        ("good", "paused", 1)
    ]
    (letter,) = [decode_dead_letter(value) for value in topics.values(DEAD_LETTERS)]
    assert letter.offset == 1
    assert "campaigns_name_check" in letter.reason
