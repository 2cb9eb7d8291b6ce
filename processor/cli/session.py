"""What every command needs: the settings, and a connection to the database."""

import asyncio
import getpass
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click
import psycopg

from contract.console import CommandError
from contract.database import conninfo
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
    """Who is at the terminal, for the audit."""
    return getpass.getuser()


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
