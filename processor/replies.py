"""Replies of the servers that mail was sent to: what they said, and how final a refusal is.

`reply_of` takes the server's words out of a delivery's text; `classify` judges a refusal. Both are
pure, and linear in the length of the text, as `postfix_log` is.
"""

import re
from typing import Final, Literal

from msgspec import Struct

Class = Literal["hard", "soft", "unknown"]


class Reply(Struct, frozen=True):
    """What the other server said (RFC 5321 section 4.2).

    `host` is `name[address]`, None where Postfix does not repeat it. `dsn` is the enhanced code as
    said (RFC 2034), None without one. `text` is free of codes, its lines joined by a space.
    `command` is what was answered: `MAIL FROM`, `RCPT TO`, `DATA`, `end of DATA`; None otherwise.
    """

    host: str | None
    code: int | None
    dsn: str | None
    text: str
    command: str | None


_SAID_BY: Final = re.compile(
    r"(?:delivery temporarily suspended: )?"
    r"(?:host |SASL (?:\[CACHED\] )?authentication failed; server )"
    r"(?P<host>[^\s\[]++(?:\[[^\]]*+\])?) (?:said|refused to talk to me): "
)
_CODE: Final = re.compile(r"(?P<code>[2-5]\d\d)(?P<mark>[- ]|\Z)", re.ASCII)
_DSN: Final = re.compile(r"[245]\.\d{1,3}+\.\d{1,3}+(?!\S)", re.ASCII)


def reply_of(text: str) -> Reply | None:
    """The other server's reply in a delivery's text; None where the text is Postfix's own.

    `smtp_proto.c` writes `host H said: REPLY (in reply to COMMAND command)` and `host H refused to
    talk to me: REPLY`, `smtp_sasl_glue.c` the like; a bare reply ended a delivery that went well.
    """
    said_by = _SAID_BY.match(text)
    host = said_by and said_by["host"]
    said, command = _without_command(text[said_by.end() :]) if said_by else (text, None)
    if (code := _CODE.match(said)) is None:
        return Reply(host, None, None, said.strip(), command) if said_by else None
    lines = _lines(code["code"], said[4:]) if code["mark"] == "-" else [said[4:]]
    dsn = _DSN.match(said[4:].lstrip())
    return Reply(
        host=host,
        code=int(code["code"]),
        dsn=dsn[0] if dsn and dsn[0][0] == code["code"][0] else None,
        text=" ".join(filter(None, map(_without_dsn, lines))),
        command=command,
    )


def _without_command(said: str) -> tuple[str, str | None]:
    before, mark, command = said.rpartition(" (in reply to ")
    if not (mark and command.endswith(")")):
        return said, None
    return before, command.removesuffix(")").removesuffix(" command")


def _lines(code: str, said: str) -> list[str]:
    """The lines of a reply (RFC 5321 section 4.2.1), whose ends `smtp_proto.c` makes spaces of.

    Only the last has the code and a space. It may lack, as Postfix cuts long lines; if its text has
    the same code and a space once more, that comes out too.
    """
    *continued, last = f"{said} ".split(f" {code}-")
    before, _, final = f" {last}".rpartition(f" {code} ")
    return [*continued, before, final]


def _without_dsn(line: str) -> str:
    line = line.strip()
    dsn = _DSN.match(line)
    return line[dsn.end() :].lstrip() if dsn else line


_REFUSED: Final = frozenset({"deferred", "bounced", "rejected"})
_NO_SUCH_RECIPIENT: Final = frozenset({"5.1.1", "5.1.2", "5.1.3", "5.1.4", "5.1.6", "5.1.10"})


def classify(dsn: str | None, status: str) -> Class | None:
    """How final a refusal is; None where the status is no refusal.

    Args:
        dsn: the enhanced code that Postfix logged (RFC 3463), or None.
        status: a state of a message, such as `bounced`.

    `hard` says that mail to this address never can arrive: 5.1.x of the destination (RFC 3463
    section 3.2; 5.1.10 of RFC 7505). 5.1.7 and 5.1.8 speak of the sender, and 5.1.0 of either, so
    they are `unknown`, as is every other 5.x.x. `soft` is 4.x.x: what failed may work later.
    """
    if status not in _REFUSED:
        return None
    if dsn is not None and dsn.startswith("4."):
        return "soft"
    return "hard" if dsn in _NO_SUCH_RECIPIENT and status != "deferred" else "unknown"
