"""Resistance: the size of batches and the backoff follow what Postfix takes."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from smtp_agent.handover import HandedOver, Refusal
from smtp_agent.resistance import Resistance

AT = datetime(2024, 5, 1, tzinfo=UTC)
GOOD = HandedOver([(1, "A")], [], [], [], None)
LATE = HandedOver([(1, "A")], [], [2, 3], [], None)
NOT_BEGUN = HandedOver([], [], [1, 2], [], None)
UNSENT = HandedOver([], [], [1, 2], [], "451 4.3.0 queue file write error")
DOUBT = HandedOver([], [], [], [1], None)
DECLINED = HandedOver([], [], [], [], None, [Refusal(1, AT, "4.7.1", "450 4.7.1 later")])
ENDS = [GOOD, LATE, NOT_BEGUN, UNSENT, DOUBT, DECLINED]


def test_batches_grow_while_they_are_quick_and_shrink_when_they_are_late() -> None:
    """A batch that was quick is followed by one of twice the size, one that was late by half of it."""
    resistance = Resistance()
    first = resistance.batch_limit
    resistance.learn(GOOD, 0.1, 0.0, 1.0)
    assert resistance.batch_limit == 2 * first
    resistance.learn(GOOD, 0.5, 1.0, 1.0)
    assert resistance.batch_limit == 2 * first
    resistance.learn(LATE, 1.0, 2.0, 1.0)
    assert resistance.batch_limit == first


def test_a_postfix_that_takes_nothing_is_left_alone_ever_longer() -> None:
    """Each batch of which nothing is taken doubles the wait, up to five seconds; one that is taken ends it."""
    resistance = Resistance()
    waits = []
    for now in range(6):
        resistance.learn(UNSENT, 0.1, now * 10.0, 1.0)
        waits.append(resistance.until - now * 10.0)
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert (resistance.since, resistance.reason) == (0.0, UNSENT.unsent)
    resistance.learn(GOOD, 0.1, 100.0, 1.0)
    assert (resistance.since, resistance.reason, resistance.accepted_at) == (None, None, 100.0)
    assert resistance.until < 100.0


def test_what_says_nothing_of_postfix() -> None:
    """A batch that began too late is no fault of Postfix, nor is one message declined soon after others were taken."""
    resistance = Resistance()
    resistance.learn(NOT_BEGUN, 1.0, 0.0, 1.0)
    assert resistance.since is None
    resistance.learn(GOOD, 0.1, 10.0, 1.0)
    resistance.learn(DECLINED, 0.1, 20.0, 1.0)
    assert resistance.since is None
    resistance.learn(DECLINED, 0.1, 41.0, 1.0)
    assert resistance.since == 41.0


def test_doubt_is_no_acceptance() -> None:
    """A connection lost after DATA makes the next batch smaller, and the lane wait, as one that fails before does."""
    resistance = Resistance()
    before = resistance.batch_limit
    resistance.learn(DOUBT, 0.1, 10.0, 1.0)
    assert resistance.batch_limit < before
    assert resistance.until > 10.0


@given(st.lists(st.tuples(st.sampled_from(ENDS), st.floats(0, 5), st.floats(0.5, 1))))
def test_bounds(batches: list[tuple[HandedOver, float, float]]) -> None:
    """Whatever happens, a batch holds from 1 to 500 messages, and no wait is longer than five seconds."""
    resistance = Resistance()
    now = 0.0
    for done, seconds, jitter in batches:
        now += seconds
        resistance.learn(done, seconds, now, jitter)
        assert 1 <= resistance.batch_limit <= 500
        assert resistance.until - now <= 5.0
