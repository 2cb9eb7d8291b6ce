"""States of messages and campaigns: which may follow which, whatever the order of events."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.states import (
    FINAL,
    MESSAGE_TRANSITIONS,
    CampaignEventType,
    CampaignState,
    MessageState,
    next_campaign_state,
)

SCHEMA = Path(__file__).parents[2] / "contract/migrations/0001_schema.sql"
SCHEDULED, PAUSED = CampaignEventType.SCHEDULED, CampaignEventType.PAUSED
RESUMED, CANCELLED = CampaignEventType.RESUMED, CampaignEventType.CANCELLED


def after(events: list[CampaignEventType]) -> list[CampaignState]:
    """The states that an unknown campaign goes through."""
    state = CampaignState.WAITING
    scheduled = False
    states = [state]
    for event in events:
        state = next_campaign_state(state, event, scheduled=scheduled)
        scheduled = scheduled or event is SCHEDULED
        states.append(state)
    return states


# ------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("name", "states"), [("message_state", MessageState), ("campaign_state", CampaignState)]
)
def test_postgres_has_the_same_states_in_the_same_order(
    name: str, states: type[MessageState] | type[CampaignState]
) -> None:
    """SQL compares states by their order, so the types of the schema are those of the code."""
    found = re.search(rf"CREATE TYPE {name} AS ENUM \(([^)]*)\)", SCHEMA.read_text())
    assert found is not None
    assert re.findall(r"'(\w+)'", found[1]) == [state.value for state in states]


def test_final_states_are_the_last() -> None:
    """A state before `sent` is not final, and no other is."""
    order = list(MessageState)
    assert set(order[order.index(MessageState.SENT) :]) == FINAL


def test_nothing_follows_a_final_state() -> None:
    """The first final state of a message stays but for `rejected`, and only a final state has no way on."""
    assert set(MESSAGE_TRANSITIONS) == set(MessageState)
    ends = {state for state, following in MESSAGE_TRANSITIONS.items() if not following}
    assert ends == FINAL - {MessageState.REJECTED}


def test_what_was_rejected_is_sent_only_when_it_is_handed_over_again() -> None:
    """From `rejected` a message gets no further than into its chunk, and nothing that Postfix ever had can be retried."""
    never_left = {
        MessageState.PLANNED,
        MessageState.EXPIRED,
        MessageState.SUPPRESSED,
        MessageState.CANCELLED,
    }
    assert MESSAGE_TRANSITIONS[MessageState.REJECTED] == never_left


def test_every_state_is_reached_and_every_message_can_end() -> None:
    """From `planned` each state can come about, and from each state a final one."""
    assert reachable(MessageState.PLANNED) == set(MessageState)
    for state in set(MessageState) - FINAL:
        assert reachable(state) & FINAL


def reachable(start: MessageState) -> set[MessageState]:
    """The states that may ever follow, and the state itself."""
    found = {start}
    waiting = [start]
    while waiting:
        for state in MESSAGE_TRANSITIONS[waiting.pop()] - found:
            found.add(state)
            waiting.append(state)
    return found


def test_only_a_hand_over_leads_out_of_the_chunk() -> None:
    """No message is in Postfix that was not handed over, and what may be there is never planned again unseen."""
    in_postfix = {MessageState.QUEUED, MessageState.DEFERRED, MessageState.SENT}
    assert not MESSAGE_TRANSITIONS[MessageState.PLANNED] & in_postfix
    for state in in_postfix:
        assert MessageState.PLANNED not in MESSAGE_TRANSITIONS[state]
        assert MessageState.HANDED not in MESSAGE_TRANSITIONS[state]


# ------------------------------------------------------------------ campaigns

CAMPAIGN_TABLE = [
    (CampaignState.WAITING, SCHEDULED, False, CampaignState.ACTIVE),
    (CampaignState.WAITING, PAUSED, False, CampaignState.PAUSED),
    (CampaignState.WAITING, RESUMED, False, CampaignState.WAITING),
    (CampaignState.WAITING, CANCELLED, False, CampaignState.CANCELLED),
    (CampaignState.ACTIVE, SCHEDULED, True, CampaignState.ACTIVE),
    (CampaignState.ACTIVE, PAUSED, True, CampaignState.PAUSED),
    (CampaignState.ACTIVE, RESUMED, True, CampaignState.ACTIVE),
    (CampaignState.ACTIVE, CANCELLED, True, CampaignState.CANCELLED),
    (CampaignState.PAUSED, SCHEDULED, False, CampaignState.PAUSED),
    (CampaignState.PAUSED, SCHEDULED, True, CampaignState.PAUSED),
    (CampaignState.PAUSED, PAUSED, True, CampaignState.PAUSED),
    (CampaignState.PAUSED, RESUMED, True, CampaignState.ACTIVE),
    (CampaignState.PAUSED, RESUMED, False, CampaignState.WAITING),
    (CampaignState.PAUSED, CANCELLED, False, CampaignState.CANCELLED),
    (CampaignState.CANCELLED, SCHEDULED, True, CampaignState.CANCELLED),
    (CampaignState.CANCELLED, PAUSED, True, CampaignState.CANCELLED),
    (CampaignState.CANCELLED, RESUMED, True, CampaignState.CANCELLED),
    (CampaignState.CANCELLED, CANCELLED, True, CampaignState.CANCELLED),
]


@pytest.mark.parametrize(("state", "event", "scheduled", "following"), CAMPAIGN_TABLE)
def test_what_an_event_makes_of_a_campaign(
    state: CampaignState, event: CampaignEventType, following: CampaignState, *, scheduled: bool
) -> None:
    """Each event has one outcome in each state."""
    assert next_campaign_state(state, event, scheduled=scheduled) is following


event_lists = st.lists(st.sampled_from(CampaignEventType), max_size=12)


@given(event_lists, event_lists)
def test_cancelled_is_final(before: list[CampaignEventType], then: list[CampaignEventType]) -> None:
    """Once cancelled, a campaign stays so, whatever comes."""
    states = after([*before, CANCELLED, *then])
    assert set(states[len(before) + 1 :]) == {CampaignState.CANCELLED}


@given(event_lists, st.lists(st.sampled_from([SCHEDULED, PAUSED]), max_size=6))
def test_a_pause_lasts_until_it_is_lifted(
    before: list[CampaignEventType], then: list[CampaignEventType]
) -> None:
    """A repeated schedule does not lift a pause."""
    state = after([*before, PAUSED, *then])[-1]
    assert state is (CampaignState.CANCELLED if CANCELLED in before else CampaignState.PAUSED)


@given(event_lists)
def test_nothing_is_active_without_its_content(events: list[CampaignEventType]) -> None:
    """A campaign is active only after a schedule, neither paused since nor cancelled ever."""
    active = after(events)[-1] is CampaignState.ACTIVE
    pausing = [event for event in events if event in (PAUSED, RESUMED)]
    paused = bool(pausing) and pausing[-1] is PAUSED
    assert active == (SCHEDULED in events and not paused and CANCELLED not in events)


@given(event_lists)
def test_a_repeated_event_changes_nothing(events: list[CampaignEventType]) -> None:
    """The same event twice in a row is the same as once."""
    twice = [event for event in events for _ in range(2)]
    assert after(twice)[-1] is after(events)[-1]


@given(event_lists)
def test_each_campaign_is_waiting_only_before_its_content(events: list[CampaignEventType]) -> None:
    """A campaign that has been active is never a placeholder again."""
    for earlier, later in pairwise(after(events)):
        if earlier is CampaignState.ACTIVE:
            assert later is not CampaignState.WAITING
