"""The pace, as Postfix's log and the mailbox operators saw it: some minutes of three mail hosts, and all that gets in their way.

Every figure is of one run. Host `a` has limits that are changed, a Postgres that is held up and a Postfix that is stopped
for a while; host `b` is drained and started again, and killed and started again; host `c` has a clock that is an hour fast
and then an hour slow. Each may hand the whole of a limit over.
"""

import json
import os
import signal
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.pace import handed_over, in_windows
from smtp_agent.pacing import WINDOW
from testbed import Testbed
from testbed.fleet import Instance
from testbed.installation import Installation, OperatorRule, Running
from testbed.ports import accepts, reserve_port
from testbed.processes import Process, wait_until
from tests.acceptance.conftest import IMPATIENT, House

pytestmark = pytest.mark.long

A, B, C = HOSTS = ("mta-pace-a", "mta-pace-b", "mta-pace-c")
STEADY = {"one": 1, "clock": 60, "steady": 350}
"""Limits that are never changed."""
LOW, HIGH = 120, 1200
CHANGED = {"raised": (LOW, HIGH), "lowered": (HIGH, LOW)}
MESSAGES = {"one": 4, "clock": 110, "steady": 650, "raised": 1800, "lowered": 600}
"""More than a campaign can hand over meanwhile."""

CATCH_UP = 2.0
"""Seconds' worth that a lane makes up for at once."""
POSTGRES_SECONDS = 4.0
POSTFIX_SECONDS = 1.5
PATIENCE = 120

# An agent whose wall clock is an hour fast, and after a while an hour slow; asks nothing of the machine's.
WRONG_CLOCK = """
import datetime, importlib, pkgutil, time
import smtp_agent, smtp_agent.cli

real, began = time.time, time.monotonic()

def off():
    return 3600 if time.monotonic() - began < 30 else -3600

class Wrong(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.now(tz) + datetime.timedelta(seconds=off())

time.time = lambda: real() + off()
for name in ("agent", "backlog", "fence", "handover", "lanes"):
    importlib.import_module(f"smtp_agent.{name}").datetime = Wrong
smtp_agent.cli.main()
"""


@dataclass(frozen=True)
class Seen:
    """What there was to see of it, by host and operator; all times in order.

    Attributes:
        by_log: when Postfix got a message.
        by_operator: when the operator took it.
        marks: when something was done.
        wrong_by: how wrong host `c`'s clock was at first.
    """

    by_log: dict[str, dict[str, list[float]]]
    by_operator: dict[str, dict[str, list[float]]]
    marks: dict[str, float]
    wrong_by: timedelta


@pytest.fixture(scope="module")
def seen(testbed: Testbed, template: str) -> Iterator[Seen]:
    """The run."""
    with ExitStack() as stack:
        operators = testbed.add_operators({o: [f"{o}.test"] for o in MESSAGES})
        limits = STEADY | {operator: before for operator, (before, _) in CHANGED.items()}
        installation = stack.enter_context(
            Installation(testbed, "pace", rules(limits), template=template)
        )
        hosts = {}
        for name in HOSTS:
            hosts[name] = testbed.add_instance(
                name,
                operators=operators.values(),
                topic=installation.topic("delivery-log"),
                postfix=IMPATIENT,
            )
            stack.callback(testbed.remove_instance, name)
        yield run(House(installation, hosts, operators), stack)


def run(house: House, stack: ExitStack) -> Seen:
    """Does it all."""
    house.processes["worker"] = house.installation.start_worker()
    house.processes["tracker"] = house.installation.start_tracker()
    plan(house)
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = time.time()

    a, b, c = (house.hosts[name] for name in HOSTS)
    house.start_agent(a)
    house.start_agent(b, FAIRPOST_OPERATORS=",".join(STEADY))
    house.processes[C] = start_wrong_agent(house, c, stack)
    wrong_by = clock_of(house, c) - datetime.now(UTC)

    wait_for_clock(house, 12)
    house.installation.apply_operators(
        rules(STEADY | {operator: after for operator, (_, after) in CHANGED.items()})
    )
    for operator, (_, after) in CHANGED.items():
        wait(
            lambda o=operator, n=after: limit_of(house, a, o) == n,  # type: ignore[misc]
            "a new limit",
        )
        mark(operator)

    wait_for_clock(house, 20)
    house.processes[B].stop()
    mark("drained")
    house.start_agent(b, FAIRPOST_OPERATORS=",".join(STEADY))
    wait_for_clock(house, 35)
    house.processes[B].kill()
    mark("killed")
    house.start_agent(b, FAIRPOST_OPERATORS=",".join(STEADY))

    wait_for_clock(house, 62)
    mark("Postgres")
    with house.installation.connect() as connection, connection.transaction():
        connection.execute("LOCK TABLE chunks IN ACCESS EXCLUSIVE MODE")
        time.sleep(POSTGRES_SECONDS)
    wait_for_clock(house, 68)
    mark("Postfix")
    with stopped(a):
        time.sleep(POSTFIX_SECONDS)
    wait_for_clock(house, 78)
    mark("end")
    for name, host in house.hosts.items():
        house.processes[name].stop()
        wait(lambda h=host: h.postfix.queue() == [], "an empty queue")  # type: ignore[misc]
    return observe(house, marks, wrong_by)


