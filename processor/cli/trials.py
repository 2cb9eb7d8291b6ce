"""`fairpost campaigns test`: one copy of a campaign's mail to a given address."""

import uuid
from pathlib import Path

import click

from contract import console, printable
from contract.console import CommandError
from contract.events import CAMPAIGNS, DUE_EMAILS, EventError
from contract.outage import first_line
from contract.states import MessageState
from processor.cli.previews import choosing_mail, load_mail
from processor.cli.session import actor, json_option, settings_of, with_database
from processor.emitting import Emission
from processor.fleet import show_sending
from processor.publishing import Publisher
from processor.settings import ProcessorSettings
from processor.trials import Outcome, Trial, begin, follow, outcome


@click.command("test")
@choosing_mail
@click.option("--wait", is_flag=True, help="Wait for the outcome; exit code 1 unless it is sent.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, max=1e6),
    default=300,
    show_default=True,
    help="With --wait: how long at most.",
)
@json_option
@click.pass_context
def test_(
    context: click.Context,
    *,
    campaign: str,
    address: str,
    variables: Path | None,
    email_key: str | None,
    wait: bool,
    timeout: float,
    as_json: bool,
) -> None:
    """Send one copy of a campaign's mail to an address, through the fleet, marked as a test.

    CAMPAIGN is a file (.toml or .json) or the id of a campaign that was published, whether it is due, held or not. The
    subject begins with "[test]", and the header has X-Fairpost-Test: yes. The copy is a campaign of its own,
    test-UUID: it counts in no figure of the campaign, and reaches none of its contacts. A fleet or an operator that is
    paused does not send it, and to an address that is suppressed it is refused.

    \b
    Examples:
      fairpost campaigns test spring.toml --to me@shop.example --variables contacts.csv
      fairpost campaigns test spring --to me@shop.example --variables me.json --wait
    """
    event, due, _ = load_mail(context, campaign, address, variables, email_key)
    settings = settings_of(context)
    trial_id = f"test-{uuid.uuid4()}"
    try:
        made = with_database(settings, lambda c: begin(c, event, due, trial_id, actor()))
    except EventError as error:
        raise CommandError(first_line(error)) from None
    _publish(settings, made)
    console.complain(f"{trial_id}: published, to {address}")
    if not with_database(settings, show_sending).sending:
        console.complain("sending is off: it waits until `fairpost sending on`")
    if wait:
        found = with_database(settings, lambda c: follow(c, trial_id, timeout, _tell))
    else:
        found = with_database(settings, lambda c: outcome(c, trial_id))
    if as_json:
        console.show([found], as_json=True)
    if wait and not found.is_final:
        console.complain(f"{trial_id}: no outcome yet; see `fairpost campaigns show {trial_id}`")
    context.exit(console.FAILED if wait and found.state != MessageState.SENT else 0)


def _publish(settings: ProcessorSettings, made: Trial) -> None:
    campaign, due = made.campaign, made.due
    emissions = [
        Emission(settings.topic(CAMPAIGNS), campaign.campaign_id, campaign),
        Emission(settings.topic(DUE_EMAILS), due.user_id, due),
    ]
    results = Publisher(settings.brokers).publish(emissions)
    for emission, error in zip(emissions, results, strict=True):
        if error is not None:
            raise CommandError(f"{emission.topic}: {error}")


def _tell(found: Outcome) -> None:
    """A line for each step of its way."""
    parts = [found.state]
    if found.instance is not None:
        parts.append(f"by {found.instance}")
    if found.reply is not None:
        parts.append(f"({printable.one_line(found.reply)})")
    console.complain(f"{found.campaign_id}: {' '.join(parts)}")
