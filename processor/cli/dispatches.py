"""`fairpost dispatches`: what is reserved and not planned, and what became of a user's."""

from typing import Any

import click
from psycopg import AsyncConnection

from contract import console
from contract.watching import watch_option, watched
from processor.cli.session import json_option, limit_option, settings_of, with_database
from processor.dispatches import (
    Dispatch,
    Unplanned,
    count_unplanned,
    list_dispatches,
    list_unplanned,
)
from processor.settings import ProcessorSettings


@click.command()
@click.argument("user_id", metavar="USER", required=False)
@click.option("--unplanned", is_flag=True, help="What is reserved and not planned, oldest first.")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0, max=1e9),
    metavar="SECONDS",
    help="With --unplanned: only what was reserved at least so long ago.",
)
@limit_option
@watch_option
@json_option
@click.pass_context
def dispatches(
    context: click.Context,
    user_id: str | None,
    older_than: float | None,
    limit: int,
    watch: float | None,
    *,
    unplanned: bool,
    as_json: bool,
) -> None:
    """List a user's dispatches, or what is not planned.

    A user's come the latest first; what is reserved and not planned, the oldest first.

    \b
    Examples:
      fairpost dispatches user-17
      fairpost dispatches --unplanned --older-than 60 --json
      fairpost dispatches --unplanned --watch
    """
    if unplanned == (user_id is not None):
        raise click.UsageError("name a user, or ask for --unplanned", context)
    if older_than is not None and not unplanned:
        raise click.UsageError("--older-than goes with --unplanned", context)
    settings = settings_of(context)
    if user_id is None:
        _show_unplanned(settings, older_than or 0.0, limit, watch, as_json=as_json)
        return

    def tell(found: list[Dispatch]) -> None:
        console.show(found, as_json=as_json, one_line=watch is not None)
        if not found:
            console.complain(f"dispatches: user {user_id!r} has none")

    watched(
        watch,
        lambda: with_database(settings, lambda c: list_dispatches(c, user_id, limit=limit)),
        tell,
        as_json=as_json,
    )


def _show_unplanned(
    settings: ProcessorSettings,
    older_than: float,
    limit: int,
    watch: float | None,
    *,
    as_json: bool,
) -> None:
    async def look(connection: AsyncConnection[Any]) -> tuple[list[Unplanned], int]:
        found = await list_unplanned(connection, older_than=older_than, limit=limit)
        return found, await count_unplanned(connection, older_than=older_than)

    def tell(looked: tuple[list[Unplanned], int]) -> None:
        found, count = looked
        console.show(found, as_json=as_json, one_line=watch is not None)
        aged = f" for {older_than:g} s or longer" if older_than else ""
        if count == 0:
            console.complain(f"dispatches: none is reserved and not planned{aged}")
            return
        console.complain(
            f"dispatches: {count} reserved and not planned{aged}: wait while a worker plans them; one that stays is"
            " healed by publishing its due e-mail again, a minute after its reservation"
        )

    watched(watch, lambda: with_database(settings, look), tell, as_json=as_json)
