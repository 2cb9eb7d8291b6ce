"""What the acceptance tests share: an installation of a test's own, with mail hosts and mailbox operators."""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from contract.events import (
    DEAD_LETTERS,
    DELIVERY_STATUS,
    DeadLetter,
    DeliveryStatus,
    decode_dead_letter,
    decode_delivery_status,
)
from testbed import Testbed
from testbed.fleet import Instance
from testbed.installation import Installation, OperatorRule, Running
from testbed.mailbox import MailboxOperator
from testbed.processes import wait_until
from testbed.reckoning import Reckoning, reckon

PATIENCE = 60
"""Seconds after which a test gives up waiting; none waits so long when all is well."""

# What is refused for now is tried again within seconds.
IMPATIENT = {"minimal_backoff_time": "1s", "maximal_backoff_time": "2s", "queue_run_delay": "1s"}

_numbers = itertools.count(1)


@dataclass
class House:
    """An installation that a test runs, and what it talks to.

    Attributes:
        installation: database, topics and commands.
        hosts: the mail hosts, by name.
        operators: the mailbox operators, by name.
        processes: what runs, by name.
    """

    installation: Installation
    hosts: dict[str, Instance]
    operators: dict[str, MailboxOperator]
    processes: dict[str, Running] = field(default_factory=dict)

    def start(self, **settings: str) -> None:
        """Start a worker, a tracker, and an agent on each host."""
        self.processes["worker"] = self.installation.start_worker(**settings)
        self.processes["tracker"] = self.installation.start_tracker(**settings)
        for host in self.hosts.values():
            self.start_agent(host, **settings)

    def start_agent(self, host: Instance, **settings: str) -> None:
        """Start the agent of a host."""
        self.processes[host.name] = self.installation.start_agent(host, **settings)

    def publish_campaign(self, campaign_id: str, **fields: object) -> None:
        """Publish a campaign that may be sent at once; its one `email_key` is `offer`."""
        event = {
            "campaign_id": campaign_id,
            "name": f"Campaign {campaign_id}",
            "sender": "Shop <news@shop.example>",
            "scheduled_for": "2026-01-01T00:00:00Z",
            "templates": {"offer": {"subject": "For {{ name }}", "text": "Hello {{ name }}"}},
            **fields,
        }
        path = self.installation.directory / f"{campaign_id}.json"
        path.write_text(json.dumps(event))
        self.installation.fairpost("publish", "campaign", str(path))

    def publish_due(self, campaign_id: str, emails: Sequence[str], *, copies: int = 1) -> None:
        """Publish a due e-mail for each address, as user `u0`, `u1` and so on."""
        rows = "".join(f"u{n},{email},Name {n}\n" for n, email in enumerate(emails))
        for _ in range(copies):
            self.installation.fairpost(
                *("publish", "due-emails", "-", "--campaign", campaign_id, "--email-key", "offer"),
                stdin=f"user_id,email,name\n{rows}".encode(),
            )

    def counts(self, campaign_id: str) -> dict[str, Any]:
        """A campaign as the command line lists it; empty where it is unknown."""
        listed = json.loads(self.installation.fairpost("campaigns", "list", "--json").stdout)
        return next((c for c in listed if c["campaign_id"] == campaign_id), {})

    def query(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Look into the database."""
        with self.installation.connect() as connection:
            return connection.execute(statement.encode(), values).fetchall()

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until it holds; fails the test if it never does."""
        wait_until(condition, timeout=PATIENCE, what=what)

    def wait_for_states(self, campaign_id: str, expected: Mapping[str, int]) -> None:
        """Wait until so many messages of a campaign are in these states."""
        found: dict[str, int] = {}

        def reached() -> bool:
            rows = self.query(
                "SELECT m.state::text, count(*) FROM dispatches d JOIN messages m USING (dispatch_id)"
                " WHERE campaign_id = %s GROUP BY m.state",
                campaign_id,
            )
            found.clear()
            found.update(rows)
            return all(found.get(state, 0) == number for state, number in expected.items())

        try:
            self.wait_for(reached, f"{campaign_id}: {dict(expected)}")
        except Exception as error:
            error.add_note(f"found {found}")
            raise

    def handed(self, campaign_id: str) -> int:
        """How many messages of a campaign were ever handed over."""
        [(number,)] = self.query(
            "SELECT count(*) FROM dispatches JOIN messages USING (dispatch_id)"
            " WHERE campaign_id = %s AND handovers > 0",
            campaign_id,
        )
        return int(number)

    def agent_status(self, host: Instance) -> dict[str, Any]:
        """What `fairpost-agent status --json` says."""
        said = self.installation.fairpost_agent(host, "status", "--json").stdout
        answer: dict[str, Any] = json.loads(said)
        return answer

    def wait_for_the_end(self, name: str) -> None:
        """Wait until a process has ended; it must have ended well."""
        process = self.processes[name].process
        self.wait_for(lambda: not process.running, f"the end of {name}")
        assert process.exit_code == 0, process.log.read_text()

    def reckon(self) -> Reckoning:
        """Hold the operators' records against the database."""
        return reckon(self.installation, self.operators.values())

    def statuses(self) -> dict[int, list[DeliveryStatus]]:
        """What `delivery-status` told of each dispatch, in order."""
        told: dict[int, list[DeliveryStatus]] = {}
        for value in self.read(DELIVERY_STATUS):
            status = decode_delivery_status(value)
            told.setdefault(status.dispatch_id, []).append(status)
        return told

    def dead_letters(self) -> list[DeadLetter]:
        """What stands on `dead-letters`."""
        return [decode_dead_letter(value) for value in self.read(DEAD_LETTERS)]

    def read(self, name: str) -> list[bytes]:
        """The values on a topic now."""
        topic = self.installation.topic(name)
        servers = self.installation.environment["FAIRPOST_KAFKA_BOOTSTRAP_SERVERS"]
        consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "reads-without-a-group",
                "enable.auto.commit": False,
                "log_level": 2,
            }
        )
        try:
            values: list[bytes] = []
            for number in consumer.list_topics(topic, timeout=10).topics[topic].partitions:
                partition = TopicPartition(topic, number, 0)
                _, end = consumer.get_watermark_offsets(partition, timeout=10)
                consumer.assign([partition])
                first = len(values)
                while len(values) - first < end:
                    message = consumer.poll(10)
                    assert message is not None, "Kafka does not answer"
                    assert message.error() is None
                    values.append(message.value() or b"")
            return values
        finally:
            consumer.close()


