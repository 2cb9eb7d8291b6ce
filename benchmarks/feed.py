"""An agent that hands messages of 5,000 octets over to Postfix, against Postfix's own `smtp-source`.

The value is a `fairpost-agent` process without limits, with mail for four operators or for one: it claims chunks, writes
batches ahead (PostgreSQL with fsync), renders each message from its campaign's template, and gives it to Postfix's feed
service. Its time is from the first claim to the return of the last chunk. The baseline is `smtp-source` with as many
connections to the same service, each used for all of its messages: it does nothing but send the same octets again and
again.

`feed_signed` is the agent with four lanes where OpenDKIM signs each message (RSA, 2,048 bits), against the same where
nobody does.

Postfix runs what deploy/postfix holds and discards what it takes; either half begins with an empty queue. Each agent has
a database of its own; its batches grow from ten messages.
"""

import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

from benchmarks.measurement import Measurement, Pair, compare
from benchmarks.steps import OPERATORS, Steps, open_steps
from contract.events import DueEmail, Template
from testbed import Testbed
from testbed.fleet import Instance
from testbed.installation import FEED_CONNECTIONS
from testbed.opendkim import OpenDkim
from testbed.ports import LOOPBACK
from testbed.postfix import Postfix
from testbed.processes import find_program, wait_until

NAME: Final = "feed"
_CAMPAIGN: Final = "spring-sale"
_FROM_DOMAIN: Final = "shop.example"
_MESSAGES: Final = 15_000
_SIZE: Final = 5_000
"""Octets of a message, within a few, in either half."""
_REPEATS: Final = 3
_TIMEOUT: Final = 120.0
_PAUSE: Final = 0.1
"""Seconds between two looks whether the agent is done, which take from the CPU time that is measured."""

_LINE: Final = '<tr><td class="line">All that grows and blooms has come to the shop with the spring.</td></tr>\n'
_TEMPLATE: Final = Template(
    subject="{{ first_name }}, your voucher",
    html=(
        "<h1>Hello {{ first_name }}</h1>\n"
        '<p>Your voucher is <a href="{{ link }}">{{ voucher }}</a>, until the end of May.</p>\n'
        "<table>\n" + _LINE * 44 + "</table>\n"
        '<p>This was sent to {{ email }}. <a href="{{ link }}&bye=1">No more of it</a></p>\n'
    ),
)

# When the first chunk was claimed, and how long it took from there until none of them had anything left.
_SECONDS: Final = """
SELECT extract(epoch FROM clock_timestamp() - min(claimed_at))::float8 FROM chunks
HAVING bool_and(planned = 0 AND instance IS NULL)"""
_HANDED: Final = "SELECT count(*) FROM messages WHERE state = 'handed'"


def measure(testbed: Testbed) -> list[Measurement]:
    """Messages a second, an agent with four lanes at work and with one, each against smtp-source; and signed."""
    opendkim = OpenDkim("bench", testbed.directory / "bench-dkim", [_FROM_DOMAIN])
    with ExitStack() as stack:
        stack.callback(opendkim.stop)
        opendkim.start()
        plain = stack.enter_context(_postfix(testbed, "postfix-bench", ""))
        signed = stack.enter_context(_postfix(testbed, "postfix-signed", opendkim.milter))
        return compare(
            [NAME, f"{NAME}_one_lane", f"{NAME}_signed"],
            "messages/s",
            partial(_repeat, testbed, plain, signed),
            repeats=_REPEATS,
        )


def _postfix(testbed: Testbed, name: str, milter: str) -> Postfix:
    discarding = {"default_transport": "discard:"}
    return Postfix(name, testbed.directory / name, parameters=discarding, milter=milter)


def _repeat(testbed: Testbed, plain: Postfix, signed: Postfix, number: int) -> list[Pair]:
    pairs = []
    for operators in (OPERATORS, OPERATORS[-1:]):
        value = _agent_rate(testbed, plain, operators, f"{NAME}_{number}_{len(operators)}")
        pairs.append(Pair(value, _MESSAGES / _send(plain)))
        _drain(plain)
    value = _agent_rate(testbed, signed, OPERATORS, f"{NAME}_{number}_signed")
    return [*pairs, Pair(value, pairs[0].value)]


def _agent_rate(
    testbed: Testbed, postfix: Postfix, operators: Sequence[str], database: str
) -> float:
    with open_steps(testbed, database) as steps:
        steps.installation.start_agent(Instance(postfix.name, postfix, fluentd=None))
        rate = _MESSAGES / _hand_over(steps, operators)
    _drain(postfix)
    return rate


def _hand_over(steps: Steps, operators: Sequence[str]) -> float:
    """Plans mail for these operators, lets it go, and answers how many seconds the agent took."""
    emails = [_email(number, operators[number % len(operators)]) for number in range(_MESSAGES)]
    steps.plan(steps.reserve(emails, offset=0))
    steps.wait_until_ripe()
    # Nothing can be claimed before its campaign is known.
    steps.schedule(_CAMPAIGN, _TEMPLATE)
    seconds: list[float] = []
    with steps.installation.connect() as owner:

        def done() -> bool:
            time.sleep(_PAUSE)
            seconds[:] = [row[0] for row in owner.execute(_SECONDS)]
            return bool(seconds)

        wait_until(done, timeout=_TIMEOUT, what=f"{_MESSAGES} messages handed over")
        assert owner.execute(_HANDED).fetchone() == (_MESSAGES,)
    return seconds[0]


def _email(number: int, operator: str) -> DueEmail:
    return DueEmail(
        user_id=f"user-{number:09d}",
        campaign_id=_CAMPAIGN,
        email_key="offer",
        email=f"firstname.lastname.{number:09d}@{operator}.test",
        variables={
            "first_name": "Zoe",
            "voucher": f"SPRING-{number:09d}",
            "link": f"https://shop.example/spring?voucher=SPRING-{number:09d}",
        },
    )


def _send(postfix: Postfix) -> float:
    """Sends as many messages by smtp-source; answers how many seconds it took."""
    began = time.monotonic()
    subprocess.run(
        [
            *(find_program("smtp-source"), "-d", "-N", "-s", str(FEED_CONNECTIONS)),
            *("-m", str(_MESSAGES), "-l", str(_SIZE)),
            *("-f", f"bench@{postfix.bounce_domain}", "-t", f"bench@{OPERATORS[-1]}.test"),
            f"{LOOPBACK}:{postfix.feed_port}",
        ],
        check=True,
        timeout=_TIMEOUT,
        cwd="/",
    )
    return time.monotonic() - began


def _drain(postfix: Postfix) -> None:
    wait_until(lambda: not postfix.queue(), timeout=_TIMEOUT, what="an empty queue")
