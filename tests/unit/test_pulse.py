"""A standstill is a lane that makes no turn, waits for nobody, and is held up by no outage; nothing less."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from contract.outage import RETRIES
from contract.pulse import STANDSTILL_SECONDS, Pulse, count_retries


@dataclass
class World:
    """A clock, and how many calls were tried again."""

    now: float = 1000.0
    retries: float = 0.0

    def pulse(self) -> Pulse:
        """A pulse in this world."""
        return Pulse(lambda: self.now, lambda: self.retries)


def test_a_lane_that_stands_still_is_named() -> None:
    """After so long without a turn, and no sooner; the others are not."""
    world = World()
    pulse = world.pulse()
    pulse.beat("outlook")
    pulse.beat("gmail")
    pulse.beat("yahoo")
    world.now += STANDSTILL_SECONDS - 1
    pulse.beat("yahoo")
    assert pulse.standing() == []
    world.now += 1
    assert pulse.standing() == ["gmail", "outlook"]
    pulse.beat("gmail")
    assert pulse.standing() == ["outlook"]


@given(st.floats(0, 1e9))
def test_who_rests_does_not_stand_still(seconds: float) -> None:
    """A lane that waits for its turn, or has ended, may do so for ever."""
    world = World()
    pulse = world.pulse()
    pulse.beat("gmail")
    pulse.rest("gmail")
    pulse.rest("never seen")
    world.now += seconds
    assert pulse.standing() == []


@given(st.lists(st.floats(0, STANDSTILL_SECONDS * 0.9), max_size=100))
def test_an_outage_is_no_standstill(looks: list[float]) -> None:
    """While calls are tried again now and then, nobody stands still; when no more are, who does not move does."""
    world = World()
    pulse = world.pulse()
    pulse.beat("gmail")
    world.retries += 1
    assert pulse.standing() == []
    for seconds in looks:
        world.now += seconds
        world.retries += 1
        assert pulse.standing() == []
    world.now += STANDSTILL_SECONDS + 1
    assert pulse.standing() == ["gmail"]


def test_retries_are_counted() -> None:
    """Every operation's count."""
    before = count_retries()
    RETRIES.labels("one of a test").inc()
    RETRIES.labels("another of a test").inc(2)
    assert count_retries() - before == 3
