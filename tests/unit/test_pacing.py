"""The pace of a lane: simulated hours of batches, stalls and changes, in milliseconds."""

import pickle
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smtp_agent.pacing import MAXIMUM_LIMIT, WINDOW, Pace, Retries, resume

POLL = 0.2
LARGEST_BATCH = 500
"""Of a lane whose Postfix takes as much within a second."""
CATCH_UP = 2.0
"""Seconds' worth that may be made up for at once."""
START = datetime(2024, 5, 1, tzinfo=UTC)
LIMITS = [1, 2, 7, 59, 60, 61, 350, 1_000, 6_000, 60_000]


class Batch(NamedTuple):
    """Hand-overs that happened somewhere between two times."""

    start: float
    end: float
    handed: int


def work(
    pace: Pace,
    *,
    begin: float,
    until: float,
    duration: Callable[[], float] = lambda: 0.01,
    at_most: int = 10_000,
) -> list[Batch]:
    """What a lane with endless work hands over, each batch taking `duration()` s."""
    batches = []
    now = begin
    while now < until:
        if (wait := pace.wait(now)) > 0:
            now += min(wait, POLL)
            continue
        count = pace.take(now, at_most)
        assert count > 0
        end = now + duration()
        pace.settle(count, end)
        batches.append(Batch(now, end, count))
        now = end
    return batches


def total(batches: list[Batch], begin: float, end: float) -> int:
    """Hand-overs that started from `begin` to before `end`."""
    return sum(batch.handed for batch in batches if begin <= batch.start < end)


def assert_window_holds(batches: list[Batch], limit: int) -> None:
    """No 60 s hold more than the limit, wherever in its batch each hand-over took place."""
    oldest = within = 0
    for batch in batches:
        while batch.start - batches[oldest].end >= WINDOW:
            within -= batches[oldest].handed
            oldest += 1
        within += batch.handed
        assert within <= limit


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("longest", [0.02, 0.2, 0.5])
def test_ten_minutes_use_99_percent_and_never_more(limit: int, longest: float) -> None:
    """Ten minutes of batches as lanes make them use at least 99% of the limit, and no window exceeds it.

    Postfix and Postgres are slow for them, each differently.
    """
    clock = random.Random(limit)
    pace = Pace(limit, 1_000_000.0)
    batches = work(
        pace,
        begin=1_000_000.0,
        until=1_000_600.0,
        duration=lambda: clock.uniform(0.005, longest),
        at_most=LARGEST_BATCH,
    )
    assert_window_holds(batches, limit)
    assert total(batches, 0, 1_000_600.0) >= 0.99 * limit * 10


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("seconds", "part"), [(0.1, 0.99), (0.5, 0.98), (1.0, 0.965)])
def test_no_drift_in_hours_of_slow_batches(limit: int, seconds: float, part: float) -> None:
    """However long each batch takes, the third hour holds as much as the first."""
    pace = Pace(limit, 0.0)
    batches = work(pace, begin=0, until=3 * 3_600, duration=lambda: seconds)
    assert_window_holds(batches, limit)
    hours = [total(batches, begin, begin + 3_600) for begin in range(0, 3 * 3_600, 3_600)]
    assert hours == pytest.approx([hours[0]] * 3, rel=0.001, abs=1)
    assert min(hours) >= part * 60 * limit


@settings(deadline=None, max_examples=50)  # simulates five minutes each time
@given(
    limit=st.integers(1, MAXIMUM_LIMIT),
    longest=st.floats(0, 3),
    stalls=st.floats(0, 0.3),
    at_most=st.integers(20, 2_000),
    seed=st.integers(0, 2**32),
)
def test_window_holds_through_stalls(
    limit: int, longest: float, stalls: float, at_most: int, seed: int
) -> None:
    """Whatever the batches' sizes, durations and stalls, no 60 s hold more than the limit."""
    clock = random.Random(seed)

    def duration() -> float:
        stall = clock.uniform(0, 90) if clock.random() < stalls else 0.0
        return 0.02 + clock.uniform(0, longest) + stall

    pace = Pace(limit, 0.0)
    assert_window_holds(work(pace, begin=0, until=300, duration=duration, at_most=at_most), limit)


@pytest.mark.parametrize("limit", [60, 350, 1_000, 6_000, 60_000])
def test_even_within_the_minute(limit: int) -> None:
    """Each 10 s of the first, fifth and tenth minute hold a sixth of the limit, a quarter off at most."""
    clock = random.Random(limit)
    pace = Pace(limit, 0.0)
    batches = work(pace, begin=0, until=600, duration=lambda: clock.uniform(0, 0.2))
    for minute in (0, 300, 540):
        for begin in range(minute, minute + 50):
            assert total(batches, begin, begin + 10) == pytest.approx(limit / 6, rel=0.25, abs=1)


