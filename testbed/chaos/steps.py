"""Steps: one disturbance after the other, with mail published between them, and how a process is armed to die."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

from contract.fail_points import AgentFailPoint, WorkerFailPoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

FailPoint = WorkerFailPoint | AgentFailPoint

D = TypeVar("D")


@dataclass(frozen=True)
class Armed:
    """A process that kills itself at a fail point, at each visit with this probability."""

    point: FailPoint
    probability: float


Life = Armed | None
"""How a process starts; an unarmed one is killed from outside."""


@dataclass(frozen=True)
class Step(Generic[D]):
    """One disturbance.

    Attributes:
        records: so many due e-mails are published first.
        pause: then so many seconds pass.
    """

    disturbance: D
    records: int
    pause: float


@dataclass(frozen=True)
class Course(Generic[D]):
    """All disturbances of a run.

    Attributes:
        lives: how each process starts, life after life; after the last it is unarmed and left alone.
        steps: in order; each life that is listed ends in one of them.
    """

    lives: tuple[tuple[Life, ...], ...]
    steps: tuple[Step[D], ...]

    @property
    def kills(self) -> int:
        """How many processes die by SIGKILL."""
        return sum(map(len, self.lives))


def spread(random: Random, steps: Sequence[tuple[D, float]], records: int) -> Iterator[Step[D]]:
    """Gives each disturbance and its pause a part of the records; the parts differ, and sum up."""
    bounds = list(accumulate((random.uniform(0.2, 1.8) for _ in steps), initial=0.0))
    places = [round(records * bound / bounds[-1]) for bound in bounds]
    for (disturbance, pause), (first, end) in zip(steps, pairwise(places), strict=True):
        yield Step(disturbance, end - first, pause)
