"""A worker from `due-emails` to planned messages, against the same worker with planning off.

The value is one `fairpost worker` process that does all of its steps: it reserves due e-mails, emits them to
`send-emails`, takes them from there again and plans them. The baseline is what `due_to_send` measures: the process
stops at `send-emails`, and planning is left to other workers.

Each half has a database and topics of its own, on which as many events wait. The value counts all of them, from the
first look (every 20 ms) that finds one reserved to the one that finds all planned: a rate of planning alone, between
two moments, would leave out the reservations that went before. The baseline leaves out its first and last tenth.

Standard error tells how long planning waited for its first event, and how far it was behind at most.
"""

import sys
import time
from typing import Final

from msgspec import Struct

from benchmarks.due_to_send import emitted_times, published
from benchmarks.measurement import Measurement, Pair, compare, steady_rate
from testbed import Testbed
from testbed.installation import Installation
from testbed.processes import ServiceError

NAME: Final = "due_to_planned"
_EVENTS: Final = 60_000
_REPEATS: Final = 3
_TIMEOUT: Final = 120.0
_LOOK: Final = 0.02

_LOOK_AT: Final = """
SELECT (SELECT coalesce(sum(dispatches), 0) FROM dispatch_counts)::bigint,
       (SELECT coalesce(sum(size), 0) FROM chunks)::bigint"""


class _Look(Struct, frozen=True):
    """How many were reserved and planned at a moment, in seconds of the monotonic clock."""

    reserved: int
    planned: int
    at: float


def measure(testbed: Testbed) -> list[Measurement]:
    """Events a second, planned against only emitted."""
    return compare([NAME], "events/s", lambda number: _repeat(testbed, number), repeats=_REPEATS)


def _repeat(testbed: Testbed, number: int) -> list[Pair]:
    with published(testbed, f"{NAME}_{number}", _EVENTS) as installation:
        looks = _work(installation)
    with published(testbed, f"{NAME}_{number}_emitted", _EVENTS) as installation:
        emitted = steady_rate(emitted_times(testbed, installation, _EVENTS))
    first_planned = next(look.at for look in looks if look.planned)
    behind = max(look.reserved - look.planned for look in looks)
    print(
        f"{NAME}: the first was planned {first_planned - looks[0].at:.1f} s after the first was reserved;"
        f" planning was up to {behind:,} of {_EVENTS:,} behind",
        file=sys.stderr,
    )
    return [Pair(_EVENTS / (looks[-1].at - looks[0].at), emitted)]


def _work(installation: Installation) -> list[_Look]:
    """Looks from the first that finds a reservation to the first that finds all planned."""
    looks: list[_Look] = []
    with installation.connect() as owner:
        worker = installation.start_worker(FAIRPOST_LOG_LEVEL="WARNING")
        end = time.monotonic() + _TIMEOUT
        try:
            while not looks or looks[-1].planned < _EVENTS:
                row = owner.execute(_LOOK_AT).fetchone()
                assert row is not None
                reserved, planned = row
                look = _Look(reserved, planned, time.monotonic())
                if look.reserved:
                    looks.append(look)
                if look.at > end:
                    raise ServiceError(f"{look.planned} of {_EVENTS} planned in {_TIMEOUT:g} s")
                time.sleep(_LOOK)
        finally:
            worker.stop()
    return looks
