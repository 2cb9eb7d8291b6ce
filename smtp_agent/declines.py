"""Declines: messages that Postfix did not take for reasons of their own, and what becomes of them.

A declined message is set aside for a while, so that others go first, and given back then. It is refused for good when it
was handed over MAX_HANDOVERS times and is declined again, though others of its lane were accepted with it or since it was
first: where nothing passes, as when Postfix does not relay for this host, nothing is refused.
"""

from datetime import datetime
from typing import Final

from msgspec import Struct, structs

from smtp_agent.handover import Batch, HandedOver, Refusal

MAX_HANDOVERS: Final = 5
"""How often a message is handed over before a reply that may pass is final."""

_ASIDE_SECONDS: Final = 30.0
_REMEMBERED_SECONDS: Final = 3600.0


class Aside(Struct, frozen=True):
    """Messages of one hand-over; they stay `handed` until `due`, in monotonic seconds."""

    chunk_id: int
    handed_at: datetime
    dispatch_ids: list[int]
    due: float


class Declines:
    """The declined messages of one lane; every `now` is in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._aside: list[Aside] = []
        self._first: dict[int, float] = {}

    def judge(self, batch: Batch, done: HandedOver, accepted_at: float, now: float) -> HandedOver:
        """What was declined too often, while others passed, is refused.

        Args:
            batch: what was written ahead.
            done: how it went.
            accepted_at: when Postfix last took something of this lane, this batch included.
            now: the end of the batch.
        """
        if not done.declined:
            return done
        recent = now - _REMEMBERED_SECONDS
        first = {refusal.dispatch_id: now for refusal in done.declined}
        self._first = first | {d: at for d, at in self._first.items() if at > recent}
        final = [
            refusal
            for refusal in done.declined
            if batch.handovers[refusal.dispatch_id] >= MAX_HANDOVERS
            and self._first[refusal.dispatch_id] <= accepted_at
        ]
        return structs.replace(
            done,
            refused=done.refused + final,
            declined=[refusal for refusal in done.declined if refusal not in final],
        )

    def set_aside(self, chunk_id: int, declined: list[Refusal], now: float) -> None:
        """Sets aside what a batch of the chunk had declined."""
        if declined:
            ids = [refusal.dispatch_id for refusal in declined]
            due = now + _ASIDE_SECONDS
            self._aside.append(Aside(chunk_id, declined[0].handed_at, ids, due))

    def take_due(self, now: float) -> list[Aside]:
        """What is to be given back by now; infinity: all."""
        due = [aside for aside in self._aside if aside.due <= now]
        self._aside = [aside for aside in self._aside if aside.due > now]
        return due
