"""What every command needs: the settings, and a connection to the database."""

import asyncio
import getpass
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
import psycopg

from contract import console
from contract.console import CommandError
from contract.database import conninfo
from contract.outage import first_line
from processor import audit
from processor.settings import ProcessorSettings

T = TypeVar("T")

LoadSettings = Callable[[], ProcessorSettings]


def settings_of(context: click.Context) -> ProcessorSettings:
    """The settings, read when a command needs them, so that `--help` needs none."""
    load: LoadSettings = context.obj
    return load()


def with_database(
    settings: ProcessorSettings, call: Callable[[psycopg.AsyncConnection[Any]], Awaitable[T]]
) -> T:
    """Calls with a connection, in an event loop of its own.

    Raises:
        CommandError: the database does not answer.
    """

    async def run() -> T:
        dsn = conninfo(settings.database.get_secret_value(), "fairpost")
        try:
            connection = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        except psycopg.OperationalError as error:
            raise CommandError(
                f"database: {error}; is `database` right?".replace("\n", " ")
            ) from None
        async with connection:
            return await call(connection)

    return asyncio.run(run())


def actor() -> str:
    """Who is at the terminal, for the audit; behind sudo, who called it."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"


def on_record(settings: ProcessorSettings, *acts: audit.Act) -> None:
    """Puts on record what was done to Kafka alone; where the database does not take it, says so, as it is done."""
    if not acts:
        return
    try:
        with_database(settings, lambda connection: audit.record(connection, actor(), *acts))
    except (CommandError, psycopg.Error) as error:
        console.complain(f"audit: not on record: {first_line(error)}")


class Time(click.ParamType):
    """A moment such as `2026-05-01T12:00:00Z`; UTC where it has no offset."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        """Fails the command's usage where the text is no time."""
        try:
            at = datetime.fromisoformat(str(value))
            return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no time such as 2026-05-01T12:00:00Z", param, ctx)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON array on standard output."
)

limit_option = click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="How many at most.",
)
