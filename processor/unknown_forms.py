"""Unknown forms: lines that begin as those of a mail do and cannot be read. They are counted, and a sample is shown.

A new Postfix may log what no pattern here expects; an outcome would be missing then. The sample says which form it is,
without the addresses in it.
"""

import logging
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from contract.printable import one_line
from processor import metrics, postfix_log
from processor.log_refusal import address_pattern

logger = logging.getLogger(__name__)

EVERY: Final = timedelta(minutes=1)
"""Between two samples of one program at least."""
MAX_SAMPLE: Final = 200
"""Characters of a sample."""

PROGRAMS: Final = frozenset({
    "anvil", "bounce", "cleanup", "discard", "error", "flush", "lmtp", "local", "master", "oqmgr",
    "pickup", "pipe", "postdrop", "postfix-script", "postlog", "postlogd", "postqueue",
    "postscreen", "postsuper", "proxymap", "qmgr", "qmqpd", "retry", "scache", "sendmail", "showq",
    "smtp", "smtpd", "spawn", "tlsmgr", "tlsproxy", "trivial-rewrite", "verify", "virtual",
})  # fmt: skip
"""Postfix's programs that log, which bound the metric's labels; any other is `else`."""

# What looks like an address and does not end like one is taken for one to the end of the line.
_ADDRESS: Final = re.compile(rf"=(?:{address_pattern('address')}(?=,? |\Z)|<.*+)", re.DOTALL)
# A quotation mark begins a local part, which may hold anything.
_TEXT: Final = re.compile(r" \(.*+|: .*+| \".*+", re.DOTALL)


def skeleton(message: str) -> str:
    """A message without addresses and texts, such as `4F5A91C0: to=<…>, relay=none, status=odd (…`."""
    queue_id, _, said = message.partition(": ")
    shape = _TEXT.sub(lambda text: f"{text[0][:2]}…", _ADDRESS.sub("=<…>", said), count=1)
    words = ["…" if "@" in word else word for word in shape.split(" ")]
    if "=" not in words[-1] and "…" not in words[-1]:
        # The line may have been cut within an address, before its @.
        words[-1] = "…"
    return f"{queue_id}: {' '.join(words)}"[:MAX_SAMPLE]


class UnknownForms:
    """Counts lines of kind `other`, and shows some of those that could not be read."""

    def __init__(self, show: Callable[..., None] = logger.info) -> None:
        self._show = show
        self._shown: dict[str, datetime] = {}

    def see(self, tag: str, message: str, line: postfix_log.Line, now: datetime) -> None:
        """Notes a line, whatever its kind.

        Args:
            tag: as in `postfix_log.parse`.
            message: likewise.
            line: what `parse` made of it.
            now: the time by which samples are rare.
        """
        if not isinstance(line, postfix_log.Other):
            return
        name = tag.rpartition("/")[2]
        program = name if name in PROGRAMS else "else"
        metrics.OTHER_LOG_LINES.labels(program, "unknown" if line.unknown else "plain").inc()
        shown = self._shown.get(program)
        if not line.unknown or (shown is not None and abs(now - shown) < EVERY):
            return
        self._shown[program] = now
        sample = one_line(skeleton(message))
        self._show("a line of %s has a form that is not known: %s", one_line(tag), sample)
