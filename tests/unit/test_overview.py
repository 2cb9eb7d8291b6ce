"""A campaign's account: its dispatches are the sum of its states."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from contract.states import FINAL, MessageState
from processor.overview import COUNTED, Campaign

counts = st.fixed_dictionaries({name: st.integers(0, 10**6) for name in COUNTED})


def campaign(dispatches: int, states: dict[str, int]) -> Campaign:
    """A campaign with these counts."""
    return msgspec.convert(
        {
            "campaign_id": "c",
            "name": None,
            "state": "active",
            "scheduled_for": None,
            "finish_by": None,
            "held_at": None,
            "held_by": None,
            "ended_at": None,
            "dispatches": dispatches,
            **states,
        },
        Campaign,
    )


def test_every_state_is_counted() -> None:
    """Every state of a message counts, and what is not planned yet or pruned already."""
    assert set(COUNTED) == {state.value for state in MessageState} | {"unplanned", "pruned"}
    assert len(COUNTED) == len(set(COUNTED))


@given(counts)
def test_what_is_accounted_for(states: dict[str, int]) -> None:
    """Each dispatch counts once, in whichever state it is."""
    assert campaign(0, states).accounted == sum(states.values())


@given(counts, st.sampled_from(COUNTED))
def test_one_more_anywhere_shows(states: dict[str, int], name: str) -> None:
    """A dispatch that is lost or counted twice is seen, in whichever state it should be."""
    off = states | {name: states[name] + 1}
    assert campaign(0, off).accounted == campaign(0, states).accounted + 1


@given(counts)
def test_progress(states: dict[str, int]) -> None:
    """It is the part of all dispatches that nothing can happen to any more, and 100 only when that is all of them."""
    total = sum(states.values())
    progress = campaign(total, states).progress
    final = states["pruned"] + sum(states[state] for state in FINAL)
    if not total:
        assert progress is None
    else:
        assert progress is not None
        assert (progress == 100) == (final == total)
        assert progress <= 100 * final / total < progress + 1
