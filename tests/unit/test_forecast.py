"""Forecasts: when a campaign ends, and whether in time."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from processor.forecast import (
    WINDOW,
    Forecast,
    OperatorWork,
    Work,
    fleet_rate,
    forecast,
    in_words,
    minutes_left,
    present_rate,
)

NOW = datetime(2026, 5, 1, 13, 10, tzinfo=UTC)


@st.composite
def works(draw: st.DrawFn) -> OperatorWork:
    """What a campaign may have to give an operator, as the database could say it."""
    chunks = draw(st.integers(0, 50))
    largest = draw(st.integers(1, 10_000)) if chunks else 0
    return OperatorWork(
        "gmail",
        planned=draw(st.integers(largest + chunks - 1, largest * chunks)) if chunks else 0,
        chunks=chunks,
        largest=largest,
        limit=draw(st.none() | st.integers(1, 60_000)),
        campaigns=draw(st.integers(1, 20)),
        handed=draw(st.integers(0, 100_000)),
        seconds=draw(st.floats(0, WINDOW.total_seconds())),
    )


fleets = st.integers(0, 50)


def of(
    *operators: OperatorWork,
    finish_by: datetime | None = None,
    instances: int = 3,
    unplanned: int = 0,
) -> Work:
    """The work of a campaign that nothing keeps."""
    return Work(operators, None, None, finish_by, unplanned, instances)


# ------------------------------------------------------------------ rates


@given(works())
def test_the_present_rate(work: OperatorWork) -> None:
    """It is what was handed over by the time that it took, and not known before that time tells anything."""
    rate = present_rate(work)
    if rate is None:
        assert not work.handed or work.seconds < 30
    else:
        assert rate * work.seconds / 60 == pytest.approx(work.handed)


@given(works(), fleets)
def test_what_the_fleet_can_give(work: OperatorWork, instances: int) -> None:
    """The shares of equal campaigns are no more than all instances give, and a chunk is given by one of them."""
    rate = fleet_rate(work, instances)
    if rate is None:
        assert work.limit is None or not instances
        return
    assert work.limit is not None
    assert rate * work.campaigns <= work.limit * instances * (1 + 1e-9)
    assert rate <= work.limit * work.chunks


@given(works(), fleets)
def test_minutes_left(work: OperatorWork, instances: int) -> None:
    """Never less than what one instance takes for the largest chunk; none where nothing is planned."""
    minutes = minutes_left(work, instances)
    if not work.planned:
        assert minutes == 0
    elif minutes is not None and work.limit:
        assert minutes >= work.largest / work.limit
    if work.planned and not instances:
        assert minutes is None


@given(works(), fleets)
def test_more_instances_never_end_later(work: OperatorWork, instances: int) -> None:
    """Another instance makes no end later, another campaign none earlier."""
    minutes = minutes_left(work, instances)
    if minutes is None:
        return
    more = minutes_left(work, instances + 1)
    assert more is not None
    assert more <= minutes
    crowded = minutes_left(structs.replace(work, campaigns=work.campaigns + 1), instances)
    assert crowded is not None
    assert crowded >= minutes


@given(works(), st.integers(1, 50))
def test_without_a_rate_a_limit_is_enough(work: OperatorWork, instances: int) -> None:
    """A campaign that has not begun has an end wherever the operator has a limit."""
    fresh = structs.replace(work, handed=0)
    known = minutes_left(fresh, instances) is not None
    assert known == (fresh.limit is not None or not fresh.planned)


# ------------------------------------------------------------------ campaigns


@given(st.lists(works(), max_size=5), fleets)
def test_a_campaign_ends_with_its_last_operator(
    operators: list[OperatorWork], instances: int
) -> None:
    """Its end is the latest of its operators', known only where each of theirs is."""
    found = forecast(of(*operators, instances=instances), NOW)
    assert found.rate == pytest.approx(sum(present_rate(one) or 0 for one in operators))
    if any(one.unknown for one in found.operators):
        assert found.done_at is None
        assert found.unknown is not None
    else:
        ends = [one.done_at for one in found.operators if one.done_at is not None]
        assert found.done_at == max(ends, default=None)
    for one in found.operators:
        assert one.done_at is None or one.done_at >= NOW


@given(st.lists(works(), max_size=5), st.timedeltas(-timedelta(days=9), timedelta(days=9)))
def test_whether_finish_by_is_met(operators: list[OperatorWork], until: timedelta) -> None:
    """Yes or no exactly where the end is known or its time is over with mail left."""
    finish_by = NOW + until
    found = forecast(of(*operators, finish_by=finish_by), NOW)
    left = sum(one.planned for one in operators)
    if left and finish_by < NOW:
        assert found.on_time is False
    elif found.done_at is not None:
        assert found.on_time == (found.done_at <= finish_by)
    else:
        assert found.on_time is (True if not left and finish_by >= NOW else None)


GMAIL = OperatorWork("gmail", planned=21_000, chunks=3, largest=9_800, limit=350)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        # 3 instances alone: 20 minutes by the sum, 28 by the largest chunk.
        (of(GMAIL), ["handed over by 13:38 UTC, at what the fleet can give"]),
        # Two campaigns: 1.5 instances each, 40 minutes.
        (
            of(structs.replace(GMAIL, campaigns=2), finish_by=NOW + timedelta(minutes=50)),
            ["handed over by 13:50 UTC, at what the fleet can give", "finish_by 14:00 UTC: yes"],
        ),
        # 700 a minute are 30 minutes.
        (
            of(
                structs.replace(GMAIL, handed=1_400, seconds=120.0),
                finish_by=NOW + timedelta(minutes=10),
            ),
            [
                "handed over by 13:40 UTC, at the present rate",
                "finish_by 13:20 UTC: no, 20 minutes late",
            ],
        ),
        (
            of(structs.replace(GMAIL, limit=None), finish_by=NOW + timedelta(days=1)),
            ["end not known: no rate is known yet", "finish_by 2026-05-02 13:10 UTC: nobody can tell"],
        ),
        (of(GMAIL, instances=0), ["end not known: no instance is alive"]),
        (
            of(GMAIL, structs.replace(GMAIL, operator="aol", paused=True)),
            ["end not known: aol is paused"],
        ),
        (
            structs.replace(of(GMAIL), closed="it is held by ann", finish_by=NOW - timedelta(minutes=1)),
            ["end not known: it is held by ann", "finish_by 13:09 UTC: no"],
        ),
        (
            structs.replace(of(GMAIL), scheduled_for=NOW + timedelta(hours=12)),
            ["handed over by 2026-05-02 01:38 UTC, at what the fleet can give"],
        ),
        (
            of(unplanned=5, finish_by=NOW + timedelta(minutes=10)),
            [
                "nothing planned is left to be handed over, 5 are yet to be planned",
                "finish_by 13:20 UTC: nobody can tell",
            ],
        ),
        (
            of(structs.replace(GMAIL, planned=0, chunks=0, largest=0), finish_by=NOW),
            ["nothing planned is left to be handed over", "finish_by 13:10 UTC: yes"],
        ),
    ],
)  # fmt: skip
def test_in_words(work: Work, said: list[str]) -> None:
    """A person reads when it ends, on what that rests, and whether in time."""
    assert list(in_words(forecast(work, NOW), work, NOW)) == said


def test_what_never_ends_has_an_end_that_can_be_shown() -> None:
    """A rate of nearly nothing breaks no calendar."""
    found: Forecast = forecast(of(OperatorWork("o", 10**9, 10**5, 10_000, 1)), NOW)
    assert found.done_at is not None
    assert found.done_at.year < 2100
