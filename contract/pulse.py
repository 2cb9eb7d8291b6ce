"""Pulse: whether the parts of a process move, for the watchdog.

A part that waits has good reasons, which are no standstill: another's turn (a lane under `max_chunks`), or an outage, whose
calls are tried again and again. What is left is a part in which something never returns, and that a new start would heal.
"""

from collections.abc import Callable
from typing import Final

from contract.outage import RETRIES

STANDSTILL_SECONDS: Final = 120.0
"""A turn takes at most about a minute: so slow may Postfix be to answer the end of a message to a lane."""


def count_retries() -> float:
    """Calls that this process tried again because a service was away, so far."""
    return sum(
        sample.value
        for metric in RETRIES.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )


class Pulse:
    """When each part last moved.

    Args:
        clock: monotonic seconds.
        retries: how many calls were tried again so far.
    """

    def __init__(
        self, clock: Callable[[], float], retries: Callable[[], float] = count_retries
    ) -> None:
        self._clock = clock
        self._count_retries = retries
        self._retries = retries()
        self._retried_at = float("-inf")
        self._beats: dict[str, float] = {}

    def beat(self, part: str) -> None:
        """The part begins another turn."""
        self._beats[part] = self._clock()

    def rest(self, part: str) -> None:
        """The part has ended, or waits for others for as long as they like."""
        self._beats.pop(part, None)

    def standing(self) -> list[str]:
        """The parts that have not moved for `STANDSTILL_SECONDS`, while no outage was waited out for as long."""
        since = self._clock() - STANDSTILL_SECONDS
        if (retries := self._count_retries()) != self._retries:
            self._retries, self._retried_at = retries, self._clock()
        if self._retried_at > since:
            return []
        return sorted(part for part, at in self._beats.items() if at <= since)
