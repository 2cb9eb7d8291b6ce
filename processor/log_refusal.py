"""Refusals in Postfix's log: what smtpd, cleanup and postscreen say of mail that they refused or held.

Apart from `postfix_log` because these lines are the hardest to take apart: the client's words stand in them.
"""

import re
from itertools import islice
from typing import Final

from msgspec import Struct


def address_pattern(name: str) -> str:
    """The pattern of an address in external form (`info_log_addr_form.c`), as the group `name`."""
    return rf'<(?P<{name}>(?>"(?>(?:[^"\\]|\\.)*)"[^>]*+|[^>]*+))>'


class Refusal(Struct, frozen=True):
    """What was done to a command or a mail.

    Attributes:
        action: `reject` or `hold`.
        stage: `CONNECT`, `MAIL`, `RCPT`, `END-OF-MESSAGE`, `header`, …
        text: what the client was told, from the reply's codes on, or why.
    """

    action: str
    stage: str
    sender: str | None
    recipient: str | None
    text: str


_REFUSAL: Final = re.compile(
    r"(?:milter-)?(?P<action>reject|hold): (?P<stage>[A-Za-z-]++) (?P<rest>.*+)", re.DOTALL
)
_CLIENT: Final = re.compile(r"from [^\s\[]*+\[[^\]]*+\](?::\d++)?: ")
_CONTEXT: Final = re.compile(
    rf";(?: from={address_pattern('sender')})?(?:,? to={address_pattern('recipient')})?"
    r"(?:,? proto=[^\s,]++)?(?:,? helo=<[^>]*+>)?(?>(?: sasl_[a-z]++=\S++)*)"
)
_CONTEXT_MARK: Final = re.compile("; (?:from|to|proto)=|;$")
_CONTEXTS: Final = 8  # tried at most: keeps the time linear


def refusal_of(said: str) -> Refusal | None:
    """The refusal that a message says after its queue id; None where it says none.

    `smtpd_check.c` (log_whatsup), `smtpd.c`, `cleanup_milter.c`, `postscreen_smtpd.c`:
    `[milter-]ACTION: STAGE from NAME[ADDRESS]: TEXT;[ from=<A>][ to=<A>][ proto=P][ helo=<H>]`.
    `cleanup_message.c` puts the header or line of the body after `STAGE`, and its reason at the end.
    """
    if (refusal := _REFUSAL.fullmatch(said)) is None:
        return None
    split = _split_context if refusal["stage"].isupper() else _split_inner_context
    text, sender, recipient = split(refusal["rest"])
    text = text[client.end() if (client := _CLIENT.match(text)) else 0 :]
    return Refusal(refusal["action"], refusal["stage"], sender, recipient, text)


def _split_context(rest: str) -> tuple[str, str | None, str | None]:
    """The text, the sender and the recipient.

    The text repeats the recipient in internal form, unquoted, and `to=` has it once more: both may
    hold what looks like a context. The true one is the first that reaches the end of the line.
    """
    for mark in islice(_CONTEXT_MARK.finditer(rest), _CONTEXTS):
        if (context := _CONTEXT.fullmatch(rest, mark.start())) is not None:
            return rest[: mark.start()], context["sender"], context["recipient"]
    return rest, None, None


def _split_inner_context(rest: str) -> tuple[str, str | None, str | None]:
    """The same of a header check: `HEADER from CLIENT; from=<A> to=<A> proto=P helo=<H>[: REASON]`.

    A header may hold what looks like a context; the true one is the last, and follows the client. A cut line may end
    before it.
    """
    mark = max(rest.rfind("; from=<"), 0)
    context = _CONTEXT.match(rest, mark)
    if context is None or " " in rest[:mark].rpartition(" from ")[2]:
        return rest, None, None
    before, after = rest[:mark], rest[context.end() :]
    if after and not after.startswith(": "):
        return rest, None, None
    return before + after, context["sender"], context["recipient"]
