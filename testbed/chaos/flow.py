"""The flow of a run's mail: due e-mails little by little, and what becomes of campaigns event by event."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

from testbed.processes import POLL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from testbed.chaos.producer import Producer
    from testbed.chaos.steps import Step
    from testbed.chaos.workload import Workload

D = TypeVar("D")

TRICKLE_SECONDS: Final = 0.5


class Flow:
    """Publishes a workload as its run goes on.

    Args:
        producer: publishes.
        workload: all that there is to publish.
    """

    def __init__(self, producer: Producer, workload: Workload) -> None:
        self._producer = producer
        self._workload = workload
        self._events = 0
        self.records = 0
        """Due e-mails given to the producer, copies included."""

    def open(self) -> None:
        """Tells the first events of the campaigns."""
        for event in self._workload.openings:
            self._producer.tell(event)

    def follow(self, steps: Sequence[Step[D]], begin: Callable[[D, int], None]) -> Iterator[D]:
        """Publishes step after step; gives the disturbance of each when its pause is over.

        Args:
            steps: in order.
            begin: called first in each, with its disturbance and the place up to which its records go.
        """
        self.open()
        for step in steps:
            end = self.records + step.records
            begin(step.disturbance, end)
            self.publish(end)
            time.sleep(step.pause)
            yield step.disturbance

    def tell(self) -> None:
        """Tells what becomes of a campaign next."""
        self._producer.tell(self._workload.changes[self._events])
        self._events += 1

    def publish(self, end: int) -> None:
        """Publishes the records up to that place."""
        if end > self.records:
            self._producer.publish(self._workload.records[self.records : end])
            self.records = end

    def trickle(self, end: int, done: Callable[[], bool], seconds: float) -> None:
        """Publishes the records up to that place a few at a time, for so long at most, until it is done."""
        for left in range(round(seconds / TRICKLE_SECONDS), 0, -1):
            self.publish(self.records + (end - self.records) // left)
            if wait(done, TRICKLE_SECONDS):
                return


def wait(condition: Callable[[], bool], seconds: float, poll: float = POLL) -> bool:
    """Waits until the condition holds, so long at most; whether it does."""
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(poll)
    return held
