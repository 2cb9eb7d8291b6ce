"""`fairpost campaigns list` and `show`: how campaigns stand, and when they end."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
from msgspec import Struct, structs
from psycopg import AsyncConnection

from contract import console
from contract.states import CampaignState
from contract.watching import watch_option, watched
from processor.cli.completing import campaign_argument
from processor.cli.session import json_option, settings_of, with_database
from processor.forecast import WINDOW, OperatorForecast, OperatorWork, Work, forecast, in_words
from processor.overview import (
    COUNTED,
    Campaign,
    OperatorShare,
    campaign_shares,
    campaign_work,
    list_campaigns,
    show_campaign,
)


class ListedCampaign(Campaign, frozen=True, kw_only=True):
    """A campaign; `progress` is how many per cent of its dispatches are final."""

    progress: int | None


class CampaignLine(Struct, frozen=True):
    """A campaign as a line of the table; its other counts are in `campaigns show` and --json.

    Attributes:
        state: what holds it up or has ended it, else the one of its events.
        left: dispatches that are yet to be handed over.
        under_way: messages that are handed over and not final.
    """

    campaign_id: str
    state: str
    progress: str | None
    scheduled_for: datetime | None
    dispatches: int
    left: int
    under_way: int
    uncertain: int
    sent: int
    bounced: int


class OperatorProgress(OperatorShare, frozen=True, kw_only=True):
    """A campaign at one operator.

    Attributes:
        limit: messages a minute from one instance; None: no limit.
        rate: messages a minute now; None: not known yet.
        done_at: when all that is planned will have been handed over; None: nothing is, or nobody can tell.
    """

    limit: int | None
    rate: int | None
    done_at: datetime | None


class ShownCampaign(ListedCampaign, frozen=True, kw_only=True):
    """A campaign with its forecast.

    Attributes:
        rate: messages handed over a minute now.
        done_at: when all that is planned will have been handed over; None: nothing is, or nobody can tell.
        unknown: why nobody can tell.
        on_time: whether `finish_by` will be met; None: it has none, or nobody can tell.
        forecast: the same in words.
    """

    rate: int
    done_at: datetime | None
    unknown: str | None
    on_time: bool | None
    forecast: Sequence[str]
    operators: Sequence[OperatorProgress]


_SORTS: Final[dict[str, Callable[[Campaign], Any]]] = {
    "id": lambda campaign: campaign.campaign_id,
    "progress": lambda campaign: -1 if campaign.progress is None else campaign.progress,
    "left": lambda campaign: -_left(campaign),
}


def _left(campaign: Campaign) -> int:
    return campaign.unplanned + campaign.planned


@click.command("list")
@click.option("--active", is_flag=True, help="Only those that are neither cancelled nor ended.")
@click.option(
    "--sort",
    type=click.Choice(["scheduled", *_SORTS]),
    default="scheduled",
    show_default=True,
    help="By schedule, the latest first; by id; by progress, the least first; by what is left to hand over, the most first.",
)
@watch_option
@json_option
@click.pass_context
def list_(
    context: click.Context, sort: str, watch: float | None, *, active: bool, as_json: bool
) -> None:
    """List campaigns with their progress: how many per cent of their dispatches are final.

    `left` are yet to be handed over, `under_way` handed over and not final. --json has the messages by state.

    \b
    Examples:
      fairpost campaigns list
      fairpost campaigns list --active --sort left --watch 5
      fairpost campaigns list --json | jq -r '.[] | select(.uncertain > 0) | .campaign_id'
    """
    settings = settings_of(context)

    def look() -> list[ListedCampaign]:
        found = with_database(settings, lambda c: list_campaigns(c, active=active))
        if sort in _SORTS:
            found.sort(key=_SORTS[sort])
        return [
            ListedCampaign(**structs.asdict(campaign), progress=campaign.progress)
            for campaign in found
        ]

    def tell(found: list[ListedCampaign]) -> None:
        rows = found if as_json else [_line(campaign) for campaign in found]
        columns = CampaignLine.__struct_fields__
        console.show(rows, as_json=as_json, columns=columns, one_line=watch is not None)

    watched(watch, look, tell, as_json=as_json)


def _line(campaign: Campaign) -> CampaignLine:
    ended = campaign.ended_at is not None and campaign.state != CampaignState.CANCELLED
    return CampaignLine(
        campaign_id=campaign.campaign_id,
        state="ended" if ended else "held" if campaign.held_at else campaign.state,
        progress=_per_cent(campaign),
        scheduled_for=campaign.scheduled_for,
        dispatches=campaign.dispatches,
        left=_left(campaign),
        under_way=campaign.handed + campaign.queued + campaign.deferred,
        uncertain=campaign.uncertain,
        sent=campaign.sent,
        bounced=campaign.bounced,
    )


def _per_cent(campaign: Campaign) -> str | None:
    return None if campaign.progress is None else f"{campaign.progress}%"


@click.command()
@campaign_argument
@watch_option
@json_option
@click.pass_context
def show(context: click.Context, campaign_id: str, watch: float | None, *, as_json: bool) -> None:
    """Show one campaign: its progress, its rate now, when it ends, and how it stands at each operator.

    The end is when all that is planned now will have been handed over to Postfix: at the rate of the last two minutes,
    and before there is one at the operators' limits, the instances shared fairly between campaigns. It holds as long as
    nothing is added and no instance or campaign comes or goes.

    \b
    Examples:
      fairpost campaigns show spring
      fairpost campaigns show spring --watch 10
      fairpost campaigns show spring --json | jq '.[0].on_time'
    """
    settings = settings_of(context)

    def tell(found: ShownCampaign) -> None:
        if as_json:
            console.show([found], as_json=True, one_line=watch is not None)
        else:
            _tell(found)

    watched(
        watch,
        lambda: with_database(settings, lambda c: _look(c, campaign_id)),
        tell,
        as_json=as_json,
    )


async def _look(connection: AsyncConnection[Any], campaign_id: str) -> ShownCampaign:
    campaign = await show_campaign(connection, campaign_id)
    shares = await campaign_shares(connection, campaign_id)
    return shown(campaign, shares, await campaign_work(connection, campaign), datetime.now(UTC))


def shown(
    campaign: Campaign, shares: Sequence[OperatorShare], work: Work, now: datetime
) -> ShownCampaign:
    """A campaign with its forecast of now."""
    found = forecast(work, now)
    of_operators = {
        one.operator: (one, ahead)
        for one, ahead in zip(work.operators, found.operators, strict=True)
    }
    return ShownCampaign(
        **structs.asdict(campaign),
        progress=campaign.progress,
        rate=round(found.rate),
        done_at=found.done_at,
        unknown=found.unknown,
        on_time=found.on_time,
        forecast=in_words(found, work, now),
        operators=[
            _at_operator(share, *of_operators[share.operator])
            for share in shares
            if share.operator
            in of_operators  # planned between the two looks: the next one shows it
        ],
    )


def _at_operator(
    share: OperatorShare, work: OperatorWork, ahead: OperatorForecast
) -> OperatorProgress:
    return OperatorProgress(
        **structs.asdict(share),
        limit=work.limit,
        rate=None if ahead.rate is None else round(ahead.rate),
        done_at=ahead.done_at,
    )


def _tell(campaign: ShownCampaign) -> None:
    for name in ("campaign_id", "name", "state", "scheduled_for", "finish_by", "ended_at"):
        _tell_of(name, getattr(campaign, name))
    if campaign.held_at is not None:
        _tell_of("held", f"{console.cell(campaign.held_at)} by {campaign.held_by}")
    done = _per_cent(campaign) or "-"
    _tell_of("progress", f"{done} of {campaign.dispatches:,} dispatches final")
    states = [f"{name} {number:,}" for name in COUNTED if (number := getattr(campaign, name))]
    _tell_of("messages", ", ".join(states) or "none")
    minutes = WINDOW.total_seconds() / 60
    _tell_of("rate", f"{campaign.rate:,} a minute in the last {minutes:g} minutes")
    for sentence in campaign.forecast:
        _tell_of("forecast", sentence)
    if campaign.operators:
        click.echo()
        console.show(campaign.operators, as_json=False)


def _tell_of(name: str, value: object) -> None:
    if value is not None:
        click.echo(f"{name:14} {console.cell(value)}")
