"""A worker from `due-emails` to planned messages, against the same worker with planning off.

The value is one `fairpost worker` process that does all of its steps: it reserves due e-mails, emits them to
`send-emails`, takes them from there again and plans them. The baseline is the process that `due_to_send` measures:
it stops at `send-emails`, and leaves planning to other workers.

Each half has a database and topics of its own, on which as many events wait. A message counts as planned at the first
look that finds it (`chunks.size`, every 20 ms). Rates leave out the first and the last tenth of the events.
"""

import time
from typing import Final

from benchmarks.due_to_send import emitted_times, published
from benchmarks.measurement import Measurement, Pair, compare, steady_rate
from testbed import Testbed
from testbed.installation import Installation
from testbed.processes import ServiceError

NAME: Final = "due_to_planned"
_EVENTS: Final = 30_000
_REPEATS: Final = 4
_TIMEOUT: Final = 120.0
_LOOK: Final = 0.02

_PLANNED: Final = "SELECT coalesce(sum(size), 0) FROM chunks"


def measure(testbed: Testbed) -> list[Measurement]:
    """Events a second, planned against only emitted."""
    return compare([NAME], "events/s", lambda number: _repeat(testbed, number), repeats=_REPEATS)


def _repeat(testbed: Testbed, number: int) -> list[Pair]:
    with published(testbed, f"{NAME}_{number}", _EVENTS) as installation:
        planned = steady_rate(_planned_times(installation))
    with published(testbed, f"{NAME}_{number}_emitted", _EVENTS) as installation:
        emitted = steady_rate(emitted_times(testbed, installation, _EVENTS))
    return [Pair(planned, emitted)]


def _planned_times(installation: Installation) -> list[float]:
    """When each event was seen to be a message, in seconds."""
    times: list[float] = []
    with installation.connect() as owner:
        worker = installation.start_worker(FAIRPOST_LOG_LEVEL="WARNING")
        end = time.monotonic() + _TIMEOUT
        try:
            while len(times) < _EVENTS:
                row = owner.execute(_PLANNED).fetchone()
                now = time.monotonic()
                if row is None or now > end:
                    raise ServiceError(f"{len(times)} of {_EVENTS} planned within {_TIMEOUT:g} s")
                times += [now] * (row[0] - len(times))
                time.sleep(_LOOK)
        finally:
            worker.stop()
    return times
