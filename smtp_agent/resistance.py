"""Resistance: how readily Postfix takes the mail of one lane, as its last batches showed."""

from typing import Final

from smtp_agent.handover import HandedOver

_FIRST_BATCH: Final = 10
_LARGEST_BATCH: Final = 500
_BACKOFF: Final = (0.5, 5.0)
_LONELY_SECONDS: Final = 30.0
"""When nothing was accepted for so long, a message that was declined says something of Postfix too."""


class Resistance:
    """What a lane knows of Postfix; every `now` is in seconds of one monotonic clock.

    Attributes:
        batch_limit: messages that Postfix takes within a batch's time.
        since: of the first batch of which it took nothing; None: it takes mail.
        until: no batch is to begin before.
        reason: why it took nothing; None: it takes mail.
        accepted_at: when it last took something; minus infinity: never.
    """

    def __init__(self) -> None:
        self.batch_limit = _FIRST_BATCH
        self.since: float | None = None
        self.until = float("-inf")
        self.reason: str | None = None
        self.accepted_at = float("-inf")
        self._backoff = 0.0

    def learn(self, done: HandedOver, seconds: float, now: float, jitter: float) -> None:
        """Draws the conclusions of a batch.

        Args:
            done: how it went.
            seconds: how long it took; the next is larger where that was a small part of a second.
            now: its end.
            jitter: from 0.5 to 1, the part of the backoff to wait.
        """
        if done.given_back or done.in_doubt:
            self.batch_limit = max(1, self.batch_limit // 2)
        elif seconds < 1 / 4:
            self.batch_limit = min(_LARGEST_BATCH, self.batch_limit * 2)
        if done.accepted:
            self.accepted_at = now
        if done.accepted or not (done.given_back or done.declined or done.in_doubt):
            self.since, self.until, self.reason, self._backoff = None, float("-inf"), None, 0.0
            return
        # A batch of which nothing was begun, as when the write-ahead came late, says nothing of Postfix.
        # Nor does one message that was declined while others were accepted a moment ago.
        reason = done.unsent
        if reason is None and done.declined and now - self.accepted_at > _LONELY_SECONDS:
            reason = done.declined[0].reply
        if self.since is None and reason is not None:
            self.since, self.reason = now, reason
        self._backoff = min(max(self._backoff * 2, _BACKOFF[0]), _BACKOFF[1])
        self.until = now + self._backoff * jitter

    def leave_alone(self, now: float) -> None:
        """Makes the lane wait once more before it tries again."""
        self.until = now + self._backoff
