"""`fairpost log classify`: how a refusal is judged, and by which rule."""

import re
from collections.abc import Iterable
from typing import Final

import click
import msgspec
from msgspec import Struct

from contract import console, printable
from contract.events import ReplyClass
from processor import postfix_log
from processor.log_header import split_header
from processor.replies import Verdict, classify, classify_delivery

_STDIN: Final = "-"
_QUEUE_ID: Final = re.compile(
    r"[0-9A-Za-z]{5,}+: (?=host |connect to |lost |conversation )", re.ASCII
)


class Judged(Struct, frozen=True):
    """A verdict as it is shown; all null: the text refuses nothing."""

    reply_class: ReplyClass | None = msgspec.field(name="class")
    reason: str | None
    provider: str | None
    rule: str | None


@click.command("classify")
@click.argument("reply", metavar="REPLY|-")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each reply.")
def classify_(reply: str, *, as_json: bool) -> None:
    """Print how a refusal is judged: class, reason, provider, and the rule that judged it.

    A REPLY is what a server said, in one line or several; what stands in the parentheses of Postfix's log; or a whole
    line of that log, which tells more: the status, the enhanced code, the recipient and the host. For -, standard
    input is read, one reply a line, and each is answered at once.

    \b
    With --json each reply gives an object with these fields, null where nothing is known; all are
    null where the text refuses nothing:
      class           hard, full, rate, policy, soft, unknown
      reason          such as no_such_mailbox; docs/replies.md has them all
      provider        whose server, or whose software, spoke
      rule            of replies.toml

    \b
    Examples:
      fairpost log classify "550 5.1.1 User unknown"
      fairpost log classify --json "connect to mx.shop.test[192.0.2.1]:25: Connection timed out"
      grep status=bounced mail.log | fairpost log classify - | sort | uniq -c
    """
    if reply != _STDIN:
        click.echo(_shown(judge(reply), as_json=as_json))
        return
    with console.while_read():
        _answer(click.get_text_stream("stdin", errors="replace"), as_json=as_json)


def judge(text: str) -> Verdict | None:
    """The verdict on a reply, on what Postfix logs of one, or on a whole line of its log; None: nothing is refused."""
    header, message = split_header(text.strip()) or (None, text.strip())
    match postfix_log.parse(header.tag if header else "", message):
        case postfix_log.Delivery() as attempt:
            return classify_delivery(attempt)
        case postfix_log.Rejection() as rejection:
            return classify(rejection.text)
        case postfix_log.Other():
            if (queue_id := _QUEUE_ID.match(message)) is not None:
                return classify(message[queue_id.end() :])
            return classify(message) if message and header is None else None
        case _:
            return None


def _answer(replies: Iterable[str], *, as_json: bool) -> None:
    for reply in replies:
        click.echo(_shown(judge(reply), as_json=as_json))


def _shown(verdict: Verdict | None, *, as_json: bool) -> str:
    judged = (
        Judged(verdict.reply_class, verdict.reason, verdict.provider, verdict.rule)
        if verdict
        else Judged(None, None, None, None)
    )
    if as_json:
        return printable.json_text(judged)
    shown = [value or "-" for value in msgspec.structs.astuple(judged)]
    return "{:8} {:21} {:12} {}".format(*shown)
