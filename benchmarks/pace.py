"""Ten minutes of an agent's pace: six mailbox operators with limits from 1 to 6,000 a minute, at once, on one instance.

A row a limit. The value is how many messages Postfix got for that operator in the ten minutes from its first one on, the
baseline is the limit times ten, so that the ratio is the part of the allowance that was used. The spread is of all windows
of 60 s within these ten minutes, wherever they begin: the emptiest and the fullest, each as a part of the limit.

Agent, Postfix, its transports and the operators' servers are real, PostgreSQL with fsync, and nothing is tried again. When
Postfix got a message stands in its queue id, to the microsecond. Standard error also tells what the operators saw, whose
times hold Postfix's own delays, and how even the pace was.
"""

import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Final

from benchmarks.measurement import Measurement
from benchmarks.steps import Steps, open_steps
from contract.envelope import dispatch_of
from contract.events import DueEmail, Template
from processor.postfix_log import QueueActive, parse
from testbed import Testbed
from testbed.installation import OperatorRule
from testbed.processes import wait_until

NAME: Final = "pace"
_LIMITS: Final = (1, 7, 60, 350, 1_000, 6_000)
_MINUTES: Final = 10
_MARGIN: Final = 1.05
"""Messages that are there for each that the limit lets through, so that no lane runs out of work."""
_CAMPAIGN: Final = "spring-sale"
_TIMEOUT: Final = 120.0

_OPERATOR_OF: Final = "SELECT dispatch_id, operator FROM messages JOIN chunks USING (chunk_id)"
_BEGUN: Final = "SELECT count(DISTINCT operator) FROM handovers"

# Postfix, src/global/mail_queue.h: six digits of seconds, four of microseconds, both of base 52, `z`, the inode.
_DIGITS: Final = "0123456789BCDFGHJKLMNPQRSTVWXYZbcdfghjklmnpqrstvwxyz"


def queued_at(queue_id: str) -> float:
    """When Postfix began to take the message, in Unix time: a long queue id (enable_long_queue_ids) says so."""
    seconds, microseconds = _number(queue_id[:6]), _number(queue_id[6:10])
    return seconds + microseconds / 1e6


def in_windows(times: Sequence[float], seconds: float) -> list[int]:
    """How many of the times, which are in order, are within as many seconds from each of them on."""
    return [bisect_left(times, start + seconds) - place for place, start in enumerate(times)]


def handed_over(log: Path, operator_of: Mapping[int, str]) -> dict[str, list[float]]:
    """When Postfix got each message, by operator and in order, as its log says.

    Args:
        log: Postfix's.
        operator_of: the operator of each dispatch.
    """
    found: set[str] = set()
    by_operator: dict[str, list[float]] = {operator: [] for operator in operator_of.values()}
    for active in _queue_active(log):
        operator = operator_of.get(dispatch_of(active.sender) or 0)
        if operator is not None and active.queue_id not in found:
            found.add(active.queue_id)
            by_operator[operator].append(queued_at(active.queue_id))
    return {operator: sorted(times) for operator, times in by_operator.items()}


def measure(testbed: Testbed) -> list[Measurement]:
    """The part of each limit that was used."""
    operators = testbed.add_operators({_operator(limit): [_domain(limit)] for limit in _LIMITS})
    with open_steps(testbed, NAME) as steps:
        installation = steps.installation
        installation.apply_operators(
            [OperatorRule(_operator(limit), [_domain(limit)], limit) for limit in _LIMITS]
            + [OperatorRule("other")]
        )
        instance = testbed.add_instance(
            "postfix-pace",
            operators=operators.values(),
            topic=installation.topic("delivery-log"),
        )
        _plan(steps)
        agent = installation.start_agent(instance)
        with installation.connect() as owner:
            wait_until(
                lambda: owner.execute(_BEGUN).fetchone() == (len(_LIMITS),),
                timeout=_TIMEOUT,
                what="a first message to each operator",
            )
            time.sleep(60 * _MINUTES)
            operator_of = dict(owner.execute(_OPERATOR_OF).fetchall())
        agent.stop()
        wait_until(lambda: not instance.postfix.queue(), timeout=_TIMEOUT, what="an empty queue")
        by_log = handed_over(instance.log, operator_of)
        testbed.remove_instance(instance.name)
    return [
        _measurement(
            limit,
            by_log[_operator(limit)],
            sorted(attempt.time for attempt in operators[_operator(limit)].accepted()),
        )
        for limit in _LIMITS
    ]


def _plan(steps: Steps) -> None:
    """Plans more mail for each operator than the ten minutes take."""
    emails = list(
        chain.from_iterable(
            map(_email, range(int(limit * _MINUTES * _MARGIN) + 1), repeat(_domain(limit)))
            for limit in _LIMITS
        )
    )
    steps.plan(steps.reserve(emails, offset=0))
    steps.schedule(_CAMPAIGN, Template(subject="An offer", text="Hello {{ first_name }}"))
    steps.wait_until_ripe()


def _email(number: int, domain: str) -> DueEmail:
    return DueEmail(
        user_id=f"user-{number:06d}@{domain}",
        campaign_id=_CAMPAIGN,
        email_key="offer",
        email=f"user-{number:06d}@{domain}",
        variables={"first_name": "Zoë"},
    )


def _measurement(limit: int, by_log: Sequence[float], by_operator: Sequence[float]) -> Measurement:
    end = by_log[0] + 60 * _MINUTES
    used = bisect_left(by_log, end)
    minutes = [n for n, at in zip(in_windows(by_log, 60), by_log, strict=True) if at <= end - 60]
    tens = [n for n, at in zip(in_windows(by_log, 10), by_log, strict=True) if at <= end - 10]
    print(
        f"{NAME}_{limit}: 60 s hold at most {max(in_windows(by_log, 60))} by Postfix's log and"
        f" {max(in_windows(by_operator, 60))} by the operator, 10 s from {min(tens)} to {max(tens)},"
        f" 1 s at most {max(in_windows(by_log, 1))}; used {used} of {limit * _MINUTES}",
        file=sys.stderr,
    )
    return Measurement(
        name=f"{NAME}_{limit}",
        value=used,
        unit="messages",
        baseline=limit * _MINUTES,
        ratio=used / (limit * _MINUTES),
        spread=(min(minutes) / limit, max(minutes) / limit),
    )


def _queue_active(log: Path) -> Iterator[QueueActive]:
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            _, _, rest = line.partition(" postfix-")
            head, _, message = rest.partition(": ")
            if "/qmgr[" in head:
                parsed = parse(f"postfix-{head.partition('[')[0]}", message.rstrip("\n"))
                if isinstance(parsed, QueueActive):
                    yield parsed


def _number(digits: str) -> int:
    number = 0
    for digit in digits:
        number = number * len(_DIGITS) + _DIGITS.index(digit)
    return number


def _operator(limit: int) -> str:
    return f"limit{limit}"


def _domain(limit: int) -> str:
    return f"limit-{limit}.test"
