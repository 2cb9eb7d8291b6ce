"""`fairpost campaigns`: how campaigns stand, and what a person does to them."""

import click

from contract import console
from contract.states import CampaignState
from processor.cli.session import actor, json_option, settings_of, with_database
from processor.interventions import cancel, hold, lift
from processor.overview import campaign_shares, list_campaigns, show_campaign

_COLUMNS = (
    "campaign_id",
    "state",
    "held_at",
    "scheduled_for",
    "dispatches",
    "unplanned",
    "planned",
    "handed",
    "queued",
    "deferred",
    "sent",
    "bounced",
    "cancelled",
)


@click.group()
def campaigns() -> None:
    """List, show, pause, resume and cancel campaigns."""


@campaigns.command("list")
@json_option
@click.pass_context
def list_(context: click.Context, *, as_json: bool) -> None:
    """List campaigns with their messages by state, the latest first."""
    found = with_database(settings_of(context), list_campaigns)
    console.show(found, as_json=as_json, columns=_COLUMNS)


@campaigns.command()
@click.argument("campaign_id")
@json_option
@click.pass_context
def show(context: click.Context, campaign_id: str, *, as_json: bool) -> None:
    """Show one campaign; as a table, also how it stands at each operator.

    \b
    Example: fairpost campaigns show spring
    """
    settings = settings_of(context)
    found = with_database(settings, lambda c: show_campaign(c, campaign_id))
    if as_json:
        console.show([found], as_json=True)
        return
    for name in found.__struct_fields__:
        value = getattr(found, name)
        if value not in (None, 0):
            click.echo(f"{name:14} {value}")
    click.echo()
    shares = with_database(settings, lambda c: campaign_shares(c, campaign_id))
    console.show(shares, as_json=False)


@campaigns.command()
@click.argument("campaign_id")
@click.pass_context
def pause(context: click.Context, campaign_id: str) -> None:
    """Hold a campaign: within a second nothing more of it is handed over, until a person resumes it.

    \b
    Example: fairpost campaigns pause spring
    """
    with_database(settings_of(context), lambda c: hold(c, campaign_id, actor()))
    console.complain(f"campaign {campaign_id}: held")


@campaigns.command()
@click.argument("campaign_id")
@click.pass_context
def resume(context: click.Context, campaign_id: str) -> None:
    """Lift a hold.

    \b
    Example: fairpost campaigns resume spring
    """
    state = with_database(settings_of(context), lambda c: lift(c, campaign_id, actor()))
    console.complain(f"campaign {campaign_id}: no longer held")
    if state is CampaignState.PAUSED:
        console.complain("it stays paused by its own event: publish campaign.resumed to lift that")


@campaigns.command("cancel")
@click.argument("campaign_id")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def cancel_(context: click.Context, campaign_id: str, *, yes: bool) -> None:
    """Cancel a campaign for good: what was not handed over never is.

    \b
    Example: fairpost campaigns cancel spring --yes
    """
    if not yes:
        click.confirm(f"Cancel {campaign_id} for good?", abort=True, err=True)
    with_database(settings_of(context), lambda c: cancel(c, campaign_id, actor()))
    console.complain(f"campaign {campaign_id}: cancelled")
