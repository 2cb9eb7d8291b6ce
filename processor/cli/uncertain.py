"""`fairpost uncertain`: messages that may or may not have been sent, and a person's word on them."""

from collections.abc import Callable, Mapping
from typing import Any

import click
from psycopg import AsyncConnection

from contract import console
from contract.printable import counted
from contract.states import MessageState
from contract.watching import watch_option, watched
from processor.cli.completing import complete_campaign, complete_instance
from processor.cli.session import actor, json_option, limit_option, settings_of, with_database
from processor.uncertain import (
    Selection,
    UncertainMessage,
    Verdict,
    count_uncertain,
    list_uncertain,
    resolve,
)

_COLUMNS = (
    "dispatch_id",
    "user_id",
    "campaign_id",
    "email_key",
    "email",
    "instance",
    "handed_at",
    "since",
    "why",
)

_instance_option = click.option(
    "--instance",
    metavar="NAME",
    shell_complete=complete_instance,
    help="Only what was handed to this instance.",
)
_campaign_option = click.option(
    "--campaign",
    "campaign_id",
    metavar="ID",
    shell_complete=complete_campaign,
    help="Only what belongs to this campaign.",
)


def _selecting(command: Callable[..., Any]) -> Callable[..., Any]:
    """The ways to name messages, and the question."""
    for option in (
        click.option("--yes", is_flag=True, help="Do not ask."),
        click.option("--all", "whole", is_flag=True, help="Whatever is uncertain."),
        _campaign_option,
        _instance_option,
        click.argument(
            "dispatch_ids", metavar="[DISPATCH]...", nargs=-1, type=click.IntRange(1, 2**63 - 1)
        ),
    ):
        command = option(command)
    return command


@click.group()
def uncertain() -> None:
    """List messages that may or may not have been sent, and say what becomes of them.

    Nothing is ever sent again by itself.
    """


@uncertain.command("list")
@_instance_option
@_campaign_option
@limit_option
@watch_option
@json_option
@click.pass_context
def list_(
    context: click.Context,
    instance: str | None,
    campaign_id: str | None,
    limit: int,
    watch: float | None,
    *,
    as_json: bool,
) -> None:
    """List uncertain messages, the oldest first, with what is known of each.

    A line that the log of a message's instance still brings resolves it, however late.

    \b
    Example: fairpost uncertain list --instance postfix-a --json
    """
    settings = settings_of(context)
    selection = Selection(instance=instance, campaign_id=campaign_id)

    async def look(connection: AsyncConnection[Any]) -> tuple[list[UncertainMessage], int]:
        found = await list_uncertain(connection, selection, limit=limit)
        return found, (await count_uncertain(connection, selection)).number

    def tell(looked: tuple[list[UncertainMessage], int]) -> None:
        found, number = looked
        console.show(found, as_json=as_json, columns=_COLUMNS, one_line=watch is not None)
        shown = f", the oldest {len(found)} shown: see --limit" if number > len(found) else ""
        console.complain(f"uncertain: {number} messages{shown}")
        if number:
            console.complain(
                "look for bounce+DISPATCH@ in the mail log of the instance; then `fairpost uncertain resend DISPATCH`"
                " sends a message again, and `fairpost uncertain drop DISPATCH` never"
            )

    watched(watch, lambda: with_database(settings, look), tell, as_json=as_json)


@uncertain.command()
@_selecting
@click.pass_context
def resend(
    context: click.Context,
    dispatch_ids: tuple[int, ...],
    instance: str | None,
    campaign_id: str | None,
    *,
    whole: bool,
    yes: bool,
) -> None:
    """Send messages again that were not sent, as far as a person can tell.

    Who had one after all gets it twice. What was cancelled, expired, suppressed or forgotten meanwhile becomes that
    instead. A message that is no longer uncertain is left alone.

    \b
    Examples:
      fairpost uncertain resend 4711 4712
      fairpost uncertain resend --instance postfix-a --campaign spring
    """
    selection = _selection(context, dispatch_ids, instance, campaign_id, whole=whole)
    question = "Send {} again? Who had one after all gets it twice."
    _resolve(context, selection, Verdict.RESEND, None if yes else question)


@uncertain.command()
@_selecting
@click.pass_context
def drop(
    context: click.Context,
    dispatch_ids: tuple[int, ...],
    instance: str | None,
    campaign_id: str | None,
    *,
    whole: bool,
    yes: bool,
) -> None:
    """Give messages up: they are never sent again, and count as cancelled for good.

    A message that is no longer uncertain is left alone.

    \b
    Examples:
      fairpost uncertain drop 4711 4712
      fairpost uncertain drop --instance postfix-a --yes
    """
    selection = _selection(context, dispatch_ids, instance, campaign_id, whole=whole)
    _resolve(context, selection, Verdict.DROP, None if yes else "Give {} up for good?")


def _resolve(
    context: click.Context, selection: Selection, verdict: Verdict, question: str | None
) -> None:
    settings = settings_of(context)
    found = with_database(settings, lambda c: count_uncertain(c, selection))
    if found.number and question is not None:
        click.confirm(question.format(counted(found.number, "message")), abort=True, err=True)
    with console.progress_bar("messages") as seen:
        done = with_database(
            settings,
            lambda c: resolve(
                c,
                selection,
                verdict,
                until=found.at,
                actor=actor(),
                seen=lambda number: seen(number, found.number),
            ),
        )
    asked = len(set(selection.dispatch_ids)) if selection.dispatch_ids else found.number
    console.complain(f"uncertain: {_told(verdict, done, asked)}")


def _selection(
    context: click.Context,
    dispatch_ids: tuple[int, ...],
    instance: str | None,
    campaign_id: str | None,
    *,
    whole: bool,
) -> Selection:
    named = bool(dispatch_ids)
    filtered = instance is not None or campaign_id is not None
    if named + filtered + whole != 1:
        raise click.UsageError(
            "name dispatches, or an --instance or --campaign, or ask for --all", context
        )
    return Selection(dispatch_ids if named else None, instance, campaign_id)


def _told(verdict: Verdict, done: Mapping[MessageState, int], asked: int) -> str:
    if verdict is Verdict.DROP:
        parts = [f"{counted(sum(done.values()), 'message')} dropped"]
    else:
        parts = [f"{counted(done.get(MessageState.PLANNED, 0), 'message')} planned again"]
        parts += [
            f"{number} {state}"
            for state, number in sorted(done.items())
            if state is not MessageState.PLANNED
        ]
    if (alone := asked - sum(done.values())) > 0:
        parts.append(f"{alone} left alone, being no longer uncertain")
    return ", ".join(parts)
