"""What happens to mail hosts in a run: to agents, Postfix and Fluentd, and to the operators that they deliver to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from testbed.chaos.schedule import Nothing, Tell
from testbed.mailbox import Rules

INSTANCES = ("mta-1", "mta-2", "mta-3")

OPERATORS = ("gmail", "outlook", "other")


SLOW = "slow"
MOODS = {
    SLOW: Rules(delay=3),
    "throttling": Rules(rate=120),
    "deferring": Rules(mood="defer"),
}
AT_EASE = "at ease"


class End(StrEnum):
    """How Postfix ends."""

    MASTER_KILLED = "master killed"
    STOPPED = "stopped"
    ALL_KILLED = "all killed"


@dataclass(frozen=True)
class EndLife:
    """The agent of this instance dies: by itself if it is armed, or it is killed (SIGKILL)."""

    instance: int
    life: int

    def __str__(self) -> str:
        return f"agent of {INSTANCES[self.instance]} dies"


@dataclass(frozen=True)
class Freeze:
    """An agent is stopped (SIGSTOP)."""

    instance: int

    def __str__(self) -> str:
        return f"agent of {INSTANCES[self.instance]} stands still"


@dataclass(frozen=True)
class Thaw:
    """It goes on (SIGCONT), where it was not killed meanwhile."""

    instance: int

    def __str__(self) -> str:
        return f"agent of {INSTANCES[self.instance]} goes on"


@dataclass(frozen=True)
class Down:
    """A service ends: in order, or killed (`hard`); an instance's Fluentd, or Postgres (None)."""

    instance: int | None
    hard: bool

    def __str__(self) -> str:
        return f"{_service(self.instance)} is {'killed' if self.hard else 'stopped'}"


@dataclass(frozen=True)
class Up:
    """It starts again."""

    instance: int | None

    def __str__(self) -> str:
        return f"{_service(self.instance)} starts"


@dataclass(frozen=True)
class Mood:
    """A mailbox operator becomes slow, or defers mail, or is at ease again."""

    operator: str
    name: str

    @property
    def rules(self) -> Rules:
        """How it behaves then."""
        return MOODS.get(self.name, Rules())

    def __str__(self) -> str:
        return f"{self.operator} is {self.name}"


@dataclass(frozen=True)
class Slow:
    """A Postfix takes its time after the final dot of each message, in sessions that begin from now on.

    So it takes messages seconds after the agent that gave them to it is dead.
    """

    instance: int

    def __str__(self) -> str:
        return f"Postfix of {INSTANCES[self.instance]} is slow"


@dataclass(frozen=True)
class Fast:
    """It takes messages at once again, in sessions that begin from now on."""

    instance: int

    def __str__(self) -> str:
        return f"Postfix of {INSTANCES[self.instance]} is fast"


@dataclass(frozen=True)
class EndPostfix:
    """A Postfix ends."""

    instance: int
    end: End

    def __str__(self) -> str:
        return f"Postfix of {INSTANCES[self.instance]}: {self.end}"


@dataclass(frozen=True)
class StartPostfix:
    """It starts again."""

    instance: int

    def __str__(self) -> str:
        return f"Postfix of {INSTANCES[self.instance]} starts"


@dataclass(frozen=True)
class Rotate:
    """Postfix's log is rotated."""

    instance: int

    def __str__(self) -> str:
        return f"log of {INSTANCES[self.instance]} is rotated"


def _service(instance: int | None) -> str:
    return "postgres" if instance is None else f"Fluentd of {INSTANCES[instance]}"


Disturbance = (
    EndLife
    | Freeze
    | Thaw
    | Down
    | Up
    | Mood
    | Slow
    | Fast
    | EndPostfix
    | StartPostfix
    | Rotate
    | Tell
    | Nothing
)
