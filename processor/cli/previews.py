"""`fairpost campaigns preview`: a campaign's mail as its recipient would get it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from contract import console, printable
from contract.console import CommandError
from contract.events import CampaignScheduled, DueEmail, campaign_event_type, decode_campaign_event
from contract.rendering import Rendered
from contract.rendering_pool import NoProcessError
from processor.campaign_files import read_campaign_file
from processor.cli.session import json_option, settings_of, with_database
from processor.contacts import Wanted, read_contact
from processor.export import whole_file
from processor.previews import Preview, PreviewError, line_in_file, render_copy
from processor.previews import preview as preview_of
from processor.trials import stored_campaign


def choosing_mail(command: Callable[..., Any]) -> Callable[..., Any]:
    """The ways to say whose mail is meant, and what its templates see."""
    for option in (
        click.option(
            "--email-key",
            metavar="KEY",
            help="Which mail of the campaign; by default its only one, or that of the due e-mail.",
        ),
        click.option(
            "--variables",
            "variables",
            metavar="FILE",
            type=click.Path(dir_okay=False, path_type=Path),
            help="What the templates see: a JSON object, or due e-mails (.csv, .jsonl) with one to the address.",
        ),
        click.option("--to", "address", metavar="ADDRESS", required=True, help="The recipient."),
        click.argument("campaign", metavar="CAMPAIGN"),
    ):
        command = option(command)
    return command


def load_mail(
    context: click.Context,
    campaign: str,
    address: str,
    variables: Path | None,
    email_key: str | None,
) -> tuple[CampaignScheduled, DueEmail, Rendered]:
    """The campaign, the due e-mail, and the message that they make.

    Args:
        context: of the command.
        campaign: a file where it ends in .toml or .json, else the id of a campaign in the database.
        address: of the recipient.
        variables: see `read_contact`.
        email_key: likewise.

    Raises:
        CommandError: the message cannot be made; in a file, with the line.
    """
    file = Path(campaign) if campaign.lower().endswith((".toml", ".json")) else None
    if file is None:
        event = with_database(settings_of(context), lambda c: stored_campaign(c, campaign))
    else:
        read = read_campaign_file(file, decode_campaign_event)
        if not isinstance(read, CampaignScheduled):
            raise CommandError(f"{file}: {campaign_event_type(read)} has no templates")
        event = read
    wanted = Wanted(address, event.campaign_id, list(event.templates), email_key)
    due = read_contact(variables, wanted)
    try:
        return event, due, asyncio.run(render_copy(event, due))
    except NoProcessError as error:
        raise CommandError(f"no rendering process: {error}") from None
    except PreviewError as error:
        raise CommandError(f"{_place(campaign, file, event, due, error)}: {error}") from None


def _place(
    campaign: str,
    file: Path | None,
    event: CampaignScheduled,
    due: DueEmail,
    error: PreviewError,
) -> str:
    if file is None:
        return f"campaign {campaign!r}"
    line = line_in_file(file.read_text(encoding="utf-8"), event, due.email_key, error)
    return str(file) if line is None else f"{file}:{line}"


@click.command()
@choosing_mail
@click.option(
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the message itself there (.eml), for a mail program to open.",
)
@json_option
@click.pass_context
def preview(
    context: click.Context,
    *,
    campaign: str,
    address: str,
    variables: Path | None,
    email_key: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show a campaign's mail as its recipient would get it; nothing is sent.

    CAMPAIGN is a file, as `fairpost publish campaign` takes it (.toml or .json), or the id of a campaign that was
    published. The mail is made as the agents make it, within the same limits; only its date, and the number and domain
    in Message-ID and envelope sender, are others when it is sent.

    \b
    Examples:
      fairpost campaigns preview spring.toml --to ann@shop.example --variables contacts.csv
      fairpost campaigns preview spring.toml --to ann@shop.example --variables ann.json --output ann.eml
      fairpost campaigns preview spring --to ann@shop.example --email-key reminder --json
    """
    event, due, rendered = load_mail(context, campaign, address, variables, email_key)
    if output is not None:
        try:
            with whole_file(output) as file:
                file.write(rendered.message)
        except OSError as error:
            raise CommandError(f"{output}: {error.strerror or error}") from None
        console.complain(f"{output}: {len(rendered.message)} bytes written")
    found = preview_of(event.campaign_id, due.email_key, rendered)
    if as_json:
        console.show([found], as_json=True)
    elif output is None:
        click.echo(_told(found))


def _told(found: Preview) -> str:
    """A mail at a terminal: header, then each part under a line of its own."""
    lines = [printable.one_line(f"{name}: {value}") for name, value in found.headers]
    for kind, part in (("text", found.text), ("html", found.html)):
        if part is not None:
            lines += [
                "",
                click.style(f"--- {kind}", dim=True),
                printable.lines(part.rstrip("\n")),
            ]
    return "\n".join(lines)
