"""`fairpost topics`: Kafka's topics."""

import click

from contract import console
from processor.audit import Act, Action
from processor.cli.session import json_option, on_record, settings_of
from processor.topics import Topics, topic_specs

partitions_option = click.option(
    "--partitions",
    type=click.IntRange(1, 10_000),
    default=12,
    show_default=True,
    help="Of the topics that workers share out.",
)


@click.group()
def topics() -> None:
    """Create and check the topics in Kafka."""


@topics.command()
@partitions_option
@click.option(
    "--replication",
    type=click.IntRange(1, 10),
    default=3,
    show_default=True,
    help="Copies of each.",
)
@click.pass_context
def create(context: click.Context, partitions: int, replication: int) -> None:
    """Create the topics that are missing; the others stay as they are.

    \b
    Example: fairpost topics create --partitions 24 --replication 3
    """
    settings = settings_of(context)
    made = Topics(settings.kafka_bootstrap_servers).create(
        topic_specs(settings, partitions=partitions), replication=replication
    )
    for name in made:
        click.echo(name)
    details = {"partitions": partitions, "replication": replication}
    on_record(settings, *(Act(Action.TOPICS_CREATE, name, details) for name in made))
    console.complain(f"topics: {len(made)} created" if made else "topics: all are there")


@topics.command()
@partitions_option
@json_option
@click.pass_context
def check(context: click.Context, partitions: int, *, as_json: bool) -> None:
    """Compare the topics with what they must be; exit code 1 if one is wrong.

    \b
    Example: fairpost topics check --json | jq -r '.[] | select(.complaint) | .topic'
    """
    settings = settings_of(context)
    states = Topics(settings.kafka_bootstrap_servers).check(
        topic_specs(settings, partitions=partitions)
    )
    console.show(states, as_json=as_json)
    context.exit(console.FAILED if any(state.complaint for state in states) else 0)
