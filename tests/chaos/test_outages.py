"""Outages that last: Postgres and Kafka away for a minute, and a failover that drops every connection."""

import json
import re
import time
from collections.abc import Iterator
from urllib.request import urlopen

import psycopg
import pytest

from testbed import Testbed
from testbed.installation import Installation, OperatorRule, Running
from testbed.processes import wait_until

MINUTE = 60.0
PATIENCE = 90

CAMPAIGN = {
    "campaign_id": "c",
    "name": "Through the storm",
    "sender": "news@shop.example",
    "scheduled_for": "2026-01-01T00:00:00Z",
    "templates": {"k": {"subject": "s", "text": "t"}},
}


@pytest.fixture
def installation() -> Iterator[tuple[Testbed, Installation]]:
    """An installation on services of its own, which this test stops."""
    with (
        Testbed(instances=(), operators={}, fsync=False) as testbed,
        Installation(testbed, "storm", [OperatorRule("other")]) as installation,
    ):
        path = installation.directory / "campaign.json"
        path.write_text(json.dumps(CAMPAIGN))
        installation.fairpost("publish", "campaign", str(path))
        yield testbed, installation


def publish(installation: Installation, first: int, end: int) -> None:
    """Publish the due e-mails of these users."""
    rows = "".join(f"u{n},u{n}@a.test\n" for n in range(first, end))
    installation.fairpost(
        *("publish", "due-emails", "-", "--campaign", "c", "--email-key", "k"),
        stdin=f"user_id,email\n{rows}".encode(),
    )


def wait_for_planned(installation: Installation, count: int) -> None:
    """Wait until so many messages are planned and nothing is pending."""

    def planned() -> bool:
        try:
            with installation.connect() as connection:
                row = connection.execute(
                    "SELECT (SELECT count(*) FROM messages), (SELECT count(*) FROM pending)"
                ).fetchone()
        except psycopg.OperationalError:
            return False
        return row == (count, 0)

    wait_until(planned, timeout=PATIENCE, what=f"{count} messages planned")


def let_pass(seconds: float) -> None:
    """Let time pass: the length of the outage is what is tested."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end, timeout=2 * seconds, what="the outage")


def waiting(running: Running) -> set[str]:
    """What a process waits to do for a service that is away, as its metrics say."""
    with urlopen(f"http://{running.address}:{running.metrics_port}/metrics") as answer:
        text = answer.read().decode()
    return set(re.findall(r'^fairpost_calls_waiting{operation="(.+)"} [1-9]', text, re.MULTILINE))


def runs(worker: Running) -> bool:
    """Whether it still is the process that was started."""
    return worker.process.exit_code is None


def test_a_minute_without_postgres_and_kafka(
    installation: tuple[Testbed, Installation],
) -> None:
    """A worker that loses both for a minute, with mail in hand, neither exits nor skips, and goes on by itself.

    So does a tracker, and the metrics of both say that they wait.
    """
    testbed, house = installation
    worker = house.start_worker()
    tracker = house.start_tracker()
    publish(house, 0, 200)
    wait_for_planned(house, 200)
    testbed.postgres.stop()
    publish(house, 200, 400)
    testbed.kafka.stop()
    let_pass(MINUTE)
    assert runs(worker), worker.log.read_text()
    assert waiting(worker) == {"reservation"}
    assert waiting(tracker) == {"outbox", "unread"}
    testbed.postgres.start()
    testbed.kafka.start()
    wait_for_planned(house, 400)
    publish(house, 400, 500)
    wait_for_planned(house, 500)
    wait_until(
        lambda: not waiting(worker) | waiting(tracker), timeout=PATIENCE, what="nothing to wait for"
    )
    assert runs(worker), worker.log.read_text()
    assert runs(tracker), tracker.log.read_text()


def test_a_failover_that_drops_every_connection(
    installation: tuple[Testbed, Installation],
) -> None:
    """Connections cut again and again while mail flows cost nothing: each due e-mail is planned once."""
    _, house = installation
    worker = house.start_worker()
    publish(house, 0, 2_000)
    with house.connect() as connection:
        for _ in range(20):
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            publish(house, 0, 100)
    wait_for_planned(house, 2_000)
    assert runs(worker), worker.log.read_text()
