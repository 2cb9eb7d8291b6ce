"""`fairpost suppressions`: mailboxes that get no mail."""

from itertools import islice
from typing import IO, Any, Final

import click
from psycopg import AsyncConnection

from contract import console
from contract.addresses import suppression_key
from contract.operators import normalise_domain
from processor.cli.completing import complete_campaign
from processor.cli.session import actor, json_option, limit_option, settings_of, with_database
from processor.overview import CampaignError, show_campaign
from processor.suppression_files import read_suppressions
from processor.suppressions import (
    Selection,
    Source,
    add,
    import_block,
    list_suppressions,
    read_suppression,
    remove,
)

BLOCK: Final = 5_000
"""Rows of a file in one transaction."""

_COLUMNS = ("suppression_id", "mailbox", "campaign_id", "since", "source", "reason", "dsn")


def _utf8(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Refuses what Postgres cannot hold; a command line may be any bytes."""
    for text in value if isinstance(value, tuple) else (value,):
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise click.BadParameter(f"{text!r} is not UTF-8") from None
    return value


_addresses_argument = click.argument(
    "addresses", metavar="ADDRESS...", nargs=-1, required=True, callback=_utf8
)
_campaign_option = click.option(
    "--campaign",
    "campaign_id",
    metavar="ID",
    callback=_utf8,
    shell_complete=complete_campaign,
    help="Of this campaign only; by default of all.",
)
_reason_option = click.option(
    "--reason", metavar="TEXT", callback=_utf8, help="Why; by default who said so."
)


@click.group()
def suppressions() -> None:
    """Keep mailboxes from getting mail: list, check, add, import and remove them.

    Letters' case, quotes and the way a domain is written make no difference. A hard bounce suppresses by itself.
    """


@suppressions.command("add")
@_addresses_argument
@_campaign_option
@_reason_option
@click.pass_context
def add_(
    context: click.Context,
    addresses: tuple[str, ...],
    campaign_id: str | None,
    reason: str | None,
) -> None:
    """Suppress addresses: nothing more is handed over to them, of all campaigns or of one.

    What was handed over already is still delivered.

    \b
    Examples:
      fairpost suppressions add ann@shop.example --reason "asked by phone"
      fairpost suppressions add ann@shop.example ben@shop.example --campaign spring
    """
    reason = reason if reason is not None else f"added by {actor()}"
    try:
        given = [read_suppression(a, reason=reason, campaign_id=campaign_id) for a in addresses]
    except ValueError as error:
        raise click.UsageError(str(error), context) from None
    settings = settings_of(context)
    added = with_database(settings, lambda c: add(c, given, actor()))
    again = len({suppression.mailbox for suppression in given}) - added
    console.complain(f"suppressions: {added} added" + (f", {again} there already" if again else ""))
    with_database(settings, lambda c: _warn(c, campaign_id))


@suppressions.command("import")
@click.argument("file", type=click.File("rb"))
@_campaign_option
@_reason_option
@click.pass_context
def import_(
    context: click.Context, file: IO[bytes], campaign_id: str | None, reason: str | None
) -> None:
    """Suppress the addresses of a file, one a line or CSV with a header; `-` is standard input.

    The header is `email` and any of `reason`, `campaign_id` and `since`, in any order. A bad row is told with file and
    line; the good ones are stored, a block at a time, and the exit code is 1. Imported again, a file changes nothing.

    \b
    Examples:
      fairpost suppressions import unsubscribed.csv
      export-unsubscribed | fairpost suppressions import - --campaign spring
    """
    settings = settings_of(context)
    name = click.format_filename(file.name)
    reason = reason if reason is not None else f"imported by {actor()}"

    async def run(connection: AsyncConnection[Any]) -> tuple[int, int, int]:
        added = again = bad = 0
        with console.counted_lines(file) as lines:
            rows = read_suppressions(lines, reason=reason, campaign_id=campaign_id)
            while block := list(islice(rows, BLOCK)):
                for row in block:
                    if row.complaint is not None:
                        console.complain(f"{name}:{row.line}: {row.complaint}")
                good = [row.value for row in block if row.value is not None]
                new = await import_block(connection, good, actor(), name) if good else 0
                added, again, bad = (
                    added + new,
                    again + len(good) - new,
                    bad + len(block) - len(good),
                )
        await _warn(connection, campaign_id)
        return added, again, bad

    added, again, bad = with_database(settings, run)
    console.complain(
        f"suppressions: {added} added"
        + (f", {again} there already" if again else "")
        + (f", {bad} bad rows" if bad else "")
    )
    context.exit(console.FAILED if bad else 0)


@suppressions.command("remove")
@_addresses_argument
@_campaign_option
@click.option(
    "--all",
    "everywhere",
    is_flag=True,
    help="Those of single campaigns too: whatever suppresses the address.",
)
@click.pass_context
def remove_(
    context: click.Context,
    addresses: tuple[str, ...],
    campaign_id: str | None,
    *,
    everywhere: bool,
) -> None:
    """Let mail to addresses through again, whoever suppressed them: what is handed over from now on.

    Takes back what was said of all campaigns at once, of one with --campaign, or both with --all. A message that was
    passed over stays `suppressed`.

    \b
    Examples:
      fairpost suppressions remove ann@shop.example
      fairpost suppressions remove ann@shop.example --campaign spring
    """
    if everywhere and campaign_id is not None:
        raise click.UsageError("--all and --campaign exclude each other", context)
    mailboxes = sorted({suppression_key(address) for address in addresses})

    async def run(connection: AsyncConnection[Any]) -> None:
        removed = await remove(
            connection, mailboxes, actor(), campaign_id=campaign_id, everywhere=everywhere
        )
        absent = len(mailboxes) - len(removed)
        console.complain(
            f"suppressions: {len(removed)} removed" + (f", {absent} not there" if absent else "")
        )
        for mailbox in mailboxes:
            left = await list_suppressions(connection, Selection(mailbox=mailbox), limit=1)
            if left:
                where = "all campaigns" if left[0].campaign_id is None else left[0].campaign_id
                console.complain(f"{mailbox} is still suppressed: {where}")

    with_database(settings_of(context), run)


@suppressions.command("list")
@click.option(
    "--campaign",
    "campaign_id",
    metavar="ID",
    callback=_utf8,
    shell_complete=complete_campaign,
    help="Only what was said of this campaign.",
)
@click.option(
    "--source",
    type=click.Choice([source.value for source in Source]),
    help="Only what came from there.",
)
@click.option(
    "--match",
    metavar="TEXT",
    callback=_utf8,
    help="Only this address, or addresses of this domain.",
)
@click.option(
    "--before",
    metavar="ID",
    type=click.IntRange(1, 2**63 - 1),
    help="Only what was stored before this suppression_id: the next page.",
)
@limit_option
@json_option
@click.pass_context
def list_(
    context: click.Context,
    *,
    campaign_id: str | None,
    source: str | None,
    match: str | None,
    before: int | None,
    limit: int,
    as_json: bool,
) -> None:
    """List suppressions, the one that was stored last first.

    Of a user who was forgotten a digest stands in place of the mailbox; --match with the address finds it.

    \b
    Examples:
      fairpost suppressions list --source bounce --match gmail.com
      fairpost suppressions list --limit 10000 --json
    """
    address = match if match is not None and "@" in match else None
    domain = match if match is not None and "@" not in match else None
    selection = Selection(
        mailbox=None if address is None else suppression_key(address),
        domain=None if domain is None else normalise_domain(domain),
        campaign_id=campaign_id,
        source=None if source is None else Source(source),
        before=before,
    )
    found = with_database(
        settings_of(context), lambda c: list_suppressions(c, selection, limit=limit)
    )
    console.show(found, as_json=as_json, columns=_COLUMNS)
    if len(found) == limit:
        console.complain(f"there may be more: see --limit, or --before {found[-1].suppression_id}")


@suppressions.command("check")
@click.argument("address", callback=_utf8)
@click.option(
    "--campaign",
    "campaign_id",
    metavar="ID",
    callback=_utf8,
    shell_complete=complete_campaign,
    help="Whether mail of this campaign may go there; by default of any.",
)
@json_option
@click.pass_context
def check(context: click.Context, address: str, campaign_id: str | None, *, as_json: bool) -> None:
    """Show whether an address is suppressed, and why: exit code 0 where it is not, 1 where it is.

    \b
    Examples:
      fairpost suppressions check ann@shop.example
      fairpost suppressions check ann@shop.example --campaign spring && echo "may be sent"
    """
    selection = Selection(mailbox=suppression_key(address))
    found = with_database(
        settings_of(context), lambda c: list_suppressions(c, selection, limit=None)
    )
    if campaign_id is not None:
        found = [row for row in found if row.campaign_id in (None, campaign_id)]
    if found or as_json:
        console.show(found, as_json=as_json, columns=_COLUMNS)
    if not found:
        console.complain(f"{address} is not suppressed")
    context.exit(console.FAILED if found else 0)


async def _warn(connection: AsyncConnection[Any], campaign_id: str | None) -> None:
    """Says so where a campaign is not known: it may be yet to come, or mistyped."""
    if campaign_id is None:
        return
    try:
        await show_campaign(connection, campaign_id)
    except CampaignError as error:
        console.complain(str(error))
