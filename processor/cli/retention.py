"""`fairpost prune` and `fairpost forget`: what is old goes, and what a person wants forgotten."""

import re
from datetime import timedelta

import click

from contract import console
from processor.cli.session import actor, settings_of, with_database
from processor.retention import forget as forget_user
from processor.retention import prune as prune_old

_UNITS = {"h": "hours", "d": "days", "w": "weeks"}
_MINIMUM = timedelta(days=1)


class Age(click.ParamType):
    """A length of time such as `90d`, `36h` or `12w`."""

    name = "age"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        """Fails the command's usage where the text is no age, or under a day."""
        if isinstance(value, timedelta):
            return value
        match = re.fullmatch(r"(\d{1,5})([hdw])", str(value))
        if match is None:
            self.fail(f"{value!r} is no age such as 90d, 36h or 12w", param, ctx)
        age = timedelta(**{_UNITS[match[2]]: int(match[1])})
        if age < _MINIMUM:
            self.fail(f"{value!r} is under a day", param, ctx)
        return age


@click.command()
@click.option(
    "--older-than",
    type=Age(),
    required=True,
    help="Since the last word of a message: 90d, 36h, 12w; a day at least.",
)
@click.pass_context
def prune(context: click.Context, older_than: timedelta) -> None:
    """Delete final messages that are old; dispatches stay, so that nothing is sent again.

    In small transactions, beside running workers and agents; may be killed and run again.

    \b
    Example: fairpost prune --older-than 90d
    """
    settings = settings_of(context)
    with console.progress_bar("chunks") as seen:
        pruned = with_database(settings, lambda c: prune_old(c, older_than, actor(), seen))
    console.complain(f"prune: {pruned} messages deleted")


@click.command()
@click.argument("user_id")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def forget(context: click.Context, user_id: str, *, yes: bool) -> None:
    """Erase a user's addresses, variables and replies; what was not handed over yet never is.

    The opaque user id stays, so that the same e-mail is never sent again. Kafka keeps what its topics hold until their
    retention is over.

    \b
    Example: fairpost forget user-4711
    """
    if not yes:
        click.confirm(f"Erase what is known of {user_id}?", abort=True, err=True)
    forgotten = with_database(
        settings_of(context), lambda connection: forget_user(connection, user_id, actor())
    )
    console.complain(f"forget: {forgotten} messages of {user_id} erased")
