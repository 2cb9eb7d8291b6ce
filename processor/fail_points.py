"""Fail points: where a test makes a worker die, as `kill -9` would, at the moments that matter most.

They are named in the setting `fail_points`; without it, reaching one does nothing.
"""

import logging
import os
import random
import signal
from collections.abc import Callable, Mapping
from enum import StrEnum

logger = logging.getLogger(__name__)


class FailPoint(StrEnum):
    """The moments between one promise kept and the next."""

    CAMPAIGN_APPLIED = "campaign_applied"
    """A campaign event is committed; it is not acknowledged."""
    BLOCK_RESERVED = "block_reserved"
    """A block of dispatches is committed; nothing of it is emitted."""
    BATCH_EMITTED = "batch_emitted"
    """The broker has acknowledged the send events of a batch; its due e-mails are not acknowledged."""
    BLOCK_PLANNED = "block_planned"
    """A block of messages is committed; its send events are not acknowledged."""


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FailPoints:
    """Kills the process at some of the times that it reaches a fail point.

    Args:
        probabilities: how likely it dies at each point, from 0 to 1; at a point not named it never does.
        draw: gives evenly distributed numbers from 0 to below 1.
        kill: ends the process at once.
    """

    def __init__(
        self,
        probabilities: Mapping[FailPoint, float],
        draw: Callable[[], float] = random.random,
        kill: Callable[[], None] = _kill,
    ) -> None:
        self._probabilities = probabilities
        self._draw = draw
        self._kill = kill

    def reach(self, point: FailPoint) -> None:
        """Does not return if the process is to die here."""
        if self._probabilities and self._draw() < self._probabilities.get(point, 0):
            logger.critical("fail point %s: killing this process", point)
            self._kill()
