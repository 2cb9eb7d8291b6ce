"""Shipping: Fluentd killed, the log rotated, Kafka away, all while mail flows; each outcome arrives, in order, and counts once."""

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka import KafkaException

from contract.events import (
    DELIVERY_LOG,
    DELIVERY_STATUS,
    PostfixLine,
    decode_delivery_log,
    decode_delivery_status,
)
from contract.states import FINAL, MessageState
from processor.brokers import Brokers
from processor.log_header import split_header
from processor.postfix_log import Delivery, Expired, Fence, QueueActive, parse
from processor.stall import Lag
from testbed import Testbed
from testbed.fleet import DELIVERY_LOG_PARTITIONS, Instance
from testbed.fluentd import Fluentd
from testbed.installation import Installation, OperatorRule, Running
from testbed.postfix import KEPT_LOGS
from testbed.processes import wait_until
from testbed.reckoning import reckon
from testbed.topic import read_records, read_topic

INSTANCE = "mta-a"
NEEDED = (QueueActive, Delivery, Expired, Fence)

RATE = 600
"""Messages a minute, so that mail flows as long as anything is disturbed."""

PATIENCE = 240
"""Seconds after which the test gives up: Fluentd may wait for 90 before it tries Kafka again."""

# What is refused for now is tried again within seconds.
IMPATIENT = {"minimal_backoff_time": "2s", "maximal_backoff_time": "4s", "queue_run_delay": "2s"}

# A fence a second: one ahead of its evidence would make `uncertain` what was delivered.
AUDITED = {"FAIRPOST_AUDIT_SECONDS": "1"}

MAILBOXES = ["", "", "", "", "", "", "", "", "reject.", "grey."]
"""How recipients' addresses begin, in turn: some are refused, for good or at first."""

CAMPAIGN = {
    "campaign_id": "c",
    "name": "Through the storm",
    "sender": "news@shop.example",
    "scheduled_for": "2026-01-01T00:00:00Z",
    "templates": {"k": {"subject": "s", "text": "t"}},
}

_STATES = "SELECT state::text, count(*) FROM messages GROUP BY state"

Line = tuple[str, int | None, str, str]
"""Tag, process id, stamp and message of a line of Postfix's log."""


@dataclass
class MailHost:
    """A mail host through which mail flows, and whose shipping is disturbed."""

    testbed: Testbed
    installation: Installation
    instance: Instance
    agent: Running
    random: random.Random

    def flow(self) -> None:
        """Let a few more deliveries be tried; fails the test when no mail is left to flow."""
        expected = self._attempts() + 3
        wait_until(lambda: self._attempts() >= expected, timeout=30, what="mail that still flows")

    def kill_fluentd(self, rotations: int) -> None:
        """Kill Fluentd while it ships; mail flows, and the log is rotated so often, until it is back."""
        self.flow()
        time.sleep(self.random.uniform(0, 0.3))
        self._fluentd.kill()
        for _ in range(rotations):
            self.flow()
            self.instance.postfix.rotate_log()
        self.flow()
        self._fluentd.start()

    def rotate(self) -> None:
        """Rotate the log while Fluentd follows it."""
        self.flow()
        self.instance.postfix.rotate_log()

    def lose_kafka(self, seconds: float, kills: int) -> None:
        """Kafka is away for so long; meanwhile mail flows, Fluentd is killed, and the log rotated once."""
        self.flow()
        self.testbed.kafka.stop()
        end = time.monotonic() + seconds
        for number in range(kills):
            self.kill_fluentd(rotations=1 if number == 0 else 0)
        time.sleep(max(0, end - time.monotonic()))
        self.testbed.kafka.start()

    def settle(self, due: int) -> None:
        """Cancel what was not handed over yet, and wait until all else is delivered, shipped and tracked."""
        self.flow()
        self.installation.fairpost("campaigns", "cancel", "c", "--yes")
        wait_until(lambda: self._ended() == due, timeout=PATIENCE, what="all outcomes")
        # It logs a fence every second.
        self.agent.stop()
        wait_until(lambda: not self.missing(), timeout=PATIENCE, what="all lines shipped")
        wait_until(self._is_tracked, timeout=PATIENCE, what="all lines tracked")

    def logs(self) -> Iterator[list[Line]]:
        """What tracking needs of the log and of its rotated files, oldest first."""
        for suffix in (*(f".{number}" for number in range(KEPT_LOGS, 0, -1)), ""):
            file = Path(f"{self.instance.log}{suffix}")
            if file.exists():
                yield list(_needed(file.read_text(errors="replace").splitlines()))

    def shipped(self) -> list[tuple[int | None, Line]]:
        """The lines on `delivery-log`, each with its partition, in the order in which they lie there."""
        records = read_records(self._servers, self._topic(DELIVERY_LOG))
        decoded = (
            (record.partition(), decode_delivery_log(record.value() or b"")) for record in records
        )
        return [
            (partition, (line.tag, line.pid, line.time, line.message))
            for partition, line in decoded
            if isinstance(line, PostfixLine) and line.instance == INSTANCE
        ]

    def missing(self) -> set[Line]:
        """Lines that tracking needs and that are not shipped."""
        time.sleep(0.2)
        return {line for log in self.logs() for line in log} - {line for _, line in self.shipped()}

    def told(self) -> dict[int, list[MessageState]]:
        """What `delivery-status` says of each dispatch; a repeated event counts once."""
        events = map(
            decode_delivery_status, read_topic(self._servers, self._topic(DELIVERY_STATUS))
        )
        told: defaultdict[int, list[MessageState]] = defaultdict(list)
        for event in {event.event_id: event for event in events}.values():
            told[event.dispatch_id].append(MessageState(event.status))
        return told

    @property
    def _fluentd(self) -> Fluentd:
        assert self.instance.fluentd is not None
        return self.instance.fluentd

    @property
    def _servers(self) -> str:
        return self.testbed.kafka.bootstrap_servers

    def _topic(self, name: str) -> str:
        return self.installation.topic(name)

    def _attempts(self) -> int:
        time.sleep(0.05)
        return sum(len(operator.attempts()) for operator in self.testbed.operators.values())

    def _ended(self) -> int:
        time.sleep(0.5)
        # A mail that qmgr finds "still being delivered" would wait for the next one, which does not come.
        self.instance.postfix.flush()
        with self.installation.connect() as connection:
            states = dict(connection.execute(_STATES).fetchall())
        return sum(number for state, number in states.items() if state in FINAL)

    def _is_tracked(self) -> bool:
        with self.installation.connect() as connection:
            outbox = connection.execute("SELECT FROM outbox LIMIT 1").fetchone()
        topic = self._topic(DELIVERY_LOG)
        partitions = frozenset((topic, number) for number in range(DELIVERY_LOG_PARTITIONS))
        with closing(Lag(Brokers(self._servers), self._topic("fairpost-tracker"))) as lag:
            try:
                return outbox is None and not any(lag.measure(partitions).values())
            except KafkaException:
                return False


