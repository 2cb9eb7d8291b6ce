"""Envelope senders (RFC 5321 section 4.1.1.2): the address that ties a line of Postfix's log to a dispatch.

Every message goes out from `bounce+<dispatch_id>@<bounce domain>`, a variable envelope return path: `qmgr` logs it each
time it activates the message, so the log itself says which dispatch Postfix holds.
"""

import re
from typing import Final

_SENDER: Final = re.compile(r"bounce\+([1-9][0-9]{0,18})@", re.ASCII)

_FENCE: Final = re.compile(r"fence\+([0-9A-Za-z_-]++)@", re.ASCII)

MAX_DISPATCH_ID: Final = 2**63 - 1


def sender_of(dispatch_id: int, bounce_domain: str) -> str:
    """The envelope sender of a dispatch."""
    return f"bounce+{dispatch_id}@{bounce_domain}"


def dispatch_of(sender: str) -> int | None:
    """The dispatch that an envelope sender names, or None where the mail is not ours."""
    match = _SENDER.match(sender)
    if match is None:
        return None
    dispatch_id = int(match[1])
    return dispatch_id if dispatch_id <= MAX_DISPATCH_ID else None


def fence_sender(token: str, bounce_domain: str) -> str:
    """The envelope sender by which the log says that a fence was reached."""
    return f"fence+{token}@{bounce_domain}"


def fence_of(sender: str) -> str | None:
    """The token of the fence that an envelope sender names, or None where it names none."""
    match = _FENCE.match(sender)
    return match[1] if match else None
