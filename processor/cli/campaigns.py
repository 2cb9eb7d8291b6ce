"""`fairpost campaigns`: how campaigns stand, and what a person does to them."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import click

from contract import console
from contract.states import CampaignState
from processor.cli.session import actor, json_option, settings_of, with_database
from processor.export import ExportFormat, export_campaign, whole_file
from processor.interventions import cancel, hold, lift
from processor.overview import campaign_shares, list_campaigns, show_campaign

_COLUMNS = (
    "campaign_id",
    "state",
    "held_at",
    "scheduled_for",
    "ended_at",
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
    """List, show, export, pause, resume and cancel campaigns."""


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
            console.tell(f"{name:14} {value}")
    click.echo()
    shares = with_database(settings, lambda c: campaign_shares(c, campaign_id))
    console.show(shares, as_json=False)


@campaigns.command()
@click.argument("campaign_id")
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to; standard output by default. The file is there when it is whole, for its owner only.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON lines instead of CSV.")
@click.pass_context
def export(context: click.Context, campaign_id: str, output: Path | None, *, as_json: bool) -> None:
    """Export what became of each message of a campaign, as CSV.

    In CSV a value of others (user_id, email_key, email, reply) that begins with = + - @ or a tab or line end gets an
    apostrophe before it, so that a spreadsheet shows it and does not compute it; --json has all as it is stored.

    \b
    Examples:
      fairpost campaigns export spring --output spring.csv
      fairpost campaigns export spring --json | jq 'select(.status == "bounced") | .email'
    """
    form = ExportFormat.JSON_LINES if as_json else ExportFormat.CSV
    target = nullcontext(console.octets_out()) if output is None else whole_file(output)
    try:
        with target as file, console.progress_bar("messages") as seen:
            rows = with_database(
                settings_of(context), lambda c: export_campaign(c, campaign_id, file, form, seen)
            )
            file.flush()
    except BrokenPipeError:
        # Who reads has seen enough. What is still buffered has nowhere to go (library reference, module signal).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise console.CommandError("standard output: closed before the end") from None
    except OSError as error:
        raise console.CommandError(
            f"{output or 'standard output'}: {error.strerror or error}"
        ) from None
    console.complain(f"campaign {campaign_id}: {rows} messages exported")


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
