"""Fail points: where a test makes a worker or an agent die, as `kill -9` would, at the moments that matter most.

They are named in the setting `fail_points`; without it, reaching one does nothing.
"""

import logging
import os
import random
import signal
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec
from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

logger = logging.getLogger(__name__)


class WorkerFailPoint(StrEnum):
    """A worker's moments between one promise kept and the next."""

    CAMPAIGN_APPLIED = "campaign_applied"
    """A campaign event is committed; it is not acknowledged."""
    BLOCK_RESERVED = "block_reserved"
    """A block of dispatches is committed; nothing of it is emitted."""
    BATCH_EMITTED = "batch_emitted"
    """The broker has acknowledged the send events of a batch; its due e-mails are not acknowledged."""
    BLOCK_PLANNED = "block_planned"
    """A block of messages is committed; its send events are not acknowledged."""


class AgentFailPoint(StrEnum):
    """An agent's moments between what it has written down and what Postfix has."""

    WRITTEN_AHEAD = "written_ahead"
    """A batch is committed as handed over; Postfix has nothing of it."""
    IN_DATA = "in_data"
    """Postfix has a part of a message, not its end."""
    AFTER_DOT = "after_dot"
    """Postfix has all of a message; its reply is not read."""
    FENCE_ASKED = "fence_asked"
    """A fence and the messages that it is to judge are committed; Postfix has not logged its line."""


P = TypeVar("P", bound=StrEnum)

Probability = Annotated[float, Field(ge=0, le=1)]


def _from_json(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise ValueError(f"is no JSON: {error}") from None


Probabilities: TypeAlias = Annotated[dict[P, Probability], NoDecode, BeforeValidator(_from_json)]
"""The type of the setting `fail_points`: a table in the file, a JSON object in the environment."""


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FailPoints(Generic[P]):
    """Kills the process at some of the times that it reaches a fail point.

    Args:
        probabilities: how likely it dies at each point, from 0 to 1; at a point not named it never does.
        draw: gives evenly distributed numbers from 0 to below 1.
        kill: ends the process at once.
    """

    def __init__(
        self,
        probabilities: Mapping[P, float],
        draw: Callable[[], float] = random.random,
        kill: Callable[[], None] = _kill,
    ) -> None:
        self._probabilities = probabilities
        self._draw = draw
        self._kill = kill

    def armed(self, point: P) -> bool:
        """Whether the process may die there; what only a test needs is done only then."""
        return point in self._probabilities

    def reach(self, point: P) -> None:
        """Does not return if the process is to die here."""
        if self._probabilities and self._draw() < self._probabilities.get(point, 0):
            logger.critical("fail point %s: killing this process", point)
            self._kill()
