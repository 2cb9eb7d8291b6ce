"""Planning at a million messages, against planning at ten thousand.

The worker's own steps reserve and plan a campaign of a million contacts, and twenty others with a twentieth of that
between them, window after window in one database; standard error tells of the rate and the process's resident memory as
they went. The value is the rate of further windows there. The baseline is that of windows in a second database of the
same server, which begins with ten thousand messages, in turn with those: what else the machine does meanwhile (minutes
lie between the first message and the millionth; checkpoints, autovacuum) slows down both. A ratio of 1 says that
planning does not slow down with what was planned before.

Only planning is timed. PostgreSQL runs with fsync, and its autovacuum as by default.
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.measurement import Measurement, Pair, compare
from benchmarks.steps import Steps, open_steps
from benchmarks.workload import due_emails
from contract.events import DueEmail
from testbed import Testbed

NAME: Final = "planning_growth"
_CONTACTS: Final = 1_000_000
_EVERY: Final = 21
"""Of so many due e-mails in a row, one is another campaign's."""
_WINDOW: Final = 10_500
_WINDOWS: Final = _CONTACTS * _EVERY // (_EVERY - 1) // _WINDOW
_REPEATS: Final = 9
_TOLD: Final = 10
_MEBIBYTE: Final = 2**20

_PLANNED: Final = """
SELECT max(size) FROM (SELECT sum(size) AS size FROM chunks GROUP BY campaign_id) campaign"""


def measure(testbed: Testbed) -> list[Measurement]:
    """Send events planned a second, among a million messages against among ten thousand."""
    with open_steps(testbed, NAME) as steps:
        _plan_the_million(steps)
        with open_steps(testbed, f"{NAME}_few") as few:
            _window(few, 0)
            return compare(
                [NAME],
                "events/s",
                lambda number: [Pair(_window(steps, _WINDOWS + number), _window(few, number))],
                repeats=_REPEATS,
            )


def _plan_the_million(steps: Steps) -> None:
    memory: list[int] = []
    for number in range(_WINDOWS):
        rate = _window(steps, number)
        memory.append(_resident_bytes())
        if number == 1 or (number + 1) % _TOLD == 0:
            print(
                f"{NAME}: {(number + 1) * _WINDOW:,} messages: {rate:,.0f} events/s,"
                f" {memory[-1] / _MEBIBYTE:.0f} MiB",
                file=sys.stderr,
            )
    growth = max(memory) - max(memory[:_TOLD])
    print(f"{NAME}: memory grew by {growth / _MEBIBYTE:.1f} MiB", file=sys.stderr)
    with steps.installation.connect() as owner:
        assert owner.execute(_PLANNED).fetchone() == (_CONTACTS,)


def _window(steps: Steps, number: int) -> float:
    """The rate of the window."""
    first = number * _WINDOW
    emails = [
        _of_the_million(email) if place % _EVERY else email
        for place, email in enumerate(due_emails(_WINDOW, first=first))
    ]
    events = steps.reserve(emails, offset=first)
    started = time.perf_counter()
    steps.plan(events)
    return len(events) / (time.perf_counter() - started)


def _of_the_million(email: DueEmail) -> DueEmail:
    return msgspec.structs.replace(email, campaign_id="the-million")


def _resident_bytes() -> int:
    """Of this process (proc_pid_statm(5))."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
