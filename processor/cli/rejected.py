"""`fairpost campaigns retry-rejected`: what a template, or Postfix, kept back is sent after all."""

import click

from contract import console
from contract.printable import counted
from contract.states import MessageState
from processor.cli.completing import campaign_argument, complete_operator
from processor.cli.session import actor, json_option, settings_of, with_database
from processor.rejected import Selection, count_rejected, list_reasons, retry

_REASONS = 20


@click.command("retry-rejected")
@campaign_argument
@click.option(
    "--operator",
    metavar="NAME",
    shell_complete=complete_operator,
    help="Only what was planned for this operator.",
)
@click.option(
    "--reason", metavar="TEXT", help="Only what was rejected for a reason with this text."
)
@click.option("--dry-run", is_flag=True, help="Only say how many, and why they were rejected.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_context
def retry_rejected(
    context: click.Context,
    campaign_id: str,
    operator: str | None,
    reason: str | None,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Plan rejected messages of a campaign again, once what they were rejected for is mended.

    They are those of which a template failed, or that the Postfix of an instance refused; none of them was ever accepted
    by one. A template is mended by publishing the campaign again. What expired, was suppressed or forgotten meanwhile is
    not sent. May be killed and run again. --json goes with --dry-run.

    \b
    Examples:
      fairpost campaigns retry-rejected spring --dry-run
      fairpost campaigns retry-rejected spring --reason "'name' is undefined"
      fairpost campaigns retry-rejected spring --operator gmail --yes
    """
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run", context)
    settings = settings_of(context)
    selection = Selection(campaign_id, operator, reason)
    found = with_database(settings, lambda c: count_rejected(c, selection))
    if dry_run or not found.number:
        if dry_run:
            reasons = with_database(settings, lambda c: list_reasons(c, selection, limit=_REASONS))
            console.show(reasons, as_json=as_json)
        console.complain(f"campaign {campaign_id}: {counted(found.number, 'message')} to retry")
        return
    if not yes:
        click.confirm(f"Send {counted(found.number, 'message')} after all?", abort=True, err=True)
    with console.progress_bar("messages") as seen:
        done = with_database(
            settings,
            lambda c: retry(
                c,
                selection,
                until=found.at,
                actor=actor(),
                seen=lambda number: seen(number, found.number),
            ),
        )
    parts = [f"{counted(done[MessageState.PLANNED], 'message')} planned again"]
    parts += [f"{done[s]} {s}" for s in MessageState if s in done and s is not MessageState.PLANNED]
    console.complain(f"campaign {campaign_id}: {', '.join(parts)}")
