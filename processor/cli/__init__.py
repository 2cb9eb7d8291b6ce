"""The command line `fairpost`: one module a noun."""

from pathlib import Path
from typing import NoReturn

import click
import psycopg
from confluent_kafka import KafkaException

from contract import console
from contract.help import end_with_exit_codes
from contract.operators import OperatorsError
from contract.schema import SchemaError
from contract.settings import load_settings
from processor.campaign_files import CampaignFileError
from processor.cli import (
    audit,
    campaigns,
    dead_letters,
    dispatches,
    instances,
    log,
    migrate,
    operators,
    processes,
    publish,
    retention,
    sending,
    status,
    suppressions,
    topics,
    uncertain,
)
from processor.contacts import ContactError
from processor.dead_letter_topic import DeadLetterError
from processor.explaining import UnknownMessageError
from processor.instances import InstanceError
from processor.operators import OperatorError
from processor.overview import CampaignError
from processor.settings import ProcessorSettings
from processor.topics import TopicsError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="FAIRPOST_CONFIG",
    help="The settings file; /etc/fairpost/fairpost.toml where it exists.",
)
@click.version_option(package_name="fairpost")
@click.pass_context
def cli(context: click.Context, config: Path | None) -> None:
    """Campaigns and due e-mails through a fixed fleet of Postfix servers.

    \b
    First steps on a new installation:
      fairpost migrate
      fairpost topics create
      fairpost operators apply operators.toml
      fairpost worker            (and, beside it: fairpost tracker)
      fairpost publish campaign newsletter.toml
      fairpost publish due-emails contacts.csv
      fairpost campaigns list
      fairpost status
    """
    context.obj = lambda: load_settings(ProcessorSettings, config)


@cli.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def print_completion(shell: str) -> None:
    """Print the line that completes commands and options in a shell.

    \b
    Example: fairpost completion bash >> ~/.bashrc
    """
    click.echo(console.completion("fairpost", shell))


for command in (
    status.status,
    processes.worker,
    processes.tracker,
    migrate.migrate,
    topics.topics,
    publish.publish,
    operators.operators,
    campaigns.campaigns,
    instances.instances,
    uncertain.uncertain,
    suppressions.suppressions,
    retention.prune,
    retention.forget,
    sending.sending,
    dispatches.dispatches,
    dead_letters.dead_letters,
    log.log,
    audit.audit,
):
    cli.add_command(command)
end_with_exit_codes(cli)


def main() -> NoReturn:
    """The entry point of `fairpost`."""
    console.run(
        cli,
        (
            psycopg.Error,
            KafkaException,
            TopicsError,
            CampaignError,
            CampaignFileError,
            ContactError,
            InstanceError,
            OperatorError,
            DeadLetterError,
            UnknownMessageError,
            OperatorsError,
            SchemaError,
        ),
    )
