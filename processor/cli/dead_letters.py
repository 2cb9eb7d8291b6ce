"""`fairpost dead-letters`: records that could not be used."""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, Final

import click
from msgspec import Struct

from contract import console
from contract.watching import watch_option, watched
from processor.cli.session import (
    Time,
    actor,
    json_option,
    limit_option,
    settings_of,
    with_database,
)
from processor.dead_letter_topic import DeadLetterError, DeadLetterTopic, StoredLetter, newest
from processor.dead_letters import value_of
from processor.publishing import Publisher
from processor.republishing import KEYS, last_copies, republish
from processor.settings import ProcessorSettings

BATCH: Final = 1_000
_NUMBER: Final = re.compile(r"[0-9]{1,18}")


class _Position(click.ParamType):
    name = "partition:offset"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        partition, _, offset = str(value).partition(":")
        if not (_NUMBER.fullmatch(partition) and _NUMBER.fullmatch(offset)):
            self.fail(
                f"{value!r} is no position such as 0:17; see `fairpost dead-letters list`",
                param,
                ctx,
            )
        return f"{int(partition)}:{int(offset)}"


_topic_option = click.option(
    "--topic", type=click.Choice(sorted(KEYS)), help="Only the records of this topic."
)
_since_option = click.option(
    "--since", type=Time(), help="Only what was written at this time (UTC) or later."
)


class ListedLetter(Struct, frozen=True):
    """A dead letter without its value; `place` is where its record stood."""

    position: str
    at: datetime
    topic: str
    place: str
    reason: str


@click.group("dead-letters")
def dead_letters() -> None:
    """List, show and republish records that could not be used."""


@dead_letters.command("list")
@_topic_option
@_since_option
@limit_option
@watch_option
@json_option
@click.pass_context
def list_(
    context: click.Context,
    topic: str | None,
    since: datetime | None,
    limit: int,
    watch: float | None,
    *,
    as_json: bool,
) -> None:
    """List dead letters, the newest first.

    `position` is where a dead letter stands, `place` where its record stood.

    \b
    Example: fairpost dead-letters list --topic due-emails --since 2026-05-01T12:00:00Z
    """
    settings = settings_of(context)

    def look() -> list[StoredLetter]:
        with DeadLetterTopic(settings) as dead:
            # One more tells whether there are more; without a filter only the end needs to be read.
            last = limit + 1 if topic is None else None
            return newest(_of_topic(settings, topic, dead.read(since=since, last=last)), limit + 1)

    def tell(found: list[StoredLetter]) -> None:
        console.show(
            [
                ListedLetter(letter.position, letter.at, letter.topic, letter.place, letter.reason)
                for letter in found[:limit]
            ],
            as_json=as_json,
            columns=("position", "at", "place", "reason"),
            one_line=watch is not None,
        )
        if len(found) > limit:
            console.complain(f"dead-letters: the newest {limit}; see more with --limit")

    watched(watch, look, tell, as_json=as_json)


@dead_letters.command()
@click.argument("position", metavar="PARTITION:OFFSET", type=_Position())
@json_option
@click.pass_context
def show(context: click.Context, position: str, *, as_json: bool) -> None:
    """Show one dead letter whole.

    Its record is on standard output, byte for byte, all else on standard error.

    \b
    Example: fairpost dead-letters show 0:17 > record.json
    """
    with DeadLetterTopic(settings_of(context)) as dead:
        letter = dead.find(position)
    if as_json:
        console.show([letter], as_json=True)
        return
    try:
        record = value_of(letter)
    except ValueError:
        raise DeadLetterError(f"{position}: its value is said to be base64, and is not") from None
    console.complain(f"position  {letter.position}")
    console.complain(f"at        {letter.at:%Y-%m-%dT%H:%M:%SZ}")
    for name in ("place", "key", "reason", "encoding", "truncated"):
        value = getattr(letter, name)
        console.complain(f"{name:9} {'-' if value is None else value}")
    console.octets_out().write(record)
    if sys.stdout.isatty():
        click.echo()


@dead_letters.command("republish")
@click.argument("positions", metavar="[PARTITION:OFFSET]...", nargs=-1, type=_Position())
@_topic_option
@click.option(
    "--all", "whole", is_flag=True, help="With --topic: all its dead letters, each record once."
)
@_since_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def republish_(
    context: click.Context,
    positions: Sequence[str],
    topic: str | None,
    since: datetime | None,
    *,
    whole: bool,
    yes: bool,
) -> None:
    """Publish records again, unchanged.

    They go where they came from, after what was wrong with them was mended. What is still bad becomes a dead letter
    again; a due e-mail that was reserved meanwhile is not sent twice. A campaign event counts as the newest of its
    campaign. The exit code is 1 if a record cannot be published.

    \b
    Examples:
      fairpost dead-letters republish 0:17 0:18
      fairpost dead-letters republish --topic due-emails --all --since 2026-05-01 --yes
    """
    if bool(positions) == whole:
        raise click.UsageError("name dead letters, or --all of a --topic", context)
    if whole != (topic is not None) or (since is not None and not whole):
        raise click.UsageError("--topic, --all and --since go together", context)
    settings = settings_of(context)
    letters: Iterator[StoredLetter]
    with DeadLetterTopic(settings) as dead:
        if whole:
            chosen = last_copies(_of_topic(settings, topic, dead.read(since=since)))
            number, missing = len(chosen), 0
            letters = (letter for letter in dead.read(since=since) if letter.position in chosen)
        else:
            named = _named(dead, dict.fromkeys(positions))
            number, missing = len(named), len(set(positions)) - len(named)
            letters = iter(named)
        if number and not yes:
            click.confirm(f"Publish {number} dead letters again?", abort=True, err=True)
        published = _republish(settings, letters)
    failed = missing + number - published
    console.complain(
        f"dead-letters: {published} published again" + (f", {failed} not" if failed else "")
    )
    context.exit(console.FAILED if failed else 0)


def _named(dead: DeadLetterTopic, positions: Iterable[str]) -> list[StoredLetter]:
    found = []
    for position in positions:
        try:
            found.append(dead.find(position))
        except DeadLetterError as error:
            console.complain(str(error))
    return found


def _republish(settings: ProcessorSettings, letters: Iterator[StoredLetter]) -> int:
    """Publishes batch by batch and tells what could not be; answers how many were published."""
    publisher = Publisher(settings.brokers)
    published = 0
    while batch := list(islice(letters, BATCH)):
        again = partial(
            republish, settings=settings, publisher=publisher, letters=batch, actor=actor()
        )
        answers = with_database(settings, again)
        for letter, error in zip(batch, answers, strict=True):
            if error is None:
                published += 1
            else:
                console.complain(f"{letter.position}: not published: {error}")
    return published


def _of_topic(
    settings: ProcessorSettings, topic: str | None, letters: Iterator[StoredLetter]
) -> Iterator[StoredLetter]:
    wanted = None if topic is None else settings.topic(topic)
    return (letter for letter in letters if wanted in (None, letter.topic))