def _check_logs(houses: Sequence[House]) -> None:
    """No worker, tracker, agent or Fluentd has logged a recipient's address, whatever became of its mail."""
    for house in houses:
        recipient = re.compile(rf"[^\s<>]+@(?:{'|'.join(house.operators)})\.test")
        logs = [*house.installation.directory.glob("*.log")]
        logs += [host.fluentd.log for host in house.hosts.values() if host.fluentd is not None]
        for log in logs:
            lines = log.read_text(errors="replace").splitlines()
            assert [line for line in lines if recipient.search(line)] == [], log


Build = Callable[..., House]


@pytest.fixture
def build(testbed: Testbed, template: str, request: pytest.FixtureRequest) -> Iterator[Build]:
    """Builds the house of a test: `build({"gmail": 600}, hosts=2)`; nothing runs before `start()`.

    With `signed`, the From domains that its hosts sign, the operators keep what they receive. When all is stopped, no log
    of it names a recipient.
    """
    houses: list[House] = []
    with ExitStack() as stack:
        stack.callback(_check_logs, houses)

        def _build(
            limits: Mapping[str, int | None],
            *,
            hosts: int = 1,
            postfix: Mapping[str, str] = IMPATIENT,
            signed: Sequence[str] = (),
        ) -> House:
            number = next(_numbers)
            name = f"{re.sub('[^a-z]+', '_', request.node.name)[:32]}_{number}"
            operators = testbed.add_operators(
                {o: [f"{o}.test"] for o in limits}, keep_messages=bool(signed)
            )
            rules = [OperatorRule(o, [f"{o}.test"], limit) for o, limit in limits.items()]
            installation = stack.enter_context(
                Installation(testbed, name, rules, template=template)
            )
            instances = {}
            for host in range(hosts):
                instance = testbed.add_instance(
                    f"mta-{number}-{host}",
                    operators=operators.values(),
                    topic=installation.topic("delivery-log"),
                    postfix=postfix,
                    signed=signed,
                )
                stack.callback(testbed.remove_instance, instance.name)
                instances[instance.name] = instance
            houses.append(House(installation, instances, operators))
            return houses[-1]

        yield _build
