"""What a mailbox operator gets when it was silent for a while and is back: a burst, with a bound."""

import json
import subprocess
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from testbed.fleet import Instance
from testbed.mailbox import MailboxOperator
from testbed.ports import LOOPBACK
from testbed.processes import wait_until
from tests.acceptance.conftest import House

Build = Callable[..., House]

LIMIT = 240
LISTING = LIMIT / 4
"""What a lane may hand over before it notices that Postfix holds a minute's worth: a listing every five seconds, or, where it
takes long, as on a machine that runs other tests too, more rarely."""
PATIENCE = 150

# Nothing is tried again by itself: when it is, is what the test is about.
PATIENT = {"minimal_backoff_time": "1h", "maximal_backoff_time": "1h", "queue_run_delay": "1h"}

OPERATOR = """
[[operator]]
name = "{name}"
domains = ["{name}.test"]
per_minute = {limit}
# A silent session ends in a second, and no more than that keeps the next ones from trying.
[operator.transport]
nexthop = "{nexthop}"
smtp_rcpt_timeout = "1s"
initial_destination_concurrency = 8
destination_concurrency_negative_feedback = 0
destination_concurrency_failed_cohort_limit = 0
"""


@pytest.mark.long
def test_a_burst_after_silence_is_bounded(build: Build) -> None:
    """In any 60 s an operator takes at most what Postfix held and the limit; tried again at once, little more than was held.

    Postfix holds a minute's worth by then, and what a lane hands over between two listings. Of the two operators one gets
    all of it when it is back, as by a queue run; then its lane waits, as retries count. The other gets it at the worst
    moment, when its lane has gone on and hands over at its pace again.
    """
    house = build({"gmail": LIMIT, "outlook": LIMIT}, hosts=2)
    hosts = dict(zip(house.operators, house.hosts.values(), strict=True))
    set_up(house, hosts)
    for mailbox in house.operators.values():
        mailbox.set_mood("silent")
    house.publish_campaign("c")
    house.publish_due("c", [f"u{n}@{o}.test" for o in hosts for n in range(3 * LIMIT)])

    for name, host in hosts.items():
        wait(partial(waits_for_the_backlog, house, host, name), f"a minute's worth for {name}")
    held = {name: len(host.postfix.queue()) for name, host in hosts.items()}
    assert all(LIMIT < number <= LIMIT + LISTING for number in held.values())
    for mailbox in house.operators.values():
        assert mailbox.accepted() == []
        mailbox.set_mood("accept")

    postqueue(hosts["gmail"], "-f")
    outlook, mailbox = hosts["outlook"], house.operators["outlook"]
    for message in outlook.postfix.queue()[LIMIT * 19 // 20 :]:
        postqueue(outlook, "-i", message.queue_id)
    # The lane goes on, at its pace; what Postfix still holds then comes on top.
    wait(lambda: len(mailbox.accepted()) >= LIMIT // 2, "a lane at its pace")
    postqueue(outlook, "-f")
    wait(lambda: outlook.postfix.queue() == [], "an empty queue")

    bursts = {name: busiest(mailbox) for name, mailbox in house.operators.items()}
    assert LIMIT <= bursts["gmail"] <= held["gmail"] + LIMIT / 4
    assert LIMIT * 5 / 4 < bursts["outlook"] <= held["outlook"] + LIMIT


def set_up(house: House, hosts: dict[str, Instance]) -> None:
    """Runs everything, with a host for each operator, and transports that `postfix-config` made."""
    path = house.installation.directory / "silence.toml"
    path.write_text("".join(operator_toml(mailbox) for mailbox in house.operators.values()))
    house.installation.fairpost("operators", "apply", str(path))
    for host in hosts.values():
        host.postfix.set_parameters(PATIENT)
        house.installation.fairpost_agent(host, "postfix-config", "--apply", "--reload")
    house.processes["worker"] = house.installation.start_worker()
    house.processes["tracker"] = house.installation.start_tracker()
    for name, host in hosts.items():
        house.start_agent(host, FAIRPOST_OPERATORS=name)


def operator_toml(mailbox: MailboxOperator) -> str:
    """An operator whose mail goes to that server."""
    nexthop = f"[{LOOPBACK}]:{mailbox.port}"
    return OPERATOR.format(name=mailbox.name, limit=LIMIT, nexthop=nexthop)


def waits_for_the_backlog(house: House, host: Instance, operator: str) -> bool:
    """Whether an operator's lane waits, as Postfix holds enough."""
    status = json.loads(house.installation.fairpost_agent(host, "status", "--json").stdout)
    return (operator, "the backlog") in [
        (lane["operator"], lane["waiting_for"]) for lane in status["lanes"]
    ]


def postqueue(host: Instance, *arguments: str) -> None:
    """Has Postfix try again."""
    subprocess.run(
        ["postqueue", "-c", host.postfix.config_directory, *arguments], check=True, cwd="/"
    )


def busiest(mailbox: MailboxOperator) -> int:
    """The most messages that it took in any 60 s."""
    times = sorted(attempt.time for attempt in mailbox.accepted())
    return max(in_a_minute(times))


def in_a_minute(times: list[float]) -> Iterable[int]:
    """How many there are from each of them on within 60 s."""
    end = 0
    for start, time in enumerate(times):
        while end < len(times) and times[end] < time + 60:
            end += 1
        yield end - start


def wait(condition: Callable[[], bool], what: str) -> None:
    """Waits longer than other tests: a minute's worth takes a minute."""
    wait_until(condition, timeout=PATIENCE, what=what)
