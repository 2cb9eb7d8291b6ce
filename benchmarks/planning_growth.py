"""Planning at a million messages, against planning at ten thousand, in one database.

The worker's own steps reserve and plan a campaign of a million contacts, and twenty others with a twentieth of that
between them, window after window. The value is the rate of the last windows, the baseline that of the first ones after
ten thousand messages: a ratio of 1 says that planning does not slow down with what was planned before. Only planning
is timed. PostgreSQL runs with fsync, and its autovacuum as by default: it takes a quarter of the rate on two cores for
the seconds that it works, at any size, so the windows that are compared begin when it rests.

Standard error tells of the rate and the process's resident memory as they went.
"""

import os
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.measurement import Measurement, Pair, summarize
from benchmarks.steps import Steps, open_steps
from benchmarks.workload import due_emails
from contract.events import DueEmail
from testbed import Testbed
from testbed.processes import wait_until

NAME: Final = "planning_growth"
_CONTACTS: Final = 1_000_000
_EVERY: Final = 21
"""Of so many due e-mails in a row, one is another campaign's."""
_WINDOW: Final = 10_500
_WINDOWS: Final = _CONTACTS * _EVERY // (_EVERY - 1) // _WINDOW
_COMPARED: Final = 5
_TOLD: Final = 10
_PATIENCE: Final = 180.0
_MEBIBYTE: Final = 2**20

_PLANNED: Final = """
SELECT max(size) FROM (SELECT sum(size) AS size FROM chunks GROUP BY campaign_id) campaign"""
_AT_REST: Final = """
SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'autovacuum worker')"""


def measure(testbed: Testbed) -> list[Measurement]:
    """Send events planned a second, the last windows against the first."""
    rates: list[float] = []
    memory: list[int] = []
    last = range(_WINDOWS - _COMPARED, _WINDOWS)
    first = range(1, 1 + _COMPARED)
    with open_steps(testbed, NAME) as steps, steps.installation.connect() as owner:

        def at_rest() -> bool:
            return owner.execute(_AT_REST).fetchone() == (True,)

        for number in range(_WINDOWS):
            if number in {*first, *last}:
                wait_until(at_rest, timeout=_PATIENCE, what="autovacuum at rest")
            rates.append(_window(steps, number))
            memory.append(_resident_bytes())
            if (number + 1) % _TOLD == 0:
                print(
                    f"{NAME}: {(number + 1) * _WINDOW:,} messages: {rates[-1]:,.0f} events/s,"
                    f" {memory[-1] / _MEBIBYTE:.0f} MiB",
                    file=sys.stderr,
                )
        assert owner.execute(_PLANNED).fetchone() == (_CONTACTS,)
    growth = max(memory) - max(memory[: first.stop])
    print(f"{NAME}: memory grew by {growth / _MEBIBYTE:.1f} MiB", file=sys.stderr)
    pairs = [Pair(rates[late], rates[early]) for late, early in zip(last, first, strict=True)]
    return [summarize(NAME, "events/s", pairs)]


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
