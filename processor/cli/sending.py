"""`fairpost sending`: the fleet's switch."""

import click

from contract import console
from processor.cli.session import actor, json_option, settings_of, with_database
from processor.fleet import Sending, show_sending, switch_sending


@click.group()
def sending() -> None:
    """Switch the fleet off and on, and see how it stands."""


@sending.command()
@click.pass_context
def off(context: click.Context) -> None:
    """Stop the fleet within a second.

    Nothing is reserved, emitted or handed over until a person switches it on. Due e-mails wait on their topic, as long
    as it keeps them. What Postfix holds already is still delivered, and the outcomes are recorded.

    \b
    Example: fairpost sending off
    """
    _switch(context, sending=False)


@sending.command()
@click.pass_context
def on(context: click.Context) -> None:
    """Let the fleet send: what waited goes on, each e-mail once.

    \b
    Example: fairpost sending on
    """
    _switch(context, sending=True)


@sending.command()
@json_option
@click.pass_context
def status(context: click.Context, *, as_json: bool) -> None:
    """Say whether the fleet sends, since when, and by whom.

    The exit code is 0 either way.

    \b
    Example: fairpost sending status --json
    """
    found = with_database(settings_of(context), show_sending)
    if as_json:
        console.show([found], as_json=True)
    else:
        console.tell(_told(found))


def _switch(context: click.Context, *, sending: bool) -> None:
    settings = settings_of(context)
    switched = with_database(settings, lambda c: switch_sending(c, sending=sending, actor=actor()))
    told = _told(with_database(settings, show_sending))
    console.complain(told if switched else f"{told}: nothing to switch")


def _told(found: Sending) -> str:
    since = found.changed_at.strftime("%Y-%m-%dT%H:%M:%SZ")
    by = "" if found.changed_by is None else f", by {found.changed_by}"
    return f"sending is {'on' if found.sending else 'off'} since {since}{by}"