def plan(house: House) -> None:
    """A campaign a host, each with more than a host can hand over."""
    for campaign, names in zip(("a", "b", "c"), (MESSAGES, STEADY, STEADY), strict=True):
        emails = [f"u{n}@{name}.test" for name in names for n in range(MESSAGES[name])]
        house.publish_campaign(campaign)
        house.publish_due(campaign, emails)
        house.wait_for_states(campaign, {"planned": len(emails)})


def rules(limits: dict[str, int]) -> list[OperatorRule]:
    """The operators of `operators.toml`."""
    return [OperatorRule(o, [f"{o}.test"], limit) for o, limit in limits.items()]


def start_wrong_agent(house: House, host: Instance, stack: ExitStack) -> Running:
    """Starts an agent whose wall clock is wrong."""
    port = reserve_port()
    process = Process(
        "agent with a wrong clock",
        [sys.executable, "-c", WRONG_CLOCK, "run"],
        log=house.installation.directory / "wrong-clock.log",
        environment={
            **house.installation.agent_environment(host),
            "FAIRPOST_OPERATORS": ",".join(STEADY),
            "FAIRPOST_METRICS_PORT": str(port),
        },
    )
    stack.callback(process.stop)
    process.start(lambda: accepts(port))
    return Running(process, port)


def clock_of(house: House, host: Instance) -> datetime:
    """What an agent took the time for when it asked for its fence, which was just now."""

    def fenced() -> bool:
        return status(house, host)["last_fence"] is not None

    wait(fenced, "a fence")
    return datetime.fromisoformat(str(status(house, host)["last_fence"]["asked_at"]))


def status(house: House, host: Instance) -> dict[str, dict[str, object]]:
    """What `fairpost-agent status --json` says."""
    answer: dict[str, dict[str, object]] = json.loads(
        house.installation.fairpost_agent(host, "status", "--json").stdout
    )
    return answer


def limit_of(house: House, host: Instance, operator: str) -> object:
    """The limit that a lane goes by."""
    lanes: list[dict[str, object]] = list(status(house, host)["lanes"])  # type: ignore[arg-type]
    return next(lane["limit_per_minute"] for lane in lanes if lane["operator"] == operator)


def wait(condition: Callable[[], bool], what: str) -> None:
    """Waits as long as such a run may take."""
    wait_until(condition, timeout=PATIENCE, what=what)


def wait_for_clock(house: House, number: int) -> None:
    """Waits until host `a` has handed so many messages over at the limit of one a second."""
    address = house.hosts[A].postfix.address

    def reached() -> bool:
        time.sleep(0.05)
        return sum(x.peer == address for x in house.operators["clock"].attempts()) >= number

    wait(reached, f"{number} messages at one a second")


@contextmanager
def stopped(host: Instance) -> Iterator[None]:
    """Stops all processes of Postfix that take mail."""
    pids = [
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if is_taking_mail(stat, host.postfix.master_pid)
    ]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def is_taking_mail(stat: Path, master: int | None) -> bool:
    """Whether it is the process of an smtpd or cleanup of that Postfix (proc_pid_stat(5))."""
    try:
        _, name, _, parent, *_ = stat.read_text().split()
    except OSError:
        return False
    return name in {"(smtpd)", "(cleanup)"} and int(parent) == master


def observe(house: House, marks: dict[str, float], wrong_by: timedelta) -> Seen:
    """Reads the log and the operators' records."""
    operator_of = dict(
        house.query("SELECT dispatch_id, operator FROM messages JOIN chunks USING (chunk_id)")
    )
    assert [a for o in house.operators.values() for a in o.attempts() if not a.accepted] == []
    return Seen(
        {name: handed_over(host.log, operator_of) for name, host in house.hosts.items()},
        {
            name: {
                operator: sorted(
                    a.time for a in mailbox.accepted() if a.peer == host.postfix.address
                )
                for operator, mailbox in house.operators.items()
            }
            for name, host in house.hosts.items()
        },
        marks,
        wrong_by,
    )


def within(times: Sequence[float], begin: float, end: float) -> int:
    """How many of the times are there from one time to before another."""
    return bisect_left(times, end) - bisect_left(times, begin)


