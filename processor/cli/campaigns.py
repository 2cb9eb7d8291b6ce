"""`fairpost campaigns`: how campaigns stand, and what a person does to them."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import click

from contract import console
from contract.states import CampaignState
from processor.cli.campaign_listing import list_, show
from processor.cli.completing import campaign_argument
from processor.cli.previews import preview
from processor.cli.rejected import retry_rejected
from processor.cli.session import actor, settings_of, with_database
from processor.cli.trials import test_
from processor.export import ExportFormat, export_campaign, whole_file
from processor.interventions import cancel, hold, lift


@click.group()
def campaigns() -> None:
    """List, show, preview, test, export, pause, resume and cancel campaigns, and retry what was rejected."""


campaigns.add_command(list_)
campaigns.add_command(show)


@campaigns.command()
@campaign_argument
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
@campaign_argument
@click.pass_context
def pause(context: click.Context, campaign_id: str) -> None:
    """Hold a campaign: within a second nothing more of it is handed over, until a person resumes it.

    \b
    Example: fairpost campaigns pause spring
    """
    with_database(settings_of(context), lambda c: hold(c, campaign_id, actor()))
    console.complain(f"campaign {campaign_id}: held")


@campaigns.command()
@campaign_argument
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
@campaign_argument
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


for command in (preview, test_, retry_rejected):
    campaigns.add_command(command)
