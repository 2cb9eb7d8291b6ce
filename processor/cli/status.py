"""`fairpost status`: is all well?"""

import asyncio
from datetime import UTC, datetime
from typing import Final

import click
import psycopg
from confluent_kafka import KafkaException
from psycopg import errors

from contract.checks import Check, exit_code, show_checks
from contract.database import conninfo
from contract.outage import first_line
from contract.settings import SettingsError
from contract.watching import watch_option, watched
from processor.brokers import advise
from processor.cli.session import json_option, settings_of
from processor.consumer_groups import read_kafka_vitals
from processor.health import NOT_WELL, Vitals, judge, judge_kafka
from processor.settings import ProcessorSettings
from processor.vitals import read_vitals

PATIENCE: Final = 15.0
"""Seconds for the database to answer everything."""


_HELP: Final = """
Say whether all is well: a line for each thing, with what to do where it is not. Exit code 1 if one is not.

The cost does not grow with the number of messages. What a person has paused or held is well.

\b
Not well is:
{not_well}

\b
Examples:
  fairpost status
  fairpost status --watch 5
  fairpost status --json | jq '.[] | select(.ok | not)'
""".format(not_well="\n".join(f"  {what:13} {when}" for what, when in NOT_WELL.items()))


@click.command(help=_HELP.strip())
@watch_option
@json_option
@click.pass_context
def status(context: click.Context, watch: float | None, *, as_json: bool) -> None:
    """Says whether all is well."""
    settings = settings_of(context)

    def tell(checks: list[Check]) -> None:
        show_checks(checks, as_json=as_json, one_line=watch is not None)

    checks = watched(watch, lambda: look(settings), tell, as_json=as_json)
    context.exit(0 if checks is None else exit_code(checks))


def look(settings: ProcessorSettings) -> list[Check]:
    """Looks at everything; a service that does not answer is a line too."""
    try:
        vitals = asyncio.run(_ask_database(settings))
        checks = [Check("database", ok=True, found="answers"), *judge(vitals)]
        sending = vitals.sending.sending
    except (psycopg.Error, TimeoutError) as error:
        checks, sending = [_no_database(error)], True
    return [*checks, *_look_at_kafka(settings, sending=sending)]


async def _ask_database(settings: ProcessorSettings) -> Vitals:
    dsn = conninfo(settings.database.get_secret_value(), "fairpost status")
    async with (
        asyncio.timeout(PATIENCE),
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection,
    ):
        return await read_vitals(connection)


def _no_database(error: Exception) -> Check:
    match error:
        case errors.UndefinedTable() | errors.UndefinedColumn() | errors.UndefinedFunction():
            found = "its schema is missing or old, or hidden from this role"
            remedy = "run `fairpost migrate`, or GRANT fairpost_processor TO the role"
        case errors.InsufficientPrivilege():
            found, remedy = first_line(error), "GRANT fairpost_processor TO the role"
        case TimeoutError():
            found = f"did not answer within {PATIENCE:g} s"
            remedy = "is Postgres up, and not overloaded?"
        case _:
            found, remedy = first_line(error), "is Postgres up, and `database` right?"
    return Check("database", ok=False, found=found, remedy=remedy)


def _look_at_kafka(settings: ProcessorSettings, *, sending: bool) -> list[Check]:
    try:
        vitals = read_kafka_vitals(settings, datetime.now(UTC))
    except KafkaException as error:
        found = f"{settings.kafka_bootstrap_servers}: {error.args[0].str()}"
        return [Check("kafka", ok=False, found=found, remedy=advise(error.args[0]))]
    except SettingsError as error:
        return [Check("kafka", ok=False, found=str(error))]
    return [Check("kafka", ok=True, found="answers"), *judge_kafka(vitals, sending=sending)]
