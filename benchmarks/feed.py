"""An agent that hands messages of 5,000 octets over to Postfix, against Postfix's own `smtp-source`.

The value is a `fairpost-agent` process without limits, with mail for four operators or for one: it claims chunks, writes
batches ahead (PostgreSQL with fsync), renders each message from its campaign's template, and gives it to Postfix's feed
service. Its time is from the first claim to the return of the last chunk. The baseline is `smtp-source` with as many
connections to the same service, each used for all of its messages: it does nothing but send one such message again and
again, so that Postfix has the same header fields and lines to work on.

Postfix runs what deploy/postfix holds and discards what it takes; either half begins with an empty queue. Each agent has
a database of its own; its batches grow from ten messages.

In either half Postfix has a core of its own, and all else the others: the ratio says how busy the agent keeps it. On a
machine that has but two cores they are then shared too: smtp-source does nothing, so the ratio is Postfix's part of the CPU
time that a message costs.

`feed_signed` is the agent on shared cores where OpenDKIM signs each message (RSA, 2,048 bits), against the same where nobody
does.
"""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parseaddr
from functools import partial
from pathlib import Path
from typing import Final

import psycopg
from msgspec import Struct

from benchmarks.measurement import Measurement, Pair, compare
from benchmarks.steps import OPERATORS, SENDER, Steps, open_steps
from contract.events import DueEmail, Template
from contract.rendering import Content, Recipient, Renderer
from testbed import Testbed
from testbed.fleet import Instance
from testbed.installation import FEED_CONNECTIONS
from testbed.opendkim import OpenDkim
from testbed.ports import LOOPBACK
from testbed.postfix import BOUNCE_DOMAIN, Postfix
from testbed.processes import find_program, wait_until

NAME: Final = "feed"
_SIGNED: Final = f"{NAME}_signed"
_CAMPAIGN: Final = "spring-sale"
_FROM_DOMAIN: Final = parseaddr(SENDER)[1].rpartition("@")[2]
_MESSAGES: Final = 15_000
_REPEATS: Final = 3
_TIMEOUT: Final = 120.0
_PAUSE: Final = 0.1
"""Seconds between two looks whether the agent is done, which take from the CPU time that is measured."""

_LINE: Final = '<tr><td class="line">All that grows and blooms has come to the shop with the spring.</td></tr>\n'
_OFFER: Final = "offer"
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


class _Case(Struct, frozen=True):
    """What is measured: mail for these operators, and whether all share the cores."""

    name: str
    operators: Sequence[str]
    shared: bool


_CASES: Final = (
    _Case(NAME, OPERATORS, shared=False),
    _Case(f"{NAME}_one_lane", OPERATORS[-1:], shared=False),
    _Case(f"{NAME}_shared", OPERATORS, shared=True),
)


def measure(testbed: Testbed) -> list[Measurement]:
    """Messages a second, an agent with four lanes, with one, and on shared cores, each against smtp-source; and signed."""
    message = testbed.directory / "message"
    message.write_bytes(_message())
    opendkim = OpenDkim("bench", testbed.directory / "bench-dkim", [_FROM_DOMAIN])
    try:
        opendkim.start()
        return compare(
            [*(case.name for case in _CASES), _SIGNED],
            "messages/s",
            partial(_repeat, testbed, message, opendkim),
            repeats=_REPEATS,
        )
    finally:
        opendkim.stop()


def _repeat(testbed: Testbed, message: Path, opendkim: OpenDkim, number: int) -> list[Pair]:
    pairs = [_pair(testbed, message, case, f"{case.name}_{number}") for case in _CASES]
    return [*pairs, _signed_pair(testbed, opendkim, f"{_SIGNED}_{number}")]


def _pair(testbed: Testbed, message: Path, case: _Case, name: str) -> Pair:
    postfix = _postfix(testbed, name)
    with _started(testbed, postfix, shared=case.shared):
        value = _agent_rate(testbed, postfix, case.operators, name)
        baseline = _MESSAGES / _send(postfix, message)
        _drain(postfix)
    return Pair(value, baseline)


def _signed_pair(testbed: Testbed, opendkim: OpenDkim, name: str) -> Pair:
    rates = []
    for half, milter in ((name, opendkim.milter), (f"{name}_not", "")):
        postfix = _postfix(testbed, half, milter)
        with _started(testbed, postfix, shared=True):
            rates.append(_agent_rate(testbed, postfix, OPERATORS, half))
    return Pair(*rates)


def _postfix(testbed: Testbed, name: str, milter: str = "") -> Postfix:
    discarding = {"default_transport": "discard:"}
    return Postfix("postfix-bench", testbed.directory / name, parameters=discarding, milter=milter)


def _agent_rate(testbed: Testbed, postfix: Postfix, operators: Sequence[str], name: str) -> float:
    with open_steps(testbed, name) as steps:
        steps.installation.start_agent(Instance(postfix.name, postfix, fluentd=None))
        rate = _MESSAGES / _hand_over(steps, operators)
    _drain(postfix)
    return rate


@contextmanager
def _started(testbed: Testbed, postfix: Postfix, *, shared: bool) -> Iterator[None]:
    """Runs Postfix, on a core of its own unless all are shared; a process that is started has the cores of its parent."""
    cores = os.sched_getaffinity(0)
    own = {min(cores)}
    postmaster = _postmaster(testbed)
    try:
        os.sched_setaffinity(0, cores if shared else own)
        with postfix:
            for pid in (0, postmaster):
                os.sched_setaffinity(pid, cores if shared else cores - own or own)
            yield
    finally:
        for pid in (0, postmaster):
            os.sched_setaffinity(pid, cores)


def _postmaster(testbed: Testbed) -> int:
    with psycopg.connect(testbed.postgres.dsn()) as connection:
        backend = connection.info.backend_pid
        return int(Path(f"/proc/{backend}/stat").read_text().rpartition(") ")[2].split()[1])


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
        email_key=_OFFER,
        email=f"firstname.lastname.{number:09d}@{operator}.test",
        variables={
            "first_name": "Zoe",
            "voucher": f"SPRING-{number:09d}",
            "link": f"https://shop.example/spring?voucher=SPRING-{number:09d}",
        },
    )


def _message() -> bytes:
    """One of the agent's messages, some 5,000 octets, with the line ends of a file."""
    email = _email(0, OPERATORS[-1])
    content = Content(_CAMPAIGN, 1, SENDER, None, {_OFFER: _TEMPLATE}, None, {})
    recipient = Recipient(1, email.user_id, email.email, email.email_key, email.variables)
    rendered = Renderer(content, BOUNCE_DOMAIN).render(recipient, datetime.now(UTC))
    return rendered.message.replace(b"\r\n", b"\n")


def _send(postfix: Postfix, message: Path) -> float:
    """Sends the message as often by smtp-source; answers how many seconds it took."""
    began = time.monotonic()
    subprocess.run(
        [
            *(find_program("smtp-source"), "-d", "-N", "-s", str(FEED_CONNECTIONS)),
            *("-m", str(_MESSAGES), "-F", str(message)),
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