@settings(deadline=None, max_examples=50)  # simulates five minutes each time
@given(
    limit=st.integers(1, MAXIMUM_LIMIT),
    seconds=st.floats(0.1, 30),
    stalls=st.floats(0, 0.3),
    seed=st.integers(0, 2**32),
)
def test_no_burst_after_stalls(limit: int, seconds: float, stalls: float, seed: int) -> None:
    """However batches are held up, some seconds let start no more than their worth, the catch-up and one."""
    clock = random.Random(seed)

    def duration() -> float:
        return clock.uniform(5, 30) if clock.random() < stalls else clock.uniform(0.02, 1)

    batches = work(Pace(limit, 0.0), begin=0, until=300, duration=duration)
    most = 1 + (seconds + CATCH_UP) * limit / 60
    oldest = within = 0
    for batch in batches:
        while batch.start - batches[oldest].start >= seconds:
            within -= batches[oldest].handed
            oldest += 1
        within += batch.handed
        assert within <= most + 1e-6


@pytest.mark.parametrize("limit", [60, 350, 1_000, 6_000, 60_000])
def test_seconds_are_even(limit: int) -> None:
    """While nothing is held up for long, no second holds more than half above its worth, and one."""
    clock = random.Random(limit)
    pace = Pace(limit, 0.0)
    batches = work(pace, begin=0, until=300, duration=lambda: clock.uniform(0.01, 0.1))
    for begin in range(300):
        assert total(batches, begin, begin + 1) <= 1.5 * limit / 60 + 1


@pytest.mark.parametrize("limit", LIMITS)
def test_catch_up_after_a_stall_is_small(limit: int) -> None:
    """After an idle hour at most one hand-over and 2 s worth of spacing go at once."""
    pace = Pace(limit, 0.0)
    assert 1 <= pace.take(3_600, 10**6) <= 1 + CATCH_UP * limit / 60


@pytest.mark.parametrize("limit", LIMITS)
def test_short_stalls_lose_nothing(limit: int) -> None:
    """A stall of 1.5 s every half minute leaves 99% of the limit used."""
    pace = Pace(limit, 0.0)
    batches = []
    for half in range(20):
        batches += work(pace, begin=30.0 * half + 1.5, until=30.0 * (half + 1))
    assert_window_holds(batches, limit)
    assert total(batches, 0, 600) >= 0.99 * limit * 10 - 1


