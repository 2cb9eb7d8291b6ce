"""The outcome of a run: its figures, and every promise that was broken."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from testbed.processes import find_program

if TYPE_CHECKING:
    from pathlib import Path

    from testbed.chaos.crew import Crash, Death
    from testbed.chaos.steps import FailPoint
    from testbed.fleet import Testbed
    from testbed.installation import Installation


@dataclass(frozen=True)
class Tally:
    """The figures of the last line.

    Attributes:
        kills: of workers or agents, by SIGKILL.
        messages: of all dispatches.
        lost: due e-mails without a message, or whose message is not what it should be.
        twice: dispatched, or handed over, more than once.
        uncertain: messages whose fate nobody can know.
        postfix_twice: messages that a Postfix delivered more than once under one queue id.
    """

    kills: int = 0
    messages: int = 0
    lost: int = 0
    twice: int = 0
    uncertain: int = 0
    postfix_twice: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.kills + other.kills,
            self.messages + other.messages,
            self.lost + other.lost,
            self.twice + other.twice,
            self.uncertain + other.uncertain,
            self.postfix_twice + other.postfix_twice,
        )

    def __str__(self) -> str:
        return (
            f"kills={self.kills} messages={self.messages} lost={self.lost} twice={self.twice}"
            f" uncertain={self.uncertain} postfix_twice={self.postfix_twice}"
        )


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        part: what was disturbed.
        tally: its figures.
        deaths: of workers or agents, by SIGKILL.
        crashes: of processes that nobody killed; work went on, but each is worth a look.
        seconds: from the first start of a process until nothing moved.
        remark: what else is worth a word.
        complaints: every promise that was broken.
        directory: every log, where a promise was broken.
    """

    part: str
    tally: Tally
    deaths: tuple[Death, ...]
    crashes: tuple[Crash, ...]
    seconds: float
    remark: str
    complaints: tuple[str, ...]
    directory: Path

    @property
    def fell(self) -> Counter[FailPoint]:
        """How often somebody died at each fail point."""
        return Counter(death.point for death in self.deaths if death.point is not None)

    def __str__(self) -> str:
        fell = "".join(f", {number} at {point}" for point, number in sorted(self.fell.items()))
        return (
            f"{self.part}: {self.seconds:.0f} s; killed {len(self.deaths) - self.fell.total()} at any moment{fell};"
            f" crashed: {len(self.crashes)}; {self.remark}"
        )


def keep(testbed: Testbed, installation: Installation) -> None:
    """Leaves every log and the topics behind, and the database, which ends with the installation, as SQL."""
    testbed.keep()
    dump = testbed.directory / "database.sql"
    dsn = testbed.postgres.dsn(installation.name)
    subprocess.run([find_program("pg_dump"), "--file", str(dump), dsn], check=False)
