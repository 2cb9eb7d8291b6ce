"""A stall is work that waits, nobody who has it in hand, and time that passes; nothing less."""

from hypothesis import given
from hypothesis import strategies as st

from processor.stall import Progress, Stall, find_stall

LIMIT = 60.0


def test_work_that_nobody_takes_is_a_stall() -> None:
    """Behind for the whole limit, with the last batch as long ago: stalled."""
    progress = Progress()
    progress.begin("planning")
    progress.end("planning", 100.0)
    assert find_stall(progress, {"planning": 7}, {"planning": 90.0}, 160.0, LIMIT) == Stall(
        "planning", 7, 60.0
    )
    assert find_stall(progress, {"planning": 7}, {"planning": 90.0}, 159.9, LIMIT) is None


def test_a_step_that_never_had_a_batch_stalls_too() -> None:
    """A worker that takes nothing from its start on is stalled after the limit."""
    assert find_stall(Progress(), {"campaigns": 1}, {"campaigns": 5.0}, 65.0, LIMIT) == Stall(
        "campaigns", 1, 60.0
    )


@given(since=st.floats(0, 1e6), lag=st.integers(0, 10**9), now=st.floats(0, 1e6))
def test_a_batch_in_hand_is_no_stall(since: float, lag: int, now: float) -> None:
    """A batch that an outage or a switched-off fleet holds up may last for hours."""
    progress = Progress()
    progress.begin("reservation")
    assert find_stall(progress, {"reservation": lag}, {"reservation": since}, now, LIMIT) is None


@given(done=st.floats(0, 1e6), now=st.floats(0, 1e6))
def test_nothing_to_do_is_no_stall(done: float, now: float) -> None:
    """Without lag a step may idle for as long as it likes."""
    progress = Progress()
    progress.end("reservation", done)
    assert find_stall(progress, {"reservation": 0}, {}, now, LIMIT) is None