def held_longer(by_log: Sequence[float], by_operator: Sequence[float]) -> float:
    """By how much longer Postfix had one message than another, beyond what the pace allows for.

    On a machine that has nothing else to do that is 0.
    """
    held = [taken - got for got, taken in zip(by_log, by_operator, strict=True)]
    assert min(held) > 0
    return max(max(held) - min(held) - (WINDOW - 60), 0)


def stalled(times: Sequence[float], end: float, limit: int) -> float:
    """How many messages a lane did not hand over as something held it up for longer than it makes up for.

    On a machine that has nothing else to do that is none.
    """
    spacing = 60 / limit
    gaps = (later - earlier for earlier, later in pairwise(times) if later < end)
    return sum(max(gap - spacing - CATCH_UP, 0) for gap in gaps) / spacing


LANES = [(host, operator, limit) for host in HOSTS for operator, limit in STEADY.items()]


@pytest.mark.parametrize(("host", "operator", "limit"), LANES)
def test_no_60_seconds_hold_more_than_the_limit(
    seen: Seen, host: str, operator: str, limit: int
) -> None:
    """Nor of Postfix's log, nor of what the operator saw, wherever they begin, whatever was stopped, killed or started."""
    by_log, by_operator = seen.by_log[host][operator], seen.by_operator[host][operator]
    assert max(in_windows(by_log, 60)) <= limit
    assert max(in_windows(by_operator, 60 - held_longer(by_log, by_operator))) <= limit


@pytest.mark.parametrize(("host", "operator", "limit"), [lane for lane in LANES if lane[0] != B])
def test_a_minute_of_work_uses_99_percent(seen: Seen, host: str, operator: str, limit: int) -> None:
    """Until something is in its way each lane uses its limit; also the one whose clock is wrong."""
    times = seen.by_log[host][operator]
    end = min(times[0] + 60, seen.marks["Postgres"])
    worth = (end - times[0]) * limit / 60
    assert within(times, times[0], end) >= int(0.99 * worth) - stalled(times, end, limit)


@pytest.mark.parametrize("host", HOSTS)
def test_no_second_holds_a_burst(seen: Seen, host: str) -> None:
    """No second holds more than one message, its own worth, the catch-up, and what a batch took before it."""
    limits = STEADY | dict.fromkeys(CHANGED, HIGH)
    for operator, times in seen.by_log[host].items():
        if times:
            assert max(in_windows(times, 1)) <= 1 + (2 + CATCH_UP) * limits[operator] / 60


def test_a_raised_limit_is_used_and_brings_no_burst(seen: Seen) -> None:
    """From then on as much goes as the new limit lets through, evenly, and no 60 s hold more."""
    times, raised = seen.by_log[A]["raised"], seen.marks["raised"]
    assert max(in_windows(times, 60)) <= HIGH
    for begin in (raised + 1, raised + 11, raised + 21):
        assert within(times, begin, begin + 10) == pytest.approx(HIGH / 6, rel=0.1)


def test_a_lowered_limit_counts_what_went_before(seen: Seen) -> None:
    """Nothing goes until the last 60 s hold fewer than the new limit, then it goes on."""
    times, since = seen.by_log[A]["lowered"], seen.marks["lowered"] + 1
    later = [at for at in times if at >= since]
    assert later
    assert all(within(times, at - 60, at) < LOW for at in later)


@pytest.mark.parametrize("host", [A, C])
def test_what_was_held_up_is_made_up_for(seen: Seen, host: str) -> None:
    """A Postgres and a Postfix that are slow for seconds cost the pace what the catch-up does not cover, and no more."""
    held_up, end = seen.marks["Postgres"], seen.marks["end"]
    for operator in ("clock", "steady"):
        times, limit = seen.by_log[host][operator], STEADY[operator]
        lost = stalled(times, held_up, limit)
        # A lane whose batch was given back waits for up to a second before it tries again.
        lost += (POSTGRES_SECONDS - CATCH_UP + 1.5) * limit / 60
        assert within(times, 0, end) >= 0.99 * (end - times[0]) * limit / 60 - lost


def test_a_new_agent_goes_on_within_the_window(seen: Seen) -> None:
    """After a drain and after a kill the lanes of the next agent go on; what the last one handed over counts."""
    times, limit = seen.by_log[B]["steady"], STEADY["steady"]
    for mark in ("drained", "killed"):
        first = times[bisect_left(times, seen.marks[mark])]
        lost = stalled([at for at in times if at >= first], first + 10, limit)
        assert within(times, first, first + 10) >= 0.9 * limit / 6 - lost


def test_the_clock_was_wrong(seen: Seen) -> None:
    """The agent whose pace held with a wrong clock did have one."""
    assert seen.wrong_by == pytest.approx(timedelta(hours=1), abs=timedelta(minutes=2))
