"""Forecasts: when all of a campaign's planned mail will have been handed over, and whether by its `finish_by`.

What an operator is still to be given goes at the rate of the last minutes; where there is none yet, at what the fleet can
give: the operator's limit for each instance that works for the campaign there, if campaigns share the instances fairly.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

WINDOW: Final = timedelta(minutes=2)
"""Hand-overs since then make the present rate."""

_SETTLED: Final = 30.0
"""Seconds of hand-overs that make a rate; before, chance decides."""

_LATEST: Final = timedelta(days=3650)
"""What would take longer never ends, for a person."""


class OperatorWork(Struct, frozen=True):
    """What a campaign is still to give an operator.

    Attributes:
        planned: messages.
        chunks: that hold them.
        largest: the most of them in one chunk, which one instance takes.
        limit: messages a minute from one instance; None: no limit.
        paused: a person has paused the operator.
        campaigns: that have mail for it now, this one included.
        handed: this campaign's messages handed over to it within `WINDOW`; what was given back counts each time.
        seconds: since the first of them.
    """

    operator: str
    planned: int = 0
    chunks: int = 0
    largest: int = 0
    limit: int | None = None
    paused: bool = False
    campaigns: int = 1
    handed: int = 0
    seconds: float = 0.0


class Work(Struct, frozen=True):
    """What a campaign is still to give, and what may keep it from that.

    Attributes:
        closed: why nothing of it is handed over now, wherever; None: nothing keeps it.
        scheduled_for: before, nothing is handed over.
        unplanned: reserved, and yet to be planned; forecasts leave it out.
        instances: that are alive and not paused.
    """

    operators: tuple[OperatorWork, ...] = ()
    closed: str | None = None
    scheduled_for: datetime | None = None
    finish_by: datetime | None = None
    unplanned: int = 0
    instances: int = 0


class OperatorForecast(Struct, frozen=True):
    """When an operator will have been given all.

    Attributes:
        rate: messages a minute now; None: not known yet.
        done_at: None: nothing is left, or nobody can tell.
        unknown: why nobody can tell.
    """

    operator: str
    rate: float | None
    done_at: datetime | None
    unknown: str | None


class Forecast(Struct, frozen=True):
    """When all operators will have been given all.

    Attributes:
        rate: messages a minute now, to all operators.
        done_at: None: nothing is left, or nobody can tell.
        unknown: why nobody can tell.
        on_time: whether `finish_by` will be met; None: it has none, or nobody can tell.
    """

    rate: float
    done_at: datetime | None
    unknown: str | None
    on_time: bool | None
    operators: tuple[OperatorForecast, ...]


def forecast(work: Work, now: datetime) -> Forecast:
    """The forecast of a campaign."""
    operators = tuple(_of_operator(one, work, now) for one in work.operators)
    unknown = next((one.unknown for one in operators if one.unknown), None)
    ends = [one.done_at for one in operators if one.done_at is not None]
    done_at = max(ends) if ends and unknown is None else None
    left = sum(one.planned for one in work.operators) + work.unplanned
    return Forecast(
        rate=sum(one.rate or 0.0 for one in operators),
        done_at=done_at,
        unknown=unknown,
        on_time=_on_time(work.finish_by, done_at, left, now),
        operators=operators,
    )


def _of_operator(work: OperatorWork, campaign: Work, now: datetime) -> OperatorForecast:
    rate = present_rate(work)
    minutes, unknown = None, None
    if work.planned:
        unknown = campaign.closed or (f"{work.operator} is paused" if work.paused else None)
        minutes = minutes_left(work, campaign.instances)
        if unknown is None and minutes is None:
            unknown = "no instance is alive" if not campaign.instances else "no rate is known yet"
    if minutes is None or unknown is not None:
        return OperatorForecast(work.operator, rate, None, unknown)
    begin = max(now, campaign.scheduled_for or now)
    done_at = begin + min(timedelta(minutes=min(minutes, 1e9)), _LATEST)
    return OperatorForecast(work.operator, rate, done_at, None)


def present_rate(work: OperatorWork) -> float | None:
    """Messages a minute now; None: none were handed over lately, or the first too short a while ago."""
    if not work.handed or work.seconds < _SETTLED:
        return None
    return work.handed / work.seconds * 60


def fleet_rate(work: OperatorWork, instances: int) -> float | None:
    """Messages a minute that the fleet can give, if campaigns share it fairly; None: no limit says so."""
    if work.limit is None or not instances:
        return None
    # A chunk is one instance's at a time.
    return work.limit * min(instances / max(work.campaigns, 1), work.chunks)


def minutes_left(work: OperatorWork, instances: int) -> float | None:
    """Minutes of handing over what is planned; None: nobody can tell."""
    rate = present_rate(work) or fleet_rate(work, instances)
    if not work.planned:
        return 0.0
    if not instances or not rate:
        return None
    # However many work for the campaign, the largest chunk is handed over by one of them.
    slowest = work.largest / work.limit if work.limit else 0.0
    return max(work.planned / rate, slowest)


def _on_time(
    finish_by: datetime | None, done_at: datetime | None, left: int, now: datetime
) -> bool | None:
    if finish_by is None:
        return None
    if left and finish_by < now:
        return False
    if done_at is not None:
        return done_at <= finish_by
    # When the last one was handed over is not kept: later than `finish_by`, nobody can tell.
    return True if not left and now <= finish_by else None


def in_words(found: Forecast, work: Work, now: datetime) -> Sequence[str]:
    """The forecast for people, a sentence a line."""
    said = [_end_in_words(found, work, now)]
    if work.finish_by is not None:
        verdict = {True: "yes", False: "no", None: "nobody can tell"}[found.on_time]
        said.append(
            f"finish_by {_clock(work.finish_by, now)}: {verdict}{_by_how_much(found, work)}"
        )
    return said


def _end_in_words(found: Forecast, work: Work, now: datetime) -> str:
    waits = f", {work.unplanned} are yet to be planned" if work.unplanned else ""
    if found.unknown is not None:
        return f"end not known: {found.unknown}{waits}"
    if found.done_at is None:
        return f"nothing planned is left to be handed over{waits}"
    measured = all(one.rate is not None for one in found.operators if one.done_at is not None)
    basis = "at the present rate" if measured else "at what the fleet can give"
    return f"handed over by {_clock(found.done_at, now)}, {basis}{waits}"


def _by_how_much(found: Forecast, work: Work) -> str:
    if found.done_at is None or work.finish_by is None or found.on_time:
        return ""
    minutes = (found.done_at - work.finish_by).total_seconds() / 60
    return f", {minutes:,.0f} minutes late"


def _clock(at: datetime, now: datetime) -> str:
    return f"{at:%H:%M} UTC" if at.date() == now.date() else f"{at:%Y-%m-%d %H:%M} UTC"
