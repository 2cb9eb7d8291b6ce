"""`fairpost publish`: campaigns and due e-mails from files to Kafka."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Final

import click

from contract import console
from contract.console import CommandError
from contract.events import CAMPAIGNS, DUE_EMAILS, DueEmail, campaign_event_type
from processor.audit import Act, Action
from processor.campaign_files import read_campaign_file
from processor.campaigns import read_campaign_event
from processor.cli.completing import complete_campaign
from processor.cli.session import on_record, settings_of
from processor.due_files import read_csv, read_json_lines
from processor.emitting import Emission
from processor.file_rows import FileRow
from processor.publishing import Publisher

BATCH: Final = 5_000


@click.group()
def publish() -> None:
    """Publish campaigns and due e-mails from files."""


@publish.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.pass_context
def campaign(context: click.Context, file: Path) -> None:
    """Publish a campaign event from a TOML or JSON file.

    The file holds the fields of the event; `type` is campaign.scheduled where it is not given.

    \b
    Example: fairpost publish campaign spring.toml

    \b
    Example of a file:
      campaign_id = "spring"
      name = "Spring sale"
      sender = "Shop <news@shop.example>"
      scheduled_for = 2026-12-01T08:00:00Z
      [templates.offer]
      subject = "For you, {{ name }}"
      text = "Hello {{ name }}"
    """
    event = read_campaign_file(file, read_campaign_event)
    settings = settings_of(context)
    [error] = Publisher(settings.brokers).publish(
        [Emission(settings.topic(CAMPAIGNS), event.campaign_id, event)]
    )
    if error is not None:
        raise CommandError(f"{settings.topic(CAMPAIGNS)}: {error}")
    details = {"type": campaign_event_type(event), "file": click.format_filename(file)}
    on_record(settings, Act(Action.CAMPAIGN_PUBLISH, event.campaign_id, details))
    console.complain(f"published {campaign_event_type(event)} of {event.campaign_id}")


@publish.command("due-emails")
@click.argument("file", type=click.File("rb"))
@click.option(
    "--format",
    "kind",
    type=click.Choice(["csv", "jsonl"]),
    help="By default from the file's name; csv on standard input.",
)
@click.option(
    "--campaign",
    "campaign_id",
    shell_complete=complete_campaign,
    help="The campaign_id of rows that have none.",
)
@click.option("--email-key", help="The email_key of rows that have none.")
@click.pass_context
def due_emails(
    context: click.Context,
    file: IO[bytes],
    kind: str | None,
    campaign_id: str | None,
    email_key: str | None,
) -> None:
    """Publish due e-mails from a CSV file with a header, or from JSON lines; `-` is standard input.

    CSV columns that are no field of a due e-mail are its variables. A bad row is told with file and line; the good
    ones are published, and the exit code is 1.

    \b
    Examples:
      fairpost publish due-emails contacts.csv --campaign spring --email-key offer
      generate | fairpost publish due-emails - --format jsonl
    """
    settings = settings_of(context)
    defaults = {
        name: value
        for name, value in (("campaign_id", campaign_id), ("email_key", email_key))
        if value is not None
    }
    publisher = Publisher(settings.brokers)
    published: Counter[str] = Counter()
    bad = 0
    try:
        with console.counted_lines(file) as lines:
            for rows in _batches(_reader(file.name, kind)(lines, defaults)):
                for row in rows:
                    if row.complaint is not None:
                        bad += 1
                        console.complain(f"{file.name}:{row.line}: {row.complaint}")
                good = [(row.line, row.value) for row in rows if row.value is not None]
                results = publisher.publish(
                    [Emission(settings.topic(DUE_EMAILS), e.user_id, e) for _, e in good]
                )
                for (line, event), error in zip(good, results, strict=True):
                    if error is None:
                        published[event.campaign_id] += 1
                    else:
                        bad += 1
                        console.complain(f"{file.name}:{line}: not published: {error}")
    finally:
        # Also of what was interrupted.
        name = click.format_filename(file.name)
        on_record(
            settings,
            *(
                Act(Action.DUE_EMAILS_PUBLISH, campaign, {"published": number, "file": name})
                for campaign, number in published.items()
            ),
        )
    console.complain(
        f"published {published.total()} due e-mails" + (f", {bad} bad rows" if bad else "")
    )
    context.exit(console.FAILED if bad else 0)


def _reader(
    name: str, kind: str | None
) -> Callable[[Iterable[bytes], Mapping[str, str]], Iterator[FileRow[DueEmail]]]:
    json_lines = name.lower().endswith((".jsonl", ".ndjson", ".json"))
    if kind == "jsonl" or (kind is None and json_lines):
        return read_json_lines
    return read_csv


def _batches(rows: Iterator[FileRow[DueEmail]]) -> Iterator[list[FileRow[DueEmail]]]:
    batch: list[FileRow[DueEmail]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
