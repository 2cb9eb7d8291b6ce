"""`fairpost topics`: Kafka's topics."""

import click
from msgspec.structs import replace

from contract import console
from contract.events import DELIVERY_LOG
from processor.audit import Act, Action
from processor.cli.session import actor, json_option, on_record, settings_of, with_database
from processor.partitions import accept_partitions, find_changes, known_partitions
from processor.topics import Topics, TopicsError, topic_specs

_COLUMNS = ("topic", "partitions", "copies", "verdict")


replication_option = click.option(
    "--replication",
    type=click.IntRange(1, 10),
    default=3,
    show_default=True,
    help="Copies of each; one of them may be away.",
)

retention_option = click.option(
    "--retention-days",
    type=click.IntRange(1, 365),
    default=7,
    show_default=True,
    help="How long what waits to be read is kept.",
)


@click.group()
def topics() -> None:
    """Create and check the topics in Kafka."""


@topics.command()
@click.option(
    "--partitions",
    type=click.IntRange(1, 10_000),
    default=12,
    show_default=True,
    help="Of the topics that workers share out; that of delivery-log must not change later.",
)
@replication_option
@retention_option
@click.pass_context
def create(context: click.Context, partitions: int, replication: int, retention_days: int) -> None:
    """Create the topics that are missing; the others stay as they are.

    \b
    Example: fairpost topics create --partitions 24 --replication 3
    """
    settings = settings_of(context)
    made = Topics(settings.brokers).create(
        topic_specs(
            settings, partitions=partitions, replication=replication, retention_days=retention_days
        )
    )
    for name in made:
        click.echo(name)
    details = {"partitions": partitions, "replication": replication}
    on_record(settings, *(Act(Action.TOPICS_CREATE, name, details) for name in made))
    console.complain(f"topics: {len(made)} created" if made else "topics: all are there")


@topics.command()
@replication_option
@retention_option
@json_option
@click.pass_context
def check(context: click.Context, replication: int, retention_days: int, *, as_json: bool) -> None:
    """Compare the topics with what they must be; exit code 1 if one is wrong.

    What is wrong is told with the promise that rests on it and with what mends it. Nothing is changed. Partitions that
    are right to have: one of campaigns, and of delivery-log those that it had when a worker or tracker first saw it;
    the others may get more at any time.

    \b
    Examples:
      fairpost topics check
      fairpost topics check --replication 1 --json | jq -r '.[] | select(.faults != []) | .topic'
    """
    settings = settings_of(context)
    kafka = Topics(settings.brokers)
    states = kafka.check(
        topic_specs(settings, partitions=1, replication=replication, retention_days=retention_days)
    )
    known = with_database(settings, lambda connection: known_partitions(connection, settings))
    counts = {state.topic: state.partitions for state in states if state.partitions}
    changes = find_changes(settings, counts, known)
    states = [
        replace(state, faults=[changes[state.topic], *state.faults])
        if state.topic in changes
        else state
        for state in states
    ]
    console.show(states, as_json=as_json, columns=_COLUMNS)
    for state in states:
        for fault in state.faults:
            console.complain(f"{state.topic}: {fault.complaint}. Mend: {fault.mend}")
    context.exit(console.FAILED if any(state.faults for state in states) else 0)


@topics.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def accept(context: click.Context, *, yes: bool) -> None:
    """Accept that delivery-log has more partitions than before, which workers and trackers refuse to run with.

    From when partitions were added, a host's lines may stand in two of them, and a tracker may read the later ones
    first. So what is handed over and not proven at this moment is not given back by any fence, but becomes uncertain,
    unless its lines come.

    Do so five minutes after the partitions were added, when every Fluentd writes to the new ones, and start the workers
    and trackers again then.

    \b
    Example: fairpost topics accept --yes
    """
    settings = settings_of(context)
    topic = settings.topic(DELIVERY_LOG)
    counts = Topics(settings.brokers).count_partitions([topic])
    if topic not in counts:
        raise TopicsError(f"topic {topic} is missing: run `fairpost topics create`")
    count = counts[topic]
    known = with_database(settings, lambda connection: known_partitions(connection, settings))
    if known in (None, count):  # none: no worker or tracker has ever seen it
        console.complain(f"{topic}: {count} partitions, as before")
        return
    if not yes:
        click.confirm(
            f"{topic} had {known} partitions. Were the others added more than five minutes ago?",
            abort=True,
            err=True,
        )
    lost = with_database(
        settings, lambda connection: accept_partitions(connection, settings, count, actor())
    )
    console.complain(
        f"{topic}: {count} partitions from now on; no fence can prove what became of {lost} hand-overs"
    )
