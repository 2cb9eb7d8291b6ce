"""Verdicts: what Postfix's replies say of a message (RFC 5321, RFC 3463)."""

import re
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from smtp_agent.smtp import Reply

_QUEUE_ID: Final = re.compile(r"queued as ([0-9A-Za-z]+)", re.ASCII)
_DSN: Final = re.compile(r"([245]\.\d{1,3}\.\d{1,3})(?:\s+|$)", re.ASCII)
# Policy, such as `relay access denied`: the fault of this host's configuration, not of the message.
_POLICY: Final = "5.7."
_CODES: Final = re.compile(r"\d{3}(?: [245]\.\d{1,3}\.\d{1,3})?(?= |$)", re.ASCII)
_OK: Final = 250
_SHUTTING_DOWN: Final = 421
_PERMANENT: Final = 500


class Accepted(Struct, frozen=True):
    """Postfix replied 250 to the message; the queue id is None where its reply names none."""

    queue_id: str | None


class Refused(Struct, frozen=True):
    """Postfix refused this message for good (5xx to its recipient, or to its content)."""

    dsn: str | None
    reply: str


class Declined(Struct, frozen=True):
    """Postfix did not take this message for a reason that may pass: it says nothing of other messages.

    4xx or 5.7.x to its recipient or content, or 5xx to its SMTPUTF8, while the session worked.
    """

    dsn: str | None
    reply: str


class Unsent(Struct, frozen=True):
    """Postfix surely does not have it, and would have taken no other either: not tried, or the session failed."""

    reason: str


class InDoubt(Struct, frozen=True):
    """No reply came to the message: Postfix may have it."""

    reason: str


Verdict = Accepted | Refused | Declined | Unsent | InDoubt

NOT_BEGUN: Final = Unsent("not begun in time")
"""Says nothing of Postfix: the deadline came first, or the session was lost by an earlier message."""


def judge_envelope(
    replies: Sequence[Reply], *, smtputf8: bool
) -> Refused | Declined | Unsent | None:
    """What the replies to MAIL, RCPT and DATA say; None: Postfix waits for the message.

    Args:
        replies: at least one, and all three where those before are 250.
        smtputf8: whether the addresses need it (RFC 6531).
    """
    mail, *rest = replies
    if mail.code != _OK:
        if smtputf8 and mail.code >= _PERMANENT:
            return Declined(_dsn(mail), str(mail))
        return Unsent(str(mail))
    recipient, *rest = rest
    if recipient.code != _OK:
        return _refusal(recipient)
    [data] = rest
    return None if data.code == 354 else _refusal(data)  # noqa: PLR2004  of RFC 5321, section 4.3.2


def judge_content(reply: Reply) -> Verdict:
    """What the reply to the whole message says."""
    if reply.code != _OK:
        return _refusal(reply)
    queue_id = _QUEUE_ID.search(reply.text)
    return Accepted(queue_id[1] if queue_id else None)


def loggable(reason: str) -> str:
    """A reason without the text of a reply, which may name the recipient: its codes, or the error of a connection."""
    codes = _CODES.match(reason)
    return codes[0] if codes else reason


def _refusal(reply: Reply) -> Refused | Declined | Unsent:
    if reply.code == _SHUTTING_DOWN:
        return Unsent(str(reply))
    dsn = _dsn(reply)
    if reply.code >= _PERMANENT and not (dsn or "").startswith(_POLICY):
        return Refused(dsn, str(reply))
    return Declined(dsn, str(reply))


def _dsn(reply: Reply) -> str | None:
    """The enhanced status code (RFC 2034)."""
    dsn = _DSN.match(reply.text)
    return dsn[1] if dsn else None
