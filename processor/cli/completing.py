"""What a shell completes beyond commands and options: names that are in the database. Silent where it does not answer."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import click
import psycopg

from contract.database import conninfo
from contract.settings import load_settings
from processor.settings import ProcessorSettings

_PATIENCE: Final = 1.0
"""Seconds that a person at a prompt waits."""
_MOST: Final = 100

_CAMPAIGNS: Final = """
SELECT campaign_id FROM campaigns WHERE starts_with(campaign_id, %s)
 ORDER BY ended_at IS NOT NULL, created_at DESC LIMIT %s"""
_INSTANCES: Final = """
SELECT instance FROM instances WHERE starts_with(instance, %s) ORDER BY instance LIMIT %s"""
_OPERATORS: Final = """
SELECT operator FROM operators WHERE starts_with(operator, %s) ORDER BY operator LIMIT %s"""

Completion = Callable[[click.Context, click.Parameter, str], list[str]]


def _completion(query: str) -> Completion:
    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        try:
            # No command runs, so that the program's own group has prepared nothing.
            settings = load_settings(ProcessorSettings, context.find_root().params.get("config"))
            found = asyncio.run(_ask(settings, query, incomplete))
        except Exception:  # noqa: BLE001  whatever it is, it must not stand in the prompt
            return []
        return [name for name in found if name.isprintable()]

    return complete


async def _ask(settings: ProcessorSettings, query: str, incomplete: str) -> list[str]:
    dsn = conninfo(settings.database.get_secret_value(), "fairpost completion")
    async with (
        asyncio.timeout(_PATIENCE),
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection,
    ):
        rows = await connection.execute(query.encode(), (incomplete, _MOST))
        return [name for (name,) in await rows.fetchall()]


complete_campaign: Final = _completion(_CAMPAIGNS)
complete_instance: Final = _completion(_INSTANCES)
complete_operator: Final = _completion(_OPERATORS)

campaign_argument: Callable[[Any], Any] = click.argument(
    "campaign_id", metavar="CAMPAIGN", shell_complete=complete_campaign
)
instance_argument: Callable[[Any], Any] = click.argument(
    "name", metavar="INSTANCE", shell_complete=complete_instance
)
operator_argument: Callable[[Any], Any] = click.argument(
    "name", metavar="OPERATOR", shell_complete=complete_operator
)
