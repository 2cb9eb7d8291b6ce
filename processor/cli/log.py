"""`fairpost log`: what the mail logs say, and what became of a message."""

import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any, BinaryIO, Final
from zoneinfo import ZoneInfo

import click
import psycopg
from msgspec import structs

from contract import console, printable
from contract.console import CommandError
from processor.advice import advice
from processor.cli.classify import classify_
from processor.cli.session import json_option, settings_of, with_database
from processor.explaining import Life, count_roughly, of_dispatch, of_email, of_queue_id
from processor.log_line import LogLine, in_words, read_line

LONGEST: Final = 64 * 1024
"""Bytes of a line that are read; what follows is skipped. Postfix cuts its lines at about 2,000."""
_STEP: Final = 1_000
"""Lines between two movements of the progress bar."""

_STDIN: Final = "-"


_DIGITS: Final = re.compile("[0-9]{1,19}")
_MANY: Final = 100_000
"""Messages from which on looking at all of them takes a while."""


class Explained(Life, frozen=True, kw_only=True):
    """A message's life; `next` is what can be done for it now."""

    next: str


class _Zone(click.ParamType):
    name = "zone"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tzinfo:
        try:
            return ZoneInfo(str(value))
        except (KeyError, ValueError, OSError):
            self.fail(f"{value!r} is no time zone such as Europe/Warsaw", param, ctx)


@click.group()
def log() -> None:
    """Read mail logs as the pipeline does, and tell a message's life."""


@log.command()
@click.argument(
    "files",
    metavar="[FILE|-]...",
    nargs=-1,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each line.")
@click.option(
    "--tz",
    type=_Zone(),
    default="UTC",
    show_default=True,
    metavar="ZONE",
    help="The zone of stamps that name none.",
)
def parse(files: tuple[str, ...], tz: tzinfo, *, as_json: bool) -> None:
    """Print what the pipeline understands of mail logs, one line for each line.

    Without a FILE, or for -, standard input is read, and each line is answered at once. A stamp without a year gets the
    latest that is not more than a day ahead.

    \b
    With --json each line is an object with these fields, null where a line does not say it:
      kind            queue_active, delivery, expired, removed, bounce_notification, reject, hold,
                      requeue, fence, daemon_start, daemon_stop; other for all else, and for what
                      is no line of a log
      time            in UTC
      host, tag, service, pid
                      tag postfix-a/gmail/smtp has the service gmail/smtp
      queue_id        that the message begins with; null for NOQUEUE
      sender, recipient, orig_recipient
      relay_host, relay_ip, relay_port
                      null for relay=none; a local service or a Unix socket has a host only
      conn_use, delay, delays
                      seconds in all; before the queue manager, in it, to connect, to transfer
      dsn             that Postfix logged (RFC 3463)
      status          of a delivery sent, deferred (SOFTBOUNCE too) or bounced; of an expiry expired
      text            what stands in the parentheses; of a reject or hold the answer, or the reason;
                      of other kinds what is in no other field
      reply_code, reply_dsn, reply_text
                      the reply in the text, its lines folded into one, without codes
      reply_host      who replied, if the text says so: the name as in relay_host, without address
      command         that was answered: MAIL FROM, RCPT TO, DATA, end of DATA, …

    \b
    Examples:
      fairpost log parse mail.log mail.log.1
      zcat mail.log.2.gz | fairpost log parse --json --tz Europe/Warsaw - | jq 'select(.kind == "reject")'
      tail -f mail.log | fairpost log parse -
    """
    out = click.get_binary_stream("stdout")
    show = printable.json_text if as_json else in_words
    with console.while_read():
        for name in files or (_STDIN,):
            _parse(name, tz, show, out)
        out.flush()


def _parse(name: str, tz: tzinfo, show: Callable[[LogLine], str], out: BinaryIO) -> None:
    live = name == _STDIN or not stat.S_ISREG(Path(name).stat().st_mode)
    with _opened(name) as stream, _progress(name, live=live) as seen:
        for number, line in enumerate(_lines(name, stream)):
            out.write(show(read_line(line, datetime.now(UTC), tz)).encode() + b"\n")
            if live:
                out.flush()
            elif number % _STEP == 0:
                seen(stream.tell(), Path(name).stat().st_size)


def _opened(name: str) -> AbstractContextManager[BinaryIO]:
    if name == _STDIN:
        if sys.stdin.isatty():
            console.complain("log: reading lines from the terminal; Ctrl-D ends them")
        return nullcontext(click.get_binary_stream("stdin"))
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}") from None


