"""Reports: they reach Kafka through Fluentd, wait while it is away within bounds, and never hold anything up."""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from contract.events import DELIVERY_LOG, AgentReport, decode_delivery_log
from processor.settings import ProcessorSettings
from smtp_agent.reporting import Reporter
from testbed import Testbed
from testbed.fluentd import Fluentd
from testbed.ports import LOOPBACK, reserve_port
from testbed.processes import wait_until
from tests.conftest import TestTopics

PATIENCE = 60
"""Seconds after which a test gives up waiting; none waits so long when all is well."""
INSTANCE = "mta-1"
AT = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def fluentd(
    testbed: Testbed, settings: ProcessorSettings, topics: TestTopics, tmp_path: Path
) -> Iterator[Fluentd]:
    """A Fluentd that does not run yet, with this test's topic."""
    fluentd = Fluentd(
        INSTANCE,
        testbed.directory / f"fluentd-{topics.settings.topic_prefix}",
        postfix_log=tmp_path / "mail.log",
        bootstrap_servers=testbed.kafka.bootstrap_servers,
        topic=settings.topic(DELIVERY_LOG),
    )
    yield fluentd
    fluentd.stop()


@contextmanager
def reporting(port: int) -> Iterator[Reporter]:
    """A reporter that is closed in the end."""
    reporter = Reporter(LOOPBACK, port)
    try:
        yield reporter
    finally:
        reporter.close()


def report(reporter: Reporter, number: int, **fields: object) -> None:
    """Reports a claim of the chunk with that number."""
    reporter.report("claimed", at=AT.isoformat(), operator="gmail", chunk_id=number, **fields)


def arrived(topics: TestTopics) -> list[AgentReport]:
    """What stands on `delivery-log`, in order."""
    reports = [decode_delivery_log(value) for value in topics.values(DELIVERY_LOG)]
    assert all(isinstance(report, AgentReport) for report in reports)
    return [report for report in reports if isinstance(report, AgentReport)]


def wait_for(topics: TestTopics, number: int) -> list[AgentReport]:
    """Waits until as many reports arrived."""
    wait_until(lambda: len(arrived(topics)) >= number, timeout=PATIENCE, what=f"{number} reports")
    return arrived(topics)


@pytest.fixture
def counted() -> Callable[[], tuple[float, float]]:
    """How many reports the metric counts since the test began: sent, dropped."""

    def now() -> list[float]:
        values = [
            REGISTRY.get_sample_value("fairpost_reports_total", {"result": result})
            for result in ("sent", "dropped")
        ]
        return [value or 0.0 for value in values]

    before = now()

    def since() -> tuple[float, float]:
        sent, dropped = now()
        return sent - before[0], dropped - before[1]

    return since


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log warned of."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_reports_arrive(
    fluentd: Fluentd, topics: TestTopics, counted: Callable[[], tuple[float, float]]
) -> None:
    """A report is a record of `delivery-log` with all its fields, by the instance of Fluentd's configuration."""
    fluentd.start()
    with reporting(fluentd.port) as reporter:
        reporter.report(
            "handed_over",
            operator="gmail",
            at=AT.isoformat(),
            chunk_id=2**60,
            campaign_id="späti",
            accepted=[(1, "4abc"), (2, "")],
            refused=[(3, "550 5.4.4 gelöscht \N{PERSONAL COMPUTER}")],
            given_back=4,
            seconds=0.25,
        )
        reporter.report("drained", at=AT.isoformat())
    assert wait_for(topics, 2) == [
        AgentReport(
            instance=INSTANCE,
            event="handed_over",
            operator="gmail",
            at=AT,
            chunk_id=2**60,
            campaign_id="späti",
            accepted=[(1, "4abc"), (2, "")],
            refused=[(3, "550 5.4.4 gelöscht \N{PERSONAL COMPUTER}")],
            given_back=4,
            seconds=0.25,
        ),
        AgentReport(instance=INSTANCE, event="drained", at=AT),
    ]
    assert {message.key() for message in topics.read(DELIVERY_LOG)} == {INSTANCE.encode()}
    assert counted() == (2, 0)


def test_reports_wait_while_fluentd_is_away(
    fluentd: Fluentd,
    topics: TestTopics,
    counted: Callable[[], tuple[float, float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Reports of two outages arrive in order, once, with the first report after each; each outage is two warnings."""

    def away(outage: int) -> Callable[[], bool]:
        return lambda: len(warnings(caplog)) == outage * 2 - 1

    with reporting(fluentd.port) as reporter:
        for outage in (1, 2):
            for number in range(50):
                report(reporter, outage * 100 + number)
            wait_until(away(outage), timeout=PATIENCE, what=f"the warning of outage {outage}")
            fluentd.start()
            report(reporter, outage * 100 + 50)
            wait_for(topics, outage * 51)
            fluentd.stop()
    expected = [outage * 100 + number for outage in (1, 2) for number in range(51)]
    assert [report.chunk_id for report in arrived(topics)] == expected
    assert counted() == (102, 0)
    assert (
        warnings(caplog)
        == ["reports: Fluentd is away; they wait", "reports: Fluentd takes them again"] * 2
    )


def test_what_waits_is_bounded(
    fluentd: Fluentd,
    topics: TestTopics,
    counted: Callable[[], tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While Fluentd is away no more is kept than fits; what is dropped is counted, and later reports arrive."""
    monkeypatch.setattr("smtp_agent.reporting._PENDING_BYTES", 10_000)
    with reporting(fluentd.port) as reporter:
        for number in range(30):
            report(reporter, number, note="x" * 1_000)
        wait_until(lambda: counted()[1] > 0, timeout=PATIENCE, what="dropped reports")
        fluentd.start()
        report(reporter, 30)
    sent, dropped = counted()
    assert (sent + dropped, dropped >= 10) == (31, True)
    assert [r.chunk_id for r in wait_for(topics, int(sent))] == list(range(int(dropped), 31))


def test_a_fluentd_that_hangs_holds_nothing_up(
    counted: Callable[[], tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Fluentd takes a connection and reads nothing, reports beyond the queue are dropped at once and counted."""
    monkeypatch.setattr("smtp_agent.reporting._WAITING", 3)
    deaf = socket.create_server((LOOPBACK, 0))
    with deaf, reporting(deaf.getsockname()[1]) as reporter:
        report(reporter, 1, note="x" * 30_000_000)
        connection, _ = deaf.accept()
        for number in range(2, 7):
            report(reporter, number)
        assert counted() == (0, 2)
        connection.close()
        deaf.close()
    assert counted() == (0, 6)


def test_close_gives_up_what_cannot_be_sent(
    counted: Callable[[], tuple[float, float]], caplog: pytest.LogCaptureFixture
) -> None:
    """Closing returns though Fluentd is away, and says how many reports are lost by it."""
    with reporting(reserve_port()) as reporter:
        for number in range(5):
            report(reporter, number)
    assert counted() == (0, 5)
    assert warnings(caplog)[-1].startswith("reports: 5 (")


def test_close_sends_what_waits(
    fluentd: Fluentd,
    topics: TestTopics,
    counted: Callable[[], tuple[float, float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What waits for a Fluentd that is back is sent by closing."""
    with reporting(fluentd.port) as reporter:
        report(reporter, 1)
        wait_until(lambda: bool(warnings(caplog)), timeout=PATIENCE, what="a warning")
        fluentd.start()
    assert [r.chunk_id for r in wait_for(topics, 1)] == [1]
    assert counted() == (1, 0)