def _needed(lines: Sequence[str]) -> Iterator[Line]:
    for line in lines:
        header, message = split_header(line) or pytest.fail(f"no line of a log: {line}")
        if isinstance(parse(header.tag, message), NEEDED):
            yield header.tag, header.pid, header.time, message


@contextmanager
def mail_host(due: int) -> Iterator[MailHost]:
    """A mail host that has so much mail to deliver, and everything around it."""
    with (
        Testbed(
            instances=(INSTANCE,),
            operators={"gmail": ["gmail.test"]},
            postfix=IMPATIENT,
            fsync=False,
        ) as testbed,
        Installation(
            testbed, "shipping", [OperatorRule("gmail", ["gmail.test"], RATE)], prefix=""
        ) as installation,
    ):
        path = installation.directory / "campaign.json"
        path.write_text(json.dumps(CAMPAIGN))
        installation.fairpost("publish", "campaign", str(path))
        rows = "".join(f"u{n},{MAILBOXES[n % len(MAILBOXES)]}u{n}@gmail.test\n" for n in range(due))
        installation.fairpost(
            *("publish", "due-emails", "-", "--campaign", "c", "--email-key", "k"),
            stdin=f"user_id,email\n{rows}".encode(),
        )
        installation.start_worker()
        installation.start_tracker()
        instance = testbed.instances[INSTANCE]
        agent = installation.start_agent(instance, **AUDITED)
        yield MailHost(testbed, installation, instance, agent, random.Random(due))


def check(host: MailHost, due: int) -> None:
    """All is shipped in order, and every outcome is told and counted once, as the mailbox operators saw it."""
    shipped = host.shipped()
    assert len({partition for partition, _ in shipped}) == 1
    first: dict[Line, int] = {}
    for position, (_, line) in enumerate(shipped):
        first.setdefault(line, position)
    fences = 0
    for log in host.logs():
        lines = dict.fromkeys(log)
        positions = [first[line] for line in lines]
        assert positions == sorted(positions), "a line overtook one that was logged before it"
        fences += sum(isinstance(parse(tag, message), Fence) for tag, _, _, message in lines)
    assert fences

    reckoning = reckon(host.installation, host.testbed.operators.values())
    assert reckoning.complaints == ()
    assert (reckoning.reserved, reckoning.lost, reckoning.twice) == (due, 0, 0)
    [counted] = json.loads(host.installation.fairpost("campaigns", "list", "--json").stdout)
    assert {state: counted[state] for state in reckoning.states} == dict(reckoning.states)

    told = host.told()
    ends = Counter(state for states in told.values() for state in states if state in FINAL)
    assert ends == reckoning.states
    assert all(sum(state in FINAL for state in states) == 1 for states in told.values())
    assert not any(MessageState.UNCERTAIN in states for states in told.values())


def test_shipping_survives_kills_rotations_and_outages() -> None:
    """Fluentd killed four times, a log rotated four times, Kafka away for seconds: no outcome is lost or counted twice."""
    due = 1_000
    with mail_host(due) as host:
        host.kill_fluentd(rotations=2)
        host.rotate()
        host.kill_fluentd(rotations=0)
        host.lose_kafka(seconds=3, kills=1)
        host.kill_fluentd(rotations=0)
        host.settle(due)
        check(host, due)


@pytest.mark.long
def test_shipping_survives_twenty_kills_and_a_minute_without_kafka() -> None:
    """Fluentd killed twenty times, a log rotated nine times, Kafka away for a minute: the same."""
    due = 4_000
    with mail_host(due) as host:
        for number in range(10):
            host.kill_fluentd(rotations=int(number % 3 == 0))
        host.rotate()
        host.lose_kafka(seconds=60, kills=3)
        for number in range(7):
            host.kill_fluentd(rotations=int(number % 3 == 0))
        host.settle(due)
        check(host, due)