def _progress(
    name: str, *, live: bool
) -> AbstractContextManager[Callable[[int, int | None], None]]:
    """A bar, where it has an end and does not stand between the lines on the same terminal."""
    if live or sys.stdout.isatty():
        return nullcontext(lambda _done, _total: None)
    return console.progress_bar(f"{name}: bytes")


def _lines(name: str, stream: BinaryIO) -> Iterator[str]:
    """The lines without their ends, and bytes that are no UTF-8 replaced."""
    try:
        while line := stream.readline(LONGEST):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(LONGEST)
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode(errors="replace")
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}") from None


@log.command()
@click.argument("name", metavar="ID")
@click.option(
    "--queue-id", "is_queue_id", is_flag=True, help="ID is Postfix's, whatever it looks like."
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Of an address, how many messages at most.",
)
@json_option
@click.pass_context
def explain(
    context: click.Context, name: str, limit: int, *, is_queue_id: bool, as_json: bool
) -> None:
    """Tell a message's life, and what can be done for it now.

    ID is a dispatch id (digits), an address (with @; its messages, the newest first), or a queue id of Postfix. For an
    address all messages are looked at: some seconds, with many millions.

    \b
    Examples:
      fairpost log explain 4711
      fairpost log explain ann@shop.example --limit 3
      fairpost log explain 4jdWPx3hz5zJLpv --json
      fairpost log explain --queue-id 3051914082
    """

    async def look(connection: psycopg.AsyncConnection[Any]) -> list[Life]:
        if is_queue_id or not ("@" in name or _DIGITS.fullmatch(name)):
            return await of_queue_id(connection, name)
        if "@" not in name:
            return await of_dispatch(connection, int(name))
        if (number := await count_roughly(connection)) > _MANY:
            console.complain(f"log: looking for {name} among about {number:,} messages")
        return await of_email(
            connection, name, limit=limit + 1
        )  # one more tells whether there are more

    lives = with_database(settings_of(context), look)
    now = datetime.now(UTC)
    shown = [Explained(**structs.asdict(life), next=advice(life, now)) for life in lives[:limit]]
    if as_json:
        console.show(shown, as_json=True)
    else:
        click.echo("\n\n".join(map(_story, shown)))
    if len(lives) > limit:
        console.complain(f"log: the newest {limit} messages that go by {name}: see --limit")


def _story(life: Explained) -> str:
    """A message's life for people: a line for each thing that happened, in its order."""
    place = f"chunk {life.chunk} of {life.campaign_id} at {life.operator}, position {life.position}"
    told = {
        "reserved": _at(life.reserved_at),
        "planned": life.chunk and f"{place}, since {_at(life.chunk_opened_at)} at the earliest",
        "handed": "; ".join(f"{_at(each.at)} to {each.instance}" for each in life.handed),
        "queue id": "; ".join(
            f"{each.queue_id} at {each.instance}, since {_at(each.seen_at)}"
            for each in life.queue_ids
        ),
        "fence": "; ".join(
            f"{each.reason} of {each.instance}, asked {_at(each.asked_at)},"
            f" {'judged ' + _at(each.judged_at) if each.judged_at else 'not judged yet'}"
            for each in life.fences
        ),
        "suppressed": "; ".join(
            f"{each.campaign_id or 'every campaign'} since {_at(each.since)} by {each.source}: {each.reason}"
            for each in life.suppressions
        ),
        "state": " ".join(
            (
                life.state,
                f"since {_at(life.status_at)}" if life.status_at else "",
                f"after {life.attempts} attempts" if life.attempts > 1 else "",
            )
        ),
        "reply": life.reply and f"{life.reply} ({life.reply_class or life.dsn or '-'})",
        "not told": "; ".join(f"{each.status} of {_at(each.at)}" for each in life.untold),
        "next": life.next,
    }
    head = f"dispatch {life.dispatch_id}: {life.email_key} of {life.campaign_id} for {life.user_id} <{life.email or ''}>"
    lines = [head, *(f"  {name:10} {text.strip()}" for name, text in told.items() if text)]
    return "\n".join(map(printable.one_line, lines))


def _at(time: datetime | None) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}" if time else ""


log.add_command(classify_)
