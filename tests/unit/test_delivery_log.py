"""What is missing of `delivery-log` is seen by the offsets alone."""

from hypothesis import given
from hypothesis import strategies as st

from processor.delivery_log import Continuity, Gap


def gaps(begin: int | None, offsets: list[int]) -> list[Gap]:
    """What is missing in a partition that is assigned and goes on at `begin`."""
    continuity = Continuity()
    continuity.forget(3)
    assert not continuity.knows(3)
    continuity.begin(3, begin)
    assert continuity.knows(3)
    return [gap for offset in offsets if (gap := continuity.follow(3, offset)) is not None]


@given(st.integers(0, 10), st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_every_step_is_a_gap(begin: int, steps: list[int]) -> None:
    """Offsets that follow on one another lack nothing; each step of more than one is told, once, with what was due."""
    offsets, expected = [], []
    due = begin
    for step in steps:
        offset = due + step - 1
        if step > 1:
            expected.append(Gap(3, due, offset))
        offsets.append(offset)
        due = offset + 1
    assert gaps(begin, offsets) == expected


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20))
def test_repeats_lack_nothing(again: list[int]) -> None:
    """What comes once more, from anywhere before, is no gap, and what follows it is not either."""
    offsets = list(range(21))
    for back in again:
        offsets += range(back, 21)
    assert gaps(0, [*offsets, 21]) == []


def test_a_first_start() -> None:
    """Where nothing was ever acknowledged the log begins at 0: whatever was deleted before is missing."""
    assert gaps(None, [0, 1]) == []
    assert gaps(None, [7, 8]) == [Gap(3, 0, 7)]


def test_a_topic_made_anew() -> None:
    """A partition that goes on at an offset and begins with 0 is another one: what the former still held is missing."""
    assert gaps(5, [0, 1, 2]) == [Gap(3, 5, 0)]
    assert gaps(5, [4, 5, 6]) == []


def test_partitions_are_apart() -> None:
    """Each partition has its own place, and one that is assigned again starts from where it then goes on."""
    continuity = Continuity()
    continuity.begin(0, 4)
    continuity.begin(1, None)
    assert continuity.follow(0, 4) is None
    assert continuity.follow(1, 0) is None
    continuity.forget(0)
    assert not continuity.knows(0)
    continuity.begin(0, 90)
    assert continuity.follow(0, 90) is None
    assert continuity.follow(1, 3) == Gap(1, 1, 3)
