"""Refusals that no rule knows: counted, and a sample told now and then, so that `replies.toml` keeps up with servers."""

import logging
from datetime import datetime, timedelta
from typing import Final

from processor import metrics
from processor.phrases import words_of
from processor.replies import Verdict

logger = logging.getLogger(__name__)

EVERY: Final = timedelta(minutes=1)
MAX_TOLD: Final = 1_000
MAX_WORDS: Final = 40


class UnreadReplies:
    """Tells a new text at most once a minute, and none twice: the last thousand are known."""

    def __init__(self) -> None:
        self._told: dict[str, None] = {}
        self._last: datetime | None = None

    def count(self, verdict: Verdict, text: str, recipient: str, now: datetime) -> None:
        """Counts a refusal, and may tell its text where no rule judged it."""
        metrics.REPLIES.labels(verdict.reply_class, verdict.reason).inc()
        if verdict.rule is not None:
            return
        metrics.UNREAD_REPLIES.inc()
        if self._last is not None and self._last <= now < self._last + EVERY:
            return
        shape = anonymous(text, recipient)
        if shape in self._told:
            return
        self._last = now
        self._told[shape] = None
        if len(self._told) > MAX_TOLD:
            del self._told[next(iter(self._told))]
        logger.info("no rule of replies.toml knows this refusal: %s", shape)


def anonymous(text: str, recipient: str) -> str:
    """The words of a text without addresses, numbers, and what names the recipient; at most 40 of them."""
    names = set(words_of(recipient.replace("@", " ")))
    words = ["…" if word in names or word == "@" else word for word in words_of(text)[:MAX_WORDS]]
    return " ".join(
        "#" if word[0].isdigit() and len(word) > len("5.1.10") else word for word in words
    )
