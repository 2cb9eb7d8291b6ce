"""`fairpost audit`: who changed what, and when."""

from datetime import datetime
from typing import Final

import click
import msgspec
from msgspec import Struct

from contract import console
from processor.audit import Action, Entry, Selection, list_audit
from processor.cli.session import Time, json_option, limit_option, settings_of, with_database

_WIDTH: Final = 120
"""Characters of the details in a table: an act on a thousand messages names them all."""


class _Row(Struct, frozen=True):
    at: datetime
    who: str
    action: str
    subject: str
    details: str


@click.command()
@click.option("--who", metavar="NAME", help="Only what this person did.")
@click.option(
    "--action",
    metavar="ACTION",
    type=click.Choice([action.value for action in Action]),
    help="Only what was done so, such as campaign.hold; any other word has them listed.",
)
@click.option(
    "--subject",
    metavar="TEXT",
    help="Only what was done to this campaign, operator, instance, user, file or address.",
)
@click.option("--since", type=Time(), help="Only what was done at this time (UTC) or later.")
@limit_option
@json_option
@click.pass_context
def audit(
    context: click.Context,
    *,
    who: str | None,
    action: str | None,
    subject: str | None,
    since: datetime | None,
    limit: int,
    as_json: bool,
) -> None:
    """List what people changed, the newest first: who, when and what.

    Neither worker nor tracker nor agent, nor any of these commands, can change or delete what stands there. No address
    does: of a suppression its digest, and --subject with the address finds it.

    \b
    Examples:
      fairpost audit --subject spring
      fairpost audit --who ann --since 2026-05-01 --json
      fairpost audit --action operators.apply --limit 5
    """
    selection = Selection(who, None if action is None else Action(action), subject, since)
    # One more tells whether there are more.
    found = with_database(settings_of(context), lambda c: list_audit(c, selection, limit=limit + 1))
    shown = found[:limit]
    console.show(shown if as_json else [_row(entry) for entry in shown], as_json=as_json)
    if len(found) > limit:
        console.complain(f"audit: the newest {limit}; see more with --limit")


def _row(entry: Entry) -> _Row:
    details = msgspec.json.encode(entry.details).decode() if entry.details else ""
    if len(details) > _WIDTH:
        details = details[:_WIDTH] + "…"
    return _Row(entry.at, entry.actor, entry.action, entry.subject, details)