@pytest.mark.parametrize("limit", [1, 7, 60])
def test_no_drift_in_a_day(limit: int) -> None:
    """Who sleeps what `wait` says uses 99.5% of the limit all day, the last hour like the first."""
    pace = Pace(limit, 0.0)
    now = 0.0
    batches = []
    while now < 24 * 3_600:
        batches.append(Batch(now, now, pace.take(now, 10)))
        pace.settle(batches[-1].handed, now)
        now += pace.wait(now)
    assert all(batch.handed > 0 for batch in batches)
    first, last = total(batches, 0, 3_600), total(batches, 23 * 3_600, 24 * 3_600)
    assert first >= 0.995 * 60 * limit
    assert last == pytest.approx(first, abs=1)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("sleep"), st.floats(0, 100)),
        st.tuples(st.just("limit"), st.integers(0, 200) | st.just(MAXIMUM_LIMIT)),
        st.tuples(st.just("batch"), st.integers(1, 300)),
        st.tuples(st.just("partly"), st.integers(1, 300)),
        st.tuples(st.just("debit"), st.integers(1, 500)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(OPERATIONS, st.floats(0, 1e7), st.floats(0, 5))
def test_window_holds_through_changes_of_the_limit(
    operations: list[tuple[str, float]], begin: float, duration: float
) -> None:
    """At every start the last 60 s, retries included, hold at most the limit of that moment."""
    pace = Pace(60, begin)
    now = begin
    batches: list[Batch] = []
    for name, value in operations:
        if name == "sleep":
            now += value
        elif name == "limit":
            pace.limit = int(value) or None
        elif name == "debit":
            pace.debit(int(value), now)
            batches.append(Batch(now, now, int(value)))
        else:
            count = pace.take(now, int(value))
            if count == 0:
                assert pace.wait(now) > 0
                continue
            within = sum(batch.handed for batch in batches if now - batch.end < WINDOW)
            assert pace.limit is None or within + count <= pace.limit
            sent = count if name == "batch" else count // 2
            batches.append(Batch(now, now + duration, sent))
            now += duration
            pace.settle(sent, now)
    assert pace.take(now + pace.wait(now), 1) == 1


def test_raised_limit_brings_no_burst() -> None:
    """A limit raised from 60 to 6,000 lets through a second's worth in the next second."""
    pace = Pace(60, 0.0)
    work(pace, begin=0, until=120)
    pace.limit = 6_000
    batches = work(pace, begin=120, until=180)
    assert batches[0].handed <= 2 + POLL * 100
    assert total(batches, 120, 121) == pytest.approx(100, abs=5 + POLL * 100)
    assert total(batches, 120, 180) == pytest.approx(6_000 - 60, rel=0.02)


def test_lowered_limit_counts_what_went_before() -> None:
    """A limit lowered from 6,000 to 60 waits until the last minute holds fewer, then goes on evenly."""
    pace = Pace(6_000, 0.0)
    work(pace, begin=0, until=120)
    pace.limit = 60
    assert 58 <= pace.wait(120) <= 60
    batches = work(pace, begin=120, until=780)
    assert total(batches, 180, 181) <= 4
    assert total(batches, 181, 781) >= 0.99 * 600


def test_limit_after_none_counts_what_went_before() -> None:
    """What went while there was no limit fills the window of the limit that comes."""
    pace = Pace(None, 0.0)
    assert pace.take(10, 500) == 500
    pace.settle(500, 11)
    assert pace.wait(11) == 0
    pace.limit = 100
    assert pace.wait(12) == pytest.approx(WINDOW - 1, abs=1e-3)
    pace.limit = None
    assert pace.take(12, 7) == 7


def test_refill_restores_the_window() -> None:
    """After a restart the pace goes on as if it had never stopped."""
    pace = Pace(60, 1_000.0)
    pace.refill([(990.0, 20), (950.0, 30), (999.0, 10), (900.0, 60)])
    assert pace.take(1_000, 1) == 0
    assert pace.wait(1_000) == pytest.approx(WINDOW - 50, abs=1e-3)
    assert pace.take(1_010.2, 100) == 2
    pace.settle(2, 1_010.2)
    assert total(work(pace, begin=1_010.2, until=1_049.9), 0, 1_049.9) == 28


def test_refill_from_the_future_counts_as_now() -> None:
    """A time that another clock put ahead does not keep the lane waiting for it."""
    pace = Pace(60, 1_000.0)
    pace.refill([(2_000.0, 60)])
    assert pace.wait(1_000) == pytest.approx(WINDOW, abs=1e-3)


@settings(deadline=None, max_examples=30)  # simulates two minutes and a half each time
@given(
    limit=st.integers(1, MAXIMUM_LIMIT),
    longest=st.floats(0.05, 1),
    lives=st.floats(0.5, 60),
    away=st.floats(0, 30),
    seed=st.integers(0, 2**32),
)
def test_window_holds_through_restarts(
    limit: int, longest: float, lives: float, away: float, seed: int
) -> None:
    """Killed again and again, also within a batch, no 60 s hold more than the limit."""
    clock = random.Random(seed)
    written: list[tuple[float, int]] = []
    batches: list[Batch] = []
    now = 0.0
    while now < 150:
        recent = [(now - at, n) for at, n in written if now - at < WINDOW + longest]
        pace = resume(limit, recent, now, longest)
        end = now + clock.uniform(0, lives)
        for batch in work(
            pace, begin=now, until=end, duration=lambda: clock.uniform(0.005, longest)
        ):
            written.append((batch.start + clock.uniform(0, 0.005), batch.handed))
            # What of it Postfix got after the kill, it never got.
            batches.append(batch._replace(end=min(batch.end, end)))
        now = end + clock.uniform(0, away)
    assert_window_holds(batches, limit)


def test_a_restart_costs_its_own_time() -> None:
    """A restart of 3 s costs no more than what 3 s are worth, and the last batch's time in the window."""
    pace = Pace(600, 0.0)
    batches = work(pace, begin=0, until=300)
    rows = [(303 - batch.start, batch.handed) for batch in batches]
    again = work(resume(600, rows, 303.0, 1.0), begin=303, until=600)
    assert_window_holds(batches + again, 600)
    assert total(batches + again, 0, 600) >= 0.99 * 6_000 - 3 * 10


def test_unsent_goes_back() -> None:
    """What of a batch was not sent may go at once."""
    pace = Pace(60, 0.0)
    pace.limit = 90
    assert pace.take(100, 10) == 3
    pace.settle(1, 100)
    assert pace.take(100, 10) == 2
    pace.settle(0, 100)
    assert pace.take(100, 10) == 2


def test_batch_counts_from_its_end() -> None:
    """The next waits until 60 s after the end of a batch, not after its start."""
    pace = Pace(1, 0.0)
    assert pace.take(0, 1) == 1
    pace.settle(1, 25)
    assert pace.wait(25) == pytest.approx(WINDOW, abs=1e-3)
    assert pace.take(25 + WINDOW - 0.001, 1) == 0
    assert pace.take(25 + WINDOW + 1e-6, 1) == 1


def test_retries_are_taken_off() -> None:
    """Hand-overs and a steady tenth of retries together use the limit, and not more."""
    pace = Pace(600, 0.0)
    handed = 0
    for second in range(600):
        pace.debit(1, second)
        handed += total(work(pace, begin=second, until=second + 1), 0, 10**6)
    assert handed == pytest.approx(5_400, rel=0.01)


def test_retries_delay_the_next() -> None:
    """Ten retries at 60 a minute take the place of the next ten seconds' hand-overs."""
    pace = Pace(60, 0.0)
    pace.debit(10, 0)
    assert pace.wait(0) == pytest.approx(10, rel=0.005)


def test_many_retries_hold_back_a_minute_only() -> None:
    """More retries than the limit stop the lane for 60 s, not for longer."""
    pace = Pace(60, 0.0)
    pace.debit(100_000, 0)
    assert pace.wait(0) == pytest.approx(61, abs=1)
    assert total(work(pace, begin=0, until=120), 0, 120) == pytest.approx(60, abs=2)


def test_retries_before_a_lowered_limit_hold_back_a_minute_only() -> None:
    """Retries taken off a large limit do not stop the lane for long once it is small."""
    pace = Pace(6_000, 0.0)
    pace.debit(6_000, 0)
    pace.limit = 6
    assert pace.wait(1) == pytest.approx(60, abs=11)


def test_clock_going_backward_gives_nothing() -> None:
    """A time before the last one counts as the last one: no credit, no forgetting."""
    pace = Pace(60, 100.0)
    assert pace.take(100, 5) == 1
    pace.settle(1, 100)
    assert pace.take(0, 5) == 0
    assert pace.wait(0) == pytest.approx(1, rel=0.005)
    assert pace.take(100.5, 5) == 0
    assert pace.take(101.1, 5) == 1


def test_memory_is_bounded() -> None:
    """A pace without a limit, 300,000 batches in a minute, stays under 2 MB."""
    pace = Pace(None, 0.0)
    for index in range(300_000):
        now = index / 5_000
        pace.settle(pace.take(now, 1), now)
    assert len(pickle.dumps(pace)) < 2_000_000
    pace.limit = MAXIMUM_LIMIT
    assert pace.take(now, 1) == 0


@pytest.mark.parametrize("limit", [0, -1, MAXIMUM_LIMIT + 1])
def test_limit_out_of_range_is_refused(limit: int) -> None:
    """A limit below 1 or above 60,000 is an error, when made and when changed."""
    with pytest.raises(ValueError, match="from 1 to 60000"):
        Pace(limit, 0.0)
    pace = Pace(1, 0.0)
    with pytest.raises(ValueError, match="from 1 to 60000"):
        pace.limit = limit
    assert pace.limit == 1


def test_batches_are_opened_and_closed_in_turn() -> None:
    """Taking twice, settling nothing, or settling more than was taken is an error."""
    pace = Pace(None, 0.0)
    with pytest.raises(RuntimeError, match="no batch is open"):
        pace.settle(0, 0)
    assert pace.take(0, 0) == 0
    assert pace.take(0, 5) == 5
    with pytest.raises(RuntimeError, match="not settled"):
        pace.take(0, 5)
    with pytest.raises(RuntimeError, match="not settled"):
        pace.wait(0)
    with pytest.raises(ValueError, match="6 of a batch of 5"):
        pace.settle(6, 0)
    pace.settle(5, 0)


@given(
    st.lists(
        st.dictionaries(st.integers(0, 5), st.integers(1, 20), max_size=6), min_size=1, max_size=8
    )
)
def test_each_retry_is_taken_off_once(sightings: list[dict[int, int]]) -> None:
    """However often retries are seen, and however their numbers grow, each comes off the window once."""
    seconds = [START + timedelta(seconds=n) for n in range(6)]
    pace = Pace(1000, 0.0)
    retries = Retries(pace)
    seen: dict[datetime, int] = {}
    taken = 0
    for sighting in sightings:
        for second, number in sighting.items():
            seen[seconds[second]] = max(seen.get(seconds[second], 0), number)
        taken += retries.take_off(seen, 0.0)
        assert taken == sum(seen.values())
    # What was taken off is missing from the minute's allowance.
    handed_over, now = 0, 0.0
    while now < 59.9:
        if number := pace.take(now, 1000):
            pace.settle(number, now)
            handed_over += number
        now += max(pace.wait(now), 0.001)
    assert handed_over <= max(1000 - taken, 0)


def test_retries_seen_no_more_are_forgotten() -> None:
    """Seconds that left the last minute are not remembered, and those that come are new."""
    pace = Pace(10, 0.0)
    retries = Retries(pace)
    assert retries.take_off({START: 3}, 0.0) == 3
    assert retries.take_off({}, 61.0) == 0
    assert retries.take_off({START + timedelta(seconds=61): 2}, 61.0) == 2
